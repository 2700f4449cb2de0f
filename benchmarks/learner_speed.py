"""What an update of each learner costs, and what keeping the frozen world's features saves the actor's.

    python -m benchmarks.learner_speed --json OUT [--base tiny_libero_object] [--device cpu|cuda] [--rounds 3]

Both learners run their public `update` on made-up episodes that the policy itself acted.  The actor learner has the
`pi_rl` preset: 4 epochs, success alone as the reward.  It is measured with one random denoising step per decision and
with all steps random, each in three ways, in turns, so that a busy machine slows all of them:

reuse   features once per update; keys and values once per decision and gradient step (their matrices are trained)
visit   features anew at every use of a decision: the base's labels and each epoch (`reuse_context: false`)
naive   features, keys and values anew for every row, that is for every (decision, denoising step) of every use; the
        label of the pair that acted is the exception, which shares its context in all three ways

All three run the world without gradient and in the same micro-batches, and have to agree: first gradients within 1e-5
of the largest entry.  `actor_reuse_ratio` (target: 3 or more) is naive over reuse with all steps random, where the
naive way repeats most; `one_reuse_ratio` is that of one random step.  Rates are per second of this thread's own clock
on the CPU, which other work on the machine does not stretch, and of the wall clock on a GPU; `*_wall_*` always wall.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from learners.actor_flow_sde import ActorFlowSDELearner
from learners.labels import LabelledBatch
from learners.video_sft import VideoSFTConfig, VideoSFTLearner
from wamrl_ray.commands_eval import check_writable
from wamrl_ray.config import load_config
from wamrl_ray.policy.bases import load_base
from wamrl_ray.policy.flow_sde import SamplerConfig
from wamrl_ray.policy.wam import WAM, Context
from wamrl_ray.types import Episode, Pair, Ticket

Way = Literal["reuse", "visit", "naive"]
WAYS: tuple[Way, ...] = ("reuse", "visit", "naive")
INSTRUCTION = "pick up the alphabet soup and place it in the basket"
PRESET, LR = "learners/pi_rl", 5e-5  # the preset's rate suits networks a thousand times larger
TOLERANCE = 1e-5


# ------------------------------------------------------------------------------------------------ data


def made_up_episodes(policy: WAM, count: int, decisions: int) -> list[Episode]:
    """Random frames and states, acted on by the policy; every second episode succeeds in its last chunk."""
    world, actor = policy.export("world").digest, policy.export("actor").digest
    pair = Pair(
        epoch=0, seq=0, world=world, actor=actor, trained_against_world=world, interface=policy.interface_digest
    )
    return [_episode(policy, pair, i, decisions, success=i % 2 == 0) for i in range(count)]


def _episode(policy: WAM, pair: Pair, i: int, decisions: int, *, success: bool) -> Episode:
    spec, rng = policy.spec, np.random.default_rng(i)
    steps = sorted({t * spec.executed + o for t in range(decisions) for o in (0, *spec.imagined_offsets)})
    shape = (len(steps), len(spec.views), spec.resolution, spec.resolution, 3)
    frames, state = rng.integers(0, 256, shape, dtype=np.uint8), rng.normal(size=(len(steps), spec.state_dim))
    at = [steps.index(t * spec.executed) for t in range(decisions)]
    seeds = [1000 * i + t for t in range(decisions)]
    made = [
        policy.decide(
            frames[[at[max(t - back, 0)] for back in reversed(range(spec.memory))]], state[at[t]].astype(np.float32),
            INSTRUCTION, action_seed=seeds[t], world_seed=seeds[t], stochastic=True,
        )
        for t in range(decisions)
    ]  # fmt: skip
    ticket = Ticket(
        ticket_id=i, env="made_up", task_id=0, init_state_id=i, run_seed=0, purpose="train", deadline_s=60.0
    )
    return Episode(
        ticket=ticket, instruction=INSTRUCTION, pair=pair, frames=frames, state=state.astype(np.float32),
        obs_step=np.int32(steps), decision_obs=np.int32(at), chain=np.stack([d.chain for d in made]),
        stochastic_step=np.int32([d.stochastic_step for d in made]),
        behaviour_logprob=np.float32([d.logprob for d in made]), world_seed=np.int64(seeds),
        actions=np.stack([d.actions for d in made]), executed=np.full(decisions, spec.executed, np.int32),
        env_reward=np.float32([0.0] * (decisions - 1) + [float(success)]), success=success,
        success_step=decisions * spec.executed if success else -1, terminated=success, truncated=not success,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------------ clocks


def timed(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds the work took: by the clock the rates are of, and of the wall."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return (time.perf_counter() - wall,) * 2
    return time.thread_time() - cpu, time.perf_counter() - wall


def peak_flops_per_s(device: torch.device) -> float:
    """Of a large float32 matrix product, best of five."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(n, n, device=device), torch.randn(n, n, device=device)
    torch.mm(a, b)
    return max(2 * n**3 / timed(lambda: torch.mm(a, b), device)[0] for _ in range(5))


