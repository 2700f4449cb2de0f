"""Clipped policy gradient on the denoising transitions (PPO through Flow-SDE or Flow-Noise).  One of the objectives.

Fed with a labelled micro-batch and what the expert says of it now; gives a loss per decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from learners.advantages import Estimate
from learners.labels import LabelledBatch
from learners.losses import ppo_clip, truncated_weight
from learners.returns import denoise_discount
from learners.transitions import Contexts, Predict, log_probs
from wamrl_ray.policy.flow_sde import Prediction, SamplerConfig, transition_std, velocity_sensitivity

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import Context


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """arXiv 1707.06347 on the density of denoising transitions (piRL, arXiv 2510.25889)."""

    kind: Literal["ppo"] = "ppo"
    clip_low: float = 0.2
    "ratio floor 1 - clip_low"
    clip_high: float = 0.2
    "ratio ceiling 1 + clip_high; 0.28 is SimpleVLA-RL's asymmetric choice.  Goes with log-probs summed over executed "
    "steps x A: rules that average them need clips of 1e-3"
    clip_schedule: Literal["constant", "exponential", "sensitivity"] = "constant"
    "width per denoising step.  exponential: grows from clip_first x the width at the first step to the width at the "
    "last random one, by equal factors (after DPPO); sensitivity: proportional to |d mean / d v| / std, mean 1: every "
    "step clips at the same change of the velocity (ours; a constant width clips late steps up to four times sooner)"
    clip_first: float = 0.1
    "exponential: share of the width at the first step; DPPO's 0.001 of 0.01"
    ratio: Literal["step", "joint"] = "step"
    "one ratio per random transition, averaged over a decision's; joint: one of the product of its densities"
    denoise_discount: float = 1.0
    "credit of a transition per step that is between it and the action; DPPO uses 0.99"
    proximal: Literal["update_start", "behaviour"] = "update_start"
    "the ratio's denominator: the policy before the update, what it is off the behaviour being an importance weight "
    "(decoupled PPO, arXiv 2110.00641); or the behaviour policy itself.  The same unless another pair acted"
    importance_cap: float = 5.0
    "update_start: largest importance weight, RLinf's cut (it drops what we truncate); 0 leaves stale data uncorrected"

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"clip_low = {self.clip_low}: use a number between 0 and 1, such as 0.2")
        for name in ("clip_high", "clip_first"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: use a positive number")
        if not 0 < self.denoise_discount <= 1:
            raise ValueError(f"denoise_discount = {self.denoise_discount}: use a number in (0, 1]")
        if not (self.importance_cap == 0 or self.importance_cap >= 1):
            raise ValueError(f"importance_cap = {self.importance_cap}: use at least 1, or 0 for no weights")
        choices = {
            "clip_schedule": ("constant", "exponential", "sensitivity"),
            "ratio": ("step", "joint"),
            "proximal": ("update_start", "behaviour"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r}: use one of {', '.join(allowed)}")
        if self.ratio == "joint" and (self.denoise_discount != 1 or self.clip_schedule != "constant"):
            raise ValueError("ratio = 'joint': has no steps to discount or clip apart; use ratio = 'step'")


class PPO:
    """Stateless between updates."""

    def __init__(self, config: PPOConfig, sampler: SamplerConfig) -> None:
        self._config, self._sampler = config, sampler
        self._clip_scale = clip_scale(config, sampler)

    def prepare(
        self, expert: Predict, contexts: Contexts, batches: Sequence[LabelledBatch], estimate: Estimate, seed: int
    ) -> None:
        """Nothing to draw."""

    def loss(
        self, expert: Predict, context: Context, batch: LabelledBatch, own: slice, now: Prediction, estimate: Estimate
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(n,) loss per decision, and `clipped` (n, m) bool and `importance_weight` (n, m) or (n, 1) for metrics."""
        config, step = self._config, batch.transitions.step
        stale = config.proximal == "update_start"
        log_pi = log_probs(batch.transitions, now, self._sampler)
        old = batch.start_logprob if stale else batch.behaviour_logprob
        log_weight = batch.start_logprob - batch.behaviour_logprob
        if config.ratio == "joint":
            log_pi, old, log_weight = (x.sum(dim=1, keepdim=True) for x in (log_pi, old, log_weight))
        scale = self._clip_scale.to(step.device)[step] if config.ratio == "step" else torch.ones_like(log_pi)
        surrogate, clipped = ppo_clip(
            log_pi - old.detach(),
            estimate.advantage[own][:, None],
            clip_low=config.clip_low * scale,
            clip_high=config.clip_high * scale,
        )
        weight = torch.ones_like(log_weight)
        if stale and config.importance_cap > 0:
            weight = truncated_weight(log_weight, cap=config.importance_cap)
        if config.denoise_discount < 1:
            surrogate = surrogate * denoise_discount(
                step, num_steps=self._sampler.num_steps, discount=config.denoise_discount
            )
        return (weight * surrogate).mean(dim=1), {"clipped": clipped, "importance_weight": weight}


def clip_scale(config: PPOConfig, sampler: SamplerConfig) -> Tensor:
    """(K,) factor on the clip widths of each denoising step; see `PPOConfig.clip_schedule`."""
    steps, last = range(sampler.num_steps), sampler.num_steps - 1 - int(sampler.exclude_last)
    match config.clip_schedule:
        case "constant":
            return torch.ones(sampler.num_steps)
        case "exponential":
            return torch.tensor([config.clip_first ** max(1.0 - k / max(last, 1), 0.0) for k in steps])
        case "sensitivity":
            if sampler.learned_std:  # an Euler step's derivative is the same at every step, and so are the std's bounds
                return torch.ones(sampler.num_steps)
            slope = [
                abs(velocity_sensitivity(k, sampler.num_steps, sampler.eta))
                / transition_std(k, sampler.num_steps, sampler.eta)
                for k in steps
            ]
            random = slope[: last + 1]
            return torch.tensor(slope) / (sum(random) / len(random))
