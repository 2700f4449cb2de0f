"""Ten-line stand-ins for policy and learners, for tests of the runtime alone.  They fit `envs.counting`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from wamrl_ray.digest import snapshot_digest
from wamrl_ray.local import done
from wamrl_ray.rollout import EpisodeSummary
from wamrl_ray.types import Decision, Episode, Metrics, Pair, PolicySpec, Snapshot, Ticket


def snapshot(component: Literal["world", "actor"], value: float, size: int = 3) -> Snapshot:
    buffer = np.full(size, value, "<f4").view(np.uint8)
    layout = (("w", "<f4", (size,)),)
    return Snapshot(
        component=component, digest=snapshot_digest(component, layout, buffer), layout=layout, buffer=buffer
    )


def value_of(snap: Snapshot) -> float:
    return float(snap.buffer.view("<f4")[0])


def ticket(ticket_id: int = 0, task_id: int = 0, init_state_id: int = 0, purpose: Any = "train") -> Ticket:
    return Ticket(
        ticket_id=ticket_id, env="counting", task_id=task_id, init_state_id=init_state_id, run_seed=7,
        purpose=purpose, deadline_s=10.0,
    )  # fmt: skip


def pair(epoch: int = 1, seq: int = 0) -> Pair:
    return Pair(epoch=epoch, seq=seq, world="w", actor="a", trained_against_world="w", interface="i")


def summary(ticket_id: int, task_id: int = 0, *, success: bool = True, nbytes: int = 10) -> EpisodeSummary:
    return EpisodeSummary(
        ticket=ticket(ticket_id, task_id), pair_order=(1, 0), success=success, success_step=4 if success else -1,
        env_steps=4, num_decisions=1, nbytes=nbytes, env_reward=1.0,
    )  # fmt: skip


class CountingPolicy:
    """Acts with 5 of 8 planned steps; its action is a function of weights, seed and state.  Remembers what it saw."""

    spec = PolicySpec(
        horizon=8, executed=5, action_dim=1, state_dim=2, channels=3, views=("counter",), resolution=16, memory=3,
        imagined_offsets=(2, 5, 7),
    )  # fmt: skip

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], float, str, int, int, bool]] = []
        self.weight = 0.0

    def decide(
        self, frames: NDArray[np.uint8], state: NDArray[np.float32], instruction: str, *, action_seed: int,
        world_seed: int, stochastic: bool,
    ) -> Decision:  # fmt: skip
        counts = [int(frame[0, 0, 0, 0]) for frame in frames]
        self.seen.append((counts, float(state[0]), instruction, action_seed, world_seed, stochastic))
        chain = np.random.default_rng(action_seed).standard_normal((3, 8, 3)).astype(np.float32) + self.weight
        return Decision(
            actions=np.tanh(chain[-1, :5, :1]), chain=chain, stochastic_step=1 if stochastic else -1,
            logprob=float(chain.mean()), world_seed=world_seed,
        )  # fmt: skip

    def load_pair(self, world: Snapshot, actor: Snapshot) -> None:
        self.weight = value_of(world) + value_of(actor)


class FakeLearner:
    """Moves one number by what the episodes' contents are, so that its digest tells which it got in which order."""

    interface = "i"

    def __init__(self, component: Literal["world", "actor"]) -> None:
        self.component = component
        self.value = 0.0
        self.calls: list[Any] = []
        self.exported: dict[str, float] = {}
        self.base = snapshot("world", 0.0).digest

    def update(self, handles: Sequence[Episode], index: int) -> Future[Metrics]:
        self.calls.append(("update", index, [episode.ticket.ticket_id for episode in handles]))
        for episode in handles:
            self.value = 0.5 * self.value + float(episode.actions.sum()) + episode.ticket.ticket_id
        return done(lambda: {f"{self.component}/value": self.value})

    def export(self) -> Future[Snapshot]:
        snap = snapshot(self.component, self.value)
        self.exported[snap.digest] = self.value
        return done(lambda: snap)

    def state(self) -> Future[dict[str, Any]]:
        return done(lambda: {"value": self.value, "exported": dict(self.exported), "base": self.base})

    def load_state(self, state: Mapping[str, Any]) -> Future[None]:
        self.value, self.exported, self.base = state["value"], dict(state["exported"]), state["base"]
        return done(lambda: None)


class FakeVideo(FakeLearner):
    def __init__(self, drift: float = 0.1) -> None:
        super().__init__("world")
        self.drift = drift

    def drift_from(self, digest: str) -> Future[float]:
        assert digest in self.exported, "the loop asked for the drift from a world that was never exported"
        return done(lambda: 0.0 if self.exported[digest] == self.value else self.drift)


class FakeActor(FakeLearner):
    def __init__(self) -> None:
        super().__init__("actor")

    def remember(self, pair: Pair, world: Snapshot, actor: Snapshot) -> Future[None]:
        self.calls.append(("remember", pair.order))
        return done(lambda: None)

    def rebase(self, world: Snapshot) -> Future[None]:
        self.calls.append(("rebase", world.digest))
        self.base = world.digest
        return done(lambda: None)

    def trained_against_world(self) -> Future[str]:
        return done(lambda: self.base)

    def clip(self) -> Future[dict[str, Any] | None]:
        return done(lambda: None)
