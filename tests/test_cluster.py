"""Real actors: a killed worker, a hung one, one that raises; and the same digests however a run is spread or cut."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray

from envs.counting import CountingConfig, CountingEnv
from tests.fakes import CountingPolicy, snapshot, ticket
from wamrl_ray.broker import WeightBroker
from wamrl_ray.cluster import build_cluster, learner_gpus, start_broker, start_pool
from wamrl_ray.cluster_pool import ElasticPool
from wamrl_ray.cluster_ports import as_future
from wamrl_ray.config import BrokerConfig, Config, RolloutConfig, load_config
from wamrl_ray.local import build_local
from wamrl_ray.policy.bases import load_base
from wamrl_ray.rollout import rollout
from wamrl_ray.run import System, run_training
from wamrl_ray.types import Episode, Pair, Ticket

pytestmark = pytest.mark.usefixtures("ray_cluster")


def counting_policy(config: Config) -> CountingPolicy:
    return CountingPolicy()


def kill_when(ready: threading.Event | Path, pid: int) -> threading.Thread:
    """SIGKILL the process as soon as the event is set or the file is there."""

    def wait() -> None:
        end = time.monotonic() + 120
        while not (ready.exists() if isinstance(ready, Path) else ready.is_set()):
            assert time.monotonic() < end, "never came to the moment of the kill"
            time.sleep(0.02)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


# ------------------------------------------------------------------------------------------------ one worker's faults


class Bench:
    """One worker in a counting environment that hangs once, at initial state 5, while `marker` is absent."""

    def __init__(self, folder: Path) -> None:
        self.marker = folder / "hung"
        env = CountingConfig(fault="hang", fault_init_state=5, fault_marker=str(self.marker))
        self.config = Config(env=env, rollout=RolloutConfig(num_workers=1, max_attempts=2))
        self.broker = start_broker(BrokerConfig(), folder / "epoch.json")
        self.pair = self.broker.begin(snapshot("world", 1.0), snapshot("actor", 2.0), interface="i")
        self.pool = start_pool(self.config, self.broker, counting_policy)

    def run(self, tickets: Sequence[Ticket], pair: Pair | None = None) -> list[Episode]:
        return [ray.get(ref, timeout=60) for _, ref in self.pool.run(tickets, pair or self.pair)]

    def counts(self) -> dict[str, float]:
        return {name.removeprefix("rollout/"): value for name, value in self.pool.metrics().items()}


@pytest.fixture(scope="module")
def bench(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    yield bench
    bench.pool.close()
    ray.kill(bench.broker.actor)


def here(tickets: Sequence[Ticket], weight: float) -> list[Episode]:
    """The same episodes in this process."""
    policy = CountingPolicy()
    policy.weight = weight
    pair = Pair(epoch=1, seq=0, world="w", actor="a", trained_against_world="w", interface="i")
    return [rollout(CountingEnv(CountingConfig(), "train"), policy, ticket, pair) for ticket in tickets]


def same(found: Sequence[Episode], expected: Sequence[Episode]) -> bool:
    arrays = ("frames", "state", "obs_step", "chain", "behaviour_logprob", "world_seed", "actions", "executed")
    pairs = list(zip(found, expected, strict=True))
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in arrays)


def test_workers_act_with_exactly_the_asked_pair(bench: Bench) -> None:
    tickets = [ticket(i, init_state_id=i) for i in range(3)]
    found = bench.run(tickets)
    assert same(found, here(tickets, weight=3.0))
    assert {episode.pair for episode in found} == {bench.pair}
    assert bench.broker.stage_actor(
        snapshot("actor", 5.0), trained_against_world=bench.pair.world, interface="i"
    )
    newer = bench.broker.commit()
    assert newer is not None
    assert same(bench.run(tickets, newer), here(tickets, weight=6.0))
    assert same(bench.run(tickets), here(tickets, weight=3.0)), "an older pair that is still kept can be acted with"
    assert bench.broker.metrics()["broker/leases"] == 1.0


def test_a_hung_simulator_is_killed_at_the_deadline_and_its_ticket_runs_again(bench: Bench) -> None:
    before, pid = bench.counts(), bench.pool.pids["rollout worker 0"]
    tickets = [replace(ticket(i, init_state_id=i), deadline_s=5.0) for i in (4, 5, 6)]
    bench.marker.unlink(missing_ok=True)
    assert same(bench.run(tickets), here(tickets, weight=3.0))
    gained = {name: value - before[name] for name, value in bench.counts().items()}
    assert (gained["deadlines_missed"], gained["reissued_tickets"], gained["worker_restarts"]) == (1, 1, 1)
    assert bench.pool.pids["rollout worker 0"] != pid


def test_a_worker_killed_in_an_episode_is_restarted_and_its_ticket_runs_again(bench: Bench) -> None:
    before, pid = bench.counts(), bench.pool.pids["rollout worker 0"]
    tickets = [replace(ticket(i, init_state_id=i), deadline_s=90.0) for i in (4, 5, 6)]
    bench.marker.unlink(missing_ok=True)
    killer = kill_when(bench.marker, pid)
    assert same(bench.run(tickets), here(tickets, weight=3.0))
    killer.join()
    gained = {name: value - before[name] for name, value in bench.counts().items()}
    assert (gained["worker_errors"], gained["reissued_tickets"], gained["worker_restarts"]) == (1, 1, 1)
    assert gained["deadlines_missed"] == 0


def test_an_error_in_a_worker_names_worker_and_ticket_and_carries_the_remote_stack(bench: Bench) -> None:
    unknown = replace(ticket(77), init_state_id=999)
    expected = "ticket 77 failed on rollout worker 0, attempt 2 of 2: init_state_id = 999"
    with pytest.raises(RuntimeError, match=expected) as caught:
        bench.run([unknown])
    cause = caught.value.__cause__
    assert isinstance(cause, ValueError)
    assert "raised in rollout worker 0" in cause.__notes__[0] and "split_of" in cause.__notes__[0]
    good = [ticket(1, init_state_id=1)]
    assert same(bench.run(good), here(good, weight=3.0))


def test_every_beginning_of_the_broker_is_a_new_epoch(bench: Bench, tmp_path: Path) -> None:
    broker = start_broker(BrokerConfig(), tmp_path / "epoch.json")
    world, actor = snapshot("world", 1.0), snapshot("actor", 2.0)
    with pytest.raises(RuntimeError, match="call begin"):
        broker.current()
    first = broker.begin(world, actor, interface="i")
    again = broker.begin(world, actor, interface="i", state=broker.state())
    assert (first.epoch, again.epoch) == (1, 2) and again.order > first.order
    assert WeightBroker(BrokerConfig(), tmp_path / "epoch.json").begin(world, actor, interface="i").epoch == 3
    ray.kill(broker.actor)


def test_a_dead_actor_is_reported_in_plain_words(ray_cluster: None) -> None:
    class Mortal:
        def die(self) -> None:
            os._exit(1)

    actor = ray.remote(Mortal).options(num_cpus=0).remote()
    with pytest.raises(RuntimeError, match="the process of the video learner died"):
        as_future(actor.die.remote(), "the video learner").result(60)


def test_asking_for_a_gpu_that_is_not_there_is_refused(ray_cluster: None) -> None:
    if ray.cluster_resources().get("GPU"):
        pytest.skip("this machine has a GPU")
    assert learner_gpus("auto") == learner_gpus("cpu") == 0.0
    with pytest.raises(ValueError, match="device = 'cuda': the cluster has no GPU; use 'auto' or 'cpu'"):
        learner_gpus("cuda")


# ------------------------------------------------------------------------------------------------ whole runs


def reach(**rollout: int) -> Config:
    """The debug preset, smaller."""
    sizes = {"episodes_per_iteration": 4, "group_size": 2, "deadline_s": 120} | rollout
    options = [f"--rollout.{name}={value}" for name, value in sizes.items()]
    return load_config(["debug"], [*options, "--evaluation.episodes=0", "--env.max-steps=16"])


def digests(summary: dict[str, object]) -> tuple[object, object]:
    return summary["world_digest"], summary["actor_digest"]


def spread(whole: System, run_dir: Path, workers: int) -> System:
    """A run of its own over the same actors, with the first `workers` of the pool's workers."""
    assert isinstance(whole.pool, ElasticPool)
    ports = [slot.port for slot in whole.pool._slots][:workers]
    return System(
        whole.config, run_dir, env_spec=whole.env_spec, tasks=whole.office._tasks,
        pool=ElasticPool(ports, max_attempts=3), video=whole.video, actor=whole.actor, broker=whole.broker,
        persist=whole._persist, restore=whole._restore, close=lambda: None,
    )  # fmt: skip


