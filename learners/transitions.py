"""The random denoising transitions of a batch of decisions, and their density under a policy.  Actor learner only.

A decision has m random transitions: one, at the step that was drawn for it, or one per step.  They stand side by side,
(n, m), so that one network call scores all of them with each decision's keys and values computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wamrl_ray.policy import flow_sde
from wamrl_ray.policy.flow_sde import Prediction, SamplerConfig, is_stochastic, sigma_grid

if TYPE_CHECKING:
    from learners.labels import LabelledBatch
    from wamrl_ray.policy.wam import Context

Predict = Callable[["Context", Tensor, Tensor, Tensor], Prediction]
"""`WAM.forward`, or the same with other weights: (context, x (B, H, D), sigma (B,), state) -> Prediction."""

Contexts = Callable[["LabelledBatch"], "Context"]
"""The features of a micro-batch, from memory or computed anew."""


@dataclass(frozen=True, kw_only=True)
class Transitions:
    """m transitions of each of n decisions.  Example (K = 4, three decisions that were random at steps 0, 2, 2): step
    [[0], [2], [2]], x = chain[i, step], x_next = chain[i, step + 1]."""

    step: Tensor
    "(n, m) int64 k"
    x: Tensor
    "(n, m, H, D) iterate before the transition"
    x_next: Tensor
    "(n, m, H, D) iterate after it"
    mask: Tensor
    "(n, 1, H, D): 1 on the entries whose density counts"

    def __len__(self) -> int:
        return len(self.step)


def transitions(chain: Tensor, stochastic_step: Tensor, mask: Tensor, sampler: SamplerConfig) -> Transitions:
    """Chains (n, K+1, H, D), each decision's `stochastic_step` (n,) and its mask (n, H, D) -> its random transitions.

    Raises ValueError if a decision has not as many as the sampler makes (it was acted by the ODE, or by another one).
    """
    steps = []
    for chosen in stochastic_step.tolist():
        steps.append([k for k in range(sampler.num_steps) if is_stochastic(chosen, k, sampler)])
        if len(steps[-1]) != sampler.stochastic_steps:
            raise ValueError(
                f"stochastic_step = {chosen}: {len(steps[-1])} random transitions where {sampler} makes "
                f"{sampler.stochastic_steps}; train on episodes collected with purpose 'train' and this sampler"
            )
    step = torch.tensor(steps, device=chain.device)
    decision = torch.arange(len(chain), device=chain.device)[:, None]
    return Transitions(step=step, x=chain[decision, step], x_next=chain[decision, step + 1], mask=mask[:, None])


def predict(policy: Predict, context: Context, batch: Transitions, state: Tensor, sampler: SamplerConfig) -> Prediction:
    """What the policy says of every transition's iterate, (n, m, H, D); `context`, `state` (n, S) are per decision."""
    sigma = torch.tensor(sigma_grid(sampler.num_steps), dtype=torch.float32, device=batch.x.device)[batch.step]
    out = policy(context, batch.x.flatten(0, 1), sigma.flatten(), state)
    raw = out.raw_std
    return Prediction(
        velocity=out.velocity.reshape(batch.x.shape), raw_std=None if raw is None else raw.reshape(batch.x.shape)
    )


def log_probs(batch: Transitions, prediction: Prediction, sampler: SamplerConfig, mask: Tensor | None = None) -> Tensor:
    """Log density of every transition under this prediction, (n, m), over the batch's mask or another one."""
    mean, std = flow_sde.transition(batch.x, prediction, batch.step, sampler)
    return flow_sde.gaussian_log_prob(batch.x_next, mean, std, batch.mask if mask is None else mask)


def kl(batch: Transitions, p: Prediction, q: Prediction, sampler: SamplerConfig) -> Tensor:
    """Exact KL(p || q) of every transition, (n, m) nats."""
    return flow_sde.transition_kl(p, q, batch.step, sampler, batch.mask)


def entropy(batch: Transitions, prediction: Prediction, sampler: SamplerConfig) -> Tensor:
    """Entropy per counted entry, mean over each decision's transitions: (n,) nats."""
    total = flow_sde.transition_entropy(prediction, batch.step, sampler, batch.mask)
    return (total / batch.mask.sum(dim=(-2, -1)).clamp(min=1.0)).mean(dim=1)
