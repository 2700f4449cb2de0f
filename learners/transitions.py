"""The random denoising transitions of a batch of decisions, and their density under a policy.  Actor learner only.

A decision has one random transition (SDE at one drawn step) or several (every step).  Each becomes a row here, sorted
by step, so that one network call scores all of them and the formulas of `flow_sde` apply per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wamrl_ray.policy.flow_sde import (
    SamplerConfig,
    gaussian_log_prob,
    is_stochastic,
    sigma_grid,
    transition_kl,
    transition_mean,
    transition_std,
)

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM, Context


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """R rows of n decisions.  Example (K = 4, one of 3 decisions random at step 0, two at step 2): steps ((0, 0, 1),
    (2, 1, 3)), row [1, 0, 2], sigma [1, 0.5, 0.5]."""

    num_decisions: int
    steps: tuple[tuple[int, int, int], ...]
    "(k, start, stop) of each step's block of rows"
    row: Tensor
    "(R,) int64 decision of each row"
    x: Tensor
    "(R, H, D) iterate before the transition"
    x_next: Tensor
    "(R, H, D) iterate after it"
    sigma: Tensor
    "(R,)"

    def per_decision(self, values: Tensor) -> Tensor:
        """Sum the rows (R,) of each decision: (n,).  Step by step, so that the order of the sum is always the same."""
        total = values.new_zeros(self.num_decisions)
        for _, start, stop in self.steps:
            total = total.index_add(0, self.row[start:stop], values[start:stop])
        return total


def transitions(chain: Tensor, stochastic_step: Sequence[int], sampler: SamplerConfig) -> Transitions:
    """Chains (n, K+1, H, D) and each decision's `stochastic_step` -> its random transitions.

    Raises ValueError if a decision has none (it was made by the ODE: evaluation, not exploration).
    """
    grid, steps = sigma_grid(sampler.num_steps), []
    rows: list[tuple[int, int]] = []
    for k in range(sampler.num_steps):
        random = [i for i, step in enumerate(stochastic_step) if is_stochastic(step, k, sampler)]
        if random:
            steps.append((k, len(rows), len(rows) + len(random)))
            rows += [(i, k) for i in random]
    if {i for i, _ in rows} != set(range(len(chain))):
        missing = sorted(set(range(len(chain))) - {i for i, _ in rows})[0]
        raise ValueError(
            f"stochastic_step = {stochastic_step[missing]}: the decision has no random transition under "
            f"{sampler}; train on episodes collected with purpose 'train' and this sampler"
        )
    row, step = torch.tensor(rows).unbind(dim=1)
    return Transitions(
        num_decisions=len(chain),
        steps=tuple(steps),
        row=row.to(chain.device),
        x=chain[row, step],
        x_next=chain[row, step + 1],
        sigma=torch.tensor(grid, dtype=torch.float32)[step].to(chain.device),
    )


def velocities(policy: WAM, context: Context, batch: Transitions, state: Tensor) -> Tensor:
    """The policy's velocity at every row, (R, H, D).  `context` and `state` (n, S) are per decision."""
    return policy.velocity(context.index(batch.row), batch.x, batch.sigma, state[batch.row]).float()


def log_probs(batch: Transitions, velocity: Tensor, mask: Tensor, sampler: SamplerConfig) -> Tensor:
    """Log density of every row's transition under this velocity, (R,), summed over mask (H, D)."""
    out = []
    for k, start, stop in batch.steps:
        mean = transition_mean(batch.x[start:stop], velocity[start:stop], k, sampler.num_steps, sampler.eta)
        std = transition_std(k, sampler.num_steps, sampler.eta)
        out.append(gaussian_log_prob(batch.x_next[start:stop], mean, std, mask))
    return torch.cat(out)


def kl(batch: Transitions, velocity: Tensor, other: Tensor, mask: Tensor, sampler: SamplerConfig) -> Tensor:
    """Exact KL between two policies' transitions at every row, (R,) nats."""
    return torch.cat(
        [
            transition_kl(velocity[start:stop], other[start:stop], k, sampler.num_steps, sampler.eta, mask)
            for k, start, stop in batch.steps
        ]
    )
