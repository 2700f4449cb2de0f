"""Collection on many workers: Demonstrator actors in the pool that training's rollouts use.

`collect.py` feeds it tickets; it feeds back each demonstration as soon as it is there.  `collect.record_here` is the
same in one process, with the same demonstrations.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import cast

import ray

from envs.build import EnvConfig
from wamrl_ray.cluster import start_hint, worker_actor
from wamrl_ray.cluster_broker import FETCH_DEADLINE_S
from wamrl_ray.cluster_pool import ElasticPool
from wamrl_ray.cluster_ports import RemoteWorker
from wamrl_ray.collect_expert import CollectConfig
from wamrl_ray.collect_worker import Demonstrator, Recorded
from wamrl_ray.jobs import connect
from wamrl_ray.types import Demonstration, Metrics, Ticket

THREADS = 1
"""per worker: physics and rendering use one, and a policy must act alike everywhere"""


def record_on_cluster(
    env: EnvConfig,
    config: CollectConfig,
    base: str | None,
    tickets: Sequence[Ticket],
    *,
    workers: int,
    max_attempts: int,
) -> Generator[tuple[Ticket, Demonstration, Metrics]]:
    """Ticket, demonstration and the pool's counters, in the order of completion.

    Raises RuntimeError for a ticket that failed `max_attempts` times, TimeoutError if no worker comes up.
    """
    started = connect(workers, THREADS)
    try:
        remote = worker_actor(Demonstrator, THREADS)
        ports = [RemoteWorker(f"worker {index}", remote.remote(env, config, base), []) for index in range(workers)]
        pool: ElasticPool[Recorded] = ElasticPool(ports, max_attempts=max_attempts, start_hint=start_hint)
        try:
            for _, recorded, ref in pool.finished(tickets, None):
                demonstration = cast(Demonstration, ray.get(ref, timeout=FETCH_DEADLINE_S))
                yield recorded.ticket, demonstration, pool.metrics()
        finally:
            pool.close()
    finally:
        if started:
            ray.shutdown()
