"""Advantage-weighted regression on the flow-matching loss: imitate one's own chunks, weighted by advantage.

One of the objectives.  It needs no density, so it also trains where the sampler's noise is small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from learners.advantages import Estimate
from learners.labels import LabelledBatch
from learners.losses import awr_weight
from learners.transitions import Contexts, Predict
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
    target: Literal["residual", "chunk"] = "residual"
    "chunk: regress on what was acted, as in pretraining.  residual: on what the expert says before the update, moved "
    "(weight - 1) times the way to it (ours).  It leaves out the gradient of imitating oneself with weight 1, which "
    "should be none; but few Euler steps give samples that spread less than what they were trained on, and imitating "
    "them again and again collapses"
    coupling: Literal["own", "independent"] = "own"
    "noise that the chunk is mixed with.  own: the noise it was denoised from, as in rectified flow's reflow (arXiv "
    "2209.03003); independent: fresh noise, as in pretraining"
    draws: int = 2
    "noise levels per decision, drawn from the sampler's grid: those are the levels at which it acts"

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature = {self.temperature}: use a positive number")
        if not self.max_weight >= 1:
            raise ValueError(f"max_weight = {self.max_weight}: use at least 1")
        for name, allowed in (("target", ("residual", "chunk")), ("coupling", ("own", "independent"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} = {getattr(self, name)!r}: use '{allowed[0]}' or '{allowed[1]}'")
        if self.draws < 1:
            raise ValueError(f"draws = {self.draws}: use at least 1")


class AWR:
    """Draws noise levels, and noise, for all decisions of an update at once: the size of a micro-batch changes
    nothing."""

    def __init__(self, config: AWRConfig, sampler: SamplerConfig) -> None:
        self._config, self._sampler = config, sampler

    def prepare(
        self, expert: Predict, contexts: Contexts, batches: Sequence[LabelledBatch], estimate: Estimate, seed: int
    ) -> None:
        """Weights, noise levels and targets of the update; `expert` is as it was before the first step."""
        config, device = self._config, batches[0].clean.device
        clean, own = torch.cat([b.clean for b in batches])[:, None], torch.cat([b.noise for b in batches])[:, None]
        weight = awr_weight(estimate.advantage, temperature=config.temperature, max_weight=config.max_weight)
        kept = weight[estimate.keep]
        self._weight = weight / kept.mean() if len(kept) else weight
        generator = torch.Generator().manual_seed(seed)
        level = torch.randint(self._sampler.num_steps, (len(clean), config.draws), generator=generator)
        self._sigma = torch.tensor(sigma_grid(self._sampler.num_steps), dtype=torch.float32)[level].to(device)
        noise = own.expand(-1, config.draws, -1, -1)
        if config.coupling == "independent":
            noise = torch.randn(noise.shape, generator=generator).to(device)
        at = self._sigma[:, :, None, None]
        self._x, self._target = (1.0 - at) * clean + at * noise, noise - clean
        if config.target == "residual":
            self._target = self._residual_targets(expert, contexts, batches)
            self._weight = torch.ones_like(weight)

    def _residual_targets(self, expert: Predict, contexts: Contexts, batches: Sequence[LabelledBatch]) -> Tensor:
        """v_start + (weight - 1) (eps - x0 - v_start), (n, draws, H, D): weight 1 asks for no change.

        v_start is computed with gradients enabled and then detached: autograd may choose other kernels, and what those
        round differently AdamW would make as large as any other step.
        """
        targets, end = [], 0
        for batch in batches:
            own, end = slice(end, end + len(batch)), end + len(batch)
            with torch.no_grad():
                context = contexts(batch)
            start = self._velocity(expert, context, batch, own).detach()
            targets.append(start + (self._weight[own, None, None, None] - 1.0) * (self._target[own] - start))
        return torch.cat(targets)

    def _velocity(self, expert: Predict, context: Context, batch: LabelledBatch, own: slice) -> Tensor:
        x = self._x[own]
        return expert(context, x.flatten(0, 1), self._sigma[own].flatten(), batch.state).velocity.reshape(x.shape)

    def loss(
        self, expert: Predict, context: Context, batch: LabelledBatch, own: slice, now: Prediction, estimate: Estimate
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(n,): weight x mean of |v - target|^2 over draws, executed steps and all channels.

        All channels: the expert denoises future states beside the actions, and where only actions are held they drift.
        """
        velocity = self._velocity(expert, context, batch, own)
        steps = batch.transitions.mask.amax(dim=-1, keepdim=True)  # (n, 1, H, 1)
        square = (velocity - self._target[own]).square() * steps
        loss = square.sum(dim=(1, 2, 3)) / (steps.sum(dim=(1, 2, 3)) * velocity.shape[1] * velocity.shape[3])
        none = torch.zeros(batch.transitions.step.shape, dtype=torch.bool, device=loss.device)
        return self._weight[own] * loss, {"clipped": none, "importance_weight": torch.ones_like(none, dtype=loss.dtype)}
