"""The weight broker behind a Ray actor, the driver's proxy to it, and the workers' way to its weights.

    driver ──RemoteBroker──► BrokerActor(WeightBroker) ──pair, two refs──► Puller in a worker ──► shadow copy

A pair's weights lie in the object store once per node, however many workers pull them.  The actor is threaded, not
async, does no torch work and calls nobody.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray

from wamrl_ray.broker import WeightBroker
from wamrl_ray.config import BrokerConfig
from wamrl_ray.types import Metrics, Pair, Snapshot

ANSWER_DEADLINE_S = 120.0
"""Wall seconds for any answer of the broker."""
FETCH_DEADLINE_S = 600.0
"""Wall seconds for weights to arrive from another node."""

Order = tuple[int, int]


class BrokerActor:
    """One WeightBroker at a time; its methods exclude one another."""

    def __init__(self, config: BrokerConfig, epoch_file: Path) -> None:
        self._config, self._epoch_file = config, epoch_file
        self._broker: WeightBroker | None = None
        self._lock = threading.Lock()
        self._refs: OrderedDict[str, Any] = OrderedDict()
        "digest -> ref of that snapshot, the latest ones"

    def begin(self, world: Snapshot, actor: Snapshot, interface: str, state: Mapping[str, Any] | None) -> Pair:
        """See `WeightBroker.begin`.  Every beginning, a restore in place too, is a broker and an epoch of its own."""
        with self._lock:
            self._broker = WeightBroker(self._config, self._epoch_file)
            return self._broker.begin(world, actor, interface=interface, state=state)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Any other method of the broker by name; RemoteBroker says which and with what types."""
        with self._lock:
            return getattr(self._begun(), method)(*args, **kwargs)

    def pull(self, order: Order | None, holder: str | None) -> tuple[Pair, list[Any]]:
        """(pair, [world ref, actor ref]), leased to `holder` if there is one."""
        with self._lock:
            broker = self._begun()
            if holder is not None:
                broker.lease(holder, order)
            pair, *snapshots = broker.pull(order)
            refs = [self._refs.pop(snapshot.digest, None) or ray.put(snapshot) for snapshot in snapshots]
            self._refs |= {snapshot.digest: ref for snapshot, ref in zip(snapshots, refs, strict=True)}
            while len(self._refs) > 2 * self._config.keep_pairs:
                self._refs.popitem(last=False)
            return pair, refs

    def _begun(self) -> WeightBroker:
        if self._broker is None:
            raise RuntimeError("the broker has no pair yet: call begin() first")
        return self._broker


class RemoteBroker:
    """`training.Broker` on a BrokerActor; every wait has a deadline (GetTimeoutError)."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def begin(
        self, world: Snapshot, actor: Snapshot, *, interface: str, state: Mapping[str, Any] | None = None
    ) -> Pair:
        pair: Pair = ray.get(self.actor.begin.remote(world, actor, interface, state), timeout=ANSWER_DEADLINE_S)
        return pair

    def current(self) -> Pair:
        pair: Pair = self._call("current")
        return pair

    def pull(self, order: Order | None = None) -> tuple[Pair, Snapshot, Snapshot]:
        return pull(self.actor, order, None)

    def stage_world(self, snapshot: Snapshot, *, drift: Mapping[str, float], interface: str) -> bool:
        return bool(self._call("stage_world", snapshot, drift=dict(drift), interface=interface))

    def stage_actor(self, snapshot: Snapshot, *, trained_against_world: str, interface: str) -> bool:
        return bool(
            self._call("stage_actor", snapshot, trained_against_world=trained_against_world, interface=interface)
        )

    def commit(self) -> Pair | None:
        pair: Pair | None = self._call("commit")
        return pair

    def commits_since(self, order: Order) -> int:
        return int(self._call("commits_since", order))

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._call("state")
        return state

    def metrics(self) -> Metrics:
        metrics: Metrics = self._call("metrics")
        return metrics

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return ray.get(self.actor.call.remote(method, *args, **kwargs), timeout=ANSWER_DEADLINE_S)


class Puller:
    """A worker's way to the broker; comes with `setup`: a handle among constructor arguments endangers restarts."""

    def __init__(self, broker: Any, holder: str) -> None:
        self._broker, self._holder = broker, holder

    def __call__(self, pair: Pair) -> tuple[Snapshot, Snapshot]:
        """The weights of exactly this pair; RuntimeError if the broker answers with another."""
        found, world, actor = pull(self._broker, pair.order, self._holder)
        if found != pair:
            raise RuntimeError(f"asked the broker for {pair}, it answered with {found}")
        return world, actor


def pull(broker: Any, order: Order | None, holder: str | None) -> tuple[Pair, Snapshot, Snapshot]:
    """Ask a BrokerActor and fetch both snapshots.  Buffers are read-only views into the object store."""
    pair, refs = ray.get(broker.pull.remote(order, holder), timeout=ANSWER_DEADLINE_S)
    world, actor = ray.get(refs, timeout=FETCH_DEADLINE_S)
    return pair, world, actor