def test_digests_do_not_depend_on_workers_deaths_or_resume(tmp_path: Path) -> None:
    config = reach(num_workers=3)
    local = build_local(config, tmp_path / "local")
    expected = digests(run_training(local, iterations=2))
    local.close()
    base = load_base(config.base)
    assert expected[0] != base.export("world").digest and expected[1] != base.export("actor").digest

    whole = build_cluster(config, tmp_path / "whole")
    whole.start()
    start = whole.save()
    try:
        for workers in (1, 2):
            system = spread(whole, tmp_path / f"workers_{workers}", workers)
            assert digests(run_training(system, iterations=2, resume=str(start))) == expected, f"{workers} workers"

        three = spread(whole, tmp_path / "three", 3)
        stopped = run_training(
            three, iterations=2, resume=str(start), stop_requested=lambda: three.iteration == 1
        )
        assert stopped["stopped"] and stopped["iterations"] == 1
        resumed = spread(whole, tmp_path / "three", 3)
        assert isinstance(resumed.pool, ElasticPool)
        under_way = threading.Event()

        def step() -> dict[str, float]:
            under_way.set()
            return resumed.step()

        killers = [kill_when(under_way, pid) for pid in list(three.pool.pids.values())[:1]]
        assert digests(run_training(resumed, iterations=2, resume="auto", step=step)) == expected, "killed and resumed"
        for killer in killers:
            killer.join()
        assert resumed.pool.metrics()["rollout/worker_errors"] >= 1.0
    finally:
        whole.close()


@pytest.mark.slow
@pytest.mark.sim
def test_libero_gives_the_same_digests_in_one_process_and_on_two_workers(tmp_path: Path) -> None:
    sizes = ["--rollout.num-workers=2", "--rollout.episodes-per-iteration=2", "--rollout.group-size=2"]
    config = load_config(["libero_object_quick"], [*sizes, "--iterations=2", "--evaluation.episodes=0"])
    local = build_local(config, tmp_path / "local")
    expected = digests(run_training(local, iterations=2))
    local.close()
    cluster = build_cluster(config, tmp_path / "cluster")
    try:
        assert digests(run_training(cluster, iterations=2)) == expected
    finally:
        cluster.close()
