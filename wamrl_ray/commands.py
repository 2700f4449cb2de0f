"""What each `wamrl` command does: check everything first, then wire the parts and run.  `__main__` feeds it arguments.

Whatever the user got wrong is a ConfigError (exit code 2) raised before a worker, learner or simulator starts; anything
else that goes wrong later is a failure (exit code 1).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

OK, FAILED = 0, 1


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the command that was named; `rest` are the dotted config overrides."""
    match args.command:
        case "train":
            from wamrl_ray.commands_train import train

            return train(args, rest)
        case "eval":
            from wamrl_ray.commands_eval import run_eval

            return run_eval(args, rest)
        case "collect":
            from wamrl_ray.commands_collect import run_collect

            return run_collect(args, rest)
        case "pretrain":
            from wamrl_ray.commands_pretrain import run_pretrain

            return run_pretrain(args, rest)
        case "dataset":
            from wamrl_ray.commands_dataset import run_dataset

            return run_dataset(args)
        case "calibrate":
            from wamrl_ray.commands_calibrate import run_calibrate

            return run_calibrate(args)
        case "doctor":
            from wamrl_ray.doctor import doctor

            return OK if doctor() else FAILED
        case unknown:
            raise AssertionError(f"the parser let {unknown!r} through")
