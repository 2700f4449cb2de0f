"""What runs inside the cluster's actors, as plain classes; `cluster.py` puts them behind Ray and wires them.

    RolloutWorker   ticket, pair ──► (summary, episode)     one simulator, one policy, pulls weights at an episode start
    LearnerHost     one learner on its own device

Constructors only keep their small arguments, because Ray runs them again after a death and never retries one that
raises; what can fail or takes long is `setup`, which may be called any number of times.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch

from envs.base import ChunkEnv
from envs.build import make_env
from wamrl_ray.config import Config
from wamrl_ray.rollout import EpisodeSummary, rollout, summarise
from wamrl_ray.tickets import split_of
from wamrl_ray.types import Episode, Metrics, Pair, Policy, Snapshot, Split, Ticket

if TYPE_CHECKING:
    from learners.actor_flow_sde import ActorFlowSDELearner
    from learners.video_sft import VideoSFTLearner
    from wamrl_ray.policy.wam import WAM

Pull = Callable[[Pair], tuple[Snapshot, Snapshot]]
"""The (world, actor) of a published pair, from the broker."""


def base_policy(config: Config) -> WAM:
    """A fresh copy of the policy the run starts from, frozen parts included."""
    # Imported here: the network's libraries take seconds, and a worker with a policy of its own does without them.
    from wamrl_ray.policy.bases import load_base

    return load_base(config.base, config.sampler)


class RolloutWorker:
    """Runs one ticket at a time.  An episode that was returned outlives this process."""

    def __init__(self, config: Config, policy_of: Callable[[Config], Policy] = base_policy) -> None:
        self._config, self._policy_of = config, policy_of
        self._pull: Pull | None = None
        self._policy: Policy | None = None
        self._env: ChunkEnv | None = None
        self._loaded: tuple[str, str] | None = None

    def setup(self, pull: Pull) -> int:
        """Load the policy and build the environment; returns the process id."""
        self._pull = pull
        if self._policy is None:
            torch.set_num_threads(self._config.threads)
            self._policy = self._policy_of(self._config)
        self._env = self._env or make_env(self._config.env, "train")
        return os.getpid()

    def run(self, ticket: Ticket, pair: Pair) -> tuple[EpisodeSummary, Episode]:
        """One episode acted with `pair`, whose weights are pulled, verified and swapped in at once if they are new.

        After an exception the simulator is not trusted any more: the next ticket gets a fresh one.
        """
        assert self._policy is not None and self._pull is not None, "setup() comes first"
        if self._loaded != (pair.world, pair.actor):
            self._policy.load_pair(*self._pull(pair))
            self._loaded = (pair.world, pair.actor)
        try:
            episode = rollout(self._env_for(ticket), self._policy, ticket, pair)
        except Exception:
            self._close_env()
            raise
        return summarise(episode), episode

    def _env_for(self, ticket: Ticket) -> ChunkEnv:
        """One environment at a time: another split's is closed first, because a simulator is large."""
        env = self._env or make_env(self._config.env, "train")
        split: Split = split_of(env.env_spec, ticket.init_state_id)
        if env.split != split:
            env.close()  # type: ignore[no-untyped-call]  # gymnasium's
            env = make_env(self._config.env, split)
        self._env = env
        return env

    def _close_env(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            env.close()  # type: ignore[no-untyped-call]  # gymnasium's


class LearnerHost:
    """One learner and its device.  Calls come in order from the driver alone; it calls nobody."""

    def __init__(
        self, component: Literal["world", "actor"], config: Config, policy_of: Callable[[Config], WAM]
    ) -> None:
        self._component, self._config, self._policy_of = component, config, policy_of
        self._learner: VideoSFTLearner | ActorFlowSDELearner | None = None

    def setup(self, gpu: bool) -> str:
        """Build the learner on `cuda:0` of the GPUs given to this process, or on the CPU; returns the interface digest.

        Raises RuntimeError if it was given a GPU that torch cannot use.
        """
        if gpu and not torch.cuda.is_available():
            raise RuntimeError("torch cannot use the GPU of this process: install a CUDA build or use device = 'cpu'")
        if self._learner is None:
            torch.set_num_threads(self._config.threads)
            self._learner = self._build("cuda:0" if gpu else "cpu")
        return self._learner.policy.interface_digest

    def _build(self, device: str) -> VideoSFTLearner | ActorFlowSDELearner:
        from learners.actor_flow_sde import ActorFlowSDELearner
        from learners.video_sft import VideoSFTLearner
        from wamrl_ray.pretraining import pretraining_windows

        config, base = self._config, self._policy_of(self._config)
        if self._component == "world":
            video, reference = config.video_learner, self._policy_of(config)
            pretraining = pretraining_windows(video.pretraining, base.config)
            return VideoSFTLearner(
                video, base, reference, run_seed=config.seed, pretraining=pretraining, device=device
            )
        return ActorFlowSDELearner(
            config.actor_learner, config.sampler, config.reward, base, run_seed=config.seed, device=device
        )

    def update(self, index: int, *episodes: Episode) -> Metrics:
        assert self._learner is not None, "setup() comes first"
        return self._learner.update(episodes, index=index)

    def call(self, method: str, *args: Any) -> Any:
        """Any other method or attribute of the learner by name; the driver's ports say which and with what types."""
        assert self._learner is not None, "setup() comes first"
        value = getattr(self._learner, method)
        return value(*args) if callable(value) else value
