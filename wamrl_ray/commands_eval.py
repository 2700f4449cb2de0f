"""`wamrl eval`: any policy, any split, the same tickets for everyone.  A checkpoint goes in, a JSON file comes out.

It measures how often the policy succeeds or, with --imagination, how well it foresees what an expert will see.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wamrl_ray import checkpoint as checkpoints
from wamrl_ray.atomic import write_json
from wamrl_ray.commands_imagination import check_imagination, measure_imagination
from wamrl_ray.config_files import ConfigError
from wamrl_ray.preflight import (
    check_fit,
    check_renderer,
    describe_env,
    env_config,
    load_policy,
    split_env_settings,
)
from wamrl_ray.progress import success_text

if TYPE_CHECKING:
    from envs.build import EnvConfig
    from wamrl_ray.config import Config
    from wamrl_ray.policy.wam import WAM


def run_eval(args: argparse.Namespace, rest: Sequence[str]) -> int:
    settings, unknown = split_env_settings(rest)
    if unknown:
        raise ConfigError(f"{' '.join(unknown)}: no option of `wamrl eval`; beside its own it takes --env.KEY VALUE")
    env_config(args.env, settings=settings)  # a wrong name is the cheaper thing to find out
    check_usage(args)
    run = find_checkpoint(Path(args.checkpoint))
    config, policy = load_any(args.checkpoint, run)
    env = choose_tasks(env_config(args.env, policy.spec.resolution, settings), args.tasks)
    if run is not None and (others := other_settings(config.env, env)):
        print(f"note: the run has {others}; this evaluation does not, unless you add it", file=sys.stderr)
    spec = describe_env(env, args.split)
    check_fit(policy.spec, spec, args.checkpoint)
    if args.imagination:
        check_imagination(policy, args)
    check_renderer(env)
    config = replace(config, env=env, seed=args.seed, rollout=replace(config.rollout, num_workers=args.workers))
    # An output that cannot be written must not be found out after an hour of episodes.
    if args.json is not None:
        check_writable(args.json)

    started = time.monotonic()
    if args.imagination:
        result = measure_imagination(config, policy, args)
    else:
        with tempfile.TemporaryDirectory(prefix="wamrl-eval-") as folder:
            result = _evaluate(config, policy, args, Path(folder))
    result |= {"checkpoint": args.checkpoint, "seed": args.seed, "wall_s": round(time.monotonic() - started, 3)}
    if args.json is not None:
        write_json(args.json, result)
    if not args.imagination:
        for task in result["tasks"]:
            print(f"task {task['task_id']:2d}  {success_text(task)}  {task['instruction']}")
        world = f"{result['env']} on {result['simulator']}, {result['split']}"
        print(f"success  {success_text(result)}  ({world}; written to {args.json})")
    return 0


def other_settings(trained: EnvConfig, env: EnvConfig) -> str:
    """What a run set otherwise in the same environment, as options.  Which tasks it takes is a choice, no setting."""
    if trained.kind != env.kind:
        return ""
    found = []
    for name in (field.name for field in fields(trained) if field.name not in ("tasks", "suite", "task")):
        value = getattr(trained, name)
        if value != getattr(env, name):
            found.append(f"--env.{name} {list(value) if isinstance(value, tuple) else value}")
    return " ".join(found)


def check_usage(args: argparse.Namespace) -> None:
    """What argparse cannot tell: which options go with --imagination and which without."""
    if not args.imagination:
        for name in ("episodes", "json"):
            if getattr(args, name) is None:
                raise ConfigError(f"--{name} is missing: only --imagination goes without it")
        if args.imagine_steps is not None:
            raise ConfigError(f"--imagine-steps {args.imagine_steps}: goes with --imagination only")
    elif args.workers != 1:
        raise ConfigError(f"--workers {args.workers}: --imagination runs in this process alone; leave it out")


def choose_tasks(env: EnvConfig, tasks: list[int] | None) -> EnvConfig:
    from envs.libero import LiberoConfig

    if not tasks:
        return env
    if not isinstance(env, LiberoConfig):
        raise ConfigError(f"--tasks {' '.join(map(str, tasks))}: only LIBERO suites take it; leave it out")
    return replace(env, tasks=tuple(tasks))


def load_any(name_or_dir: str, folder: Path | None) -> tuple[Config, WAM]:
    """Config and policy of a run's checkpoint `folder`; where there is none, of a shipped name or a policy folder."""
    from wamrl_ray.config import Config, from_json
    from wamrl_ray.local import load_checkpoint_pair

    if folder is None:
        return Config(base=name_or_dir), load_policy(name_or_dir)
    config = from_json((folder / "config.json").read_text(encoding="utf-8"))
    policy = load_policy(config.base, config.sampler)
    try:
        load_checkpoint_pair(folder, policy)
    except (ValueError, checkpoints.CheckpointError) as error:
        raise ConfigError(f"--checkpoint {name_or_dir}: {error}") from None
    return config, policy


def find_checkpoint(folder: Path) -> Path | None:
    """The folder itself if it is a run's checkpoint, the newest one if it is a run, None if it is neither."""
    if (folder / checkpoints.MANIFEST).is_file():
        return folder
    if not ((folder / "checkpoints").is_dir() or (folder / "epoch.json").is_file()):
        return None
    newest = checkpoints.load_latest(folder / "checkpoints")
    if newest is None:
        raise ConfigError(f"--checkpoint {folder}: the run has no complete checkpoint yet")
    return newest


def check_writable(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--json {path}: {error.strerror}; name a file in a folder you can write to") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"--json {path}: is not a file that can be written; name another")


def _evaluate(config: Config, policy: WAM, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    if args.workers == 1:
        from wamrl_ray.local import evaluate_local

        return evaluate_local(
            config.env, policy, args.split, args.episodes, seed=args.seed, config=config, folder=folder
        )
    from wamrl_ray.cluster_eval import evaluate_cluster

    return evaluate_cluster(config, policy, args.split, args.episodes, folder=folder)
