"""Action-expert learner: advantage-weighted policy gradient through the denoising chain, the world model frozen.

The training loop feeds it every episode of an iteration; it exports actor snapshots to the broker.

    episodes ─► label (behaviour pair: imagine, reward, log-prob) ─► advantages (`gae.py` or `advantages.py`)
             ─► gradient steps on the expert (`policy_update.py`, objective `ppo.py` or `awr.py`) ─► critic epochs

Micro-batches are composed once per update and pass through the networks whole, for labelling and for every epoch; an
epoch only shuffles their order.  The last bits of a matrix product depend on the batch it is in, so this is what makes
the first ratio exactly 1, and with lr = 0 every one.

How to add an objective or an estimator: `docs/learners.md`, section 10.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from learners.actor_config import ActorFlowSDEConfig
from learners.advantages import Estimator, GroupConfig, GroupEstimator
from learners.awr import AWR, AWRConfig
from learners.clip import ClipFrames
from learners.expert import FullExpert, LoRAExpert
from learners.gae import GAEConfig, GAEEstimator
from learners.labels import LabelledBatch, Labeller, label_episodes
from learners.optim import GuardedAdamW
from learners.policy_update import Objective, PolicyUpdate
from learners.ppo import PPO, PPOConfig
from learners.tally import Tally
from wamrl_ray.policy.flow_sde import SamplerConfig
from wamrl_ray.policy.weights import from_snapshot, to_snapshot
from wamrl_ray.rewards.pixel import PixelReward
from wamrl_ray.rewards.reconstruction import RewardConfig
from wamrl_ray.types import Episode, Metrics, Pair, Snapshot, seed_sequence

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM


class ActorFlowSDELearner:
    """Trains `policy.expert`, and a critic if the estimator has one; implements `types.Learner`.

    `policy` is this learner's own copy, built with the run's sampler; the expert it arrives with is the base of the KL
    anchor.  Its world is frozen: features are computed once per update without gradient.  Call `remember` with every
    published pair before an update on its episodes, and `rebase` when a newer world is to be trained against.
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
        """Raises ValueError if settings, sampler and policy do not fit together."""
        config.check_sampler(sampler)
        if policy.sampler.learned_std != sampler.learned_std:
            raise ValueError(
                f"sampler.noise = {sampler.noise!r}: the policy was built for {policy.sampler.noise!r}; pass the run's "
                "sampler to load_base"
            )
        self.config, self.sampler, self.reward, self.run_seed = config, sampler, reward, run_seed
        self.metric = PixelReward()
        self.policy = policy.to(device).eval().requires_grad_(False)
        policy.text.forget()  # embeddings cached on another device
        policy.sampler = sampler
        self.expert = self._expert()
        self.estimator = self._estimator()
        self.optimizer = GuardedAdamW(
            self.expert.parameters(), name="actor_learner", lr=config.lr, weight_decay=config.weight_decay,
            grad_clip=config.grad_clip, max_bad=config.max_bad_updates,
        )  # fmt: skip
        self.policy_update = PolicyUpdate(
            config=config, policy=policy, expert=self.expert, objective=self._objective(), optimizer=self.optimizer
        )
        self.base = policy.export("actor")
        self.world = policy.export("world")
        self.trained_against_world = self.world.digest
        "digest of the world in whose features the expert last took a gradient step (first: the base world)"
        self.updates = 0
        self.pairs: OrderedDict[tuple[int, int], tuple[Pair, Snapshot, Snapshot]] = OrderedDict()
        self.last_clip = ClipFrames()

    def _expert(self) -> FullExpert | LoRAExpert:
        config = self.config
        if config.lora_rank == 0:
            return FullExpert(self.policy)
        return LoRAExpert(self.policy, rank=config.lora_rank, scale=config.lora_scale, seed=self.run_seed)

    def _objective(self) -> Objective:
        match self.config.objective:
            case PPOConfig() as ppo:
                return PPO(ppo, self.sampler)
            case AWRConfig() as awr:
                return AWR(awr, self.sampler)

    def _estimator(self) -> Estimator:
        match self.config.advantage:
            case GAEConfig() as gae:
                return GAEEstimator(gae, self.policy, seed=self.run_seed, max_bad=self.config.max_bad_updates)
            case GroupConfig() as group:
                return GroupEstimator(group)

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
        self.last_clip = ClipFrames()
        if not usable:
            metrics.add("actor/decisions_count", 0)
            return metrics.means()
        self._check(usable)
        rng = np.random.default_rng(seed_sequence(self.run_seed, index, "learner"))
        labeller = Labeller(
            policy=self.policy, metric=self.metric, reward=self.reward, config=self.config, clip=self.last_clip
        )
        batches = label_episodes(labeller, usable, list(self.pairs.values()), world=self.world, base=self.base, rng=rng)
        self._note(usable, batches, metrics)
        estimate = self.estimator.estimate(self.policy, usable, batches, metrics)
        trains = self.estimator.ready()
        metrics.add("actor/warming_up", float(not trains))
        if trains and self.policy_update.run(batches, estimate, rng, metrics):
            self.trained_against_world = self.world.digest
        self.estimator.learn(batches, estimate, rng, metrics)
        self.updates += 1
        metrics.add("actor/updates_count", self.updates)
        metrics.add("actor/skipped_count", self.optimizer.skipped + self.estimator.skipped)
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
        return self.last_clip.arrays()

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
            "expert": self.expert.state(),
            "estimator": self.estimator.state(),
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
        self.expert.load_state(state["expert"])
        self.estimator.load_state(state["estimator"])