def flops(work: Callable[[], object]) -> float:
    """Floating-point operations of the matrix products and attentions in the work."""
    with FlopCounterMode(display=False) as counter:
        work()
    return float(counter.get_total_flops())


# ------------------------------------------------------------------------------------------------ actor


def _context_per_row(batch: LabelledBatch, policy: WAM) -> Context:
    """`LabelledBatch.context_in` of the naive way: one context per random transition."""
    rows = torch.arange(len(batch)).repeat_interleave(batch.transitions.step.shape[1])
    obs = batch.obs.index(rows.to(policy.device))
    return policy.world_context(obs, batch.world_seed[rows])


class ActorUpdate:
    """One way of updating; every call starts at the base's weights, with episodes of the pair they belong to."""

    def __init__(self, way: Way, policy: WAM, episodes: list[Episode], device: torch.device) -> None:
        config = load_config([PRESET])
        settings = replace(config.actor_learner, lr=LR, reuse_context=way == "reuse")
        self.way, self.episodes, self.index = way, episodes, 0
        self.learner = ActorFlowSDELearner(settings, policy.sampler, config.reward, policy, run_seed=0, device=device)
        self.world, self.actor = self.learner.world, self.learner.base
        self.start = self.weights().clone()
        self.learner.remember(episodes[0].pair, self.world, self.actor)

    def __call__(self) -> None:
        self.learner.policy.load_pair(self.world, self.actor)
        with patch.object(LabelledBatch, "context_in", _context_per_row) if self.way == "naive" else nullcontext():
            self.learner.update(self.episodes, index=self.index)
        self.index += 1

    def first_gradient(self) -> Tensor:
        """Of the next update's first step, flat: runs that update."""
        optimizer, found = self.learner.optimizer, []

        def apply() -> float:
            found.append(torch.cat([p.grad.flatten().clone() for p in optimizer.parameters if p.grad is not None]))
            return type(optimizer).apply(optimizer)

        with patch.object(optimizer, "apply", apply):
            self()
        return found[0]

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.learner.policy.expert.parameters()])


