"""How often the scripted LIBERO-Object expert succeeds: every initial state of every task, and no episode drawn.

    python -m benchmarks.experts --json OUT [--tasks 0 3] [--states 0 10 45] [--noisy]

Episodes are those of demonstration collection (`wamrl_ray/collect_expert.py`): undisturbed, or with `--noisy`
disturbed as collection disturbs them by default.  A success is one within the environment's 280 steps, recoveries
included.  OUT holds successes, Wilson intervals and mean steps, per task and in all, and one row per episode.  It is
written anew after every episode; a measurement that was cut off goes on from there, and never mixes two experts or
disturbances.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import envs.experts
from envs.libero import INIT_STATES, LiberoConfig, LiberoEnv
from wamrl_ray.atomic import write_json
from wamrl_ray.collect_expert import CollectConfig, demonstrate
from wamrl_ray.evaluate import wilson
from wamrl_ray.types import Split

NOISY = CollectConfig(capture_every=10**9)
CLEAN = replace(NOISY, noise_share=0.0, open_rate=0.0, miss_share=0.0)

Row = dict[str, Any]
"""task, instruction, split, init_state, seed, success, steps."""


def measure(out: Path, tasks: Sequence[int], states: Sequence[int], config: CollectConfig, seed: int) -> list[Row]:
    """Rows of all episodes in `out`, earlier ones first; a new one is written as soon as it is there."""
    recipe = {
        "expert": hashlib.sha256(Path(envs.experts.__file__).read_bytes()).hexdigest()[:16],
        "disturbances": asdict(config),
    }
    rows = earlier_rows(out, recipe)
    done = {(row["task"], row["init_state"], row["seed"]) for row in rows}
    for task in tasks:
        for split, split_states in INIT_STATES.items():
            todo = [state for state in states if state in split_states and (task, state, seed) not in done]
            for row in episodes(task, split, todo, config, seed):
                rows.append(row)
                write_json(out, {**recipe, **count(rows), "tasks": per_task(rows), "episodes": rows})
        print(*map(line, per_task([row for row in rows if row["task"] == task])), sep="\n", flush=True)
    return rows


def episodes(task: int, split: Split, states: Sequence[int], config: CollectConfig, seed: int) -> Iterator[Row]:
    """Run the expert from each of the initial states, all of one task and split."""
    if not states:
        return
    env = LiberoEnv(LiberoConfig(resolution=16, tasks=(task,)), split)
    try:
        for state in states:
            demo = demonstrate(env, task, state, seed, config)
            yield {
                "task": task,
                "instruction": demo.instruction,
                "split": split,
                "init_state": state,
                "seed": seed,
                "success": demo.success,
                "steps": len(demo.action),
            }
    finally:
        env.close()


def earlier_rows(out: Path, recipe: dict[str, Any]) -> list[Row]:
    """Episodes that `out` has already.  Raises ValueError if they are of another expert or other disturbances."""
    if not out.exists():
        return []
    earlier = json.loads(out.read_text())
    # A round trip, because JSON has lists where a config has tuples.
    for name, value in json.loads(json.dumps(recipe)).items():
        if earlier.get(name) != value:
            raise ValueError(f"json = {str(out)!r} has {name} {earlier.get(name)}, this is {value}: name another file")
    rows: list[Row] = earlier["episodes"]
    return rows


def count(rows: Sequence[Row]) -> dict[str, Any]:
    """Successes with their interval, and the mean steps of the successful episodes."""
    successes = sum(row["success"] for row in rows)
    low, high = wilson(successes, len(rows))
    steps = [row["steps"] for row in rows if row["success"]]
    return {
        "successes": successes,
        "trials": len(rows),
        "low": low,
        "high": high,
        "mean_steps": float(np.mean(steps)) if steps else None,
    }


def per_task(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per task, in the order of their ids."""
    by_task: dict[int, list[Row]] = {}
    for row in rows:
        by_task.setdefault(row["task"], []).append(row)
    return [
        {
            "task": task,
            "instruction": own[0]["instruction"],
            **count(own),
            "failed": [row["init_state"] for row in own if not row["success"]],
        }
        for task, own in sorted(by_task.items())
    ]


def line(entry: dict[str, Any]) -> str:
    steps = "-" if entry["mean_steps"] is None else f"{entry['mean_steps']:.0f}"
    return (
        f"{entry['task']:>2}  {entry['successes']:3d}/{entry['trials']:<3d}"
        f"  [{entry['low']:.3f}, {entry['high']:.3f}]  {steps:>4s} steps"
        f"  {entry['instruction']}" + (f"  failed: {entry['failed']}" if entry["failed"] else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, required=True, help="write the figures here, and continue from here")
    parser.add_argument("--tasks", type=int, nargs="+", default=range(10), help="default: all ten")
    parser.add_argument("--states", type=int, nargs="+", default=range(50), help="default: all fifty")
    parser.add_argument("--seed", type=int, default=0, help="of the disturbances")
    parser.add_argument("--noisy", action="store_true", help="disturb as collection does by default")
    args = parser.parse_args()
    rows = measure(args.json, args.tasks, args.states, NOISY if args.noisy else CLEAN, args.seed)
    print(line({"task": "", "instruction": "all", "failed": [], **count(rows)}))


if __name__ == "__main__":
    main()
