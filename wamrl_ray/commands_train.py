"""`wamrl train`: check, build the parts in one process or on Ray, run, report.

    config, run folder, base, environment, renderer checked ──► System ──► run_training ──► summary
                                                   (local.py or algorithm.py)     └─► metrics, clips, curves, progress
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from wamrl_ray import checkpoint as checkpoints
from wamrl_ray.config_files import ConfigError
from wamrl_ray.metrics import MetricsWriter
from wamrl_ray.preflight import check_run
from wamrl_ray.progress import Progress, success_text
from wamrl_ray.report import write_curves, write_episode_clip
from wamrl_ray.types import Metrics

if TYPE_CHECKING:
    from wamrl_ray.config import Config
    from wamrl_ray.run import System


def train(args: argparse.Namespace, rest: Sequence[str]) -> int:
    config = resolve(args, rest)
    name = Path(args.config[-1]).stem if args.config else "default"
    args.run_dir = run_dir = args.run_dir or Path("runs") / name
    checkpoint = check_run_dir(run_dir, args.resume, config)
    check_run(config)
    run_dir.mkdir(parents=True, exist_ok=True)
    where = "one process" if args.local else f"{config.rollout.num_workers} workers"
    first = f"continuing from {checkpoint}" if checkpoint else f"first the base, {config.evaluation.episodes} episodes"
    print(f"{config.base}, {where}; {first}", flush=True)
    (run_dir / "error.log").unlink(missing_ok=True)  # of an earlier attempt
    with Progress(config.iterations) as progress, Recorder(run_dir, progress) as recorder:
        summary = _run(config, run_dir, args.local, args.resume, recorder)
    world = f"{summary['env']} on {summary['simulator']}"
    write_curves(run_dir, world)
    print(f"run folder {run_dir}; {world}")
    if summary["stopped"]:
        print(f"stopped after {summary['iterations']} iterations; continue with --resume auto")
    else:
        print(f"base success  {success_text(summary['base_success'])}")
        print(f"final success {success_text(summary['final_success'])}")
    print(f"world_digest {summary['world_digest']}")
    print(f"actor_digest {summary['actor_digest']}", flush=True)
    return 0


def resolve(args: argparse.Namespace, rest: Sequence[str]) -> Config:
    """Files, then dotted overrides, then the options that have a name of their own."""
    from wamrl_ray.config import load_config

    overrides = list(rest)
    for key, value in (("--rollout.num-workers", args.workers), ("--iterations", args.iterations)):
        overrides += [] if value is None else [key, str(value)]
    return load_config(args.config, overrides)


def check_run_dir(run_dir: Path, resume: str | None, config: Config) -> Path | None:
    """A new run gets a folder of its own; a resumed one finds a checkpoint of the same config, which is returned."""
    from wamrl_ray.run import check_same_config, find_checkpoint

    found = next(path for path in (run_dir, *run_dir.resolve().parents) if path.exists())
    if not found.is_dir():
        raise ConfigError(f"--run-dir {run_dir}: {found} is a file; name a folder")
    if resume is None and (run_dir / "config.json").exists():
        raise ConfigError(f"--run-dir {run_dir}: holds an earlier run; continue it with --resume auto or name another")
    try:
        # A run that ended before its first checkpoint left its config only.
        checkpoint = find_checkpoint(run_dir, resume)
        started = checkpoint or run_dir
        if (started / "config.json").exists():
            check_same_config(checkpoints.read_json(started / "config.json"), asdict(config), started)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return checkpoint


class Recorder:
    """The callbacks of a run: metrics, clips and progress, each where it belongs."""

    def __init__(self, run_dir: Path, progress: Progress) -> None:
        self._run_dir, self._progress = run_dir, progress
        self._writer: MetricsWriter | None = None

    def on_metrics(self, iteration: int, metrics: Metrics) -> None:
        # Opened at the first iteration of this process: where that is decides what an earlier one wrote too far.
        self._writer = self._writer or MetricsWriter(self._run_dir, first_iteration=iteration)
        self._writer.write(iteration, metrics)
        self._progress.on_metrics(iteration, metrics)

    def on_evaluation(self, name: str, result: Mapping[str, Any]) -> None:
        self._progress.on_evaluation(name, result)

    def on_clip(self, name: str, clip: Mapping[str, Any]) -> None:
        write_episode_clip(self._run_dir / "clips" / f"{name}.mp4", clip)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        if self._writer is not None:
            self._writer.close()


def _run(config: Config, run_dir: Path, local: bool, resume: str | None, recorder: Recorder) -> dict[str, Any]:
    from wamrl_ray.run import run_training

    system, step, close = _build(config, run_dir, local)
    with stop_signals() as stop:
        try:
            return run_training(
                system,
                iterations=config.iterations,
                resume=resume,
                step=step,
                on_metrics=recorder.on_metrics,
                on_evaluation=recorder.on_evaluation,
                on_clip=recorder.on_clip,
                stop_requested=stop.is_set,
            )
        finally:
            close()


def _build(config: Config, run_dir: Path, local: bool) -> tuple[System, Callable[[], Metrics], Callable[[], None]]:
    """The system, its step and how to end it."""
    if local:
        from wamrl_ray.local import build_local

        system = build_local(config, run_dir)
        return system, system.step, system.close
    from wamrl_ray.algorithm import build_wamrl

    algorithm = build_wamrl(config, run_dir)
    return algorithm.system, algorithm.step_metrics, algorithm.shutdown


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """SIGTERM or a first Ctrl-C sets the event, so that the run ends with a checkpoint; a second Ctrl-C interrupts.

    Enter it after Ray is connected, which installs a handler of its own.
    """
    stop = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        print("stopping after this iteration, with a checkpoint", file=sys.stderr, flush=True)
        stop.set()

    earlier = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)
