"""Ports over Ray actors: what the plain loop and pool call, answered with `concurrent.futures`.

Fed by `cluster.py` with actor handles; feeds `cluster_pool.ElasticPool` and `training.TrainingLoop`.  A remote
exception arrives as it was raised there, with the remote stack as a note, so that a log names the worker and the line.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from wamrl_ray.types import Metrics, Pair, Snapshot, Ticket

COLOUR = re.compile(r"\x1b\[\d+m")
"""Terminal colours, which Ray puts into the text of a remote stack."""


def as_future(ref: Any, name: str) -> Future[Any]:
    """The ref's value; a remote exception as it was raised there, its stack as a note; a death said in plain words."""
    out: Future[Any] = Future()

    def forward(inner: Future[Any]) -> None:
        error = inner.exception()
        if error is None:
            out.set_result(inner.result())
        elif isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
            error.cause.add_note(f"raised in {name}:\n{COLOUR.sub('', str(error))}")
            out.set_exception(error.cause)
        elif isinstance(error, RayActorError):
            death = RuntimeError(f"the process of {name} died")
            death.__cause__ = error
            out.set_exception(death)
        else:
            out.set_exception(error)

    ref.future().add_done_callback(forward)
    return out


class RemoteWorker:
    """`cluster_pool.WorkerPort` on a worker actor, which Ray restarts whenever its process dies.

    The actor answers `setup(*setup_arguments)` with its process id and `run(ticket, pair)` with (summary, result).
    """

    def __init__(self, name: str, actor: Any, setup_arguments: Sequence[Any]) -> None:
        self.name, self._actor, self._setup_arguments = name, actor, setup_arguments

    def setup(self) -> Future[int]:
        # Retried through restarts, because a call made while the process restarts fails; setup may run twice.
        return as_future(self._actor.setup.options(max_task_retries=-1).remote(*self._setup_arguments), self.name)

    def run(self, ticket: Ticket, pair: Pair | None) -> tuple[Future[Any], Any]:
        summary, result = self._actor.run.options(num_returns=2).remote(ticket, pair)
        return as_future(summary, self.name), result

    def restart(self) -> None:
        ray.kill(self._actor, no_restart=False)

    def close(self) -> None:
        ray.kill(self._actor)


class RemoteLearner:
    """What both learner ports share.  Episode refs go as plain arguments: Ray brings them before the call begins."""

    def __init__(self, actor: Any, interface: str, name: str) -> None:
        self._actor, self.interface, self._name = actor, interface, name

    def update(self, handles: Sequence[Any], index: int) -> Future[Metrics]:
        return as_future(self._actor.update.remote(index, *handles), self._name)

    def export(self) -> Future[Snapshot]:
        return self._call("export")

    def state(self) -> Future[dict[str, Any]]:
        return self._call("state")

    def load_state(self, state: Mapping[str, Any]) -> Future[None]:
        return self._call("load_state", state)

    def _call(self, method: str, *args: Any) -> Future[Any]:
        return as_future(self._actor.call.remote(method, *args), self._name)


class RemoteVideo(RemoteLearner):
    """`training.VideoPort` on an actor."""

    def __init__(self, actor: Any, interface: str) -> None:
        super().__init__(actor, interface, "the video learner")

    def drift_from(self, digest: str) -> Future[float]:
        return self._call("drift_from", digest)


class RemoteActor(RemoteLearner):
    """`training.ActorPort` on an actor."""

    def __init__(self, actor: Any, interface: str) -> None:
        super().__init__(actor, interface, "the actor learner")

    def remember(self, pair: Pair, world: Snapshot, actor: Snapshot) -> Future[None]:
        return self._call("remember", pair, world, actor)

    def rebase(self, world: Snapshot) -> Future[None]:
        return self._call("rebase", world)

    def trained_against_world(self) -> Future[str]:
        return self._call("trained_against_world")

    def clip(self) -> Future[dict[str, Any] | None]:
        return self._call("clip")
