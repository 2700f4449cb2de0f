"""`wamrl pretrain`: everything checked first, then a base is trained on demonstrations.

    config, --init, device, state checked ──► Selection ──► Windows ──► pretrain ──► OUT: base, state.pt, logs, pictures
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from wamrl_ray.config_files import ConfigError, load_tree
from wamrl_ray.demonstrations_select import Selection
from wamrl_ray.preflight import load_policy
from wamrl_ray.progress_pretrain import PretrainProgress
from wamrl_ray.report_pretrain import PretrainLog, write_sheet
from wamrl_ray.types import Demonstration, Metrics

if TYPE_CHECKING:
    from learners.pretrain_check import Imagined
    from learners.pretrain_config import PretrainConfig
    from learners.windows import Windows
    from wamrl_ray.policy.wam import WAM


def run_pretrain(args: argparse.Namespace, rest: Sequence[str]) -> int:
    import torch

    from learners.pretrain import pretrain
    from learners.pretrain_config import PretrainConfig

    config = load_tree(PretrainConfig, args.config, rest)
    init: WAM | None = None
    if args.init is not None:
        init = load_policy(args.init)
        config = replace(config, policy=init.config)
    check_device(args.device)
    done, end = check_steps(args.out, config, args.until)
    torch.set_num_threads(config.threads)
    train, valid, count = read_windows(args, config)
    held_out = "none" if valid is train else len(valid)
    print(f"{count} demonstrations: {len(train)} windows to train on, {held_out} held out", flush=True)
    print(f"steps {done} to {end} of {config.total_steps}", flush=True)
    with PretrainProgress(end) as progress, Recorder(args.out, progress) as recorder:
        pretrain(
            config,
            train,
            valid,
            args.out,
            init=init,
            until=end,
            device=args.device,
            on_start=recorder.on_start,
            on_metrics=recorder.on_metrics,
            on_imagined=recorder.on_imagined,
        )
    if end < config.total_steps:
        print(f"stopped at step {end} of {config.total_steps}; go on with a later --until, or without one")
    print(f"base policy written to {args.out}; use it with --base {args.out}")
    return 0


def check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device cuda: torch {torch.__version__} sees no CUDA device; install a CUDA build of torch on a machine "
            "that has one, or use --device cpu"
        )


def check_steps(out: Path, config: PretrainConfig, until: int | None) -> tuple[int, int]:
    """The step that `out` continues from, and the last one to make; refuses what does not fit."""
    from learners.pretrain import STATE
    from learners.pretrain_state import check_state

    if until is not None and until > config.total_steps:
        raise ConfigError(
            f"--until {until}: the schedule has {config.total_steps} steps (video_steps + action_steps); use fewer"
        )
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: is a file; name a folder")
    try:
        return check_state(out / STATE, config), until or config.total_steps
    except ValueError as error:
        raise ConfigError(str(error)) from None


def read_windows(args: argparse.Namespace, config: PretrainConfig) -> tuple[Windows, Windows, int]:
    """Training and validation windows (the same where nothing is held out), and the number of demonstrations."""
    from learners.windows import make_windows

    selection = Selection(
        sources=tuple(args.data),
        held_out_every=config.held_out_every,
        tasks=None if args.tasks is None else tuple(args.tasks),
        few_shot=args.few_shot,
    )
    count = 0

    def counted(demonstrations: Iterable[Demonstration]) -> Iterable[Demonstration]:
        nonlocal count
        for demonstration in demonstrations:
            count += 1
            yield demonstration

    try:
        train = make_windows(counted(selection.training()), config.policy)
        held_out = list(selection.held_out())
        valid = make_windows(counted(held_out), config.policy) if held_out else train
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return train, valid, count


class Recorder:
    """The callbacks of a pretraining: log, pictures and progress, each where it belongs."""

    def __init__(self, out: Path, progress: PretrainProgress) -> None:
        self._out, self._progress = out, progress
        self._log: PretrainLog | None = None

    def on_start(self, step: int) -> None:
        self._log = PretrainLog(self._out, step)

    def on_metrics(self, step: int, metrics: Metrics) -> None:
        assert self._log is not None, "a training starts before it has metrics"
        self._log.write(step, metrics)
        self._progress.on_metrics(step, metrics)

    def on_imagined(self, step: int, imagined: Imagined) -> None:
        columns = [
            ("current", imagined.now.numpy()),
            (f"after {imagined.offset} steps", imagined.future.numpy()),
            ("imagined", imagined.imagined.numpy()),
        ]
        write_sheet(self._out / "imagination" / f"step_{step:06d}.png", columns, imagined.instruction)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        if self._log is not None:
            self._log.close()
