"""How a run meets its Ray cluster: inside a submitted job, on a cluster named by RAY_ADDRESS, or on one of its own.

`ray job submit -- python -m wamrl_ray train …` sets RAY_ADDRESS for the driver and has already fixed the job's runtime
environment, so nothing but the address is Ray's business then.  `ray job stop` sends SIGTERM and kills three seconds
later unless the job's runtime environment sets RAY_JOB_STOP_WAIT_TIME_S; the command line answers SIGTERM with a
checkpoint after the iteration under way, and must install its handler after `connect`, because `ray.init` installs one.
"""

from __future__ import annotations

import logging
import os
import warnings

import ray

OBJECT_STORE_BYTES = 2 * 1024**3
"""Object store of a cluster of our own: 2 GiB, or 30 % of the machine's memory if that is less."""
SPARE_CPUS = 1
"""logical CPUs of a cluster of our own beyond those of the workers, for a Tune trial's driver"""


def connect(num_workers: int, threads: int = 1) -> bool:
    """Connect to the cluster at RAY_ADDRESS, else start one in this machine; True if one was started.

    A cluster of our own listens on the loopback address only, without dashboard and without tokens, and counts as many
    logical CPUs as its workers ask for: more workers than cores run, slower.  Does nothing if Ray is connected already.
    """
    if ray.is_initialized():
        return False
    quiet()
    if os.environ.get("RAY_ADDRESS"):
        # Inside a job: no runtime_env here, the submitter's would clash with it; authentication is the cluster's.
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
        return False
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Ray starts workers at niceness 15: on a busy machine they would starve and miss their deadlines.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Our actors bring an environment of their own, for which Ray starts a process: those started ahead are of no use.
    for name in ("RAY_enable_worker_prestart", "RAY_prestart_worker_first_driver"):
        os.environ.setdefault(name, "0")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, num_workers * threads + SPARE_CPUS),
        object_store_memory=min(OBJECT_STORE_BYTES, int(0.3 * memory)),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _node_ip_address="127.0.0.1",
    )
    return True


def quiet() -> None:
    """Leave Ray's notices about its own interfaces out of a user's terminal; errors stay."""
    # Every remote error reaches whoever asked, by an episode's summary: its other ref is then unused.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"ray\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"ray\..*")
    for name in ("ray.rllib", "ray.tune", "ray._common.deprecation"):
        logging.getLogger(name).setLevel(logging.ERROR)
