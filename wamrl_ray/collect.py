"""`wamrl collect`: which demonstrations a folder is to hold, and filling it with those it lacks.

    Collection ──► tickets ──► Demonstrator × N (`cluster_collect.py`, or this process) ──► DemonstrationFolder

A demonstration is a function of its ticket and a ticket of its place in the collection, so the files are the same
whatever the number of workers, their faults, or the kills and reruns in between.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from envs.build import EnvConfig, make_env
from wamrl_ray.collect_expert import CollectConfig
from wamrl_ray.collect_worker import Demonstrator, base_digest
from wamrl_ray.demonstrations import DemonstrationFolder, load_demonstration, text_digest
from wamrl_ray.types import Demonstration, EnvSpec, Metrics, Ticket

EPISODES_PER_SEED = 100_000
"""Demonstration seeds that one collection seed spans; the episodes of a task count through them."""
HIGHEST_SEED = 20_000
"""of a collection: simulators take seeds below 2^31"""
DEADLINE_S = 300.0
"""Wall seconds a demonstration may take before its worker is killed; on one core a long one takes half a minute."""
MAX_ATTEMPTS = 3

Recording = tuple[Ticket, Demonstration, Metrics]
"""A ticket, what came of it, and the counters of faults since the start."""


@dataclass(frozen=True, kw_only=True)
class Collection:
    """What a folder is to hold.

    Example: env LiberoConfig(), tasks (0, 3), episodes 50, seed 0: 100 demonstrations, demo_00_000_00000.npz to
    demo_03_000_00049.npz; number i starts from training state i modulo 40 and has the seed i.
    With seed 1 they would go on from training state 50 modulo 40.
    """

    env: EnvConfig
    tasks: tuple[int, ...]
    episodes: int
    "per task"
    seed: int = 0
    config: CollectConfig = field(default_factory=CollectConfig)
    base: str | None = None
    "name or folder of the policy that acts while the expert labels; None: the expert acts"

    def __post_init__(self) -> None:
        if not 1 <= self.episodes <= EPISODES_PER_SEED:
            raise ValueError(f"episodes = {self.episodes}: use 1 to {EPISODES_PER_SEED}, then another seed")
        if not 0 <= self.seed <= HIGHEST_SEED:
            raise ValueError(f"seed = {self.seed}: use 0 to {HIGHEST_SEED}")

    def tickets(self, env_spec: EnvSpec) -> dict[str, Ticket]:
        """File name -> ticket: all tasks' first demonstrations, then their second ones, so that workers spread over
        tasks and a collection that is stopped is balanced.  Initial states are the training ones, in turn."""
        states = env_spec.init_states["train"]
        tickets: dict[str, Ticket] = {}
        for i in range(self.episodes):
            for task in self.tasks:
                tickets[f"demo_{task:02d}_{self.seed:03d}_{i:05d}.npz"] = Ticket(
                    ticket_id=len(tickets),
                    env=env_spec.name,
                    task_id=task,
                    init_state_id=states[(self.seed * self.episodes + i) % len(states)],
                    run_seed=self.seed * EPISODES_PER_SEED + i,
                    purpose="train",
                    deadline_s=DEADLINE_S,
                )
        return tickets


@dataclass(frozen=True, kw_only=True)
class Collected:
    """How far a collection is, after each demonstration.  `collect` -> whoever watches."""

    kept: int
    "demonstrations of it that were there already"
    new: int
    successes: int
    "of the new ones"
    missing: int
    "still to come"
    faults: Metrics
    "the pool's counters, `rollout/…`"


def collect(
    collection: Collection,
    out: Path,
    *,
    workers: int,
    on_progress: Callable[[Collected], None] = lambda collected: None,
) -> Collected:
    """Record what `out` lacks of the collection.  One worker runs in this process, more of them on Ray.

    Raises ValueError if `out` holds demonstrations made in another way, OSError if it cannot be written,
    RuntimeError for a demonstration that failed `MAX_ATTEMPTS` times.
    """
    env = make_env(collection.env, "train")
    env_spec = env.env_spec
    env.close()  # type: ignore[no-untyped-call]  # gymnasium's
    folder = DemonstrationFolder(out)
    check_same_recipe(folder, collection, env_spec)
    tickets = collection.tickets(env_spec)
    todo = {ticket.ticket_id: name for name, ticket in tickets.items() if name not in folder.entries}
    kept, successes = len(tickets) - len(todo), 0
    progress = Collected(kept=kept, new=0, successes=0, missing=len(todo), faults={})
    on_progress(progress)
    if not todo:
        return progress
    recordings = record(collection, [tickets[name] for name in todo.values()], workers)
    with closing(recordings):
        for new, (ticket, demonstration, faults) in enumerate(recordings, start=1):
            folder.add(demonstration, todo[ticket.ticket_id])
            successes += demonstration.success
            progress = Collected(kept=kept, new=new, successes=successes, missing=len(todo) - new, faults=faults)
            on_progress(progress)
    return progress


def check_same_recipe(folder: DemonstrationFolder, collection: Collection, env_spec: EnvSpec) -> None:
    """Raises ValueError, naming the field, if demonstrations lie there that this collection would not have made."""
    disturbance = collection.config.canonical
    wanted: dict[str, object] = {
        "env": env_spec.name,
        "resolution": env_spec.resolution,
        "base": base_digest(collection.base) if collection.base else "",
        "disturbance": text_digest(disturbance),
    }
    for entry in folder.entries.values():
        for name, value in wanted.items():
            found = getattr(entry, name)
            if found == value:
                continue
            if name == "base" and collection.base:
                value = f"{collection.base} ({value})"
            if name == "disturbance" and found:
                text = load_demonstration(folder.folder / entry.file).disturbance
                name, found, value = _first_difference(text, disturbance)
            raise ValueError(
                f"{name} = {value or 'none'}, but {folder.folder / entry.file} was made with {found or 'none'}: "
                "use another folder, or what it was made with"
            )


def _first_difference(found: str, wanted: str) -> tuple[str, object, object]:
    """(field, found, wanted) of the first field in which two canonical texts differ."""
    old, new = json.loads(found), json.loads(wanted)
    name = next(name for name in sorted(old | new) if old.get(name) != new.get(name))
    return name, old.get(name), new.get(name)


def record(collection: Collection, tickets: Sequence[Ticket], workers: int) -> Generator[Recording]:
    if workers == 1:
        return record_here(collection, tickets)
    from wamrl_ray.cluster_collect import record_on_cluster

    return record_on_cluster(
        collection.env, collection.config, collection.base, tickets, workers=workers, max_attempts=MAX_ATTEMPTS
    )


def record_here(collection: Collection, tickets: Sequence[Ticket]) -> Generator[Recording]:
    """In this process, task by task because a simulator holds one; a deadline cannot be enforced here, a retry can."""
    demonstrator = Demonstrator(collection.env, collection.config, collection.base)
    demonstrator.setup()
    errors = 0
    try:
        for ticket in sorted(tickets, key=lambda ticket: ticket.task_id):
            for attempt in range(1, MAX_ATTEMPTS + 1):
                try:
                    _, demonstration = demonstrator.run(ticket)
                    break
                except Exception as error:  # whatever a simulator raises: a fresh one gets the same ticket
                    errors += 1
                    if attempt == MAX_ATTEMPTS:
                        raise RuntimeError(f"ticket {ticket.ticket_id} failed {attempt} times: {error}") from error
            yield ticket, demonstration, {"rollout/worker_errors": errors, "rollout/reissued_tickets": errors}
    finally:
        demonstrator.close()
