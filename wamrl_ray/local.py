"""The whole system in one process, one thing after the other: the debugger, the test bed, and the reference.

`build_local(config, run_dir)` wires the very classes that `cluster.py` puts behind actors, and `run_training` drives
both the same way; a synchronous cluster run must give the digests of this one, bit for bit.  Handles are the episodes
themselves and every future is done when it is returned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from envs.base import ChunkEnv
from envs.build import EnvConfig, make_env
from learners.actor_flow_sde import ActorFlowSDELearner
from learners.video_sft import VideoSFTLearner
from wamrl_ray import checkpoint as checkpoints
from wamrl_ray.broker import WeightBroker
from wamrl_ray.config import Config
from wamrl_ray.evaluate import evaluate
from wamrl_ray.local_lockstep import LockstepPool
from wamrl_ray.policy.bases import load_base
from wamrl_ray.policy.wam import WAM
from wamrl_ray.pretraining import pretraining_windows
from wamrl_ray.rollout import EpisodeSummary, fault_metric, rollout, summarise
from wamrl_ray.run import System
from wamrl_ray.store import load_episode, save_episode
from wamrl_ray.tickets import TicketOffice, split_of
from wamrl_ray.training import Broker
from wamrl_ray.types import EnvSpec, Episode, Metrics, Pair, Policy, Snapshot, Split, Ticket

P = ParamSpec("P")
T = TypeVar("T")


def build_local(
    config: Config, run_dir: Path, policy: Callable[[], WAM] | None = None, *, lockstep: bool = False
) -> System:
    """Everything of a run in this process; close() the result.

    `policy` makes a fresh copy of the base policy; by default it loads `config.base`.  `lockstep` acts all episodes of
    an iteration side by side (see `local_lockstep.py`).  Raises ValueError for a base that is missing or does not fit
    the environment, and for demonstrations to replay that are missing or do not fit.
    """
    torch.set_num_threads(config.threads)
    base = policy or (lambda: load_base(config.base, config.sampler))
    world_device, actor_device = learner_devices(config.device)
    video = base()
    pretraining = pretraining_windows(config.video_learner.pretraining, video.config)
    broker = WeightBroker(config.broker, run_dir / "epoch.json")

    def env_of(split: Split) -> ChunkEnv:
        return make_env(config.env, split)

    pool: LocalPool | LockstepPool
    if lockstep:
        pool = LockstepPool(env_of, base(), broker)
    else:
        pool = LocalPool(env_of, base(), broker, config.rollout.max_attempts)
    return System(
        config,
        run_dir,
        env_spec=pool.env_spec,
        tasks=pool.tasks,
        pool=pool,
        video=LocalVideo(
            VideoSFTLearner(
                config.video_learner, video, base(), run_seed=config.seed, pretraining=pretraining, device=world_device
            )
        ),
        actor=LocalActor(
            ActorFlowSDELearner(
                config.actor_learner, config.sampler, config.reward, base(), run_seed=config.seed, device=actor_device
            )
        ),
        broker=broker,
        persist=save_episode,
        restore=load_episode,
        close=pool.close,
    )


def evaluate_local(
    env_config: EnvConfig, policy: WAM, split: Split, episodes: int, *, seed: int, config: Config, folder: Path
) -> dict[str, Any]:
    """Success of a policy as it is (see `evaluate.evaluate`); `folder` takes the broker's epoch file."""
    torch.set_num_threads(config.threads)
    broker = WeightBroker(config.broker, folder / "epoch.json")
    pool = LocalPool(lambda wanted: make_env(env_config, wanted), policy, broker, config.rollout.max_attempts)
    try:
        pair = broker.begin(policy.export("world"), policy.export("actor"), interface=policy.interface_digest)
        env = pool.env(split)
        office = TicketOffice(seed, env.env_spec, config.rollout, env.tasks)
        return evaluate(pool, office.eval_tickets(split, episodes), pair, env_spec=env.env_spec, split=split)
    finally:
        pool.close()


def load_checkpoint_pair(folder: Path, policy: WAM) -> None:
    """Put the published pair of a run's checkpoint into `policy` (made from the run's base).

    Raises CheckpointError for a damaged checkpoint and ValueError for one made with another interface.
    """
    checkpoints.verify(folder)
    interface = checkpoints.read_json(folder / "run.json")["broker"]["pair"]["interface"]
    if interface != policy.interface_digest:
        raise ValueError(
            f"{folder}: its pair has interface {interface!r}, this policy {policy.interface_digest!r} (another "
            "architecture, codec, text encoder or normaliser): use the base the run was started from"
        )
    policy.load_pair(checkpoints.read_snapshot(folder / "world.npz"), checkpoints.read_snapshot(folder / "actor.npz"))


def learner_devices(device: str) -> tuple[str, str]:
    """(video, actor) learner's device: one GPU each where there are two, shared where there is one, else the CPU."""
    count = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and count == 0:
        raise ValueError("device = 'cuda': torch finds no GPU here; use 'auto' or 'cpu'")
    return ("cpu", "cpu") if count == 0 else ("cuda:0", f"cuda:{min(1, count - 1)}")


