"""Labels of decisions in micro-batches: what the pair that acted imagined, and how probable it found what it did.

The actor learner calls `label_episodes` once per update and keeps the result for all its epochs.  Frames do not survive
labelling, except those of one episode for the run folder's clip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learners.batching import Decisions, Pick, all_decisions, gather
from learners.transitions import Transitions, kl, log_probs, transitions, velocities
from wamrl_ray.rewards.reconstruction import RewardConfig, decision_rewards
from wamrl_ray.types import Episode, Pair, Reward, Snapshot

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM, Context, ObsLatents


@dataclass(kw_only=True)
class LabelledBatch:
    """n decisions that always go through the networks together.  label -> actor learner, which fills in the rest."""

    episode: Tensor
    "(n,) int64"
    decision: Tensor
    "(n,) int64"
    state: Tensor
    "(n, S)"
    world_seed: Tensor
    "(n,)"
    transitions: Transitions
    obs: ObsLatents
    context: Context
    "features of the world that the actor trains against (first: of the behaviour world)"
    behaviour_velocity: Tensor
    "(R, H, D)"
    behaviour_logprob: Tensor
    "(n,) recomputed here"
    logprob_gap: Tensor
    "(n,) |recomputed - stored by the worker|"
    reconstruction: Tensor
    "(n,) shaped reward, 0 where nothing was comparable"
    scored: Tensor
    "(n,) bool: at least one imagined frame had an executed counterpart"
    reward: Tensor
    "(n,) weight x reconstruction + success_weight x success"
    base_velocity: Tensor
    "(R, H, D) of the base expert in the same context"
    start_kl: float = 0.0
    "mean KL to the behaviour, nats per decision, before the update's first step: 0 unless the weights that acted are "
    "not the learner's, as after a rebase"

    def __len__(self) -> int:
        return len(self.episode)


@dataclass(kw_only=True)
class ClipFrames:
    """What one episode imagined and what happened, decision by decision.  label -> `ActorFlowSDELearner.clip`."""

    decision: list[int]
    imagined: list[NDArray[np.uint8]]
    "(F, V, h, w, 3) each"
    executed: list[NDArray[np.uint8]]
    "(F, V, h, w, 3) each; the frame at decision time where nothing was executed"
    reached: list[NDArray[np.bool_]]
    "(F,) each"
    reward: list[float]

    def arrays(self) -> dict[str, NDArray[Any]] | None:
        """In the order of the decisions: imagined, executed (T, F, V, h, w, 3) uint8, reached (T, F), reward (T,)."""
        if not self.decision:
            return None
        order = np.argsort(self.decision)
        return {
            "imagined": np.stack(self.imagined)[order],
            "executed": np.stack(self.executed)[order],
            "reached": np.stack(self.reached)[order],
            "reward": np.asarray(self.reward, dtype=np.float32)[order],
        }


def label_episodes(
    policy: WAM,
    metric: Reward,
    config: RewardConfig,
    episodes: Sequence[Episode],
    pairs: Sequence[tuple[Pair, Snapshot, Snapshot]],
    *,
    world: Snapshot,
    base: Snapshot,
    minibatch: int,
    rng: np.random.Generator,
    clip: ClipFrames,
) -> list[LabelledBatch]:
    """Every decision once, in random micro-batches of which none mixes two behaviour pairs.

    Contexts are those of `world`, which the actor trains against; `base` is the expert of the KL anchor.  The policy
    visits other weights on the way and has its own actor, and `world`, again at the end, also after an error.
    """
    own, batches = policy.export("actor"), []
    try:
        for pair, pair_world, pair_actor in pairs:
            picks = [pick for pick in all_decisions(episodes) if episodes[pick[0]].pair.order == pair.order]
            if not picks:
                continue
            policy.load_pair(pair_world, pair_actor)
            made = [
                label(policy, metric, config, gather(episodes, part, policy.spec), clip)
                for part in micro_batches(picks, minibatch, rng)
            ]
            if (pair.world, pair.actor) != (world.digest, own.digest):
                policy.load_pair(world, own)
                for batch in made:
                    _move_to_world(policy, batch)
            batches += made
        policy.load_pair(world, base)
        with torch.no_grad():
            for batch in batches:
                batch.base_velocity = velocities(policy, batch.context, batch.transitions, batch.state)
    finally:
        policy.load_pair(world, own)
    return batches


def micro_batches(picks: Sequence[Pick], size: int, rng: np.random.Generator) -> list[list[Pick]]:
    """The picks in random order, in parts of nearly equal size <= `size`."""
    parts = np.array_split(rng.permutation(len(picks)), math.ceil(len(picks) / size))
    return [[picks[i] for i in part] for part in parts]


@torch.no_grad()
def _move_to_world(policy: WAM, batch: LabelledBatch) -> None:
    """Replace the behaviour's context by that of the policy's weights, and note how far apart the two act."""
    batch.context = policy.world_context(batch.obs, batch.world_seed)
    velocity = velocities(policy, batch.context, batch.transitions, batch.state)
    apart = kl(batch.transitions, velocity, batch.behaviour_velocity, policy.executed_mask(), policy.sampler)
    batch.start_kl = float(batch.transitions.per_decision(apart).mean())


def label(policy: WAM, metric: Reward, config: RewardConfig, batch: Decisions, clip: ClipFrames) -> LabelledBatch:
    """Label a batch with the behaviour pair, which `policy` must hold.  Episode 0's frames are added to `clip`.

    The log-probability is computed with gradients enabled and then detached: autograd may choose other kernels, and
    the ratio of the first epoch has to be exactly 1.
    """
    device = policy.device
    state = batch.state.to(device)
    with torch.no_grad():
        obs = policy.encode(batch.memory, batch.instruction)
        context = policy.world_context(obs, batch.world_seed)
    moves = transitions(batch.chain.to(device), batch.stochastic_step.tolist(), policy.sampler)
    velocity = velocities(policy, context, moves, state).detach()
    logprob = moves.per_decision(log_probs(moves, velocity, policy.executed_mask(), policy.sampler))
    reached = batch.reached.to(device)
    reconstruction = torch.zeros(len(batch), device=device)
    if config.weight > 0:
        imagined = policy.imagine(obs, batch.world_seed, config.imagine_steps)
        executed = policy.round_trip(batch.future.to(device))
        now = policy.round_trip(batch.memory[:, -1].to(device))
        reconstruction = decision_rewards(metric, imagined, executed, now, reached, config)
        _add_to_clip(clip, batch, imagined, reconstruction)
    reward = config.weight * reconstruction + config.success_weight * batch.succeeded.to(device).float()
    return LabelledBatch(
        episode=batch.episode.to(device), decision=batch.decision.to(device), state=state, world_seed=batch.world_seed,
        transitions=moves, obs=obs, context=context, behaviour_velocity=velocity, behaviour_logprob=logprob,
        logprob_gap=(logprob - batch.behaviour_logprob.to(device)).abs(), reconstruction=reconstruction,
        scored=reached.any(dim=1), reward=reward, base_velocity=torch.zeros_like(velocity),
    )  # fmt: skip


def _add_to_clip(clip: ClipFrames, batch: Decisions, imagined: Tensor, reward: Tensor) -> None:
    for i in torch.nonzero(batch.episode == 0).flatten().tolist():
        clip.decision.append(int(batch.decision[i]))
        clip.imagined.append((imagined[i] * 255.0).round().to(torch.uint8).cpu().numpy())
        clip.executed.append(batch.future[i].numpy())
        clip.reached.append(batch.reached[i].numpy())
        clip.reward.append(float(reward[i]))
