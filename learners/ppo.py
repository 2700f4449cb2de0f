"""Gradient steps of the actor learner: PPO epochs on the expert, then epochs on the critic.

Fed with labelled micro-batches and advantages; changes the weights behind the optimisers and fills the metrics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from learners.advantages import Estimate
from learners.critic import Critic
from learners.labels import LabelledBatch
from learners.losses import approx_kl, masked_mean, ppo_clip, value_loss
from learners.optim import GuardedAdamW
from learners.tally import Tally
from learners.transitions import kl, log_probs, velocities

if TYPE_CHECKING:
    from learners.actor_flow_sde import ActorFlowSDEConfig
    from wamrl_ray.policy.wam import WAM


def shuffled(
    batches: Sequence[LabelledBatch], epochs: int, rng: np.random.Generator
) -> Iterator[tuple[LabelledBatch, slice]]:
    """Every micro-batch once per epoch in random order, with its place among the concatenated decisions."""
    ends = np.cumsum([len(batch) for batch in batches])
    for _ in range(epochs):
        for i in rng.permutation(len(batches)):
            yield batches[i], slice(int(ends[i]) - len(batches[i]), int(ends[i]))


def train_expert(
    config: ActorFlowSDEConfig,
    policy: WAM,
    optimizer: GuardedAdamW,
    batches: Sequence[LabelledBatch],
    estimate: Estimate,
    rng: np.random.Generator,
    metrics: Tally,
) -> bool:
    """Clipped surrogate + kl_to_base x exact transition KL to the base expert.  Returns whether a step was applied.

    Stops before the step at which the exact KL to the behaviour policy has grown by `target_kl`: by its growth, because
    after a rebase it starts above zero and the expert has to move to adapt.
    """
    applied, stopped = False, False
    for batch, own in shuffled(batches, config.epochs, rng):
        keep = estimate.keep[own]
        if not bool(keep.any()):
            continue
        loss, terms = expert_loss(config, policy, batch, estimate.advantage[own], keep)
        if 0 < config.target_kl < float(terms["moved"][keep].mean()) - batch.start_kl:
            stopped = True
            break
        norm = optimizer.step(loss)
        if norm < 0:
            continue
        applied = True
        metrics.add("actor/grad_norm", norm)
        _note(metrics, batch, terms, keep)
    metrics.add("actor/stopped_early", float(stopped))
    return applied


def expert_loss(
    config: ActorFlowSDEConfig, policy: WAM, batch: LabelledBatch, advantage: Tensor, keep: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss of one micro-batch, advantage and keep (n,), and its parts for metrics (detached)."""
    moves, mask, sampler = batch.transitions, policy.executed_mask(), policy.sampler
    velocity = velocities(policy, batch.context, moves, batch.state)
    log_rho = moves.per_decision(log_probs(moves, velocity, mask, sampler)) - batch.behaviour_logprob
    policy_loss, clipped = ppo_clip(log_rho, advantage, keep, clip_low=config.clip_low, clip_high=config.clip_high)
    to_base = moves.per_decision(kl(moves, velocity, batch.base_velocity, mask, sampler))
    loss = policy_loss + config.kl_to_base * masked_mean(to_base, keep)
    moved = kl(moves, velocity.detach(), batch.behaviour_velocity, mask, sampler)
    terms = {
        "policy_loss": policy_loss.detach(),
        "to_base": to_base.detach(),
        "log_rho": log_rho.detach(),
        "clipped": clipped,
        "moved_rows": moved,
        "moved": moves.per_decision(moved),
    }
    return loss, terms


def _note(metrics: Tally, batch: LabelledBatch, terms: dict[str, Tensor], keep: Tensor) -> None:
    moves, ratio = batch.transitions, terms["log_rho"][keep].exp()
    metrics.add("actor/policy_loss", terms["policy_loss"])
    metrics.add("actor/kl_to_base_nats", terms["to_base"][keep])
    metrics.add("actor/kl_to_behaviour_nats", terms["moved"][keep])
    metrics.add("actor/approx_kl_nats", approx_kl(terms["log_rho"])[keep])
    metrics.add("actor/clip_fraction", terms["clipped"][keep])
    metrics.add("actor/ratio_mean", ratio)
    metrics.add("actor/ratio_deviation_mean", (ratio - 1.0).abs())
    for k, start, stop in moves.steps:
        row = moves.row[start:stop]
        metrics.add(f"actor/kl_to_behaviour_step{k}_nats", terms["moved_rows"][start:stop][keep[row]])
        metrics.add(f"actor/clip_fraction_step{k}", terms["clipped"][row][keep[row]])


def train_critic(
    config: ActorFlowSDEConfig,
    critic: Critic,
    optimizer: GuardedAdamW,
    batches: Sequence[LabelledBatch],
    estimate: Estimate,
    rng: np.random.Generator,
    metrics: Tally,
) -> None:
    """`critic_epochs` passes of Huber regression on the value targets."""
    for batch, own in shuffled(batches, config.critic_epochs, rng):
        value, old = critic(batch.context.pooled, batch.state), estimate.value[own]
        loss = value_loss(
            value, old, estimate.target[own], torch.ones_like(old), value_clip=config.value_clip, huber=config.huber
        )
        norm = optimizer.step(loss)
        if norm >= 0:
            metrics.add("actor/value_loss", loss)
            metrics.add("actor/critic_grad_norm", norm)
