"""`wamrl eval --imagination`: clean expert episodes in this process, compared decision by decision as they come.

`commands_eval` feeds it a policy and checked arguments; it prints the table, writes the contact sheet and returns what
goes into the JSON file.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from wamrl_ray.config_files import ConfigError

if TYPE_CHECKING:
    from envs.base import ChunkEnv
    from wamrl_ray.config import Config
    from wamrl_ray.policy.wam import WAM
    from wamrl_ray.types import Demonstration, Split

EPISODES_PER_TASK = 2
"""where --episodes is left out: some 24 decisions per task of LIBERO-Object"""


def check_imagination(policy: WAM, args: argparse.Namespace) -> None:
    """There is an expert to compare with, and something to compare."""
    from wamrl_ray.commands_collect import EXPERTS
    from wamrl_ray.imagination import last_executed_offset

    if args.env not in EXPERTS:
        raise ConfigError(f"--env {args.env}: there is no scripted expert to compare with; use {' or '.join(EXPERTS)}")
    try:
        last_executed_offset(policy.spec)
    except ValueError as error:
        raise ConfigError(f"--checkpoint {args.checkpoint}: {error}") from None


def measure_imagination(config: Config, policy: WAM, args: argparse.Namespace) -> dict[str, Any]:
    """Print the errors and write the sheet beside `args.json`, if there is one.  Returns `summarise`'s result and
    env, simulator, split, episodes, expert_successes, offset_env_steps."""
    import torch

    from envs.build import make_env
    from wamrl_ray.imagination import Comparison, compare, last_executed_offset, summarise, table, write_sheet

    torch.set_num_threads(config.threads)
    env = make_env(config.env, args.split)
    spec, offset = env.env_spec, last_executed_offset(policy.spec)
    steps = sorted({1, args.imagine_steps or config.reward.imagine_steps})
    count = args.episodes or EPISODES_PER_TASK * len(env.tasks)
    successes = 0
    found: list[Comparison] = []
    shown: dict[int, Comparison] = {}
    try:
        for demo in expert_episodes(env, policy, config, args.split, count):
            successes += demo.success
            comparison = compare(policy, demo, steps)
            if comparison is not None:
                shown.setdefault(demo.task_id, comparison)
                found.append(replace(comparison, pictures=comparison.pictures[:0]))
    finally:
        env.close()  # type: ignore[no-untyped-call]  # gymnasium's
    if not found:
        raise ConfigError(f"--episodes {count}: no episode lasted the {offset} env steps to compare; use more")
    summary = summarise(found, spec.views)
    print(table(summary))
    print(
        f"mean pixel error {offset} env steps ahead, over {summary['decisions']} decisions of {count} expert episodes "
        f"({successes} successes)  ({spec.name} on {spec.simulator}, {args.split})"
    )
    if args.json is not None:
        sheet = write_sheet(args.json.with_suffix(".png"), list(shown.values()), spec.views)
        print(f"written to {args.json} and {sheet}")
    about = {"env": spec.name, "simulator": spec.simulator, "split": args.split, "episodes": count}
    return {**about, "expert_successes": successes, "offset_env_steps": offset, **summary}


def expert_episodes(env: ChunkEnv, policy: WAM, config: Config, split: Split, count: int) -> Iterator[Demonstration]:
    """Undisturbed demonstrations from the starts that `wamrl eval` uses, one printed line each."""
    from wamrl_ray.collect_expert import CollectConfig, demonstrate
    from wamrl_ray.imagination import last_executed_offset
    from wamrl_ray.tickets import TicketOffice

    every = math.gcd(policy.spec.executed, last_executed_offset(policy.spec))
    clean = CollectConfig(noise_share=0.0, open_rate=0.0, miss_share=0.0, capture_every=every)
    tickets = TicketOffice(config.seed, env.env_spec, config.rollout, env.tasks).eval_tickets(split, count)
    # Task by task, because a simulator holds one.
    for number, ticket in enumerate(sorted(tickets, key=lambda ticket: ticket.task_id), start=1):
        env_seed = int(ticket.seed("env").generate_state(1, np.uint32)[0]) & 0x7FFFFFFF
        demo = demonstrate(env, ticket.task_id, ticket.init_state_id, env_seed, clean)
        ended = "success" if demo.success else "no success"
        print(
            f"episode {number}/{count}  task {demo.task_id}, initial state {demo.init_state_id}: "
            f"{ended} after {len(demo.action)} env steps",
            flush=True,
        )
        yield demo
