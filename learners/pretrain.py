"""Pretraining a base policy on demonstrations: a video stage, then an action stage.  `wamrl pretrain` -> base.

Video stage: flow matching on the true future, half of each batch at sigma = 1, the only noise level whose features the
actor ever sees.  Action stage: flow matching on labelled action chunks through features at sigma = 1; the same pass
also predicts the video, so keeping the world's loss costs nothing and stops it from forgetting (GE-Act trains the whole
model on the action loss alone in its second stage; that is `video_weight = 0`).

    Windows ──► make_batch ──► batch_loss ──► gradient step, running average ──► every `save_every` steps:
                                                                 validation, base (averaged weights), state.pt

Every batch is a function of (seed, step): a run that was killed and resumed ends in the same weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from learners.pretrain_batch import make_batch
from learners.pretrain_check import Imagined, validate
from learners.pretrain_config import PretrainConfig
from learners.pretrain_losses import batch_loss
from learners.pretrain_state import load_state, save_state
from learners.windows import Windows
from wamrl_ray.policy.bases import save_base
from wamrl_ray.policy.wam import WAM
from wamrl_ray.types import Metrics, seed_sequence

STATE = "state.pt"


def learning_rate(step: int, config: PretrainConfig) -> float:
    """Linear warm-up, then cosine decay to `final_lr_share`."""
    progress = min(step / max(config.total_steps, 1), 1.0)
    cosine = config.final_lr_share + (1.0 - config.final_lr_share) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * min(1.0, (step + 1) / config.warmup_steps) * cosine


def pretrain(
    config: PretrainConfig,
    train: Windows,
    valid: Windows,
    out: Path,
    *,
    init: WAM | None = None,
    until: int | None = None,
    device: str = "cpu",
    on_start: Callable[[int], None] = lambda step: None,
    on_metrics: Callable[[int, Metrics], None] = lambda step, metrics: None,
    on_imagined: Callable[[int, Imagined], None] = lambda step, imagined: None,
) -> WAM:
    """Train to step `until` (None: the schedule's end), from `out/state.pt` if it is there; write the averaged weights
    to `out` as a base and return the policy that has them.

    `init` brings weights and normaliser for a start from anew.  `on_start` gets the step continued from, `on_metrics`
    every `log_every` steps their means, `on_imagined` samples at each save.  Raises ValueError if the state was made
    by another config, RuntimeError for a loss or gradient that is not finite: what was saved stays sound.
    """
    torch.set_num_threads(config.threads)
    out.mkdir(parents=True, exist_ok=True)
    for leftover in out.glob(".*.tmp"):  # of a process that was killed while it saved
        leftover.unlink()
    policy = init or WAM(config.policy, seed=config.seed)
    if init is None:
        policy.normalizer.fit(train.action.flatten(0, 1), train.state)
    assert policy.config == config.policy, "the windows were made for the config's sizes"
    policy.to(device)
    policy.text.forget()
    training = Training(config, policy, train.near(policy.device))
    training.step = load_state(out / STATE, config, policy, training.average, training.optimizer)
    on_start(training.step)
    end, means = min(until or config.total_steps, config.total_steps), Means()
    while training.step < end:
        means.add(training.advance())
        saves = training.step % config.save_every == 0 or training.step == end
        if not saves and training.step % config.log_every:
            continue
        metrics = means.take(training.step)
        if saves:
            with training.averaged():
                losses, imagined = validate(policy, valid, config, action=training.step > config.video_steps)
                metrics |= losses
                if imagined is not None:
                    on_imagined(training.step, imagined)
                save_base(policy, out)
        # The state last: what a kill leaves undone before it is done again after it.
        on_metrics(training.step, metrics)
        if saves:
            save_state(out / STATE, config, policy, training.average, training.optimizer, training.step)
            means.restart_clock()
    training.keep_average()
    return policy


class Training:
    """Weights, their running average, the optimiser and how many steps they have made."""

    def __init__(self, config: PretrainConfig, policy: WAM, windows: Windows) -> None:
        self.config, self.policy, self.windows, self.step = config, policy, windows, 0
        self.trained = [*policy.world.parameters(), *policy.expert.parameters()]
        self.average = [p.detach().clone() for p in self.trained]
        self.optimizer = torch.optim.AdamW(
            self.trained, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay
        )

    def advance(self) -> dict[str, Tensor | float]:
        """One gradient step.  Its metrics stay on the device: reading one would wait for it."""
        started, config, step = time.perf_counter(), self.config, self.step
        generator = torch.Generator().manual_seed(int(seed_sequence(config.seed, step, "learner").generate_state(1)[0]))
        picks = torch.randint(len(self.windows), (config.batch_size,), generator=generator)
        action = config.trains_action(step)
        batch = make_batch(self.policy, self.windows, picks, generator, config, action=action)
        data_s = time.perf_counter() - started

        loss, terms = batch_loss(self.policy, batch, config)
        lr = learning_rate(step, config)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.trained, config.grad_clip)
        self.optimizer.step()
        decay = min(config.ema_decay, (step + 1) / (step + 10))
        torch._foreach_lerp_(self.average, [p.detach() for p in self.trained], 1.0 - decay)
        self.step += 1
        return {**terms, "pretrain/grad_norm": norm, "pretrain/lr": lr, "time/data_s": data_s}

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The policy has the averaged weights inside, the trained ones again afterwards."""
        current = [p.detach().clone() for p in self.trained]
        self.keep_average()
        try:
            yield
        finally:
            _assign(self.trained, current)

    def keep_average(self) -> None:
        _assign(self.trained, self.average)


@torch.no_grad()
def _assign(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


class Means:
    """Means of the metrics of some steps, and how long a step took."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}
        self._counts: dict[str, int] = {}
        self.restart_clock()

    def restart_clock(self) -> None:
        self._started = time.perf_counter()

    def add(self, metrics: dict[str, Tensor | float]) -> None:
        for name, value in metrics.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self, step: int) -> Metrics:
        """The means since the last call.  RuntimeError names one that is not finite."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        bad = sorted(name for name, value in means.items() if not math.isfinite(value))
        if bad:
            raise RuntimeError(
                f"{bad[0]} is {means[bad[0]]} by step {step}: the last saved state is sound; start anew with a "
                "smaller lr or grad_clip"
            )
        means["time/step_s"] = (time.perf_counter() - self._started) / max(self._counts.values())
        means["time/data_share"] = means.pop("time/data_s") / means["time/step_s"]
        self._sums, self._counts = {}, {}
        self.restart_clock()
        return means
