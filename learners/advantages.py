"""From labelled decisions to advantages: what every estimator gives, and the one that needs no critic.

The actor learner asks its estimator once per update.  `learners/returns.py` has the formulas; the estimators lay the
decisions out for them, over the whole update at once, so that every statistic is global.  The other estimator is
`learners/gae.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from learners.labels import LabelledBatch
from learners.returns import group_advantage
from learners.tally import Tally
from wamrl_ray.types import Episode

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One entry per decision, in the order of the concatenated micro-batches."""

    advantage: Tensor
    "(n,)"
    keep: Tensor
    "(n,) bool: counts in the policy loss"
    target: Tensor
    "(n,) value target; zeros without a critic"
    value: Tensor
    "(n,) the critic's value before the update; zeros without a critic"


class Estimator(Protocol):
    """Turns an update's rewards into advantages; may have something to learn itself."""

    def estimate(
        self, policy: WAM, episodes: Sequence[Episode], batches: Sequence[LabelledBatch], metrics: Tally
    ) -> Estimate: ...

    def ready(self) -> bool:
        """Whether the last estimate is good enough to train the expert on."""

    def learn(
        self, batches: Sequence[LabelledBatch], estimate: Estimate, rng: np.random.Generator, metrics: Tally
    ) -> None:
        """Train the estimator itself, after the expert was trained on the estimate."""

    @property
    def skipped(self) -> int:
        """Non-finite steps since the start."""

    def state(self) -> dict[str, Any]: ...

    def load_state(self, state: Mapping[str, Any]) -> None: ...


# ------------------------------------------------------------------------------------------------ group-relative


@dataclass(frozen=True, kw_only=True)
class GroupConfig:
    """Group-relative returns (GRPO, arXiv 2402.03300): the episodes of one task and start are each other's baseline."""

    kind: Literal["group"] = "group"
    filter_low: float = 0.0
    "least mean success of a group that is trained on; with filter_high 1 nothing is filtered"
    filter_high: float = 1.0
    "largest mean success of a group that is trained on; SimpleVLA-RL and piRL use 0.1 and 0.9, which drops the groups "
    "that all failed or all succeeded and leaves only the reconstruction reward's differences out"

    def __post_init__(self) -> None:
        for name in ("filter_low", "filter_high"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: use a number between 0 and 1")
        if self.filter_low > self.filter_high:
            raise ValueError(f"filter_low = {self.filter_low}: use at most filter_high = {self.filter_high}")


class GroupEstimator:
    """Every decision of an episode gets the episode's advantage; nothing to learn, nothing to remember."""

    skipped = 0

    def __init__(self, config: GroupConfig) -> None:
        self._config = config

    def estimate(
        self, policy: WAM, episodes: Sequence[Episode], batches: Sequence[LabelledBatch], metrics: Tally
    ) -> Estimate:
        """Groups whose mean success lies outside [filter_low, filter_high] are masked and counted."""
        episode, reward = torch.cat([b.episode for b in batches]), torch.cat([b.reward for b in batches])
        total = torch.zeros(len(episodes), device=reward.device).index_add_(0, episode, reward)
        ids = episode_groups(episodes)
        kept = set()
        for group in set(ids):
            success = np.mean([e.success for e, own in zip(episodes, ids, strict=True) if own == group])
            if self._config.filter_low <= success <= self._config.filter_high:
                kept.add(group)
        keep = torch.tensor([own in kept for own in ids], device=reward.device)[episode]
        advantage = group_advantage(total, torch.tensor(ids, device=reward.device))
        metrics.add("actor/filtered_group_share", 1.0 - len(kept) / len(set(ids)))
        metrics.add("actor/zero_advantage_share", (advantage == 0).float())
        zeros = torch.zeros_like(reward)
        return Estimate(advantage=advantage[episode], keep=keep, target=zeros, value=zeros)

    def ready(self) -> bool:
        return True

    def learn(
        self, batches: Sequence[LabelledBatch], estimate: Estimate, rng: np.random.Generator, metrics: Tally
    ) -> None:
        """Nothing."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing."""


def episode_groups(episodes: Sequence[Episode]) -> list[int]:
    """An id per episode, equal for equal (task, initial state)."""
    start = [(episode.ticket.task_id, episode.ticket.init_state_id) for episode in episodes]
    ids = {key: i for i, key in enumerate(sorted(set(start)))}
    return [ids[key] for key in start]
