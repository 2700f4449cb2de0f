"""One iteration of synchronous post-training: tickets in, a committed pair out.

        TicketOffice ──tickets──► RolloutPool ──(summary, handle)──► EpisodeStore
             ▲                        ▲                                │ for SFT          │ all
             │                        │ pair                           ▼                  ▼
             │                   WeightBroker ◄──staged world── VideoPort   ActorPort ──staged actor──┐
             │                        ▲   └────── commit: interface, digests, feature drift ◄─────────┘
             └──── step k+1           └────────── remember (pair), rebase (newest world) ──► ActorPort

    consumes   the published pair, `episodes_per_iteration` tickets
    produces   one world update (if there is any success to train on, and the last world is not waiting for an actor
               that was trained in its features), one actor update, at most one new pair
    waits for  all episodes of the iteration, then both updates, which run in parallel
    unblocked by  `RolloutPool.run` returning or raising; each learner's future within `update_deadline_s`

A *handle* stands for an episode: the Episode itself in one process, an ObjectRef in a cluster.  This file never looks
inside a handle, only at the EpisodeSummary beside it, and never knows which shell it runs in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any, Protocol, TypeVar

import numpy as np

from wamrl_ray.rollout import EpisodeSummary, mean_info
from wamrl_ray.store import EpisodeStore
from wamrl_ray.tickets import TicketOffice
from wamrl_ray.types import Metrics, Pair, Snapshot, Ticket, finite, seed_sequence

Handle = Any
T = TypeVar("T")


class RolloutPool(Protocol):
    """Runs tickets.  Retries, deadlines and worker restarts are the pool's business."""

    def run(self, tickets: Sequence[Ticket], pair: Pair) -> list[tuple[EpisodeSummary, Handle]]:
        """One result per ticket, in ticket order, every episode acted with `pair` (workers pull it from the broker by
        `pair.order`).  Raises the first error of a ticket that failed `max_attempts` times."""

    def metrics(self) -> Metrics:
        """Counters since the start, named `rollout/…` (retries, worker restarts)."""


class VideoPort(Protocol):
    """The video learner, in this process or behind an actor.  Every call returns a future; calls run in call order."""

    interface: str
    "interface digest of the policy it trains"

    def update(self, handles: Sequence[Handle], index: int) -> Future[Metrics]:
        """One SFT update on these episodes, failures only where its config asks for them; metrics named `video/…`."""

    def export(self) -> Future[Snapshot]: ...

    def drift_from(self, digest: str) -> Future[float]:
        """Mean feature KL on the probe batch between the current world and an earlier exported one; 0 for itself."""

    def state(self) -> Future[dict[str, Any]]: ...

    def load_state(self, state: Mapping[str, Any]) -> Future[None]: ...


class ActorPort(Protocol):
    """The actor learner, in this process or behind an actor.  Every call returns a future; calls run in call order."""

    interface: str

    def remember(self, pair: Pair, world: Snapshot, actor: Snapshot) -> Future[None]:
        """Keep the weights of a published pair: log-probs of episodes acted with it are recomputed at them."""

    def rebase(self, world: Snapshot) -> Future[None]:
        """Train against this world's features from now on."""

    def update(self, handles: Sequence[Handle], index: int) -> Future[Metrics]:
        """Label rewards and make one actor update; metrics named `actor/…` and `reward/…`."""

    def export(self) -> Future[Snapshot]: ...

    def trained_against_world(self) -> Future[str]:
        """Digest of the world in whose features the exported actor last took a gradient step."""

    def clip(self) -> Future[dict[str, Any] | None]:
        """What the first episode of the last update imagined and what happened, for the run folder; None if nothing.

        imagined, executed (T, F, V, h, w, 3) uint8, reached (T, F) bool, reward (T,).
        """

    def state(self) -> Future[dict[str, Any]]: ...

    def load_state(self, state: Mapping[str, Any]) -> Future[None]: ...


