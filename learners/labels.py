"""Labels of decisions in micro-batches: what the pair that acted imagined, and how probable it found what it did.

The actor learner calls `label_episodes` once per update and keeps the result for all its epochs.  Frames do not survive
labelling, except those of one episode for the run folder's clip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learners.batching import Decisions, Pick, all_decisions, gather, success_decision
from learners.clip import ClipFrames
from learners.optim import autocast
from learners.transitions import Transitions, log_probs, predict, transitions
from wamrl_ray.policy.flow_sde import Prediction
from wamrl_ray.rewards.reconstruction import RewardConfig, decision_rewards
from wamrl_ray.rewards.success import gain
from wamrl_ray.types import Episode, Pair, Reward, Snapshot

if TYPE_CHECKING:
    from learners.actor_config import ActorFlowSDEConfig
    from wamrl_ray.policy.wam import WAM, Context, ObsLatents


@dataclass(frozen=True, kw_only=True)
class LabelledBatch:
    """A micro-batch: n decisions that always go through the networks together.  label -> actor learner."""

    batch: int
    "which gradient step's batch it is a part of"
    episode: Tensor
    "(n,) int64"
    decision: Tensor
    "(n,) int64"
    state: Tensor
    "(n, S)"
    clean: Tensor
    "(n, H, D) the chunk that was acted, model units: the end of the chain"
    noise: Tensor
    "(n, H, D) what it was denoised from: the chain's beginning"
    transitions: Transitions
    obs: ObsLatents
    world_seed: Tensor
    "(n,)"
    context: Context | None
    "features of the world that the actor trains against; None if they are to be computed anew at every use"
    pooled: Tensor
    "(n, P) of the same world: the critic's input"
    behaviour: Prediction
    "of the pair that acted, (n, m, H, D)"
    behaviour_logprob: Tensor
    "(n, m)"
    start: Prediction
    "of the learner's weights before the update's first step; the behaviour's, unless another pair acted"
    start_logprob: Tensor
    "(n, m)"
    base: Prediction
    "of the base expert in the same context: the KL anchor"
    logprob_gap: Tensor
    "(n,) |recomputed behaviour log-prob - the one the worker stored|"
    reconstruction: Tensor
    "(n,) shaped reward, 0 where nothing was comparable"
    scored: Tensor
    "(n,) bool: at least one imagined frame had an executed counterpart"
    reward: Tensor
    "(n,) weight x reconstruction + success_weight x gain of success"

    def __len__(self) -> int:
        return len(self.episode)

    def context_in(self, policy: WAM) -> Context:
        """The features, from memory or computed anew with the same bits."""
        return self.context or policy.world_context(self.obs, self.world_seed)


@dataclass(frozen=True, kw_only=True)
class Labeller:
    """Labels micro-batches with the pair that `policy` holds."""

    policy: WAM
    metric: Reward
    reward: RewardConfig
    config: ActorFlowSDEConfig
    clip: ClipFrames

    def label(self, batch: Decisions, gains: Tensor, number: int) -> LabelledBatch:
        """Features, log-probs and rewards of a batch; `gains` (n,) of success.

        The prediction is made with gradients enabled and then detached: autograd may choose other kernels, and the
        ratio of the first epoch has to be exactly 1.
        """
        policy, config, device = self.policy, self.config, self.policy.device
        state = batch.state.to(device)
        with torch.no_grad(), autocast(device, config.precision):
            obs = policy.encode(batch.memory, batch.instruction)
            noise = policy.world_noise(batch.world_seed)
            world = policy.world_forward(obs, noise, torch.ones(len(noise), device=device))
            context = policy.context_of(world.features)
        full = policy.executed_mask().expand(len(batch), -1, -1)
        moves = transitions(batch.chain.to(device), batch.stochastic_step, self._mask(batch, full), policy.sampler)
        with autocast(device, config.precision):
            behaviour = predict(policy, context, moves, state, policy.sampler).detach()
        logprob = log_probs(moves, behaviour, policy.sampler)
        stored = batch.behaviour_logprob.to(device)
        whole = log_probs(moves, behaviour, policy.sampler, full[:, None]).sum(dim=1)
        if config.behaviour_logprob == "stored":
            logprob = stored[:, None]
        reconstruction, scored = self._reconstruction(batch, obs, world.velocity)
        success = self.reward.success_weight * gains.to(device)
        return LabelledBatch(
            batch=number, episode=batch.episode.to(device), decision=batch.decision.to(device), state=state,
            clean=batch.chain[:, -1].to(device), noise=batch.chain[:, 0].to(device), transitions=moves, obs=obs,
            world_seed=batch.world_seed,
            context=context if config.reuse_context else None, pooled=context.pooled.float(), behaviour=behaviour,
            behaviour_logprob=logprob, start=behaviour, start_logprob=logprob, base=behaviour,
            logprob_gap=(whole - stored).abs(), reconstruction=reconstruction, scored=scored,
            reward=self.reward.weight * reconstruction + success,
        )  # fmt: skip

    def _mask(self, batch: Decisions, full: Tensor) -> Tensor:
        """(n, H, D): the entries the density counts, of steps that ran only if so configured."""
        if not self.config.mask_unexecuted:
            return full
        step = torch.arange(full.shape[1], device=full.device)
        return full * (step < batch.executed.to(full.device)[:, None])[:, :, None]

    def _reconstruction(self, batch: Decisions, obs: ObsLatents, velocity: Tensor) -> tuple[Tensor, Tensor]:
        policy, reached = self.policy, batch.reached.to(self.policy.device)
        if self.reward.weight == 0:
            return torch.zeros(len(batch), device=reached.device), reached.any(dim=1)
        with autocast(policy.device, self.config.precision):
            imagined = policy.imagine(obs, batch.world_seed, self.reward.imagine_steps, first=velocity).float()
        executed = policy.round_trip(batch.future.to(policy.device))
        now = policy.round_trip(batch.memory[:, -1].to(policy.device))
        reward = decision_rewards(self.metric, imagined, executed, now, reached, self.reward)
        self.clip.add(batch, imagined, reward)
        return reward, reached.any(dim=1)


def label_episodes(
    labeller: Labeller,
    episodes: Sequence[Episode],
    pairs: Sequence[tuple[Pair, Snapshot, Snapshot]],
    *,
    world: Snapshot,
    base: Snapshot,
    rng: np.random.Generator,
) -> list[LabelledBatch]:
    """Every decision once, in random micro-batches of which none mixes two behaviour pairs.

    Contexts are those of `world`, which the actor trains against; `base` is the expert of the KL anchor.  The policy
    visits other weights on the way and has its own actor, and `world`, again at the end, also after an error.
    """
    policy, config = labeller.policy, labeller.config
    gains = [success_gain(episode, labeller.reward) for episode in episodes]
    own, labelled = policy.export("actor"), []
    numbers = 0
    try:
        for pair, pair_world, pair_actor in pairs:
            picks = [pick for pick in all_decisions(episodes) if episodes[pick[0]].pair.order == pair.order]
            if not picks:
                continue
            policy.load_pair(pair_world, pair_actor)
            made = []
            for number, part in micro_batches(picks, config.batch_size, config.micro_batch, rng):
                won = torch.tensor([float(gains[e][t]) for e, t in part])
                made.append(labeller.label(gather(episodes, part, policy.spec), won, numbers + number))
            numbers = made[-1].batch + 1
            if (pair.world, pair.actor) != (world.digest, own.digest):
                policy.load_pair(world, own)
                made = [_moved(labeller, batch, same_world=pair.world == world.digest) for batch in made]
            labelled += made
        policy.load_pair(world, base)
        labelled = [replace(batch, base=_prediction(labeller, batch)) for batch in labelled]
    finally:
        policy.load_pair(world, own)
    return labelled


def success_gain(episode: Episode, config: RewardConfig) -> NDArray[np.float32]:
    """Each decision's gain of success, (T,); see `rewards/success.py`."""
    if config.success_form == "difference":
        return gain((episode.env_reward > 0).astype(np.float32), "difference")
    score = np.zeros(episode.num_decisions, np.float32)
    if (first := success_decision(episode)) >= 0:
        score[first:] = 1.0
    return gain(score, "best_so_far")