def measure_actor(
    base: Callable[[SamplerConfig], WAM], sampler: SamplerConfig, device: torch.device, *, shape: tuple[int, int],
    rounds: int, peak: float,
) -> dict[str, float]:  # fmt: skip
    """Rates, ratios, agreement and use of the machine; `shape` is (episodes, decisions of each)."""
    episodes = made_up_episodes(base(sampler), *shape)
    ways = {way: ActorUpdate(way, base(sampler), episodes, device) for way in WAYS}
    gradient = {way: update.first_gradient() for way, update in ways.items()}
    difference = max(_difference(gradient[way], gradient["reuse"]) for way in WAYS)
    assert difference <= TOLERANCE, f"first gradients differ by {difference:.2e} of the largest entry"
    times: dict[Way, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, update in ways.items():
            times[way].append(timed(update, device))
    moved = (ways["reuse"].weights() - ways["reuse"].start).abs().max()
    apart = max(float((ways[way].weights() - ways["reuse"].weights()).abs().max()) for way in WAYS)
    decisions, seconds = shape[0] * shape[1], {way: statistics.median(t for t, _ in times[way]) for way in WAYS}
    work = flops(ways["reuse"])
    figures: dict[str, float] = {}
    for way in WAYS:
        name = "" if way == "reuse" else f"{way}_"
        figures[f"{name}decisions_per_s"] = decisions / seconds[way]
        figures[f"{name}wall_decisions_per_s"] = decisions / statistics.median(wall for _, wall in times[way])
    return figures | {
        "reuse_ratio": seconds["naive"] / seconds["reuse"],
        "visit_ratio": seconds["visit"] / seconds["reuse"],
        "gradient_difference": difference,
        "weight_difference_of_move": apart / float(moved),
        "tflops_per_s": work / seconds["reuse"] / 1e12,
        "share_of_peak": work / seconds["reuse"] / peak,
    }


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


# ------------------------------------------------------------------------------------------------ video


def measure_video(
    base: Callable[[SamplerConfig], WAM], device: torch.device, *, shape: tuple[int, int], rounds: int, peak: float
) -> dict[str, float]:
    """Windows per second of the video learner's default update on successful episodes."""
    config, sampler = VideoSFTConfig(), SamplerConfig()
    episodes = [e for e in made_up_episodes(base(sampler), *shape) if e.success]
    learner = VideoSFTLearner(config, base(sampler), base(sampler), run_seed=0, device=device)
    steps = learner.update(episodes, index=0)["video/steps_count"]
    times = [timed(lambda i=i: learner.update(episodes, index=i), device) for i in range(1, rounds + 1)]
    own, wall = (statistics.median(column) for column in zip(*times, strict=True))
    windows, work = steps * config.batch_size, flops(lambda: learner.update(episodes, index=rounds + 1))
    return {
        "video_samples_per_s": windows / own,
        "video_wall_samples_per_s": windows / wall,
        "video_tflops_per_s": work / own / 1e12,
        "video_share_of_peak": work / own / peak,
    }


def measure(
    base: Callable[[SamplerConfig], WAM], device: torch.device, *, shape: tuple[int, int], rounds: int
) -> dict[str, float | str]:
    preset, peak = load_config([PRESET]).sampler, peak_flops_per_s(device)
    figures: dict[str, float | str] = {"headline": "all", "peak_tflops_per_s": peak / 1e12}
    for setting in ("one", "all"):
        sampler = replace(preset, stochastic=setting)
        of = measure_actor(base, sampler, device, shape=shape, rounds=rounds, peak=peak)
        figures |= {f"{setting}_{name}": value for name, value in of.items()}
    for name in ("decisions_per_s", "naive_decisions_per_s", "reuse_ratio"):
        figures[f"actor_{name}"] = figures[f"all_{name}"]
    return figures | measure_video(base, device, shape=shape, rounds=rounds, peak=peak)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here, as one flat JSON object")
    parser.add_argument("--base", default="tiny_libero_object", help="a shipped name or a policy folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--episodes", type=int, default=8)
    parser.add_argument("--decisions", type=int, default=16, help="of each episode")
    parser.add_argument("--rounds", type=int, default=3, help="timed, after one that is not")
    args = parser.parse_args()
    if args.json:
        check_writable(args.json)
    torch.set_num_threads(1)
    figures = measure(
        lambda sampler: load_base(args.base, sampler), torch.device(args.device),
        shape=(args.episodes, args.decisions), rounds=args.rounds,
    )  # fmt: skip
    figures |= {"decisions": args.episodes * args.decisions, "rounds": args.rounds, "device": args.device}
    text = json.dumps({k: v if isinstance(v, str) else float(f"{v:.4g}") for k, v in figures.items()}, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