class Broker(Protocol):
    """The calls of `broker.WeightBroker` that the loop makes; a cluster puts a proxy with deadlines here."""

    def begin(
        self, world: Snapshot, actor: Snapshot, *, interface: str, state: Mapping[str, Any] | None = None
    ) -> Pair: ...

    def current(self) -> Pair: ...

    def pull(self, order: tuple[int, int] | None = None) -> tuple[Pair, Snapshot, Snapshot]: ...

    def stage_world(self, snapshot: Snapshot, *, drift: Mapping[str, float], interface: str) -> bool: ...

    def stage_actor(self, snapshot: Snapshot, *, trained_against_world: str, interface: str) -> bool: ...

    def commit(self) -> Pair | None: ...

    def commits_since(self, order: tuple[int, int]) -> int: ...

    def state(self) -> dict[str, Any]: ...

    def metrics(self) -> Metrics: ...


class TrainingLoop:
    """Drives the parts; holds no weights and no episode, only counters."""

    def __init__(
        self,
        *,
        run_seed: int,
        office: TicketOffice,
        pool: RolloutPool,
        store: EpisodeStore,
        video: VideoPort,
        actor: ActorPort,
        broker: Broker,
        replay: float,
        failure_share: float = 0.0,
        update_deadline_s: float = 3600.0,
    ) -> None:
        """`replay`: share of the video learner's successes that are earlier ones (`VideoSFTConfig.replay`);
        `failure_share`: of its windows that come from failures (`VideoSFTConfig.failures`)."""
        self._run_seed, self._replay, self._deadline_s = run_seed, replay, update_deadline_s
        self._failure_share = failure_share
        self._office, self._pool, self._store, self._broker = office, pool, store, broker
        self._video, self._actor = video, actor
        self.iteration = 0
        "iterations done"
        self.episodes = 0
        self.env_steps = 0
        self.successes = 0
        self.waiting = False
        "the newest world was refused; were it trained on, its actor would run after it and nothing be published again"

    def align_learners(self) -> None:
        """Give the actor learner the published pair and the newest world; once after the learners got their weights."""
        pair, world, actor = self._broker.pull()
        newest = self._result("video export", self._video.export())
        self._result("actor remember", self._actor.remember(pair, world, actor))
        self._result("actor rebase", self._actor.rebase(newest))

    def step(self) -> Metrics:
        """One iteration: rollout, both updates, staging, commit.  Raises the first error of any part."""
        started = time.monotonic()
        pair = self._broker.current()
        tickets = self._office.train_tickets(self.iteration)
        results = self._pool.run(tickets, pair)
        rolled_out = time.monotonic()
        metrics = self._admit(results)

        sft_handles, outcomes = self._sft_batch(results)
        trains_world = bool(sft_handles) and not self.waiting
        updates = {"actor update": self._actor.update([handle for _, handle in results], self.iteration)}
        if trains_world:
            updates["video update"] = self._video.update(sft_handles, self.iteration)
        for update_metrics in self._results(updates).values():
            metrics |= update_metrics
        self._office.settle(tickets)
        updated = time.monotonic()

        committed = self._publish(pair, offers_world=trains_world or self.waiting)
        self.iteration += 1
        metrics |= self._store.metrics() | self._broker.metrics() | self._pool.metrics()
        metrics |= {
            "broker/committed": float(committed),
            "video/skipped": float(not trains_world),
            **outcomes,
            "time/rollout_s": rolled_out - started,
            "time/update_s": updated - rolled_out,
            "time/publish_s": time.monotonic() - updated,
            "time/iteration_s": time.monotonic() - started,
        }
        return finite(metrics.items())

    def state(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "episodes": self.episodes,
            "env_steps": self.env_steps,
            "successes": self.successes,
            "waiting": self.waiting,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.iteration, self.episodes = int(state["iteration"]), int(state["episodes"])
        self.env_steps, self.successes = int(state["env_steps"]), int(state["successes"])
        self.waiting = bool(state["waiting"])

    # ------------------------------------------------------------------------------------------------ inside

    def _admit(self, results: Sequence[tuple[EpisodeSummary, Handle]]) -> Metrics:
        """Count the episodes; an unusable one ends the run, because in a synchronous run it would come again."""
        rows = [summary for summary, _ in results]
        for row in rows:
            if row.error is not None:
                raise RuntimeError(f"iteration {self.iteration}: {row.error}; the run cannot go on with these weights")
        staleness = [float(self._broker.commits_since(row.pair_order)) for row in rows]
        env_steps, successes = sum(row.env_steps for row in rows), sum(row.success for row in rows)
        self.episodes += len(rows)
        self.env_steps += env_steps
        self.successes += successes
        return {
            "rollout/episodes": float(len(rows)),
            "rollout/successes": float(successes),
            "rollout/success_rate": successes / len(rows),
            "rollout/env_steps": float(env_steps),
            "rollout/episode_length_steps": env_steps / len(rows),
            "rollout/decisions": float(sum(row.num_decisions for row in rows)),
            "rollout/env_reward": float(np.mean([row.env_reward for row in rows])),
            "rollout/bytes": float(sum(row.nbytes for row in rows)),
            "rollout/staleness_updates": float(np.mean(staleness)),
            "rollout/staleness_max_updates": max(staleness),
            "rollout/total_episodes": float(self.episodes),
            "rollout/total_env_steps": float(self.env_steps),
            **{f"rollout/info/{name}": value for name, value in mean_info(rows).items()},
        }

    def _sft_batch(self, results: Sequence[tuple[EpisodeSummary, Handle]]) -> tuple[list[Handle], Metrics]:
        """The iteration's episodes enter the store and the video learner's are picked; -> (handles, how many of each).

        New successes all, and earlier ones in the share `replay`; without new ones, `replay` of a full iteration.  If
        the learner asks for failures, so many from the store, new ones among them, that windows come in about its
        share; none without a success, because an update needs one.
        """
        new = [handle for summary, handle in results if summary.success]
        if new and self._replay < 1:
            wanted = round(len(new) * self._replay / (1 - self._replay))
        else:
            wanted = round(len(results) * self._replay)
        seed = seed_sequence(self._run_seed, self.iteration, "replay")
        earlier = self._store.sample(wanted, seed)
        for summary, handle in results:
            self._store.add(summary, handle)
        successes, share = new + earlier, self._failure_share
        # Rounded up: with any success and any stored failure there is one to draw windows from.
        wanted = math.ceil(len(successes) * share / (1 - share))
        failed = self._store.sample(wanted, seed.spawn(1)[0], success=False) if wanted else []
        return successes + failed, {
            "video/new_episodes": float(len(new)),
            "video/replayed_episodes": float(len(earlier)),
            "video/failed_episodes": float(len(failed)),
        }

    def _publish(self, pair: Pair, offers_world: bool) -> bool:
        """Stage actor and, if there is a new or a waiting one, world; commit, and tell the actor learner; True if a new
        pair was published."""
        trained_against = self._result("actor trained_against_world", self._actor.trained_against_world())
        exports = {"actor export": self._actor.export()}
        if offers_world:
            exports["video export"] = self._video.export()
        snapshots = self._results(exports)
        if offers_world:
            earlier = dict.fromkeys((trained_against, pair.world, pair.trained_against_world))
            drift = self._results({digest: self._video.drift_from(digest) for digest in earlier})
            self._broker.stage_world(snapshots["video export"], drift=drift, interface=self._video.interface)
        self._broker.stage_actor(
            snapshots["actor export"], trained_against_world=trained_against, interface=self._actor.interface
        )
        committed = self._broker.commit()
        if committed is not None:
            self._result("actor remember", self._actor.remember(*self._broker.pull(committed.order)))
        if offers_world:
            world = snapshots["video export"]
            self.waiting = committed is None or committed.world != world.digest
            self._result("actor rebase", self._actor.rebase(world))
        return committed is not None

    def _result(self, name: str, future: Future[T]) -> T:
        return self._results({name: future})[name]

    def _results(self, futures: Mapping[str, Future[T]]) -> dict[str, T]:
        """All results, or the first error as soon as there is one; TimeoutError names what did not answer."""
        done, pending = wait(futures.values(), timeout=self._deadline_s, return_when=FIRST_EXCEPTION)
        for name, future in futures.items():
            if future in done and future.exception() is not None:
                raise RuntimeError(f"{name} failed: {future.exception()}") from future.exception()
        late = [name for name, future in futures.items() if future in pending]
        if late:
            raise TimeoutError(f"{late[0]} gave no answer within {self._deadline_s:g} s")
        return {name: future.result() for name, future in futures.items()}
