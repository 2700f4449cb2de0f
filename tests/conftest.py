"""Settings of every test process: one thread (bit equality), no network, no Ray token in the home folder."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch, ray or mujoco can be imported by a test module.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One Ray on the loopback address for all tests that need it, with room for four workers."""
    import ray

    from wamrl_ray.jobs import connect

    connect(num_workers=4)
    yield
    ray.shutdown()
