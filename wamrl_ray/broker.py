"""WeightBroker: publishes (world, actor) pairs whose latent interfaces are aligned, and nothing else.

Learners stage components through the training loop; workers lease and pull pairs.  Plain and torch-free: `local.py`
calls it directly, `cluster.py` wraps it in an actor.

    stage_world(w, drift) ─┐    interface and digest are checked at staging,
    stage_actor(a, w')   ──┴──► commit: drift(w, w') <= max_feature_drift ──► Pair(epoch, seq)

The actor was trained against the features of some world w'; pairing it with w is sound as long as the mean feature KL
between the two is small.  If the new world is refused, the new actor is paired with the current world if that is
sound; else the last good pair stays.  Versions are (epoch, seq): the epoch rises at every start, restore, rollback or
learner recovery and is on disk before a pair carries it, so no two different pairs ever share a version.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wamrl_ray.atomic import write_json
from wamrl_ray.digest import snapshot_digest
from wamrl_ray.types import Metrics, Pair, Snapshot

if TYPE_CHECKING:
    from wamrl_ray.config import BrokerConfig

Order = tuple[int, int]

REFUSALS = ("digest", "interface", "layout", "drift", "drift_unknown")
"""Why a staged component or a pair was refused; each is a counter in the metrics."""


@dataclass(frozen=True)
class _Lease:
    order: Order
    expires: float
    "on the broker's clock, seconds"


class WeightBroker:
    """The last `keep_pairs` pairs and the leased ones, the current one among them, and what is staged."""

    def __init__(self, config: BrokerConfig, epoch_file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins a new epoch, persisted in `epoch_file` before anything is published under it."""
        self._config, self._epoch_file, self._clock = config, epoch_file, clock
        self._epoch = 0
        self._current: Pair | None = None
        self._kept: dict[Order, Pair] = {}
        "in order of publication"
        self._published_at: dict[Order, int] = {}
        "order -> commits made when it was published"
        self._weights: dict[str, Snapshot] = {}
        "digest -> snapshot, for every kept pair"
        self._staged_world: Snapshot | None = None
        self._staged_actor: tuple[Snapshot, str] | None = None
        self._drift: dict[tuple[str, str], float] = {}
        "(world, earlier world) -> mean feature KL"
        self._leases: dict[str, _Lease] = {}
        self._commits = 0
        self._refused: Counter[str] = Counter()
        self._staged_since_publication: Counter[str] = Counter()
        self._raise_epoch()

    # ------------------------------------------------------------------------------------------------ publication

    def begin(
        self, world: Snapshot, actor: Snapshot, *, interface: str, state: Mapping[str, Any] | None = None
    ) -> Pair:
        """Publish the first pair of this epoch: a base policy, or a checkpoint's pair with its broker `state`.

        Raises ValueError if a snapshot is damaged or is not what `state` says.
        """
        for snapshot in (world, actor):
            if not _is_sound(snapshot):
                raise ValueError(f"{snapshot.component} {snapshot.digest} is damaged (another digest): load it again")
        pair = Pair(
            epoch=self._epoch, seq=0, world=world.digest, actor=actor.digest,
            trained_against_world=world.digest, interface=interface,
        )  # fmt: skip
        if state is not None:
            saved = Pair(**state["pair"])
            if (saved.world, saved.actor, saved.interface) != (pair.world, pair.actor, pair.interface):
                raise ValueError(f"broker state is of {saved}, but the weights given make {pair}: use one checkpoint")
            pair = replace(saved, epoch=self._epoch)
            self._commits = int(state["commits"])
            self._refused = Counter(state["refused"])
            self._drift = {(new, old): float(value) for new, old, value in state["drift"]}
            self._staged_since_publication = Counter(state["staged_since_publication"])
        self._staged_world, self._staged_actor = None, None
        self._publish(pair, world, actor)
        return pair

    def stage_world(self, snapshot: Snapshot, *, drift: Mapping[str, float], interface: str) -> bool:
        """Offer a world; `drift` maps digests of earlier worlds to the mean feature KL from them.  False if refused."""
        if not self._admissible(snapshot, "world", interface):
            return False
        self._drift |= {(snapshot.digest, earlier): float(value) for earlier, value in drift.items()}
        self._staged_world = snapshot
        return True

    def stage_actor(self, snapshot: Snapshot, *, trained_against_world: str, interface: str) -> bool:
        """Offer an actor.  False if refused."""
        if not self._admissible(snapshot, "actor", interface):
            return False
        self._staged_actor = (snapshot, trained_against_world)
        return True

    def commit(self) -> Pair | None:
        """Publish what is staged if it is aligned; else (current world, staged actor) if that is; else None.

        What was staged is used up either way.
        """
        current, world, actor = self.current(), self._staged_world, self._staged_actor
        self._staged_world, self._staged_actor = None, None
        if world is None and actor is None:
            return None
        current_world, current_actor = self._weights[current.world], self._weights[current.actor]
        new_actor, trained_against = actor or (current_actor, current.trained_against_world)
        candidates = [world or current_world]
        if world is not None and actor is not None:
            candidates.append(current_world)
        for candidate in candidates:
            reason = self._misalignment(candidate.digest, trained_against)
            if reason is None:
                self._commits += 1
                self._clear_publication_lag(candidate is world, actor is not None)
                pair = replace(
                    current, seq=current.seq + 1, world=candidate.digest, actor=new_actor.digest,
                    trained_against_world=trained_against,
                )  # fmt: skip
                self._publish(pair, candidate, new_actor)
                return pair
            self._refused[reason] += 1
        return None

    def new_epoch(self) -> Pair:
        """Republish the current pair under a new epoch (learner recovery)."""
        return self.rollback(self.current().order)

    def rollback(self, order: Order) -> Pair:
        """Publish an older kept pair again, under a new epoch; what was staged is forgotten."""
        pair, world, actor = self.pull(order)
        self._raise_epoch()
        self._staged_world, self._staged_actor = None, None
        pair = replace(pair, epoch=self._epoch)
        self._publish(pair, world, actor)
        return pair

    # ------------------------------------------------------------------------------------------------ reading

    def current(self) -> Pair:
        """The last good pair."""
        if self._current is None:
            raise RuntimeError("the broker has no pair yet: call begin() first")
        return self._current

    def pull(self, order: Order | None = None) -> tuple[Pair, Snapshot, Snapshot]:
        """(pair, world, actor) of the current pair, or of `order`; ValueError if that one is no longer kept."""
        pair = self.current() if order is None else self._kept.get(order)
        if pair is None:
            raise ValueError(f"order = {order}: not kept any more, {sorted(self._kept)} are; lease the pairs you need")
        return pair, self._weights[pair.world], self._weights[pair.actor]

    def commits_since(self, order: Order) -> int:
        """Pairs committed after `order` was published: the age of data acted with it.  ValueError if unknown."""
        if order not in self._published_at:
            raise ValueError(f"order = {order}: no such pair was published since this broker started")
        return self._commits - self._published_at[order]

    # ------------------------------------------------------------------------------------------------ leases

    def lease(self, holder: str, order: Order | None = None) -> Pair:
        """Hold a pair (the current one by default) for `lease_s`; replaces the holder's earlier lease."""
        pair = self.pull(order)[0]
        self._leases[holder] = _Lease(pair.order, self._clock() + self._config.lease_s)
        self._prune()
        return pair

    def renew(self, holder: str) -> bool:
        """Extend a live lease by `lease_s`; False if there is none (it expired or was released)."""
        self._prune()
        lease = self._leases.get(holder)
        if lease is not None:
            self._leases[holder] = _Lease(lease.order, self._clock() + self._config.lease_s)
        return lease is not None

    def release(self, holder: str) -> None:
        """End a lease; harmless if there is none."""
        self._leases.pop(holder, None)
        self._prune()

    # ------------------------------------------------------------------------------------------------ state

    def state(self) -> dict[str, Any]:
        """JSON-able; the current snapshots are saved beside it (`pull()`), leases and older pairs are not."""
        return {
            "pair": asdict(self.current()),
            "commits": self._commits,
            "refused": dict(self._refused),
            "drift": [[new, old, value] for (new, old), value in self._drift.items()],
            "staged_since_publication": dict(self._staged_since_publication),
        }

    def metrics(self) -> Metrics:
        """`broker/…`: version, pairs committed, publish lag (staged updates not yet published), refusals, holdings."""
        pair = self.current()
        drift = self._known_drift(pair.world, pair.trained_against_world)
        return {
            "broker/epoch": float(pair.epoch),
            "broker/seq": float(pair.seq),
            "broker/pairs_committed": float(self._commits),
            "broker/publish_lag_updates": float(max(self._staged_since_publication.values(), default=0)),
            "broker/feature_drift_nats": 0.0 if drift is None else drift,
            "broker/kept_pairs": float(len(self._kept)),
            "broker/leases": float(len(self._leases)),
        } | {f"broker/refused_{reason}": float(self._refused[reason]) for reason in REFUSALS}

    # ------------------------------------------------------------------------------------------------ inside

    def _admissible(self, snapshot: Snapshot, component: str, interface: str) -> bool:
        assert snapshot.component == component, f"{snapshot.component} snapshot staged as {component}"
        current = self.current()
        published = self._weights[current.world if component == "world" else current.actor]
        self._staged_since_publication[component] += 1
        reason = None
        if not _is_sound(snapshot):
            reason = "digest"
        elif interface != current.interface:
            reason = "interface"
        elif snapshot.layout != published.layout:
            reason = "layout"
        if reason is not None:
            self._refused[reason] += 1
        return reason is None

    def _misalignment(self, world: str, trained_against: str) -> str | None:
        drift = self._known_drift(world, trained_against)
        if drift is None:
            return "drift_unknown"
        # A NaN drift must refuse too, so the comparison is not turned round.
        return None if drift <= self._config.max_feature_drift else "drift"

    def _known_drift(self, world: str, other: str) -> float | None:
        """The larger of what was measured in either direction, 0 for the same world, None if never measured."""
        if world == other:
            return 0.0
        known = [self._drift[key] for key in ((world, other), (other, world)) if key in self._drift]
        if any(math.isnan(value) for value in known):
            return math.nan
        return max(known, default=None)

    def _clear_publication_lag(self, world: bool, actor: bool) -> None:
        for component, published in (("world", world), ("actor", actor)):
            if published:
                self._staged_since_publication[component] = 0

    def _publish(self, pair: Pair, world: Snapshot, actor: Snapshot) -> None:
        self._weights |= {world.digest: world, actor.digest: actor}
        self._kept[pair.order] = pair
        self._published_at[pair.order] = self._commits
        self._current = pair  # the one assignment that makes it visible
        self._prune()

    def _prune(self) -> None:
        now = self._clock()
        self._leases = {holder: lease for holder, lease in self._leases.items() if lease.expires > now}
        last = list(self._kept)[-self._config.keep_pairs :]
        held = {*last, *(lease.order for lease in self._leases.values())}
        self._kept = {order: pair for order, pair in self._kept.items() if order in held}
        digests = {digest for pair in self._kept.values() for digest in (pair.world, pair.actor)}
        self._weights = {digest: snapshot for digest, snapshot in self._weights.items() if digest in digests}
        # Of a refused world only the drift is needed, as long as an actor may still be based on it.
        recent = list(dict.fromkeys(new for new, _ in self._drift))[-2 * self._config.keep_pairs :]
        self._drift = {key: value for key, value in self._drift.items() if key[0] in recent}

    def _raise_epoch(self) -> None:
        stored = json.loads(self._epoch_file.read_text())["epoch"] if self._epoch_file.exists() else 0
        self._epoch = max(self._epoch, int(stored)) + 1
        write_json(self._epoch_file, {"epoch": self._epoch})


def _is_sound(snapshot: Snapshot) -> bool:
    return snapshot_digest(snapshot.component, snapshot.layout, snapshot.buffer) == snapshot.digest
