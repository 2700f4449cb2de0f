"""The `wamrl` command line: arguments in, a command of `commands.py` run, an exit code out.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration.  Nothing heavy is imported before a command runs, so
`--help` answers at once.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

DONE, FAILED, WRONG_USAGE = 0, 1, 2

TRAIN = """examples:
  wamrl train --config libero_object_quick --run-dir runs/quick --workers 2 --iterations 2
  wamrl train --config debug --config learners/grpo --run-dir runs/grpo --actor-learner.lr 1e-4 --seed 3
  wamrl train --config debug --run-dir runs/grpo --resume auto

Any config key can be overridden as --section.key VALUE; wrong keys are answered with the nearest valid one."""
EVAL = """examples:
  wamrl eval --checkpoint tiny_libero_object --env libero_object --split held_out --episodes 100 --json eval.json
  wamrl eval --checkpoint tiny_libero_object --env libero_object --imagination --json imagination.json

A checkpoint is a shipped name, a policy folder, a run folder (its newest checkpoint) or one checkpoint of a run.
Settings of the environment go as --env.KEY VALUE, such as --env.max-steps 200; a run's own are not taken over."""
COLLECT = """examples:
  wamrl collect --env libero_object --episodes 40 --out data/object --workers 2
  wamrl collect --env libero_object --tasks 1 6 --episodes 40 --out data/two --miss-share 0.5 --noise-std 0.3
  wamrl collect --env libero_object --episodes 10 --out data/dagger --base tiny_libero_object

Repeat a command to continue where it was stopped.  Any key of `CollectConfig` can be overridden as --key VALUE, and
the environment's settings as --env.KEY VALUE."""
PRETRAIN = """examples:
  wamrl pretrain --config pretrain/libero_object --data data/object --out runs/base
  wamrl pretrain --config pretrain/libero_object --data data/object --out runs/weak --few-shot 5
  wamrl pretrain --config pretrain/libero_object --data data/object --data data/dagger --out runs/base --until 4000

Repeat a command to continue where it was stopped.  Any key of `PretrainConfig` can be overridden as --key VALUE."""
DATASET = """examples:
  wamrl dataset export --data data/object --out exported
  wamrl dataset import --data exported --out data/object_again
  wamrl dataset import --data LIBERO_V3 --out data/public --env libero_object --resolution 64 --capture-every 4

docs/datasets.md describes both layouts."""
CALIBRATE = """example:
  wamrl calibrate water_plants --out geometry.json --seeds 0 1 2

Needs RLBench and CoppeliaSim; docs/water_plants.md says what is measured and how the file is used."""
DOCTOR = """example:
  wamrl doctor"""


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small: use at least 1")
    return value


def not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative: use 0 or more")
    return value


ENVS = "reach, water_plants, rlbench_water_plants or a LIBERO suite"
LAYERS = "a path or a preset's name; repeatable, a later one wins"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="wamrl", description="Online post-training of world-action policies on Ray.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, summary: str, epilog: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    _train_options(command("train", "Post-train a policy and write a run folder.", TRAIN))
    _eval_options(command("eval", "Measure a policy's success per task, or its imagination.", EVAL))
    _collect_options(
        command("collect", "Record demonstrations: a disturbed expert, its clean action as label.", COLLECT)
    )
    _pretrain_options(
        command("pretrain", "Train a base policy on recorded episodes: video stage, then actions.", PRETRAIN)
    )
    _dataset_options(command("dataset", "Demonstrations to and from a LeRobotDataset v3.0 folder.", DATASET))
    _calibrate_options(command("calibrate", "Measure RLBench's scene for Water Plants (MuJoCo).", CALIBRATE))
    command("doctor", "Check versions, renderer, devices, memory and every environment.", DOCTOR)
    return parser


def _train_options(train: argparse.ArgumentParser) -> None:
    train.add_argument("--config", action="append", default=[], metavar="FILE", help=LAYERS)
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/CONFIG")
    train.add_argument("--workers", type=positive, metavar="N", help="rollout workers (rollout.num_workers)")
    train.add_argument("--iterations", type=not_negative, metavar="N", help="in all, earlier ones too; 0: evaluate")
    train.add_argument("--local", action="store_true", help="one process, no Ray: the debugger")
    train.add_argument("--resume", metavar="auto|DIR", help="auto: continue from the run folder's newest checkpoint")


def _eval_options(evaluate: argparse.ArgumentParser) -> None:
    evaluate.add_argument("--checkpoint", required=True, metavar="NAME_OR_DIR")
    evaluate.add_argument("--env", required=True, metavar="NAME", help=ENVS)
    evaluate.add_argument("--split", choices=("train", "held_out"), default="held_out", help="initial states")
    evaluate.add_argument("--episodes", type=positive, metavar="N", help="spread evenly over tasks")
    evaluate.add_argument("--tasks", type=int, nargs="+", metavar="ID", help="LIBERO task ids; default: all")
    evaluate.add_argument("--json", type=Path, metavar="OUT", help="where to write the result")
    evaluate.add_argument("--workers", type=positive, default=1, metavar="N", help="1 runs without Ray (default)")
    evaluate.add_argument("--seed", type=int, default=0, metavar="N")
    evaluate.add_argument(
        "--imagination",
        action="store_true",
        help="instead of success: pixel error of the imagined next frame on expert episodes, and a PNG beside OUT",
    )
    evaluate.add_argument(
        "--imagine-steps", type=positive, metavar="N", help="denoising steps beside 1; default: the reward's"
    )


