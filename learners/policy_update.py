"""The gradient steps of the actor learner: epochs over labelled batches, whatever the objective.

Fed with labelled micro-batches and advantages; changes the weights behind the optimiser and fills the metrics.

    for every batch of every epoch:  loss = objective + kl_to_base x exact KL to the base - entropy_bonus x entropy
                                     one step, its gradient summed over the batch's micro-batches
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from learners.advantages import Estimate
from learners.expert import FullExpert, LoRAExpert
from learners.labels import LabelledBatch
from learners.losses import MAX_LOG_RATIO, approx_kl
from learners.optim import GuardedAdamW, autocast
from learners.tally import Tally
from learners.transitions import Contexts, Predict, entropy, kl, log_probs, predict
from wamrl_ray.policy.flow_sde import Prediction, SamplerConfig

if TYPE_CHECKING:
    from learners.actor_config import ActorFlowSDEConfig
    from wamrl_ray.policy.wam import WAM, Context


class Objective(Protocol):
    """What the expert is trained for."""

    def prepare(
        self, expert: Predict, contexts: Contexts, batches: Sequence[LabelledBatch], estimate: Estimate, seed: int
    ) -> None:
        """Called once before an update's first step: draw what it needs for all decisions."""

    def loss(
        self, expert: Predict, context: Context, batch: LabelledBatch, own: slice, now: Prediction, estimate: Estimate
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(n,) loss per decision of the micro-batch that lies at `own` among the update's decisions, and `clipped`
        (n, m) or (n, 1) and `importance_weight` of the same shape for metrics."""


@dataclass(frozen=True, kw_only=True)
class PolicyUpdate:
    """What the gradient steps act on; holds no state of its own."""

    config: ActorFlowSDEConfig
    policy: WAM
    expert: FullExpert | LoRAExpert
    objective: Objective
    optimizer: GuardedAdamW

    def run(
        self, batches: Sequence[LabelledBatch], estimate: Estimate, rng: np.random.Generator, metrics: Tally
    ) -> bool:
        """`epochs` passes over the batches in random order.  Returns whether any step was applied.

        Ends before the step at which the exact KL from the update's start has reached `target_kl`.
        """
        parts = _by_batch(batches)
        with autocast(self.policy.device, self.config.precision):
            seed = int(rng.integers(2**62))
            self.objective.prepare(
                self.expert.predict, lambda batch: batch.context_in(self.policy), batches, estimate, seed
            )
        applied, stopped = False, False
        for i in (i for _ in range(self.config.epochs) for i in rng.permutation(len(parts))):
            outcome = self._step(parts[i], estimate, metrics)
            applied, stopped = applied or outcome == "applied", outcome == "stopped"
            if stopped:
                break
        metrics.add("actor/stopped_early", float(stopped))
        return applied

    def _step(
        self, parts: Sequence[tuple[LabelledBatch, slice]], estimate: Estimate, metrics: Tally
    ) -> Literal["applied", "skipped", "stopped"]:
        """One gradient step on a batch, its micro-batches one after the other; skipped if nothing counts in it."""
        kept = sum(int(estimate.keep[own].sum()) for _, own in parts)
        if kept == 0:
            return "skipped"
        noted = []
        for batch, own in parts:
            loss, terms = self._loss(batch, own, estimate)
            self.optimizer.accumulate(loss.sum() / kept)
            noted.append((batch, terms, estimate.keep[own]))
        moved = sum(float(terms["moved"][keep].sum()) for _, terms, keep in noted) / kept
        if 0 < self.config.target_kl < moved:
            self.optimizer.drop()
            return "stopped"
        norm = self.optimizer.apply()
        if norm < 0:
            return "skipped"
        self.expert.write_back()
        metrics.add("actor/grad_norm", norm)
        for batch, terms, keep in noted:
            _note(metrics, batch, terms, keep)
        return "applied"

    def _loss(self, batch: LabelledBatch, own: slice, estimate: Estimate) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss (n,) of one micro-batch, 0 where a decision is not kept, and its parts for metrics, detached."""
        config, moves, sampler = self.config, batch.transitions, self.policy.sampler
        with autocast(self.policy.device, config.precision):
            with torch.no_grad():
                context = batch.context_in(self.policy)
            now = predict(self.expert.predict, context, moves, batch.state, sampler)
            policy_loss, terms = self.objective.loss(self.expert.predict, context, batch, own, now, estimate)
        to_base = kl(moves, now, batch.base, sampler).sum(dim=1)
        loss = policy_loss + config.kl_to_base * to_base
        if config.entropy_bonus > 0:
            terms["entropy"] = entropy(moves, now, sampler)
            loss = loss - config.entropy_bonus * terms["entropy"]
        with torch.no_grad():
            terms |= _distances(batch, now.detach(), sampler)
        terms |= {"policy_loss": policy_loss, "to_base": to_base}
        return loss * estimate.keep[own].float(), {name: term.detach() for name, term in terms.items()}


def _distances(batch: LabelledBatch, now: Prediction, sampler: SamplerConfig) -> dict[str, Tensor]:
    """How far the policy is from where the update began and from the one that acted, per decision in nats."""
    moves = batch.transitions
    from_start = kl(moves, batch.start, now, sampler)
    from_behaviour = from_start if batch.behaviour is batch.start else kl(moves, batch.behaviour, now, sampler)
    return {
        "moved_steps": from_start,
        "moved": from_start.sum(dim=1),
        "to_behaviour": from_behaviour.sum(dim=1),
        "log_rho": (log_probs(moves, now, sampler) - batch.start_logprob).sum(dim=1),
    }


def _by_batch(batches: Sequence[LabelledBatch]) -> list[list[tuple[LabelledBatch, slice]]]:
    """Micro-batches with their places among the concatenated decisions, by the gradient step they belong to."""
    grouped: dict[int, list[tuple[LabelledBatch, slice]]] = {}
    end = 0
    for batch in batches:
        grouped.setdefault(batch.batch, []).append((batch, slice(end, end + len(batch))))
        end += len(batch)
    return list(grouped.values())


def _note(metrics: Tally, batch: LabelledBatch, terms: dict[str, Tensor], keep: Tensor) -> None:
    """Per decision, of those kept; clip fraction and KL also per denoising step."""
    log_rho, clipped = terms["log_rho"][keep].clamp(max=MAX_LOG_RATIO), terms["clipped"][keep]
    ratio, step = log_rho.exp(), batch.transitions.step[keep]
    metrics.add("actor/policy_loss", terms["policy_loss"][keep])
    metrics.add("actor/kl_to_base_nats", terms["to_base"][keep])
    metrics.add("actor/kl_to_behaviour_nats", terms["to_behaviour"][keep])
    metrics.add("actor/kl_to_start_nats", terms["moved"][keep])
    metrics.add("actor/approx_kl_nats", approx_kl(log_rho))
    metrics.add("actor/clip_fraction", clipped.any(dim=1).float())
    metrics.add("actor/importance_weight_mean", terms["importance_weight"][keep])
    metrics.add("actor/ratio_mean", ratio)
    metrics.add("actor/ratio_deviation_mean", (ratio - 1.0).abs())
    if "entropy" in terms:
        metrics.add("actor/entropy_nats", terms["entropy"][keep])
    for k in torch.unique(step).tolist():
        metrics.add(f"actor/kl_to_start_step{k}_nats", terms["moved_steps"][keep][step == k])
        metrics.add(f"actor/clip_fraction_step{k}", clipped.expand_as(step)[step == k].float())
