"""`wamrl collect`: everything checked first, then the folder is filled."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from wamrl_ray.config_files import ConfigError, load_tree
from wamrl_ray.preflight import check_fit, check_renderer, describe_env, env_config, load_policy, split_env_settings
from wamrl_ray.types import EnvSpec

EXPERTS = ("libero_object", "water_plants", "reach")
"""environments that `collect_expert.make_expert` has an expert for"""


def run_collect(args: argparse.Namespace, rest: Sequence[str]) -> int:
    from wamrl_ray.collect import Collection, collect
    from wamrl_ray.collect_expert import CollectConfig, check_policy
    from wamrl_ray.collect_progress import CollectionProgress, fault_text

    settings, rest = split_env_settings(rest)
    config = load_tree(CollectConfig, args.config, rest)
    env_config(args.env, settings=settings)  # a wrong name is the cheaper thing to find out
    policy = None if args.base is None else load_policy(args.base).spec
    env = env_config(args.env, args.resolution or (policy.resolution if policy else None), settings)
    spec = describe_env(env)
    if spec.name not in EXPERTS:
        raise ConfigError(f"--env {args.env}: there is no scripted expert for it; use {' or '.join(EXPERTS)}")
    tasks = choose_tasks(args.tasks, spec)
    try:
        if policy is not None:
            check_fit(policy, spec, args.base)
            check_policy(policy, config)
        check_renderer(env)
        collection = Collection(
            env=env, tasks=tasks, episodes=args.episodes, seed=args.seed, config=config, base=args.base
        )
        check_out(args.out)
        with CollectionProgress() as progress:
            done = collect(collection, args.out, workers=args.workers, on_progress=progress)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    kept = f", {done.kept} were there already" if done.kept else ""
    faults = fault_text(done)
    if done.new:
        print(f"{done.successes} of {done.new} new episodes succeeded{kept}; demonstrations are in {args.out}")
    else:
        print(f"nothing to do: all {done.kept} demonstrations are in {args.out}")
    if done.new and args.base and config.expert_share > 0:
        print(f"the expert took {config.expert_share:.0%} of the decisions (expert_share): no measure of the policy")
    if faults:
        print(f"faults, all made good: {faults}")
    return 0


def choose_tasks(tasks: Sequence[int] | None, spec: EnvSpec) -> tuple[int, ...]:
    """The asked ids in order, each once; all of them if none were asked."""
    for task in tasks or ():
        if not 0 <= task < len(spec.instructions):
            raise ConfigError(f"--tasks {task}: {spec.name} has tasks 0..{len(spec.instructions) - 1}")
    return tuple(sorted(set(tasks))) if tasks else tuple(range(len(spec.instructions)))


def check_out(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; name a folder you can write to") from None