# ------------------------------------------------------------------------------------------------ pool


class LocalPool:
    """One environment at a time and one policy; a deadline cannot be enforced in one process, a retry can."""

    def __init__(
        self, env_of: Callable[[Split], ChunkEnv], policy: Policy, broker: Broker, max_attempts: int
    ) -> None:
        self._env_of, self._policy, self._broker, self._max_attempts = env_of, policy, broker, max_attempts
        self._env: ChunkEnv | None = None
        self._loaded: tuple[str, str] | None = None
        self._errors, self._faults = 0, Counter[str]()

    def env(self, split: Split) -> ChunkEnv:
        """The environment for this split; another split's is closed first, because a simulator is large."""
        if self._env is None or self._env.split != split:
            self.close()
            self._env = self._env_of(split)
        return self._env

    @property
    def env_spec(self) -> EnvSpec:
        return self.env("train").env_spec

    @property
    def tasks(self) -> tuple[int, ...]:
        return self.env("train").tasks

    def run(self, tickets: Sequence[Ticket], pair: Pair) -> list[tuple[EpisodeSummary, Episode]]:
        pair, world, actor = self._broker.pull(pair.order)
        if self._loaded != (pair.world, pair.actor):
            self._policy.load_pair(world, actor)
            self._loaded = (pair.world, pair.actor)
        by_task = sorted(range(len(tickets)), key=lambda place: tickets[place].task_id)  # a simulator holds one task
        episodes = {place: self._attempt(tickets[place], pair) for place in by_task}
        return [(summarise(episodes[place]), episodes[place]) for place in range(len(tickets))]

    def metrics(self) -> Metrics:
        """The names that `cluster_pool.ElasticPool` uses."""
        return {
            "rollout/workers": 1.0,
            "rollout/worker_errors": float(self._errors),
            "rollout/reissued_tickets": float(self._errors),
            "rollout/deadlines_missed": 0.0,
            "rollout/worker_restarts": 0.0,
            **self._faults,
        }

    def close(self) -> None:
        if self._env is not None:
            self._env.close()  # type: ignore[no-untyped-call]  # gymnasium's
            self._env = None

    def _attempt(self, ticket: Ticket, pair: Pair) -> Episode:
        errors: list[Exception] = []
        while len(errors) < self._max_attempts:
            try:
                return rollout(self._env_for(ticket), self._policy, ticket, pair)
            except ValueError:  # a misfit, not a failure: it would come again
                raise
            except Exception as error:  # whatever a simulator raises: a fresh one gets the same ticket
                errors.append(error)
                self._errors += 1
                if (name := fault_metric(error)) is not None:
                    self._faults[name] += 1
                self.close()
        first = errors[0]
        raise RuntimeError(f"ticket {ticket.ticket_id} failed {len(errors)} times, at first: {first}") from first

    def _env_for(self, ticket: Ticket) -> ChunkEnv:
        spec = (self._env or self.env("train")).env_spec
        return self.env(split_of(spec, ticket.init_state_id))


# ------------------------------------------------------------------------------------------------ learner ports


def done(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run now; the result or the error lies in the future, as from a remote learner."""
    future: Future[T] = Future()
    try:
        future.set_result(call(*args, **kwargs))
    except Exception as error:
        future.set_exception(error)
    return future


class LocalVideo:
    """`training.VideoPort` on a learner in this process."""

    def __init__(self, learner: VideoSFTLearner) -> None:
        self._learner = learner
        self.interface = learner.policy.interface_digest

    def update(self, handles: Sequence[Episode], index: int) -> Future[Metrics]:
        return done(self._learner.update, handles, index=index)

    def export(self) -> Future[Snapshot]:
        return done(self._learner.export)

    def drift_from(self, digest: str) -> Future[float]:
        return done(self._learner.drift_from, digest)

    def state(self) -> Future[dict[str, Any]]:
        return done(self._learner.state)

    def load_state(self, state: Mapping[str, Any]) -> Future[None]:
        return done(self._learner.load_state, state)


class LocalActor:
    """`training.ActorPort` on a learner in this process."""

    def __init__(self, learner: ActorFlowSDELearner) -> None:
        self._learner = learner
        self.interface = learner.policy.interface_digest

    def remember(self, pair: Pair, world: Snapshot, actor: Snapshot) -> Future[None]:
        return done(self._learner.remember, pair, world, actor)

    def rebase(self, world: Snapshot) -> Future[None]:
        return done(self._learner.rebase, world)

    def update(self, handles: Sequence[Episode], index: int) -> Future[Metrics]:
        return done(self._learner.update, handles, index=index)

    def export(self) -> Future[Snapshot]:
        return done(self._learner.export)

    def trained_against_world(self) -> Future[str]:
        return done(lambda: self._learner.trained_against_world)

    def clip(self) -> Future[dict[str, Any] | None]:
        return done(self._learner.clip)

    def state(self) -> Future[dict[str, Any]]:
        return done(self._learner.state)

    def load_state(self, state: Mapping[str, Any]) -> Future[None]:
        return done(self._learner.load_state, state)
