"""Advantage-weighted regression on the flow-matching loss: imitate one's own chunks, the better the more.

One of the objectives.  It needs no density, so it also trains where the sampler's noise is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from learners.advantages import Estimate
from learners.labels import LabelledBatch
from learners.losses import awr_weight
from learners.transitions import Predict
from wamrl_ray.policy.flow_sde import Prediction, SamplerConfig, sigma_grid

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import Context


@dataclass(frozen=True, kw_only=True)
class AWRConfig:
    """arXiv 1910.00177 with the flow-matching loss in the place of the log-likelihood it bounds."""

    kind: Literal["awr"] = "awr"
    temperature: float = 0.5
    "advantage (in stds, where the estimator normalises) at which the weight has grown by e; smaller imitates the best "
    "alone"
    max_weight: float = 20.0
    "largest weight before they are scaled to mean 1 over the update; the paper's"
    draws: int = 4
    "noise levels per decision and pass, drawn from the sampler's grid: those are the levels at which it acts"

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature = {self.temperature}: use a positive number")
        if not self.max_weight >= 1:
            raise ValueError(f"max_weight = {self.max_weight}: use at least 1")
        if self.draws < 1:
            raise ValueError(f"draws = {self.draws}: use at least 1")


class AWR:
    """Draws noise levels and noise anew for every pass, for all decisions at once, so that the size of a micro-batch
    changes nothing."""

    def __init__(self, config: AWRConfig, sampler: SamplerConfig) -> None:
        self._config, self._sampler = config, sampler

    def prepare(self, batches: Sequence[LabelledBatch], estimate: Estimate, rng: np.random.Generator) -> None:
        """Weights of the update and noise of one pass; call before it."""
        clean = batches[0].clean
        count = sum(map(len, batches))
        weight = awr_weight(
            estimate.advantage, temperature=self._config.temperature, max_weight=self._config.max_weight
        )
        self._weight = weight / weight[estimate.keep].mean() if bool(estimate.keep.any()) else weight
        generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
        level = torch.randint(self._sampler.num_steps, (count, self._config.draws), generator=generator)
        self._sigma = torch.tensor(sigma_grid(self._sampler.num_steps), dtype=torch.float32)[level].to(clean.device)
        shape = (count, self._config.draws, *clean.shape[1:])
        self._noise = torch.randn(shape, generator=generator).to(clean.device)

    def loss(
        self, expert: Predict, context: Context, batch: LabelledBatch, own: slice, now: Prediction, estimate: Estimate
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(n,): weight x mean of |v - (eps - x0)|^2 over draws, executed steps and all channels.

        All channels: the expert denoises future states beside the actions, and where only actions are held they drift.
        """
        sigma, noise, weight = self._sigma[own], self._noise[own], self._weight[own]
        clean, level = batch.clean[:, None], sigma[:, :, None, None]
        x = (1.0 - level) * clean + level * noise
        velocity = expert(context, x.flatten(0, 1), sigma.flatten(), batch.state).velocity.reshape(x.shape)
        steps = batch.transitions.mask.amax(dim=-1, keepdim=True)  # (n, 1, H, 1)
        square = (velocity - (noise - clean)).square() * steps
        loss = square.sum(dim=(1, 2, 3)) / (steps.sum(dim=(1, 2, 3)) * sigma.shape[1] * clean.shape[-1])
        none = torch.zeros(batch.transitions.step.shape, dtype=torch.bool, device=clean.device)
        return weight * loss, {"clipped": none, "importance_weight": torch.ones_like(none, dtype=torch.float32)}
