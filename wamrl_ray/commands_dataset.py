"""`wamrl dataset export|import`: demonstrations to and from a LeRobotDataset v3.0 folder."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator

from wamrl_ray.config_files import ConfigError
from wamrl_ray.demonstrations import DemonstrationFolder, load_demonstrations
from wamrl_ray.lerobot_dataset import export_dataset
from wamrl_ray.lerobot_import import import_dataset
from wamrl_ray.lerobot_layout import new_folder
from wamrl_ray.lerobot_source import ImportConfig
from wamrl_ray.types import Demonstration


def run_dataset(args: argparse.Namespace) -> int:
    try:
        return run_export(args) if args.direction == "export" else run_import(args)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def run_export(args: argparse.Namespace) -> int:
    episodes, rows = export_dataset(_counted(load_demonstrations(args.data)), args.out, fps=args.fps)
    print(f"{episodes} episodes, {rows} rows at {args.fps} Hz; the LeRobotDataset v3.0 is in {args.out}")
    return 0


def run_import(args: argparse.Namespace) -> int:
    from wamrl_ray.preflight import describe_env, env_config

    config = ImportConfig(
        resolution=args.resolution,
        rotate_180=args.rotate_180,
        capture_every=args.capture_every,
        gripper_open_is_one=args.gripper_open_is_one,
        cameras=tuple(args.cameras or ()),
    )
    env = None if args.env is None else describe_env(env_config(args.env))
    per_task: Counter[str] = Counter()
    with new_folder(args.out) as out:
        folder = DemonstrationFolder(out)
        for episode, demo in import_dataset(args.data, config, env):
            folder.add(demo, f"demo_{demo.task_id:02d}_lerobot_{episode:05d}.npz")
            per_task[demo.instruction] += 1
            _show(per_task.total())
        if not per_task:
            raise ValueError(f"data = {str(args.data)!r}: no episode of a task of {args.env}; is it there as a whole?")
    for instruction, count in sorted(per_task.items()):
        print(f"{count:5d}  {instruction}")
    print(f"{per_task.total()} demonstrations are in {args.out}")
    return 0


def _counted(demonstrations: Iterator[Demonstration]) -> Iterator[Demonstration]:
    for number, demonstration in enumerate(demonstrations, start=1):
        yield demonstration
        _show(number)


def _show(number: int) -> None:
    if number % 20 == 0:
        print(f"{number} episodes", flush=True)
