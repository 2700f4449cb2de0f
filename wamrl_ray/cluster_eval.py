"""Evaluation on many workers, without learners: a broker that publishes one pair, and a pool that acts with it.

`wamrl eval --workers N` feeds it a policy; `local.evaluate_local` is the same in one process, with the same result.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray

from envs.build import make_env
from wamrl_ray.cluster import start_broker, start_pool
from wamrl_ray.config import Config
from wamrl_ray.evaluate import evaluate
from wamrl_ray.jobs import connect
from wamrl_ray.policy.wam import WAM
from wamrl_ray.tickets import TicketOffice
from wamrl_ray.types import Split


def evaluate_cluster(config: Config, policy: WAM, split: Split, episodes: int, *, folder: Path) -> dict[str, Any]:
    """Success of `policy`, whose frozen parts are those of `config.base` (see `evaluate.evaluate`).

    `config` names environment, seed and workers; `folder` takes the broker's epoch file.
    """
    env = make_env(config.env, split)
    env_spec, tasks = env.env_spec, env.tasks
    env.close()  # type: ignore[no-untyped-call]
    tickets = TicketOffice(config.seed, env_spec, config.rollout, tasks).eval_tickets(split, episodes)
    started = connect(config.rollout.num_workers, config.threads)
    try:
        broker = start_broker(config.broker, folder / "epoch.json")
        pair = broker.begin(policy.export("world"), policy.export("actor"), interface=policy.interface_digest)
        pool = start_pool(config, broker)
        try:
            return evaluate(pool, tickets, pair, env_spec=env_spec, split=split)
        finally:
            pool.close()
            ray.kill(broker.actor)
    finally:
        if started:
            ray.shutdown()
