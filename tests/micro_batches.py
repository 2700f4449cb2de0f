"""Labelled micro-batches made of random numbers, for tests that compare an objective with a literal sum."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from learners.advantages import Estimate
from learners.labels import LabelledBatch
from learners.transitions import Transitions
from tests import numpy_reference as reference
from wamrl_ray.policy.flow_sde import Prediction, SamplerConfig, transition

H, D, S = 3, 2, 2


def sampler_of(noise: str = "flow_sde", stochastic: str = "all", exclude_last: bool = True) -> SamplerConfig:
    return SamplerConfig(noise=noise, stochastic=stochastic, exclude_last=exclude_last)  # type: ignore[arg-type]


def labelled(rng: np.random.Generator, n: int, sampler: SamplerConfig) -> tuple[LabelledBatch, Prediction]:
    """n decisions with their random transitions, and a prediction under which they are likely."""

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape)).float()

    m = sampler.stochastic_steps
    last = sampler.num_steps - int(sampler.exclude_last)
    step = torch.from_numpy(rng.integers(0, last, (n, 1)) if m == 1 else np.tile(np.arange(m), (n, 1)))
    mask = torch.from_numpy(rng.integers(0, 2, (n, 1, H, D))).float()
    mask[:, :, 0, 0] = 1.0
    x, now = draw(n, m, H, D), Prediction(velocity=draw(n, m, H, D), raw_std=draw(n, m, H, D))
    mean, std = transition(x, now, step, sampler)
    moves = Transitions(step=step, x=x, x_next=mean + std * draw(n, m, H, D), mask=mask)
    log_pi = torch.tensor(literal_log_probs(moves, now, sampler), dtype=torch.float32)
    start = log_pi + 0.2 * draw(n, m)
    zeros = torch.zeros(n)
    batch = LabelledBatch(
        batch=0, episode=torch.arange(n), decision=torch.zeros(n, dtype=torch.int64), state=draw(n, S),
        clean=draw(n, H, D), transitions=moves, obs=None, world_seed=zeros, context=None, pooled=zeros[:, None],  # type: ignore[arg-type]
        behaviour=now, behaviour_logprob=start + 0.5 * draw(n, m), start=now, start_logprob=start, base=now,
        logprob_gap=zeros, reconstruction=zeros, scored=zeros.bool(), reward=zeros, noise=draw(n, H, D),
    )  # fmt: skip
    return batch, now


def literal_log_probs(moves: Transitions, p: Prediction, sampler: SamplerConfig) -> list[list[float]]:
    assert p.raw_std is not None
    out = np.zeros(moves.step.shape)
    for i, j in np.ndindex(moves.step.shape):
        mean, std = np.zeros((H, D)), np.zeros((H, D))
        for e in np.ndindex(H, D):
            x, v, raw = (float(a[i, j][e]) for a in (moves.x, p.velocity, p.raw_std))
            if sampler.learned_std:
                mean[e], std[e] = reference.flow_noise_step(
                    x, v, raw, sampler.num_steps, sampler.std_min, sampler.std_max
                )
            else:
                mean[e], std[e] = reference.flow_sde_step(x, v, int(moves.step[i, j]), sampler.num_steps, sampler.eta)
        out[i, j] = reference.log_density(moves.x_next[i, j].double().numpy(), mean, std, moves.mask[i, 0].numpy())
    return out.tolist()


def estimate_of(advantage: Tensor, keep: Tensor | None = None) -> Estimate:
    zeros = torch.zeros_like(advantage)
    return Estimate(
        advantage=advantage, keep=torch.ones_like(zeros).bool() if keep is None else keep, target=zeros, value=zeros
    )
