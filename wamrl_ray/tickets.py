"""The ticket office: which episodes are run, and how many may be under way.

Fed by the configuration and the environment's spec; feeds the RolloutPool.  Tickets are a pure function of
(run seed, iteration), so a resumed run issues the very same ones, and a reissued ticket repeats its episode.

Admission: outstanding + n <= (max_staleness + 1) * episodes_per_iteration, where outstanding counts tickets issued and
not yet settled (consumed by an update).  At max_staleness 0 an iteration must be settled before the next is issued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from wamrl_ray.types import EnvSpec, Split, Ticket, seed_sequence

if TYPE_CHECKING:
    from wamrl_ray.config import RolloutConfig

EVALUATION_IDS: Mapping[Split, int] = {"train": 1 << 40, "held_out": (1 << 40) + (1 << 32)}
"""First ticket id of an evaluation per split; training ids count up from 0 and never get there."""


def split_of(env_spec: EnvSpec, init_state_id: int) -> Split:
    """Which split an initial state belongs to; a worker builds its environment for that split."""
    for split, ids in env_spec.init_states.items():
        if init_state_id in ids:
            return split
    raise ValueError(f"init_state_id = {init_state_id}: {env_spec.name} has {dict(env_spec.init_states)}")


class TicketOffice:
    """Issues tickets and counts them."""

    def __init__(self, run_seed: int, env_spec: EnvSpec, rollout: RolloutConfig, tasks: Sequence[int] = ()) -> None:
        """`tasks`: the task ids to run, all of the environment's if empty."""
        self._run_seed, self._env_spec, self._config = run_seed, env_spec, rollout
        self._tasks = tuple(tasks) or tuple(range(len(env_spec.instructions)))
        train, held_out = (set(env_spec.init_states[split]) for split in ("train", "held_out"))
        if train & held_out or not train:
            raise ValueError(
                f"env_spec.init_states = {dict(env_spec.init_states)} of {env_spec.name}: "
                "use two disjoint ranges, the train one not empty"
            )
        self._outstanding: set[int] = set()
        self._issued = 0
        self._settled = 0

    @property
    def outstanding(self) -> int:
        """Training tickets issued and not yet settled."""
        return len(self._outstanding)

    @property
    def capacity(self) -> int:
        """Most training tickets that may be outstanding: (max_staleness + 1) * episodes_per_iteration."""
        return (self._config.max_staleness + 1) * self._config.episodes_per_iteration

    def train_tickets(self, iteration: int) -> list[Ticket]:
        """The iteration's tickets, ids ascending; raises RuntimeError if admission forbids them now.

        Each run of `group_size` tickets shares task and initial state.  Groups go round-robin over the tasks, and each
        task visits all its training states in a seeded order before it repeats one.
        """
        n, group_size = self._config.episodes_per_iteration, self._config.group_size
        if self.outstanding + n > self.capacity:
            raise RuntimeError(
                f"iteration {iteration}: {self.outstanding} outstanding + {n} tickets exceed the capacity of "
                f"{self.capacity}: settle the earlier ones first"
            )
        tickets = []
        for i in range(iteration * n, (iteration + 1) * n):
            visit, task_idx = divmod(i // group_size, len(self._tasks))
            tickets.append(self._ticket(i, self._tasks[task_idx], self._train_state(task_idx, visit), "train"))
        self._outstanding.update(t.ticket_id for t in tickets)
        self._issued += n
        return tickets

    def settle(self, tickets: Sequence[Ticket]) -> None:
        """These training tickets were consumed (or given up): they no longer count as outstanding."""
        ids = {t.ticket_id for t in tickets}
        unknown = sorted(ids - self._outstanding)
        if unknown or len(ids) != len(tickets):
            raise ValueError(f"ticket {unknown[:1] or '(twice)'} is not outstanding: settle each issued ticket once")
        self._outstanding -= ids
        self._settled += len(ids)

    def eval_tickets(self, split: Split, episodes: int) -> list[Ticket]:
        """The same tickets on every call: spread over tasks first, then initial states, then further seeds."""
        states = self._env_spec.init_states[split]
        if not states and episodes:
            raise ValueError(f"evaluation.split = {split!r}: {self._env_spec.name} has no such initial states")
        tickets = []
        for i in range(episodes):
            visit, task_idx = divmod(i, len(self._tasks))
            state = states[visit % len(states)]
            tickets.append(self._ticket(EVALUATION_IDS[split] + i, self._tasks[task_idx], state, "eval"))
        return tickets

    def state(self) -> dict[str, Any]:
        return {"outstanding": sorted(self._outstanding), "issued": self._issued, "settled": self._settled}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._outstanding = set(state["outstanding"])
        self._issued, self._settled = int(state["issued"]), int(state["settled"])

    def _train_state(self, task_idx: int, visit: int) -> int:
        states = self._env_spec.init_states["train"]
        lap, place = divmod(visit, len(states))
        order = seed_sequence(self._run_seed, lap * len(self._tasks) + task_idx, "schedule")
        return states[int(np.random.default_rng(order).permutation(len(states))[place])]

    def _ticket(self, ticket_id: int, task_id: int, init_state_id: int, purpose: Literal["train", "eval"]) -> Ticket:
        if purpose == "train" and init_state_id not in self._env_spec.init_states["train"]:
            raise ValueError(f"ticket {ticket_id}: init_state_id = {init_state_id} is held out, never train on it")
        return Ticket(
            ticket_id=ticket_id,
            env=self._env_spec.name,
            task_id=task_id,
            init_state_id=init_state_id,
            run_seed=self._run_seed,
            purpose=purpose,
            deadline_s=self._config.deadline_s,
        )
