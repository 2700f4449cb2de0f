"""The weight broker: single rules by example, and a state machine that tries them in every order."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fakes import snapshot
from wamrl_ray.broker import WeightBroker
from wamrl_ray.config import BrokerConfig
from wamrl_ray.digest import snapshot_digest

CONFIG = BrokerConfig(max_feature_drift=1.0, keep_pairs=2, lease_s=10.0)
W0, W1, W2 = (snapshot("world", i) for i in range(3))
A0, A1, A2 = (snapshot("actor", i) for i in range(3))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def begun(folder: Path, clock: Clock | None = None) -> WeightBroker:
    broker = WeightBroker(CONFIG, folder / "epoch.json", clock or Clock())
    broker.begin(W0, A0, interface="i")
    return broker


def refused(broker: WeightBroker) -> dict[str, float]:
    return {k.removeprefix("broker/refused_"): v for k, v in broker.metrics().items() if "refused" in k and v}


def test_a_pair_within_the_drift_bound_is_committed(tmp_path: Path):
    broker = begun(tmp_path)
    assert broker.stage_world(W1, drift={W0.digest: 1.0}, interface="i")
    assert broker.stage_actor(A1, trained_against_world=W0.digest, interface="i")
    assert broker.current().order == (1, 0), "staging publishes nothing"
    pair = broker.commit()
    assert (pair.order, pair.world, pair.actor, pair.trained_against_world) == ((1, 1), W1.digest, A1.digest, W0.digest)
    assert broker.pull() == (pair, W1, A1) and refused(broker) == {}


def test_a_world_that_drifted_too_far_is_refused_and_the_actor_published_with_the_current_one(tmp_path: Path):
    broker = begun(tmp_path)
    broker.stage_world(W1, drift={W0.digest: 1.01}, interface="i")
    broker.stage_actor(A1, trained_against_world=W0.digest, interface="i")
    pair = broker.commit()
    assert (pair.world, pair.actor, pair.seq) == (W0.digest, A1.digest, 1)
    assert refused(broker) == {"drift": 1} and broker.metrics()["broker/publish_lag_updates"] == 1


def test_the_last_good_pair_stays_if_the_actor_fits_no_world(tmp_path: Path):
    broker = begun(tmp_path)
    broker.stage_world(W1, drift={W0.digest: 5.0}, interface="i")
    broker.stage_actor(A1, trained_against_world="of another run", interface="i")
    assert broker.commit() is None and broker.pull()[1:] == (W0, A0)
    assert refused(broker) == {"drift_unknown": 2} and broker.commit() is None


def test_an_actor_adapted_to_a_refused_world_is_published_with_the_next_one(tmp_path: Path):
    broker = begun(tmp_path)
    broker.stage_world(W1, drift={W0.digest: 5.0}, interface="i")
    broker.commit()
    broker.stage_world(W2, drift={W0.digest: 6.0, W1.digest: 0.5}, interface="i")
    broker.stage_actor(A1, trained_against_world=W1.digest, interface="i")
    assert (broker.commit().world, broker.metrics()["broker/publish_lag_updates"]) == (W2.digest, 0)


def test_drift_counts_in_whichever_direction_it_was_measured(tmp_path: Path):
    broker = begun(tmp_path)
    broker.stage_world(W1, drift={W0.digest: 5.0}, interface="i")
    broker.commit()
    broker.stage_actor(A1, trained_against_world=W1.digest, interface="i")
    assert broker.commit() is None and refused(broker) == {"drift": 2}


def test_a_nan_drift_is_refused(tmp_path: Path):
    broker = begun(tmp_path)
    broker.stage_world(W1, drift={W0.digest: float("nan")}, interface="i")
    assert broker.commit() is None and refused(broker) == {"drift": 1}


def test_foreign_damaged_or_reshaped_components_are_refused_at_staging_with_their_reason(tmp_path: Path):
    broker = begun(tmp_path)
    damaged = replace(W1, buffer=W2.buffer)
    assert not broker.stage_world(damaged, drift={}, interface="i")
    assert not broker.stage_actor(A1, trained_against_world=W0.digest, interface="other")
    assert not broker.stage_actor(snapshot("actor", 1, size=4), trained_against_world=W0.digest, interface="i")
    assert refused(broker) == {"digest": 1, "interface": 1, "layout": 1} and broker.commit() is None


def test_the_epoch_rises_with_every_start_and_is_on_disk_before_a_pair_carries_it(tmp_path: Path):
    assert begun(tmp_path).current().order == (1, 0)
    WeightBroker(CONFIG, tmp_path / "epoch.json")  # killed before it published
    assert json.loads((tmp_path / "epoch.json").read_text()) == {"epoch": 2}
    assert begun(tmp_path).current().order == (3, 0)


def test_a_restored_pair_keeps_its_counters_under_a_newer_epoch(tmp_path: Path):
    broker = begun(tmp_path)
    broker.stage_world(W1, drift={W0.digest: 0.3}, interface="i")
    broker.stage_actor(A1, trained_against_world=W0.digest, interface="i")
    old = broker.commit()
    state = json.loads(json.dumps(broker.state()))
    other = WeightBroker(CONFIG, tmp_path / "epoch.json")
    pair = other.begin(W1, A1, interface="i", state=state)
    assert pair == replace(old, epoch=2) and pair.order > old.order
    assert other.metrics()["broker/pairs_committed"] == 1 and other.metrics()["broker/feature_drift_nats"] == 0.3
    with pytest.raises(ValueError, match="use one checkpoint"):
        other.begin(W0, A1, interface="i", state=state)


def test_rollback_publishes_old_weights_under_a_newer_version(tmp_path: Path):
    broker = begun(tmp_path)
    broker.stage_actor(A1, trained_against_world=W0.digest, interface="i")
    newest = broker.commit()
    pair = broker.rollback((1, 0))
    assert (pair.order, pair.actor) == ((2, 0), A0.digest) and pair.order > newest.order


def test_a_pair_is_kept_while_leased_and_gone_after_the_lease_expires(tmp_path: Path):
    clock = Clock()
    broker = begun(tmp_path, clock)
    broker.lease("worker 0")
    for actor in (A1, A2, A1):
        broker.stage_actor(actor, trained_against_world=W0.digest, interface="i")
        broker.commit()
    assert broker.pull((1, 0))[2] is A0
    clock.now = 9.0
    assert broker.renew("worker 0")
    clock.now = 18.0
    assert broker.pull((1, 0))[2] is A0
    clock.now = 19.0
    assert not broker.renew("worker 0")
    with pytest.raises(ValueError, match=r"order = \(1, 0\).*\[\(1, 2\), \(1, 3\)\]"):
        broker.pull((1, 0))


def test_age_is_counted_in_commits_across_epochs(tmp_path: Path):
    broker = begun(tmp_path)
    broker.stage_actor(A1, trained_against_world=W0.digest, interface="i")
    first = broker.commit()
    broker.new_epoch()
    broker.stage_actor(A2, trained_against_world=W0.digest, interface="i")
    broker.commit()
    assert [broker.commits_since(order) for order in ((1, 0), first.order, (2, 1), (2, 2))] == [2, 1, 1, 0]


def test_a_damaged_base_is_refused(tmp_path: Path):
    broker = WeightBroker(CONFIG, tmp_path / "epoch.json")
    with pytest.raises(RuntimeError, match="begin"):
        broker.current()
    with pytest.raises(ValueError, match="damaged"):
        broker.begin(replace(W0, buffer=W1.buffer), A0, interface="i")


class BrokerMachine(RuleBasedStateMachine):
    """Two learners, two workers, restarts and rollbacks in any order, against a plain list of what was published."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.clock = Clock()
        self.published = []
        self.committed = 0
        self.drift: dict[tuple[str, str], float] = {}
        self.leases: dict[str, tuple[tuple[int, int], float]] = {}
        self.open(None)

    def open(self, state) -> None:
        before = self.published[-1] if self.published else None
        world, actor = self.weights[1:] if before else (W0, A0)
        self.broker = WeightBroker(CONFIG, Path(self.folder.name) / "epoch.json", self.clock)
        self.record(self.broker.begin(world, actor, interface="i", state=state))
        self.leases = {}
        self.first_here = len(self.published) - 1

    def record(self, pair) -> None:
        assert not self.published or pair.order > self.published[-1].order, "versions only rise"
        self.published.append(pair)
        self.weights = self.broker.pull()
        self.staged_world, self.staged_actor = None, None

    @rule(value=st.integers(1, 9), drift=st.floats(0, 2), sound=st.booleans(), interface=st.sampled_from(["i", "j"]))
    def stage_world(self, value: int, drift: float, sound: bool, interface: str) -> None:
        snap = snapshot("world", value)
        to = self.published[-1].trained_against_world
        snap = snap if sound else replace(snap, digest="0" * 16)
        ok = self.broker.stage_world(snap, drift={to: drift}, interface=interface)
        assert ok == (sound and interface == "i")
        if ok:
            self.staged_world = snap
            self.drift[(snap.digest, to)] = drift

    @rule(value=st.integers(1, 9), other=st.booleans())
    def stage_actor(self, value: int, other: bool) -> None:
        base = "another" if other else self.published[-1].trained_against_world
        assert self.broker.stage_actor(snapshot("actor", value), trained_against_world=base, interface="i")
        self.staged_actor = (snapshot("actor", value), base)

    @rule()
    def commit(self) -> None:
        before, refusals = self.published[-1], sum(refused(self.broker).values())
        world, actor = self.staged_world, self.staged_actor
        pair = self.broker.commit()
        self.staged_world, self.staged_actor = None, None
        if pair is None:
            assert self.broker.current() == before, "the last good pair stays"
            assert (sum(refused(self.broker).values()) > refusals) == (world is not None or actor is not None)
            return
        self.committed += 1
        assert pair.actor == (actor[0].digest if actor else before.actor)
        assert pair.world in {before.world, world.digest if world else before.world}
        self.record(pair)

    @rule(holder=st.sampled_from(["a", "b"]))
    def lease(self, holder: str) -> None:
        self.leases[holder] = (self.broker.lease(holder).order, self.clock.now + CONFIG.lease_s)

    @rule(holder=st.sampled_from(["a", "b"]))
    def renew(self, holder: str) -> None:
        live = holder in self.leases and self.leases[holder][1] > self.clock.now
        assert self.broker.renew(holder) == live
        if live:
            self.leases[holder] = (self.leases[holder][0], self.clock.now + CONFIG.lease_s)

    @rule(holder=st.sampled_from(["a", "b"]))
    def release(self, holder: str) -> None:
        self.broker.release(holder)
        self.leases.pop(holder, None)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def recover_a_learner(self) -> None:
        self.record(self.broker.new_epoch())

    @precondition(lambda self: len(self.published) - 1 > self.first_here)
    @rule()
    def roll_back(self) -> None:
        target = self.published[-2]
        pair = self.broker.rollback(target.order)
        assert replace(target, epoch=pair.epoch) == pair
        self.record(pair)

    @rule()
    def restart(self) -> None:
        self.open(json.loads(json.dumps(self.broker.state())))

    @invariant()
    def what_is_pulled_is_whole_and_aligned(self) -> None:
        pair, world, actor = self.broker.pull()
        assert pair == self.published[-1]
        for snap, digest in ((world, pair.world), (actor, pair.actor)):
            assert snapshot_digest(snap.component, snap.layout, snap.buffer) == snap.digest == digest
        if pair.world != pair.trained_against_world:
            assert self.drift[(pair.world, pair.trained_against_world)] <= CONFIG.max_feature_drift

    @invariant()
    def leased_pairs_stay_and_the_rest_is_bounded(self) -> None:
        live = [order for order, expires in self.leases.values() if expires > self.clock.now]
        for order in live:
            assert self.broker.pull(order)[0].order == order
        assert self.broker.metrics()["broker/kept_pairs"] <= CONFIG.keep_pairs + len(self.leases)

    @invariant()
    def commits_are_counted_once(self) -> None:
        assert self.broker.metrics()["broker/pairs_committed"] == self.committed

    def teardown(self) -> None:
        self.folder.cleanup()


TestBrokerMachine = BrokerMachine.TestCase
TestBrokerMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
