"""ElasticPool: tickets onto workers that may die or hang, results back in ticket order.  No Ray in here.

Fed by the training loop and evaluation with tickets and a pair, by collection with tickets alone; feeds them (summary,
handle).  `cluster.py` gives it worker ports over Ray actors, the tests give it ports over threads.

            ┌─ starting ──setup done──► ready ──ticket──► busy ──episode──► ready
            │      ▲                                       │
            └──────┴─ setup again ◄── error, death, or deadline (then the process is killed first)

A ticket whose attempt failed goes back to the head of the queue and is run by the next ready worker: an episode is a
function of (ticket, pair), so who runs it, how often and in which order it is finished leaves no trace in the results.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from wamrl_ray.rollout import fault_metric
from wamrl_ray.types import Metrics, Pair, Ticket

Handle = Any

START_DEADLINE_S = 300.0
"""Wall seconds without any ready worker after which a run fails: simulators take up to a minute to start."""

POLL_S = 1.0
"""Longest wait between two looks at the deadlines, wall seconds."""


class Summary(Protocol):
    """What a worker says of a finished ticket, beside its handle."""

    @property
    def ticket(self) -> Ticket: ...


S = TypeVar("S", bound=Summary)


class WorkerPort(Protocol[S]):
    """One worker, wherever it lives.  Calls return at once."""

    name: str

    def setup(self) -> Future[int]:
        """Make the worker ready, restarting its process if it died; answers its process id.  Free if it is ready."""

    def run(self, ticket: Ticket, pair: Pair | None) -> tuple[Future[S], Handle]: ...

    def restart(self) -> None:
        """Kill the process at once, whatever it does."""

    def close(self) -> None:
        """Kill it for good."""


@dataclass
class _Job(Generic[S]):
    place: int
    "index of the ticket in this run"
    summary: Future[S]
    handle: Handle
    deadline: float
    "on the monotonic clock, seconds"


@dataclass
class _Slot(Generic[S]):
    port: WorkerPort[S]
    setup: Future[int] | None = None
    "pending while the worker starts"
    job: _Job[S] | None = None
    pid: int = -1
    task_id: int = -1
    "of its last ticket: a simulator is built for one task and takes seconds to build for another"


class ElasticPool(Generic[S]):
    """A `training.RolloutPool` over the ports of rollout workers; any worker that answers tickets will do."""

    def __init__(
        self,
        ports: Sequence[WorkerPort[S]],
        *,
        max_attempts: int,
        start_hint: Callable[[], str] = lambda: "see its log",
    ) -> None:
        """Starts the workers.  `start_hint` is asked what to tell a user whose workers do not come up."""
        self._max_attempts, self._start_hint = max_attempts, start_hint
        self._slots = [_Slot(port) for port in ports]
        self._counts: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        "lost attempts by metric name, of those that a simulator's named fault ended"
        self._ready_seen = time.monotonic()
        for slot in self._slots:
            slot.setup = slot.port.setup()

    @property
    def pids(self) -> dict[str, int]:
        """Worker name -> process id, of the workers that have been ready."""
        return {slot.port.name: slot.pid for slot in self._slots if slot.pid >= 0}

    def run(self, tickets: Sequence[Ticket], pair: Pair | None) -> list[tuple[S, Handle]]:
        """See `training.RolloutPool.run`.  RuntimeError names worker and ticket, its cause is the worker's error."""
        results = {place: (summary, handle) for place, summary, handle in self.finished(tickets, pair)}
        return [results[place] for place in range(len(tickets))]

    def finished(self, tickets: Sequence[Ticket], pair: Pair | None) -> Iterator[tuple[int, S, Handle]]:
        """(index of the ticket, summary, handle) as tickets are finished; raises as `run` does.

        `pair` is None where workers act without published weights.
        """
        todo = deque(range(len(tickets)))
        attempts: Counter[int] = Counter()
        done = 0
        self._abandon_jobs()
        self._ready_seen = time.monotonic()
        while done < len(tickets):
            self._collect_setups()
            for slot in self._slots:
                if todo and slot.setup is None and slot.job is None:
                    slot.job = self._dispatch(slot, _choose(todo, tickets, slot.task_id), tickets, pair)
            self._wait()
            for slot in self._slots:
                job = slot.job
                if job is None or not (job.summary.done() or time.monotonic() > job.deadline):
                    continue
                slot.job = None
                error = self._outcome(slot, job, tickets[job.place])
                if error is None:
                    done += 1
                    yield job.place, job.summary.result(), job.handle
                    continue
                attempts[job.place] += 1
                slot.setup = slot.port.setup()
                if attempts[job.place] >= self._max_attempts:
                    raise RuntimeError(
                        f"ticket {tickets[job.place].ticket_id} failed on {slot.port.name}, attempt "
                        f"{attempts[job.place]} of {self._max_attempts}: {error}"
                    ) from error
                self._counts["reissued_tickets"] += 1
                todo.appendleft(job.place)

    def metrics(self) -> Metrics:
        """Counters since the start, and how many workers are ready or busy."""
        up = sum(slot.setup is None for slot in self._slots)
        names = ("reissued_tickets", "deadlines_missed", "worker_errors", "worker_restarts")
        counts = {f"rollout/{name}": float(self._counts[name]) for name in names}
        return {"rollout/workers": float(up), **counts, **self._faults}

    def close(self) -> None:
        for slot in self._slots:
            slot.port.close()

    # ------------------------------------------------------------------------------------------------ inside

    def _dispatch(self, slot: _Slot[S], place: int, tickets: Sequence[Ticket], pair: Pair | None) -> _Job[S]:
        summary, handle = slot.port.run(tickets[place], pair)
        slot.task_id = tickets[place].task_id
        return _Job(place, summary, handle, time.monotonic() + tickets[place].deadline_s)

    def _outcome(self, slot: _Slot[S], job: _Job[S], ticket: Ticket) -> BaseException | None:
        """What went wrong with a finished or overdue job, None if nothing did."""
        if not job.summary.done():
            self._counts["deadlines_missed"] += 1
            slot.port.restart()
            return TimeoutError(f"no episode within deadline_s = {ticket.deadline_s:g}; the worker was killed")
        error = job.summary.exception()
        if error is not None:
            self._counts["worker_errors"] += 1
            if (name := fault_metric(error)) is not None:
                self._faults[name] += 1
            return error
        found = job.summary.result().ticket
        assert found == ticket, f"{slot.port.name} answered ticket {ticket.ticket_id} with {found.ticket_id}"
        return None

    def _collect_setups(self) -> None:
        for slot in self._slots:
            if slot.setup is None or not slot.setup.done():
                continue
            error = slot.setup.exception()
            if error is not None:
                raise RuntimeError(f"{slot.port.name} could not start: {error}") from error
            pid = slot.setup.result()
            if slot.pid not in (-1, pid):
                self._counts["worker_restarts"] += 1
            slot.pid, slot.setup = pid, None

    def _wait(self) -> None:
        """Until an episode or a worker is ready, a deadline may have passed, or nothing can come any more."""
        now = time.monotonic()
        jobs = [slot.job for slot in self._slots if slot.job is not None]
        if any(slot.setup is None for slot in self._slots):
            self._ready_seen = now
        elif now - self._ready_seen > START_DEADLINE_S:
            raise TimeoutError(f"no rollout worker is ready after {START_DEADLINE_S:g} s; {self._start_hint()}")
        pending: list[Future[Any]] = [job.summary for job in jobs]
        pending += [slot.setup for slot in self._slots if slot.setup is not None]
        soonest = min((job.deadline for job in jobs), default=now + POLL_S)
        wait(pending, timeout=min(max(soonest - now, 0.0), POLL_S), return_when=FIRST_COMPLETED)

    def _abandon_jobs(self) -> None:
        """Episodes still under way when a call failed are of no use: get their workers back, killed if busy."""
        for slot in self._slots:
            if slot.job is not None:
                if not slot.job.summary.done():
                    slot.port.restart()
                slot.job, slot.setup = None, slot.port.setup()


def _choose(todo: deque[int], tickets: Sequence[Ticket], task_id: int) -> int:
    """Take the first ticket of this task, else the first of all: the order leaves no trace in the results."""
    place = next((place for place in todo if tickets[place].task_id == task_id), todo[0])
    todo.remove(place)
    return place
