"""Evaluation: success per task with a Wilson interval, on tickets that are the same for every policy.

Fed by the run driver and `wamrl eval` with a RolloutPool and evaluation tickets; feeds evaluation/*.json, the summary
and the report.  Evaluation acts with the deterministic sampler, so base and trained policy meet the same starts and
the same noise, and their difference can be read ticket by ticket.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from wamrl_ray.rollout import EpisodeSummary, mean_info
from wamrl_ray.training import RolloutPool
from wamrl_ray.types import EnvSpec, Pair, Split, Ticket

Z_95 = 1.959963984540054
"""Two-sided 95 % point of the standard normal."""


def wilson(successes: int, trials: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson score interval (Wilson 1927), both ends in [0, 1]; (0, 1) without trials.

    centre = (p + z²/2n) / (1 + z²/n),  half-width = z √(p(1-p)/n + z²/4n²) / (1 + z²/n)
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes = {successes}: use 0..trials = {trials}")
    if trials == 0:
        return 0.0, 1.0
    p, scale = successes / trials, 1 + z * z / trials
    centre = (p + z * z / (2 * trials)) / scale
    half = z * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials)) / scale
    # Rounding must not exclude a proportion of exactly 0 or 1 from its own interval.
    return (0.0 if successes == 0 else centre - half), (1.0 if successes == trials else centre + half)


def evaluate(
    pool: RolloutPool, tickets: Sequence[Ticket], pair: Pair, *, env_spec: EnvSpec, split: Split
) -> dict[str, Any]:
    """Run the tickets with `pair` and count.  Returns a JSON-able result:

    env, simulator, split, pair {epoch, seq, world, actor, …}, successes, trials, low, high (Wilson 95 %),
    distinct_starts and repeats (episodes whose task and initial state occurred before, under another seed),
    tasks [{task_id, instruction, successes, trials, low, high}], episodes [{ticket_id, …, success, env_steps}].

    Raises ValueError for tickets that are not unique or not of this split, RuntimeError for an unusable episode.
    """
    _check(tickets, env_spec, split)
    rows = [summary for summary, _ in pool.run(tickets, pair)] if tickets else []
    for row in rows:
        if row.error is not None:
            raise RuntimeError(f"evaluation of {env_spec.name}: {row.error}")
    starts = {(t.task_id, t.init_state_id) for t in tickets}
    by_task: dict[int, list[EpisodeSummary]] = {task: [] for task in sorted({t.task_id for t in tickets})}
    for row in rows:
        by_task[row.ticket.task_id].append(row)
    return {
        "env": env_spec.name,
        "simulator": env_spec.simulator,
        "split": split,
        "pair": asdict(pair),
        **_count(rows),
        "info": mean_info(rows),
        "distinct_starts": len(starts),
        "repeats": len(tickets) - len(starts),
        "tasks": [
            {"task_id": task, "instruction": env_spec.instructions[task], **_count(own)}
            for task, own in by_task.items()
        ],
        "episodes": [_row(row) for row in rows],
    }


def _check(tickets: Sequence[Ticket], env_spec: EnvSpec, split: Split) -> None:
    if len({t.ticket_id for t in tickets}) != len(tickets):
        raise ValueError("evaluation tickets repeat an id: one episode would be counted twice; ask the ticket office")
    for ticket in tickets:
        if ticket.init_state_id not in env_spec.init_states[split] or ticket.purpose != "eval":
            raise ValueError(
                f"ticket {ticket.ticket_id} (initial state {ticket.init_state_id}, {ticket.purpose}) is no evaluation "
                f"ticket of split {split!r}: use TicketOffice.eval_tickets"
            )


def _count(rows: Sequence[EpisodeSummary]) -> dict[str, Any]:
    successes = sum(row.success for row in rows)
    low, high = wilson(successes, len(rows))
    return {"successes": successes, "trials": len(rows), "low": low, "high": high}


def _row(row: EpisodeSummary) -> dict[str, Any]:
    return {
        "ticket_id": row.ticket.ticket_id,
        "task_id": row.ticket.task_id,
        "init_state_id": row.ticket.init_state_id,
        "success": row.success,
        "success_step": row.success_step,
        "env_steps": row.env_steps,
        "env_reward": row.env_reward,
        "info": dict(row.info),
    }
