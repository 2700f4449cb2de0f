"""What one decision and one imagination cost on one CPU thread.

    python -m benchmarks.policy_speed --json OUT [--base tiny_libero_object] [--decisions 60]

Each decision acts on a frame and a state of its own, as in an episode, with 4 denoising steps; beside it, the same
decision is made without the cache of the expert's keys and values, in turns, so that a busy machine slows both.  The
two are asserted to agree bit for bit.  Figures are milliseconds per decision: `act_ms_p50` (target: 60 or less),
`act_ms_p99`, `act_uncached_ms_p50` and `imagine_ms_p50` by the wall clock; `act_cpu_ms_p50` and its like by the
thread's own clock, which other work on the machine does not stretch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wamrl_ray.policy.bases import load_base
from wamrl_ray.policy.flow_sde import SamplerConfig, sigma_grid, transition_mean
from wamrl_ray.policy.wam import WAM
from wamrl_ray.rewards.reconstruction import RewardConfig

ACTION_STEPS, WARM_UP = 4, 5
INSTRUCTION = "pick up the alphabet soup and place it in the basket"


@torch.no_grad()
def chain_uncached(policy: WAM, frames: Tensor, state: Tensor, action_seed: int, world_seed: int) -> Tensor:
    """(K+1, H, D) of the ODE sampler, with keys and values computed anew in every step."""
    context = policy.world_context(policy.encode(frames[None], [INSTRUCTION]), [world_seed])
    shape = (1, policy.spec.horizon, policy.spec.channels)
    chain = [torch.randn(shape, generator=torch.Generator().manual_seed(action_seed))]
    for k, sigma in enumerate(sigma_grid(ACTION_STEPS)[:-1]):
        v = policy.velocity(context, chain[-1], torch.full((1,), sigma), state[None])
        chain.append(transition_mean(chain[-1], v, k, ACTION_STEPS, 0.0))
    return torch.cat(chain)


def timed(work: Callable[[], Any]) -> tuple[Any, tuple[float, float]]:
    """Result of the work and the milliseconds it took: of the wall, of this thread."""
    wall, cpu = time.perf_counter(), time.thread_time()
    result = work()
    return result, (1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - cpu))


def measure(policy: WAM, decisions: int) -> dict[str, float]:
    spec, imagine_steps = policy.spec, RewardConfig().imagine_steps
    rng = np.random.default_rng(0)
    act, uncached, imagine = [], [], []
    for i in range(WARM_UP + decisions):
        shape = (spec.memory, len(spec.views), spec.resolution, spec.resolution, 3)
        frames = rng.integers(0, 256, shape, dtype=np.uint8)
        state = rng.normal(size=spec.state_dim).astype(np.float32)
        pixels, proprioception = torch.from_numpy(frames), torch.from_numpy(state)
        decision, act_ms = timed(
            lambda f=frames, s=state, i=i: policy.decide(
                f, s, INSTRUCTION, action_seed=i, world_seed=i, stochastic=False
            )
        )
        chain, uncached_ms = timed(lambda f=pixels, s=proprioception, i=i: chain_uncached(policy, f, s, i, i))
        assert np.array_equal(decision.chain, chain.numpy()), f"decision {i}: cached and uncached actions differ"
        _, imagine_ms = timed(
            lambda f=pixels, i=i: policy.imagine(policy.encode(f[None], [INSTRUCTION]), [i], imagine_steps)
        )
        if i >= WARM_UP:
            act.append(act_ms)
            uncached.append(uncached_ms)
            imagine.append(imagine_ms)
    figures = {}
    for name, times in (("act", act), ("act_uncached", uncached), ("imagine", imagine)):
        wall, cpu = np.median(np.array(times), axis=0)
        figures |= {f"{name}_ms_p50": float(wall), f"{name}_cpu_ms_p50": float(cpu)}
    figures["act_ms_p99"] = float(np.percentile([wall for wall, _ in act], 99))
    figures["cached_over_uncached"] = figures["act_cpu_ms_p50"] / figures["act_uncached_cpu_ms_p50"]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here, as one flat JSON object")
    parser.add_argument("--base", default="tiny_libero_object", help="a shipped name or a policy folder")
    parser.add_argument("--decisions", type=int, default=60, help="timed, after 5 that are not")
    args = parser.parse_args()
    torch.set_num_threads(1)
    policy = load_base(args.base, SamplerConfig(num_steps=ACTION_STEPS))
    figures = measure(policy, args.decisions)
    figures["params"] = sum(p.numel() for p in policy.parameters())
    figures |= {"threads": torch.get_num_threads(), "action_steps": ACTION_STEPS, "decisions": args.decisions}
    text = json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