def _collect_options(collect: argparse.ArgumentParser) -> None:
    collect.add_argument("--env", required=True, metavar="NAME", help=ENVS)
    collect.add_argument("--tasks", type=int, nargs="+", metavar="ID", help="task ids; default: all")
    collect.add_argument("--episodes", type=positive, required=True, metavar="N", help="per task")
    collect.add_argument("--out", type=Path, required=True, metavar="DIR", help="what is there already is kept")
    collect.add_argument("--workers", type=positive, default=1, metavar="N", help="1 runs without Ray (default)")
    collect.add_argument("--seed", type=not_negative, default=0, metavar="N")
    collect.add_argument("--resolution", type=positive, metavar="PIXELS", help="default: the base's or environment's")
    collect.add_argument("--base", metavar="NAME_OR_DIR", help="this policy acts, the expert labels (DAgger)")
    collect.add_argument("--config", action="append", default=[], metavar="FILE", help=LAYERS)


def _pretrain_options(pretrain: argparse.ArgumentParser) -> None:
    pretrain.add_argument("--config", action="append", default=[], metavar="FILE", help=LAYERS)
    pretrain.add_argument(
        "--data",
        type=Path,
        action="append",
        required=True,
        metavar="DIR",
        help="what `wamrl collect` wrote, or a tar file of it; repeatable",
    )
    pretrain.add_argument("--out", type=Path, required=True, metavar="DIR", help="policy folder to write or continue")
    pretrain.add_argument("--init", metavar="NAME_OR_DIR", help="start from this base's weights and architecture")
    pretrain.add_argument("--until", type=positive, metavar="STEP", help="save and stop at this step of the schedule")
    pretrain.add_argument("--tasks", type=int, nargs="+", metavar="ID", help="task ids; default: all in the data")
    pretrain.add_argument("--few-shot", type=positive, metavar="N", help="train on the first N demonstrations per task")
    pretrain.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda trains in mixed precision")


def _dataset_options(dataset: argparse.ArgumentParser) -> None:
    ways = dataset.add_subparsers(dest="direction", required=True, metavar="export|import")
    export = ways.add_parser("export", help="write one", allow_abbrev=False)
    export.add_argument("--data", type=Path, required=True, metavar="DIR", help="what `wamrl collect` wrote")
    export.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    export.add_argument("--fps", type=positive, default=20, metavar="HZ", help="env steps per second; LIBERO: 20")
    read = ways.add_parser("import", help="read one", allow_abbrev=False)
    read.add_argument("--data", type=Path, required=True, metavar="DIR", help="a LeRobotDataset v3.0 on this machine")
    read.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new folder")
    read.add_argument("--env", metavar="NAME", help="whose tasks to take; not needed for what was exported here")
    read.add_argument("--resolution", type=positive, metavar="PIXELS", help="resize to; default: as stored")
    read.add_argument("--capture-every", type=positive, default=1, metavar="N", help="keep each Nth frame")
    read.add_argument("--rotate-180", action="store_true", help="for images as the simulator draws them")
    read.add_argument("--gripper-open-is-one", action="store_true", help="for grippers with 1 open, 0 closed")
    read.add_argument("--cameras", nargs="+", metavar="KEY", help="columns of the views; default: the usual names")


def _calibrate_options(calibrate: argparse.ArgumentParser) -> None:
    calibrate.add_argument("env", choices=("water_plants",), help="whose geometry")
    calibrate.add_argument("--out", type=Path, required=True, metavar="FILE", help="JSON file to write")
    calibrate.add_argument(
        "--seeds", type=not_negative, nargs="+", default=[0, 1, 2], metavar="N", help="placements to measure at"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (argparse itself exits with 2 on wrong usage)."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and args.command not in ("train", "eval", "pretrain", "collect"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    from wamrl_ray import commands
    from wamrl_ray.config_files import ConfigError

    try:
        return commands.run(args, rest)
    except ConfigError as error:
        print(f"wamrl {args.command}: {error}", file=sys.stderr)
        return WRONG_USAGE
    except KeyboardInterrupt:
        print(f"wamrl {args.command}: interrupted", file=sys.stderr)
        return FAILED
    except Exception as error:
        # The border to the user: one line for them, the traceback for whoever mends it.
        print(f"wamrl {args.command}: {type(error).__name__}: {error}{_keep_traceback(args)}", file=sys.stderr)
        return FAILED


def _keep_traceback(args: argparse.Namespace) -> str:
    """Into the folder the command writes; on stderr for a command that has none."""
    folder: Path | None = getattr(args, "run_dir", None) or getattr(args, "out", None)
    if folder is None or not folder.is_dir():
        traceback.print_exc()
        return ""
    path = folder / "error.log"
    path.write_text(traceback.format_exc(), encoding="utf-8")
    return f" (traceback in {path})"


if __name__ == "__main__":
    sys.exit(main())
