"""Action-expert learner: advantage-weighted policy gradient through Flow-SDE, the world model frozen.

The training loop feeds it every episode of an iteration; it exports actor snapshots to the broker.

    episodes ─► label (behaviour pair: imagine, reward, log-prob) ─► returns (critic + GAE, or groups)
             ─► PPO epochs on the expert: clipped surrogate + KL to the base ─► critic epochs

Micro-batches are composed once per update and pass through the networks whole, for labelling and for every epoch; an
epoch only shuffles their order.  The last bits of a matrix product depend on the batch it is in, so this is what makes
the first ratio exactly 1, and with lr = 0 every one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from learners.advantages import gae_estimate, group_estimate
from learners.critic import Critic
from learners.labels import ClipFrames, LabelledBatch, label_episodes
from learners.optim import GuardedAdamW, to_cpu
from learners.ppo import train_critic, train_expert
from learners.tally import Tally
from wamrl_ray.policy.flow_sde import SamplerConfig
from wamrl_ray.policy.weights import from_snapshot, to_snapshot
from wamrl_ray.rewards.pixel import PixelReward
from wamrl_ray.rewards.reconstruction import RewardConfig
from wamrl_ray.types import Episode, Metrics, Pair, Snapshot, seed_sequence

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM


@dataclass(frozen=True, kw_only=True)
class ActorFlowSDEConfig:
    """How the action expert is trained.  Defaults follow piRL (arXiv 2510.25889) unless a line says otherwise."""

    kind: Literal["actor_flow_sde"] = "actor_flow_sde"
    advantage: Literal["gae", "group"] = "gae"
    "gae: critic and per-decision credit; group: an episode's return against the others of the same task and start"
    lr: float = 5e-6
    "AdamW of the expert; 0 trains nothing and must give ratio 1 exactly"
    critic_lr: float = 1e-3
    "AdamW of the critic; ten times piRL's, whose critic is wider and sees more decisions"
    weight_decay: float = 0.0
    "ours: the KL to the base is the anchor; piRL uses 0.01"
    epochs: int = 2
    "passes over an iteration's decisions; between piRL's 4 (pi0) and 1 (pi0.5)"
    minibatch: int = 64
    "decisions per gradient step, at most: an update's decisions are split evenly"
    clip_low: float = 0.2
    "ratio floor 1 - clip_low"
    clip_high: float = 0.2
    "ratio ceiling 1 + clip_high; 0.28 is SimpleVLA-RL's asymmetric choice.  Goes with log-probs summed over executed "
    "steps x A: rules that average them need clips of 1e-3"
    gamma: float = 0.99
    "discount per decision (not per env step)"
    gae_lambda: float = 0.95
    target_kl: float = 0.1
    "growth of the mean KL to the behaviour policy (nats per decision) at which the rest of an update is skipped; 0 "
    "disables.  Ours: at 0.1 about a tenth of the ratios lie outside 1 +- 0.5"
    kl_to_base: float = 0.01
    "weight of the exact transition KL to the base expert, nats per decision; ours, piRL has none that works"
    value_clip: float = 0.0
    "largest credited move of a value from its old one per update; 0 disables.  Ours: returns reach success_weight and "
    "more, piRL's clip of 0.2 would hold a new critic back for dozens of updates"
    huber: float = 10.0
    "value error beyond which the critic's loss grows linearly"
    critic_hidden: int = 128
    "width of the critic's two hidden layers"
    critic_epochs: int = 10
    "passes of the critic per update; it reads pooled features only, so a pass costs next to nothing"
    critic_warmup_updates: int = 0
    "first updates, which train the critic alone (DPPO uses 2).  0: the critic's last layer starts at zero, so its "
    "first advantages are plain returns, not noise"
    grad_clip: float = 1.0
    "largest global gradient norm, of expert and critic separately"
    normalise_advantage: bool = True
    "gae: zero mean, unit std over all valid decisions of the update (global, not per rank or micro-batch)"
    filter_low: float = 0.0
    "group: least mean success of a group that is kept; with filter_high 1 nothing is filtered"
    filter_high: float = 1.0
    "group: largest mean success of a group that is kept; SimpleVLA-RL uses 0.1 and 0.9"
    remember_pairs: int = 4
    "behaviour pairs whose weights are kept for recomputing log-probs; at least the staleness allowed + 1"
    max_bad_updates: int = 5
    "non-finite losses or gradients in a row after which the learner gives up with an error"

    def __post_init__(self) -> None:
        non_negative = ("lr", "critic_lr", "weight_decay", "target_kl", "kl_to_base", "value_clip")
        for name in (*non_negative, "critic_warmup_updates"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"actor_learner.{name} = {getattr(self, name)}: use 0 or a positive number")
        for name in ("epochs", "critic_epochs", "minibatch", "critic_hidden", "remember_pairs", "max_bad_updates"):
            if getattr(self, name) < 1:
                raise ValueError(f"actor_learner.{name} = {getattr(self, name)}: use at least 1")
        for name in ("gamma", "gae_lambda", "filter_low", "filter_high"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"actor_learner.{name} = {getattr(self, name)}: use a number between 0 and 1")
        if not 0 < self.clip_low < 1:
            raise ValueError(f"actor_learner.clip_low = {self.clip_low}: use a number between 0 and 1, such as 0.2")
        for name in ("clip_high", "huber", "grad_clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"actor_learner.{name} = {getattr(self, name)}: use a positive number")
        if self.filter_low > self.filter_high:
            raise ValueError(f"actor_learner.filter_low = {self.filter_low}: use at most filter_high")
        if self.advantage not in ("gae", "group"):
            raise ValueError(f"actor_learner.advantage = {self.advantage!r}: use 'gae' or 'group'")


class ActorFlowSDELearner:
    """Trains `policy.expert` and a critic; implements `types.Learner`.

    `policy` is this learner's own copy; the expert it arrives with is the base of the KL anchor.  Its world is frozen:
    features are computed once per update without gradient.  Call `remember` with every published pair before an update
    on its episodes, and `rebase` when a newer world is to be trained against.
    """

    def __init__(
        self,
        config: ActorFlowSDEConfig,
        sampler: SamplerConfig,
        reward: RewardConfig,
        policy: WAM,
        *,
        run_seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if sampler.eta == 0:
            raise ValueError("sampler.eta = 0: the ODE has no density to train on, use a positive scale such as 0.5")
        self.config, self.sampler, self.reward, self.run_seed = config, sampler, reward, run_seed
        self.metric = PixelReward()
        self.policy = policy.to(device).eval().requires_grad_(False)
        policy.text.forget()  # embeddings cached on another device
        policy.sampler = sampler
        policy.expert.requires_grad_(True)
        self.critic = Critic(policy.pooled_dim, policy.spec.state_dim, config.critic_hidden, seed=run_seed).to(device)
        shared = {"weight_decay": config.weight_decay, "grad_clip": config.grad_clip}
        self.optimizer = GuardedAdamW(
            policy.expert.parameters(), name="actor_learner", lr=config.lr, max_bad=config.max_bad_updates, **shared
        )
        self.critic_optimizer = GuardedAdamW(
            self.critic.parameters(), name="critic", lr=config.critic_lr, max_bad=config.max_bad_updates, **shared
        )
        self.base = policy.export("actor")
        self.world = policy.export("world")
        self.trained_against_world = self.world.digest
        "digest of the world in whose features the expert last took a gradient step (first: the base world)"
        self.updates = 0
        self.pairs: OrderedDict[tuple[int, int], tuple[Pair, Snapshot, Snapshot]] = OrderedDict()
        self.last_labels = ClipFrames(decision=[], imagined=[], executed=[], reached=[], reward=[])

    def remember(self, pair: Pair, world: Snapshot, actor: Snapshot) -> None:
        """Keep a published pair's weights for its episodes; the oldest beyond `remember_pairs` is forgotten.

        Raises ValueError if the snapshots are not the pair's.
        """
        if (pair.world, pair.actor) != (world.digest, actor.digest):
            raise ValueError(
                f"pair {pair.order} names world {pair.world!r}, actor {pair.actor!r}; the snapshots are "
                f"{world.digest!r}, {actor.digest!r}: pass the weights that were published with the pair"
            )
        self.pairs[pair.order] = (pair, world, actor)
        while len(self.pairs) > self.config.remember_pairs:
            self.pairs.popitem(last=False)

    def rebase(self, world: Snapshot) -> None:
        """Train against this world's features from the next update on.  Raises ValueError if it does not fit."""
        self.policy.load_component(world)
        self.world = world

    # ---------------------------------------------------------------------------------------- one update

    def update(self, episodes: Sequence[Episode], *, index: int) -> Metrics:
        """Label, estimate advantages, train.  Episodes with an error are dropped and counted.

        Raises ValueError on an evaluation or ODE episode or an unknown behaviour pair; RuntimeError when gradients stay
        non-finite.
        """
        usable = [episode for episode in episodes if episode.error is None and episode.num_decisions > 0]
        metrics = Tally()
        metrics.add("actor/dropped_error_count", len(episodes) - len(usable))
        self.last_labels = ClipFrames(decision=[], imagined=[], executed=[], reached=[], reward=[])
        if not usable:
            metrics.add("actor/decisions_count", 0)
            return metrics.means()
        self._check(usable)
        rng = np.random.default_rng(seed_sequence(self.run_seed, index, "learner"))
        batches = label_episodes(
            self.policy, self.metric, self.reward, usable, list(self.pairs.values()), world=self.world, base=self.base,
            minibatch=self.config.minibatch, rng=rng, clip=self.last_labels,
        )  # fmt: skip
        self._note(usable, batches, metrics)
        if self.config.advantage == "group":
            estimate = group_estimate(self.config, usable, batches, metrics)
        else:
            estimate = gae_estimate(self.config, self.policy, self.critic, usable, batches, metrics)
        trains = self.config.advantage == "group" or self.updates >= self.config.critic_warmup_updates
        if trains and train_expert(self.config, self.policy, self.optimizer, batches, estimate, rng, metrics):
            self.trained_against_world = self.world.digest
        if self.config.advantage == "gae":
            train_critic(self.config, self.critic, self.critic_optimizer, batches, estimate, rng, metrics)
        self.updates += 1
        metrics.add("actor/updates_count", self.updates)
        metrics.add("actor/skipped_count", self.optimizer.skipped + self.critic_optimizer.skipped)
        return metrics.means()

    def _check(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            ticket, pair = episode.ticket, episode.pair
            if ticket.purpose != "train":
                raise ValueError(f"ticket {ticket.ticket_id}: purpose = {ticket.purpose!r}: pass train episodes only")
            known = self.pairs.get(pair.order)
            if known is None or (known[0].world, known[0].actor) != (pair.world, pair.actor):
                raise ValueError(
                    f"ticket {ticket.ticket_id}: pair {pair.order} is not remembered ({list(self.pairs)}): call "
                    f"remember, or raise actor_learner.remember_pairs = {self.config.remember_pairs}"
                )

    def _note(self, episodes: Sequence[Episode], batches: Sequence[LabelledBatch], metrics: Tally) -> None:
        for batch in batches:
            metrics.add("reward/reconstruction_mean", batch.reconstruction)
            metrics.add("reward/scored_share", batch.scored)
            metrics.add("reward/decision_mean", batch.reward)
            metrics.add("actor/behaviour_logprob_gap_nats", batch.logprob_gap)
        metrics.add("reward/success_share", float(np.mean([episode.success for episode in episodes])))
        metrics.add("actor/decisions_count", sum(map(len, batches)))

    # ---------------------------------------------------------------------------------------- weights and state

    def clip(self) -> dict[str, NDArray[Any]] | None:
        """The last update's first usable episode: `imagined` and `executed` (T, F, V, h, w, 3) uint8, `reached` (T, F),
        `reward` (T,).  None before the first update or with reward.weight = 0."""
        return self.last_labels.arrays()

    def export(self) -> Snapshot:
        """The current expert."""
        return self.policy.export("actor")

    def state(self) -> dict[str, Any]:
        """Plain nested dicts, lists, numbers and CPU tensors; every set of weights once, by its digest."""
        actor = self.export()
        known = [actor, self.base, self.world, *(s for _, world, own in self.pairs.values() for s in (world, own))]
        return {
            "kind": self.config.kind,
            "interface": self.policy.interface_digest,
            "snapshots": {s.digest: {"component": s.component, "tensors": from_snapshot(s)} for s in known},
            "actor": actor.digest,
            "base": self.base.digest,
            "world": self.world.digest,
            "pairs": [asdict(pair) for pair, _, _ in self.pairs.values()],
            "trained_against_world": self.trained_against_world,
            "updates": self.updates,
            "optimizer": self.optimizer.state(),
            "critic": to_cpu(self.critic.state_dict()),
            "critic_optimizer": self.critic_optimizer.state(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state is of another kind of learner or its weights do not fit."""
        for name, own in (("kind", self.config.kind), ("interface", self.policy.interface_digest)):
            if state[name] != own:
                raise ValueError(
                    f"actor learner state has {name} = {state[name]!r}, this run {own!r}: resume with the saved config"
                )
        snapshots = {d: to_snapshot(w["component"], w["tensors"]) for d, w in state["snapshots"].items()}
        self.policy.load_pair(snapshots[state["world"]], snapshots[state["actor"]])
        self.base, self.world = snapshots[state["base"]], snapshots[state["world"]]
        self.pairs.clear()
        for pair in (Pair(**record) for record in state["pairs"]):
            self.remember(pair, snapshots[pair.world], snapshots[pair.actor])
        self.trained_against_world, self.updates = state["trained_against_world"], int(state["updates"])
        self.optimizer.load_state(state["optimizer"])
        self.critic.load_state_dict(state["critic"])
        self.critic_optimizer.load_state(state["critic_optimizer"])
