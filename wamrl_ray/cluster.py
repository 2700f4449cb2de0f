"""The system on Ray: actors around the plain classes, and ports that turn their answers into futures.

    driver ──ticket, pair──► RolloutWorker × N ──returns (summary, episode)──► object store ──ref──► learners
       │                         │ pull, at an episode start
       ├── stage, commit ──► WeightBroker (on the driver's node, no torch work in it)
       └── update, export ──► VideoLearner, ActorLearner (a GPU each, a shared one, or CPU)

The driver never looks into an episode: its handle is an ObjectRef whose value the worker *returned*, so it outlives the
worker.  Calls go driver → worker → broker and driver → learner, never back, so nothing can wait in a circle; every wait
has a deadline.  Workers are not in a Tune trial's placement group, which fixes its size: SPREAD takes them out of it.

CPUs are counted for workers alone (`config.threads` each).  Learners and broker ask for none: in a synchronous run the
learners work while the workers wait, and a two-core machine must be able to hold both.  Workers that find no room stay
pending, and the run goes on with those that did.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from envs.build import make_env
from wamrl_ray.cluster_actors import LearnerHost, RolloutWorker, base_policy
from wamrl_ray.cluster_broker import FETCH_DEADLINE_S, BrokerActor, Puller, RemoteBroker
from wamrl_ray.cluster_pool import START_DEADLINE_S, ElasticPool
from wamrl_ray.cluster_ports import RemoteActor, RemoteVideo, RemoteWorker, as_future
from wamrl_ray.config import BrokerConfig, Config
from wamrl_ray.rollout import EpisodeSummary
from wamrl_ray.run import System
from wamrl_ray.store import load_episode, save_episode
from wamrl_ray.types import Episode, Policy

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM


def build_cluster(config: Config, run_dir: Path, policy_of: Callable[[Config], WAM] = base_policy) -> System:
    """Everything of a run behind actors, on the cluster Ray is connected to; close() the result.

    Raises ValueError for `device = "cuda"` without a GPU, RuntimeError or TimeoutError if an actor does not come up.
    """
    env = make_env(config.env, "train")
    env_spec, tasks = env.env_spec, env.tasks
    env.close()  # type: ignore[no-untyped-call]  # gymnasium's
    run_dir = run_dir.resolve()
    run_dir.mkdir(parents=True, exist_ok=True)
    broker = start_broker(config.broker, run_dir / "epoch.json")
    gpus = learner_gpus(config.device)
    hosts = [_start_learner(component, config, gpus, policy_of) for component in ("world", "actor")]
    pool = start_pool(config, broker, policy_of)

    def close() -> None:
        pool.close()
        for actor in (*hosts, broker.actor):
            ray.kill(actor)

    try:
        setups = [host.setup.remote(gpus > 0) for host in hosts]
        interfaces = [
            as_future(setup, name).result(START_DEADLINE_S)
            for setup, name in zip(setups, ("video learner", "actor learner"), strict=True)
        ]
    except BaseException:
        close()
        raise
    return System(
        config,
        run_dir,
        env_spec=env_spec,
        tasks=tasks,
        pool=pool,
        video=RemoteVideo(hosts[0], interfaces[0]),
        actor=RemoteActor(hosts[1], interfaces[1]),
        broker=broker,
        persist=lambda ref, path: save_episode(cast(Episode, ray.get(ref, timeout=FETCH_DEADLINE_S)), path),
        restore=lambda path: ray.put(load_episode(path)),
        close=close,
    )


def learner_gpus(device: str) -> float:
    """GPUs per learner: 1 where the cluster has two, 0.5 where it has one, else 0."""
    count = _resources(ray.cluster_resources).get("GPU", 0.0) if device != "cpu" else 0.0
    if device == "cuda" and count < 1:
        raise ValueError("device = 'cuda': the cluster has no GPU; use 'auto' or 'cpu'")
    return min(1.0, count / 2) if count >= 1 else 0.0


def start_pool(
    config: Config, broker: RemoteBroker, policy_of: Callable[[Config], Policy] = base_policy
) -> ElasticPool[EpisodeSummary]:
    """`rollout.num_workers` worker actors, starting."""
    remote = worker_actor(RolloutWorker, config.threads)
    ports = []
    for index in range(config.rollout.num_workers):
        puller = Puller(broker.actor, holder=f"worker_{index}")
        ports.append(RemoteWorker(f"rollout worker {index}", remote.remote(config, policy_of), [puller]))
    return ElasticPool(ports, max_attempts=config.rollout.max_attempts, start_hint=start_hint)


def worker_actor(worker: type, threads: int) -> Any:
    """The actor class of a worker: `threads` CPUs, restarted whenever its process dies; its calls are never retried."""
    environment = _environment(threads) | {"CUDA_VISIBLE_DEVICES": ""}  # unset would show a worker the learners' GPUs
    return ray.remote(
        num_cpus=threads,
        num_gpus=0,
        max_restarts=-1,
        max_task_retries=0,
        scheduling_strategy="SPREAD",
        runtime_env={"env_vars": environment},
    )(worker)


def start_broker(config: BrokerConfig, epoch_file: Path) -> RemoteBroker:
    """The broker, on this node: its epoch file lies in the run folder."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote = ray.remote(num_cpus=0, max_restarts=0)(BrokerActor)
    return RemoteBroker(remote.options(scheduling_strategy=here, max_concurrency=16).remote(config, epoch_file))


def _start_learner(component: str, config: Config, gpus: float, policy_of: Callable[[Config], WAM]) -> Any:
    environment = _environment(config.threads) | ({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})
    remote = ray.remote(num_cpus=0, num_gpus=gpus, max_restarts=0, runtime_env={"env_vars": environment})(LearnerHost)
    return remote.remote(component, config, policy_of)


def _environment(threads: int) -> dict[str, str]:
    """Thread counts, set before torch is imported, and what the driver was told about rendering and offline use."""
    counts = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
    inherited = ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "HF_HUB_OFFLINE")
    return counts | {name: os.environ[name] for name in inherited if name in os.environ}


def start_hint() -> str:
    """What to tell a user whose workers do not come up."""
    total, free = _resources(ray.cluster_resources), _resources(ray.available_resources)
    return (
        f"the cluster has {free.get('CPU', 0):g} of {total.get('CPU', 0):g} CPUs free: use fewer --workers, add nodes, "
        "or look at the workers' logs"
    )


def _resources(ask: Callable[[], Any]) -> dict[str, float]:
    found: dict[str, float] = ask()
    return found
