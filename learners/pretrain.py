"""Pretraining a base policy on demonstrations: a video stage, then an action stage.  `wamrl pretrain` -> base.

Video stage: flow matching on the true future, half of each batch at sigma = 1, the only noise level whose features the
actor ever sees.  Action stage: flow matching on labelled action chunks through features at sigma = 1; the same pass
also predicts the video, so keeping the world's loss costs nothing and stops it from forgetting (GE-Act trains the whole
model on the action loss alone in its second stage; that is `video_weight = 0`).
Every batch is a function of (seed, step): a run that was killed and resumed ends in the same weights.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from learners.losses import flow_matching_mse
from wamrl_ray.policy.bases import save_base
from wamrl_ray.policy.wam import WAM, Context, WAMConfig
from wamrl_ray.types import Demonstration, Metrics, seed_sequence


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    policy: WAMConfig = field(default_factory=WAMConfig)
    seed: int = 0
    video_steps: int = 300
    action_steps: int = 5700
    batch_size: int = 32
    draws: int = 3
    "noise draws of the action loss per context: the expert is cheap beside the world pass whose features they share"
    lr: float = 1e-3
    warmup_steps: int = 200
    final_lr_share: float = 0.05
    "cosine decay of both stages together, to this share of lr"
    weight_decay: float = 1e-4
    grad_clip: float = 1.0
    ema_decay: float = 0.998
    "of the weights that are saved as the base"
    sigma_one_share: float = 0.5
    video_weight: float = 0.2
    "of the video loss at sigma = 1 in the action stage"
    video_every: int = 4
    "every n-th step of the action stage is a step of the video stage, else the other noise levels, which imagining "
    "needs, are forgotten"
    state_weight: float = 0.1
    "of the future-state channels beside the action channels"
    brightness: float = 0.1
    "random brightness factor 1 +- this, one per window and view"
    held_out_every: int = 10
    "every n-th demonstration is kept for validation"
    save_every: int = 250
    threads: int = 1
    "CPU threads; the weights' last bits may depend on it"

    @property
    def total_steps(self) -> int:
        return self.video_steps + self.action_steps

    def trains_action(self, step: int) -> bool:
        """Whether this step takes the action loss."""
        return step >= self.video_steps and (step + 1) % self.video_every != 0


@dataclass(frozen=True, kw_only=True)
class Windows:
    """All training windows of a set of demonstrations, frames stored once.  n windows, X frames in all."""

    frames: Tensor
    "(X, V, h, w, 3) uint8"
    memory: Tensor
    "(n, M) int64 into frames"
    future: Tensor
    "(n, F) int64 into frames; the current frame where there is none"
    seen: Tensor
    "(n, F) 1 where the future frame exists"
    state: Tensor
    "(n, S)"
    action: Tensor
    "(n, H, A) labels, env units"
    next_state: Tensor
    "(n, H, S)"
    valid: Tensor
    "(n, H) 1 on steps that were executed"
    instruction: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.memory)


def make_windows(demonstrations: Sequence[Demonstration], config: WAMConfig) -> Windows:
    """One window per captured observation.  Raises ValueError where data and policy sizes differ."""
    names = ("memory", "future", "seen", "state", "action", "next_state", "valid")
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    frames, instructions, offset = [], [], 0
    for demo in demonstrations:
        size = (len(config.views), config.resolution, config.resolution, 3)
        if demo.frames.shape[1:] != size:
            raise ValueError(f"demonstration frames are {demo.frames.shape[1:]}, the policy asks for {size}")
        index_of = {int(step): n for n, step in enumerate(demo.obs_step)}
        for n, step in enumerate(int(s) for s in demo.obs_step):
            if step >= len(demo.label):
                continue
            steps = np.minimum(np.arange(step, step + config.horizon), len(demo.label) - 1)
            future = [index_of.get(step + o) for o in config.imagined_offsets]
            past = [index_of.get(max(step - back * config.executed, 0), n) for back in reversed(range(config.memory))]
            parts["memory"].append(offset + np.array(past))
            parts["future"].append(offset + np.array([n if f is None else f for f in future]))
            parts["seen"].append(np.array([f is not None for f in future], np.float32))
            parts["state"].append(demo.state[step])
            parts["action"].append(demo.label[steps])
            parts["next_state"].append(demo.state[steps + 1])
            parts["valid"].append((np.arange(step, step + config.horizon) < len(demo.label)).astype(np.float32))
            instructions.append(demo.instruction)
        frames.append(demo.frames)
        offset += len(demo.frames)
    tensors = {name: torch.from_numpy(np.stack(rows)) for name, rows in parts.items()}
    return Windows(frames=torch.from_numpy(np.concatenate(frames)), instruction=tuple(instructions), **tensors)


def batch_loss(
    policy: WAM, windows: Windows, picks: Tensor, generator: torch.Generator, config: PretrainConfig, *, action: bool
) -> tuple[Tensor, Metrics]:
    """Loss of one batch of windows; all randomness from `generator`."""
    n = len(picks)
    draws = torch.rand((n, 1, len(config.policy.views), 1, 1, 1), generator=generator)
    gain = 1.0 + config.brightness * (2.0 * draws - 1.0)

    def lit(frames: Tensor) -> Tensor:
        return (frames.float() * gain).clamp(0, 255).to(torch.uint8)

    obs = policy.encode(lit(windows.frames[windows.memory[picks]]), [windows.instruction[int(i)] for i in picks])
    future = policy.encode_future(lit(windows.frames[windows.future[picks]]))
    noise = torch.randn(future.shape, generator=generator)
    sigma = torch.ones(n)
    if not action:
        uniform = torch.rand(n, generator=generator)
        sigma = torch.where(torch.rand(n, generator=generator) < config.sigma_one_share, sigma, uniform.clamp(min=0.02))
    at = sigma.reshape(-1, 1, 1, 1, 1, 1)
    out = policy.world_forward(obs, (1.0 - at) * future + at * noise, sigma)
    video = flow_matching_mse(
        out.velocity, noise, future, windows.seen[picks], weight=policy.flow_weight(sigma)
    )
    if not action:
        return video, {"pretrain/video_loss": float(video.detach())}

    loss = flow_matching_action_loss(policy, policy.context_of(out.features), windows, picks, generator, config)
    metrics = {"pretrain/video_loss": float(video.detach()), "pretrain/action_loss": float(loss.detach())}
    return loss + config.video_weight * video, metrics


def flow_matching_action_loss(
    policy: WAM, context: Context, windows: Windows, picks: Tensor, generator: torch.Generator, config: PretrainConfig
) -> Tensor:
    """Masked flow-matching MSE over action and future-state channels, `draws` noise levels per window."""
    norm, r = policy.normalizer, config.draws
    clean = torch.cat(
        [norm.normalize_action(windows.action[picks]), norm.normalize_state(windows.next_state[picks])], dim=-1
    ).repeat_interleave(r, 0)
    sigma = torch.rand(len(clean), generator=generator)
    noise = torch.randn(clean.shape, generator=generator)
    x = (1.0 - sigma[:, None, None]) * clean + sigma[:, None, None] * noise
    keys_values = tuple(
        (k.repeat_interleave(r, 0), v.repeat_interleave(r, 0)) for k, v in policy.expert.keys_values(context.features)
    )
    state = windows.state[picks].repeat_interleave(r, 0)
    v = policy.velocity(replace(context, keys_values=keys_values), x, sigma, state)
    weight = torch.ones(policy.spec.channels)
    weight[policy.spec.action_dim :] = config.state_weight
    weight = weight * windows.valid[picks].repeat_interleave(r, 0)[:, :, None]
    return ((v - (noise - clean)).square() * weight).sum() / weight.sum()


def learning_rate(step: int, config: PretrainConfig) -> float:
    """Linear warm-up, then cosine decay to `final_lr_share`."""
    progress = min(step / max(config.total_steps, 1), 1.0)
    cosine = config.final_lr_share + (1.0 - config.final_lr_share) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * min(1.0, (step + 1) / config.warmup_steps) * cosine


def pretrain(
    config: PretrainConfig,
    demonstrations: Sequence[Demonstration],
    out: Path,
    *,
    init: WAM | None = None,
    on_metrics: Callable[[int, Metrics], None] = lambda step, metrics: None,
) -> WAM:
    """Train, resuming from `out/state.pt` if it is there; write the EMA policy to `out` as a base.  Returns it."""
    torch.set_num_threads(config.threads)
    out.mkdir(parents=True, exist_ok=True)
    train = make_windows([d for i, d in enumerate(demonstrations) if (i + 1) % config.held_out_every], config.policy)
    held = [d for i, d in enumerate(demonstrations) if not (i + 1) % config.held_out_every]
    valid = make_windows(held, config.policy) if held else train
    policy = init or WAM(config.policy, seed=config.seed)
    if init is None:
        policy.normalizer.fit(train.action.flatten(0, 1), train.state)
    trained = [*policy.world.parameters(), *policy.expert.parameters()]
    average = [p.detach().clone() for p in trained]
    optimizer = torch.optim.AdamW(trained, lr=config.lr, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    start = _resume(out / "state.pt", policy, average, optimizer)

    clock = time.monotonic()
    for step in range(start, config.total_steps):
        generator = torch.Generator().manual_seed(int(seed_sequence(config.seed, step, "learner").generate_state(1)[0]))
        picks = torch.randint(len(train), (config.batch_size,), generator=generator)
        loss, metrics = batch_loss(policy, train, picks, generator, config, action=config.trains_action(step))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(trained, config.grad_clip)
        optimizer.step()
        decay = min(config.ema_decay, (step + 1) / (step + 10))
        torch._foreach_lerp_(average, [p.detach() for p in trained], 1.0 - decay)
        if (step + 1) % config.save_every == 0 or step + 1 == config.total_steps:
            metrics |= _validate(policy, valid, config, action=step >= config.video_steps)
            metrics["time/step_s"] = (time.monotonic() - clock) / (step + 1 - start)
            _save(out / "state.pt", policy, average, optimizer, step + 1)
            _export(policy, average, trained, out)
            with (out / "pretrain.jsonl").open("a") as file:
                file.write(json.dumps({"step": step + 1, **metrics}) + "\n")
        on_metrics(step + 1, metrics)
    with torch.no_grad():
        for parameter, mean in zip(trained, average, strict=True):
            parameter.copy_(mean)
    return policy


@torch.no_grad()
def _validate(policy: WAM, windows: Windows, config: PretrainConfig, *, action: bool) -> Metrics:
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(len(windows), (4 * config.batch_size,), generator=generator)
    _, metrics = batch_loss(policy, windows, picks, generator, replace(config, brightness=0.0), action=action)
    return {name.replace("pretrain/", "pretrain/valid_"): value for name, value in metrics.items()}


def _export(policy: WAM, average: Sequence[Tensor], trained: Sequence[Tensor], out: Path) -> None:
    """Write the averaged weights as a base and put the trained ones back."""
    with torch.no_grad():
        current = [p.detach().clone() for p in trained]
        for parameter, mean in zip(trained, average, strict=True):
            parameter.copy_(mean)
        save_base(policy, out)
        for parameter, value in zip(trained, current, strict=True):
            parameter.copy_(value)


def _save(path: Path, policy: WAM, average: Sequence[Tensor], optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {"policy": policy.state_dict(), "average": list(average), "optimizer": optimizer.state_dict(), "step": step}
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.rename(path)


def _resume(path: Path, policy: WAM, average: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    policy.load_state_dict(state["policy"])
    policy.text.forget()
    for mean, saved in zip(average, state["average"], strict=True):
        mean.copy_(saved)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])
