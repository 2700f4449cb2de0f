"""From labelled decisions to advantages and value targets.  The actor learner calls it once per update.

`learners/returns.py` has the formulas; this file lays the decisions out for them, over the whole update at once, so
that every statistic is global.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from learners.batching import final_memory, to_flat, to_time_major
from learners.critic import Critic
from learners.labels import LabelledBatch
from learners.returns import explained_variance, gae, group_advantage, normalise
from learners.tally import Tally
from wamrl_ray.types import Episode

if TYPE_CHECKING:
    from learners.actor_flow_sde import ActorFlowSDEConfig
    from wamrl_ray.policy.wam import WAM


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One entry per decision, in the order of the concatenated batches."""

    advantage: Tensor
    "(n,)"
    keep: Tensor
    "(n,) bool: counts in the policy loss"
    target: Tensor
    "(n,) value target; zeros without a critic"
    value: Tensor
    "(n,) the critic's value before the update; zeros without a critic"


def episode_groups(episodes: Sequence[Episode]) -> list[int]:
    """An id per episode, equal for equal (task, initial state)."""
    start = [(episode.ticket.task_id, episode.ticket.init_state_id) for episode in episodes]
    ids = {key: i for i, key in enumerate(sorted(set(start)))}
    return [ids[key] for key in start]


def group_estimate(
    config: ActorFlowSDEConfig, episodes: Sequence[Episode], batches: Sequence[LabelledBatch], metrics: Tally
) -> Estimate:
    """Group-relative: every decision of an episode gets the episode's advantage.

    Groups whose mean success lies outside [filter_low, filter_high] are masked and counted.
    """
    episode = torch.cat([b.episode for b in batches])
    reward = torch.cat([b.reward for b in batches])
    total = torch.zeros(len(episodes), device=reward.device).index_add_(0, episode, reward)
    ids = episode_groups(episodes)
    kept_groups = set()
    for group in set(ids):
        success = np.mean([e.success for e, own in zip(episodes, ids, strict=True) if own == group])
        if config.filter_low <= success <= config.filter_high:
            kept_groups.add(group)
    keep = torch.tensor([own in kept_groups for own in ids], device=reward.device)[episode]
    advantage = group_advantage(total, torch.tensor(ids, device=reward.device))
    metrics.add("actor/filtered_group_share", 1.0 - len(kept_groups) / len(set(ids)))
    metrics.add("actor/zero_advantage_share", (advantage == 0).float())
    zeros = torch.zeros_like(reward)
    return Estimate(advantage=advantage[episode], keep=keep, target=zeros, value=zeros)


def gae_estimate(
    config: ActorFlowSDEConfig,
    policy: WAM,
    critic: Critic,
    episodes: Sequence[Episode],
    batches: Sequence[LabelledBatch],
    metrics: Tally,
) -> Estimate:
    """GAE with the critic as it is before the update; a truncated episode bootstraps from its final observation."""
    where = torch.cat([b.episode for b in batches]), torch.cat([b.decision for b in batches])
    pooled, state = torch.cat([b.context.pooled for b in batches]), torch.cat([b.state for b in batches])
    critic.fit_scale(pooled, state)
    with torch.no_grad():
        flat_value = critic(pooled, state)
    reward, mask = to_time_major(torch.cat([b.reward for b in batches]), *where, len(episodes))
    value, _ = to_time_major(flat_value, *where, len(episodes))

    column = torch.arange(len(episodes), device=value.device)
    last = mask.sum(dim=0) - 1
    terminated = torch.tensor([episode.terminated for episode in episodes], device=value.device)
    discount = torch.full_like(reward, config.gamma)
    discount[last, column] = config.gamma * (~terminated).float()
    after = bootstrap_values(policy, critic, episodes, value[last, column], chunk=config.minibatch)
    advantage, target = gae(reward, value, discount, mask, after, gae_lambda=config.gae_lambda)

    metrics.add("actor/value_mean", flat_value)
    metrics.add("actor/value_target_mean", target[mask])
    metrics.add("actor/advantage_std", advantage[mask].std(unbiased=False))
    metrics.add("actor/explained_variance", explained_variance(value, target, mask))
    if config.normalise_advantage:
        advantage = normalise(advantage, mask)
    return Estimate(
        advantage=to_flat(advantage, *where),
        keep=torch.ones_like(flat_value, dtype=torch.bool),
        target=to_flat(target, *where),
        value=flat_value,
    )


@torch.no_grad()
def bootstrap_values(
    policy: WAM, critic: Critic, episodes: Sequence[Episode], last_value: Tensor, *, chunk: int
) -> Tensor:
    """Value (B,) of the moment after each episode's last decision, read with that decision's noise seed.

    Where the moment was not observed (truncation between imagined offsets) the last decision's value stands in.
    """
    out = last_value.clone()
    final = {i: final_memory(episode, policy.spec) for i, episode in enumerate(episodes) if not episode.terminated}
    observed = [(i, frames, state) for i, seen in final.items() if seen is not None for frames, state in [seen]]
    for start in range(0, len(observed), chunk):
        ids, frames, states = zip(*observed[start : start + chunk], strict=True)
        obs = policy.encode(torch.from_numpy(np.stack(frames)), [episodes[i].instruction for i in ids])
        seeds = torch.tensor([int(episodes[i].world_seed[-1]) for i in ids])
        context = policy.world_context(obs, seeds)
        out[list(ids)] = critic(context.pooled, torch.from_numpy(np.stack(states)).to(out.device))
    return out
