"""The elastic pool over threads: order, retries, deadlines and errors, without Ray."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest
from ray.exceptions import RayTaskError

from envs.rlbench_process import SimulatorFault
from tests.fakes import pair, summary, ticket
from wamrl_ray import cluster_pool
from wamrl_ray.cluster_pool import ElasticPool
from wamrl_ray.metrics import explained
from wamrl_ray.rollout import EpisodeSummary
from wamrl_ray.types import Pair, Ticket

Behaviour = Callable[[str, Ticket], None]
"""Called where the episode would run: sleeps, raises, hangs."""


class ThreadWorker:
    """One thread as a worker process; a restart forgets the thread, as a kill does."""

    def __init__(self, name: str, behave: Behaviour) -> None:
        self.name, self._behave = name, behave
        self.starts, self.ran, self.closed = 0, [], False
        self.setup_error: Exception | None = None
        self.restart()

    def setup(self) -> Future[int]:
        def start() -> int:
            if self.setup_error is not None:
                raise self.setup_error
            return self.starts

        return self._thread.submit(start)

    def run(self, ticket: Ticket, pair: Pair) -> tuple[Future[EpisodeSummary], str]:
        def episode() -> EpisodeSummary:
            self._behave(self.name, ticket)
            return replace(summary(ticket.ticket_id), ticket=ticket)

        self.ran.append(ticket.ticket_id)
        return self._thread.submit(episode), f"episode {ticket.ticket_id}"

    def restart(self) -> None:
        self.starts += 1
        self._thread = ThreadPoolExecutor(1)

    def close(self) -> None:
        self.closed = True


def pool_of(count: int, behave: Behaviour, max_attempts: int = 3) -> tuple[ElasticPool, list[ThreadWorker]]:
    workers = [ThreadWorker(f"worker {index}", behave) for index in range(count)]
    return ElasticPool(workers, max_attempts=max_attempts), workers


def ids(results: list[tuple[EpisodeSummary, str]]) -> list[int]:
    return [found.ticket.ticket_id for found, _ in results]


def test_results_come_in_ticket_order_whatever_the_order_of_completion() -> None:
    pool, workers = pool_of(3, lambda name, ticket: time.sleep(0.05 * (5 - ticket.ticket_id)))
    results = pool.run([ticket(i) for i in range(6)], pair())
    assert ids(results) == [0, 1, 2, 3, 4, 5]
    assert [handle for _, handle in results] == [f"episode {i}" for i in range(6)]
    assert all(worker.ran for worker in workers)
    assert sum(len(worker.ran) for worker in workers) == 6


def test_a_finished_ticket_is_handed_out_while_others_are_under_way() -> None:
    release = threading.Event()
    pool, _ = pool_of(2, lambda name, ticket: None if ticket.ticket_id else release.wait(10))
    finished = pool.finished([ticket(i) for i in range(3)], None)
    assert [next(finished)[0], next(finished)[0]] == [1, 2]
    release.set()
    place, found, handle = next(finished)
    assert (place, found.ticket.ticket_id, handle) == (0, 0, "episode 0") and next(finished, None) is None


def test_a_failed_ticket_is_run_again_and_counted() -> None:
    failed = threading.Event()

    def behave(name: str, ticket: Ticket) -> None:
        if ticket.ticket_id == 1 and not failed.is_set():
            failed.set()
            raise ValueError("the simulator fell over")

    pool, workers = pool_of(2, behave)
    assert ids(pool.run([ticket(i) for i in range(4)], pair())) == [0, 1, 2, 3]
    assert sorted(workers[0].ran + workers[1].ran) == [0, 1, 1, 2, 3]
    counts = pool.metrics()
    del counts["rollout/workers"]  # the one that failed may still be starting again
    assert counts == {
        "rollout/reissued_tickets": 1.0, "rollout/deadlines_missed": 0.0, "rollout/worker_errors": 1.0,
        "rollout/worker_restarts": 0.0,
    }  # fmt: skip


def test_a_fault_of_a_simulator_is_counted_by_its_kind_also_when_it_comes_through_ray() -> None:
    fault = SimulatorFault("step_timeout", "no answer")
    through_ray = RayTaskError("run", "stack", SimulatorFault("crashed", "by SIGSEGV")).as_instanceof_cause()
    coming = {0: [fault, through_ray], 1: [ValueError("no fault of a simulator")], 2: []}

    def behave(name: str, ticket: Ticket) -> None:
        if coming[ticket.ticket_id]:
            raise coming[ticket.ticket_id].pop()

    pool, _ = pool_of(1, behave)
    assert ids(pool.run([ticket(i) for i in range(3)], pair())) == [0, 1, 2]
    counts = pool.metrics()
    faults = {name: count for name, count in counts.items() if name.startswith("rollout/faults/")}
    assert faults == {"rollout/faults/step_timeout": 1.0, "rollout/faults/crashed": 1.0}
    assert counts["rollout/worker_errors"] == 3.0 and all(explained(name) for name in faults)


def test_a_ticket_beyond_its_deadline_costs_the_worker_its_life_and_runs_again() -> None:
    hung = threading.Event()

    def behave(name: str, ticket: Ticket) -> None:
        if ticket.ticket_id == 0 and not hung.is_set():
            hung.set()
            time.sleep(5)

    pool, workers = pool_of(1, behave)
    started = time.monotonic()
    results = pool.run([replace(ticket(0), deadline_s=0.3), ticket(1)], pair())
    assert time.monotonic() - started < 4
    assert ids(results) == [0, 1] and workers[0].ran == [0, 0, 1] and workers[0].starts == 2
    assert pool.metrics()["rollout/deadlines_missed"] == 1.0
    assert pool.metrics()["rollout/worker_restarts"] == 1.0


def test_the_last_error_is_raised_with_worker_ticket_and_cause() -> None:
    def behave(name: str, ticket: Ticket) -> None:
        if ticket.ticket_id == 2:
            raise ValueError("gripper lost")

    pool, workers = pool_of(1, behave, max_attempts=2)
    with pytest.raises(RuntimeError, match="ticket 2 failed on worker 0, attempt 2 of 2: gripper lost") as caught:
        pool.run([ticket(i) for i in range(4)], pair())
    assert isinstance(caught.value.__cause__, ValueError)
    assert workers[0].ran.count(2) == 2


def test_what_a_failed_call_left_under_way_is_no_result_of_the_next() -> None:
    def behave(name: str, ticket: Ticket) -> None:
        if ticket.ticket_id == 0:
            raise ValueError("no")
        time.sleep(0.4)

    pool, workers = pool_of(2, behave, max_attempts=1)
    with pytest.raises(RuntimeError):
        pool.run([ticket(0), ticket(1)], pair())
    assert ids(pool.run([ticket(i) for i in (5, 6, 7)], pair())) == [5, 6, 7]
    assert workers[1].starts == 2, "killed, because it was still busy with ticket 1"


def test_a_worker_that_cannot_start_ends_the_run_with_its_reason() -> None:
    workers = [ThreadWorker("worker 0", lambda name, ticket: None)]
    workers[0].setup_error = RuntimeError("no renderer")
    pool = ElasticPool(workers, max_attempts=3)
    with pytest.raises(RuntimeError, match="worker 0 could not start: no renderer"):
        pool.run([ticket(0)], pair())


def test_the_run_goes_on_with_the_workers_that_found_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pending(ThreadWorker):
        def setup(self) -> Future[int]:
            return Future()

    monkeypatch.setattr(cluster_pool, "START_DEADLINE_S", 0.5)
    ready, never = ThreadWorker("worker 0", lambda name, ticket: time.sleep(0.2)), Pending("worker 1", print)
    assert len(ElasticPool([ready, never], max_attempts=1).run([ticket(i) for i in range(4)], pair())) == 4
    pool = ElasticPool([never], max_attempts=1, start_hint=lambda: "add nodes")
    with pytest.raises(TimeoutError, match=r"no rollout worker is ready after 0\.5 s; add nodes"):
        pool.run([ticket(0)], pair())


def test_closing_the_pool_closes_every_worker() -> None:
    pool, workers = pool_of(2, lambda name, ticket: None)
    pool.close()
    assert all(worker.closed for worker in workers)


def test_a_worker_stays_with_its_task_while_there_are_tickets_of_it() -> None:
    pool, workers = pool_of(1, lambda name, ticket: None)
    tickets = [replace(ticket(i), task_id=i % 2) for i in range(6)]
    assert ids(pool.run(tickets, pair())) == [0, 1, 2, 3, 4, 5]
    assert workers[0].ran == [0, 2, 4, 1, 3, 5]
