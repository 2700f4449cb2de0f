"""What each `wamrl` command does: check everything first, then wire the parts and run.  `__main__` feeds it arguments.

Whatever the user got wrong is a ConfigError (exit code 2) raised before a worker, learner or simulator starts; anything
else that goes wrong later is a failure (exit code 1).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from wamrl_ray.config_files import ConfigError, load_tree
from wamrl_ray.types import Metrics

OK, FAILED = 0, 1
EXPERTS = ("libero_object", "reach")
"""environments that `collect.make_expert` has an expert for"""


def run(args: argparse.Namespace, rest: Sequence[str]) -> int:
    """Run the command that was named; `rest` are the dotted config overrides."""
    match args.command:
        case "train":
            from wamrl_ray.commands_train import train

            return train(args, rest)
        case "eval":
            from wamrl_ray.commands_eval import run_eval

            return run_eval(args)
        case "collect":
            return collect(args)
        case "pretrain":
            return pretrain(args, rest)
        case "doctor":
            from wamrl_ray.doctor import doctor

            return OK if doctor() else FAILED
        case unknown:
            raise AssertionError(f"the parser let {unknown!r} through")


def collect(args: argparse.Namespace) -> int:
    from wamrl_ray.collect import collect as collect_demonstrations
    from wamrl_ray.preflight import check_renderer, describe_env, env_config

    env = env_config(args.env, args.resolution)
    spec = describe_env(env)
    if not 0 <= args.task < len(spec.instructions):
        raise ConfigError(f"--task {args.task}: {spec.name} has tasks 0..{len(spec.instructions) - 1}")
    if spec.name not in EXPERTS:
        raise ConfigError(f"--env {args.env}: there is no scripted expert for it; use {' or '.join(EXPERTS)}")
    check_renderer(env)
    successes, total = collect_demonstrations(
        env,
        (args.task,),
        args.episodes,
        args.out,
        workers=args.workers,
        seed=args.seed,
        on_done=lambda done, of, success: print(f"episode {done}/{of}  {'success' if success else 'no success'}"),
    )
    print(f"{successes} of {total} new episodes succeeded; demonstrations are in {args.out}")
    return OK


def pretrain(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from learners.pretrain import PretrainConfig
    from learners.pretrain import pretrain as pretrain_policy
    from wamrl_ray.collect import load_demonstrations

    config = load_tree(PretrainConfig, args.config, rest)
    try:
        demonstrations = list(load_demonstrations(args.data))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    found, wanted = demonstrations[0].frames.shape[1:], (len(config.policy.views), *[config.policy.resolution] * 2, 3)
    if found != wanted:
        raise ConfigError(
            f"policy.views, policy.resolution ask for frames {wanted}, but {args.data} holds {found}: use the config "
            "that goes with the data, or collect again with another --resolution"
        )
    print(f"{len(demonstrations)} demonstrations, {config.total_steps} steps", flush=True)
    pretrain_policy(config, demonstrations, args.out, on_metrics=_print_metrics)
    print(f"base policy written to {args.out}; use it with --base {args.out}")
    return OK


def _print_metrics(step: int, metrics: Metrics) -> None:
    print(f"step {step}  " + "  ".join(f"{name} {value:.4g}" for name, value in sorted(metrics.items())), flush=True)
