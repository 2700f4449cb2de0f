"""Generalised advantage estimation with a critic on the world model's pooled features.  One of the two estimators.

labelled rewards ─► values of the critic as it is ─► GAE ─► advantages (policy loss), targets (critic's regression)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from learners.advantages import Estimate
from learners.batching import final_memory, to_flat, to_time_major
from learners.critic import Critic
from learners.labels import LabelledBatch
from learners.losses import value_loss
from learners.optim import GuardedAdamW, to_cpu
from learners.returns import explained_variance, gae, normalise
from learners.tally import Tally
from wamrl_ray.types import Episode

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM


@dataclass(frozen=True, kw_only=True)
class GAEConfig:
    """Per-decision credit with a learned baseline (arXiv 1506.02438)."""

    kind: Literal["gae"] = "gae"
    gamma: float = 0.99
    "discount per decision (not per env step), piRL's"
    gae_lambda: float = 0.95
    "piRL's"
    normalise: Literal["global", "batch", "none"] = "global"
    "zero mean, unit std over all valid decisions of the update; batch: of each gradient step's, as per-rank "
    "statistics do, which makes the result depend on the batch size"
    critic_lr: float = 1e-3
    "AdamW of the critic; ten times piRL's, whose critic is wider and sees more decisions"
    critic_hidden: int = 128
    "width of the critic's two hidden layers"
    critic_epochs: int = 10
    "passes of the critic per update; it reads pooled features only, so a pass costs next to nothing"
    critic_batch: int = 64
    "decisions per gradient step of the critic"
    trust_above: float = 0.05
    "share of the plain returns' variance that the critic must explain, in the new episodes and before it learns from "
    "them, for its values to be used; below it the advantages are plain returns.  A critic that has learnt its last "
    "episodes by heart explains less than nothing of the next and takes away what there was to learn (ours)"
    value_clip: float = 0.0
    "largest credited move of a value from its old one per update; 0 disables.  Ours: returns reach success_weight and "
    "more, piRL's clip of 0.2 would hold a new critic back for dozens of updates"
    huber: float = 10.0
    "value error beyond which the critic's loss grows linearly; piRL's"
    grad_clip: float = 1.0
    "largest global gradient norm of the critic"
    warmup_updates: int = 0
    "first updates, which train the critic alone (DPPO uses 2, RLinf's async recipe 30).  0: the critic's last layer "
    "starts at zero, so its first advantages are plain returns, not noise"
    warmup_explained_variance: float = 0.0
    "the expert waits, beyond warmup_updates, until the critic has once explained this share of the returns' variance; "
    "0 does not wait"
    warmup_max_updates: int = 10
    "updates of the run after which it waits no longer"

    def __post_init__(self) -> None:
        for name in ("critic_lr", "value_clip", "warmup_updates", "warmup_max_updates"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)}: use 0 or a positive number")
        for name in ("critic_hidden", "critic_epochs", "critic_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: use at least 1")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} = {getattr(self, name)}: use a number between 0 and 1")
        for name in ("huber", "grad_clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: use a positive number")
        if not self.trust_above <= 1:
            raise ValueError(f"trust_above = {self.trust_above}: use at most 1; a large negative number trusts always")
        if not 0 <= self.warmup_explained_variance < 1:
            raise ValueError(
                f"warmup_explained_variance = {self.warmup_explained_variance}: use a share in [0, 1), such as 0.3"
            )
        if self.normalise not in ("global", "batch", "none"):
            raise ValueError(f"normalise = {self.normalise!r}: use 'global', 'batch' or 'none'")


class GAEEstimator:
    """Owns the critic, its optimiser and the warm-up; all of it is in `state`."""

    def __init__(self, config: GAEConfig, policy: WAM, *, seed: int, max_bad: int) -> None:
        self.config = config
        self.critic = Critic(policy.pooled_dim, policy.spec.state_dim, config.critic_hidden, seed=seed)
        self.critic.to(policy.device)
        self.optimizer = GuardedAdamW(
            self.critic.parameters(), name="critic", lr=config.critic_lr, weight_decay=0.0, grad_clip=config.grad_clip,
            max_bad=max_bad,
        )  # fmt: skip
        self.estimates = 0
        "made since the start"
        self.warm = config.warmup_explained_variance == 0
        "the critic has explained enough once"

    @property
    def skipped(self) -> int:
        return self.optimizer.skipped

    def ready(self) -> bool:
        done = self.estimates - 1
        waits = not self.warm and done < self.config.warmup_max_updates
        return done >= self.config.warmup_updates and not waits

    def estimate(
        self, policy: WAM, episodes: Sequence[Episode], batches: Sequence[LabelledBatch], metrics: Tally
    ) -> Estimate:
        """With the critic as it is before the update; a truncated episode bootstraps from its final observation.

        A critic that is not trusted counts as saying 0 throughout, with gae_lambda = 1.
        """
        config = self.config
        where = torch.cat([b.episode for b in batches]), torch.cat([b.decision for b in batches])
        pooled, state = torch.cat([b.pooled for b in batches]), torch.cat([b.state for b in batches])
        self.critic.fit_scale(pooled, state)
        with torch.no_grad():
            flat_value = self.critic(pooled, state)
        reward, mask = to_time_major(torch.cat([b.reward for b in batches]), *where, len(episodes))
        value, _ = to_time_major(flat_value, *where, len(episodes))
        column = torch.arange(len(episodes), device=value.device)
        last = mask.sum(dim=0) - 1
        terminated = torch.tensor([episode.terminated for episode in episodes], device=value.device)
        discount = torch.full_like(reward, config.gamma)
        discount[last, column] = config.gamma * (~terminated).float()
        after, nothing = torch.zeros_like(value[0]), torch.zeros_like(value)
        advantage, target = gae(reward, nothing, discount, mask, after, gae_lambda=1.0)
        explained = float(explained_variance(value, target, mask))
        trusted = explained > config.trust_above
        if trusted:
            after = self._bootstrap(policy, episodes, value[last, column], chunk=max(len(b) for b in batches))
            advantage, target = gae(reward, value, discount, mask, after, gae_lambda=config.gae_lambda)
        self.estimates += 1
        self.warm = self.warm or explained >= config.warmup_explained_variance

        metrics.add("actor/value_mean", flat_value)
        metrics.add("actor/value_target_mean", target[mask])
        metrics.add("actor/advantage_std", advantage[mask].std(unbiased=False))
        metrics.add("actor/explained_variance", explained)
        metrics.add("actor/critic_trusted", float(trusted))
        if config.normalise == "global":
            advantage = normalise(advantage, mask)
        flat = to_flat(advantage, *where)
        if config.normalise == "batch":
            number = torch.cat([torch.full_like(b.episode, b.batch) for b in batches])
            for i in range(int(number.max()) + 1):
                flat[number == i] = normalise(flat[number == i], torch.ones_like(flat[number == i]))
        return Estimate(
            advantage=flat,
            keep=torch.ones_like(flat, dtype=torch.bool),
            target=to_flat(target, *where),
            value=flat_value,
        )

    def learn(
        self, batches: Sequence[LabelledBatch], estimate: Estimate, rng: np.random.Generator, metrics: Tally
    ) -> None:
        """`critic_epochs` passes of Huber regression on the value targets."""
        config = self.config
        pooled, state = torch.cat([b.pooled for b in batches]), torch.cat([b.state for b in batches])
        for _ in range(config.critic_epochs):
            order = rng.permutation(len(pooled))
            for part in np.array_split(order, -(-len(order) // config.critic_batch)):
                own = torch.from_numpy(part).to(pooled.device)
                value = self.critic(pooled[own], state[own])
                loss = value_loss(
                    value, estimate.value[own], estimate.target[own], value_clip=config.value_clip, huber=config.huber
                ).mean()
                norm = self.optimizer.step(loss)
                if norm >= 0:
                    metrics.add("actor/value_loss", loss)
                    metrics.add("actor/critic_grad_norm", norm)

    @torch.no_grad()
    def _bootstrap(self, policy: WAM, episodes: Sequence[Episode], last_value: Tensor, *, chunk: int) -> Tensor:
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
            out[list(ids)] = self.critic(context.pooled, torch.from_numpy(np.stack(states)).to(out.device))
        return out

    def state(self) -> dict[str, Any]:
        return {
            "critic": to_cpu(self.critic.state_dict()),
            "optimizer": self.optimizer.state(),
            "estimates": self.estimates,
            "warm": self.warm,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.critic.load_state_dict(state["critic"])
        self.optimizer.load_state(state["optimizer"])
        self.estimates, self.warm = int(state["estimates"]), bool(state["warm"])