def micro_batches(
    picks: Sequence[Pick], batch_size: int, micro_batch: int, rng: np.random.Generator
) -> Iterator[tuple[int, list[Pick]]]:
    """The picks in random order: gradient batches of nearly equal size, each in parts of nearly equal size.

    Yields (number of the batch, part).  What belongs to a batch does not depend on `micro_batch`.
    """
    order = rng.permutation(len(picks))
    for number, batch in enumerate(np.array_split(order, -(-len(picks) // batch_size))):
        for part in np.array_split(batch, -(-len(batch) // micro_batch)):
            yield number, [picks[i] for i in part]


def _moved(labeller: Labeller, batch: LabelledBatch, *, same_world: bool) -> LabelledBatch:
    """The batch in the context of the learner's world, with what the learner's own weights say at the start."""
    policy = labeller.policy
    if not same_world:
        with torch.no_grad(), autocast(policy.device, labeller.config.precision):
            context = policy.world_context(batch.obs, batch.world_seed)
        kept = context if labeller.config.reuse_context else None
        batch = replace(batch, context=kept, pooled=context.pooled.float())
    start = _prediction(labeller, batch)
    return replace(batch, start=start, start_logprob=log_probs(batch.transitions, start, policy.sampler))


def _prediction(labeller: Labeller, batch: LabelledBatch) -> Prediction:
    """With the weights the policy holds now, on the kernels that training uses."""
    policy = labeller.policy
    with autocast(policy.device, labeller.config.precision):
        with torch.no_grad():
            context = batch.context_in(policy)
        return predict(policy, context, batch.transitions, batch.state, policy.sampler).detach()
