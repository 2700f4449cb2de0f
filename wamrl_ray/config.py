"""The configuration of a run: a tree of frozen dataclasses.  Command line -> everyone; nobody ever writes to it.

Each component's dataclass stands beside the component; this file adds those of the runtime and joins them.  A class's
defaults are the vetted setting, a YAML file in `configs/` is a sparse difference, and a later file or a dotted
command-line override (`--actor-learner.lr 1e-4`) wins over an earlier one.

    load_config(files, overrides) ──► Config ──► to_json ──► run folder, checkpoints ──► from_json ──► an equal Config
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from envs.counting import CountingConfig
from envs.libero import LiberoConfig
from envs.reach import ReachConfig
from envs.rlbench import RLBenchConfig
from envs.water_plants import WaterPlantsConfig
from learners.actor_config import ActorFlowSDEConfig
from learners.video_config import VideoSFTConfig
from wamrl_ray.config_files import ConfigError, ConfigTree, load_tree
from wamrl_ray.policy.flow_sde import SamplerConfig
from wamrl_ray.rewards.reconstruction import RewardConfig
from wamrl_ray.types import Split

__all__ = ["Config", "ConfigError", "EnvConfig", "from_json", "load_config", "require", "to_json"]

EnvConfig = LiberoConfig | WaterPlantsConfig | RLBenchConfig | ReachConfig | CountingConfig


def require(condition: bool, field_name: str, value: object, remedy: str) -> None:
    """Raise the one message a user sees for a wrong value."""
    if not condition:
        raise ValueError(f"{field_name} = {value!r}: {remedy}")


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How episodes are made."""

    num_workers: int = 2
    episodes_per_iteration: int = 16
    group_size: int = 4
    "tickets that share task and initial state, for group-relative returns; divides episodes_per_iteration"
    deadline_s: float = 180.0
    "wall seconds one episode may take before its worker is killed and the ticket reissued"
    max_attempts: int = 3
    "times one ticket is tried before the run fails with the last error"
    max_staleness: int = 0
    "actor updates an episode may lag behind at consumption; 0 = synchronous"

    def __post_init__(self) -> None:
        episodes = self.episodes_per_iteration
        require(self.num_workers >= 1, "rollout.num_workers", self.num_workers, "use at least 1 worker")
        require(episodes >= 1, "rollout.episodes_per_iteration", episodes, "use >= 1")
        divides = self.group_size >= 1 and episodes % self.group_size == 0
        remedy = f"use a divisor of rollout.episodes_per_iteration = {episodes}"
        require(divides, "rollout.group_size", self.group_size, remedy)
        require(self.deadline_s > 0, "rollout.deadline_s", self.deadline_s, "use a positive number of seconds")
        require(self.max_attempts >= 1, "rollout.max_attempts", self.max_attempts, "use >= 1")
        require(self.max_staleness == 0, "rollout.max_staleness", self.max_staleness, "use 0 (synchronous)")


@dataclass(frozen=True, kw_only=True)
class StoreConfig:
    max_bytes: int = 2 * 1024**3
    "successes kept for the video learner, in bytes of their arrays; the oldest of the best-filled task leaves first"
    max_failure_bytes: int = 512 * 1024**2
    "the same for failures, where `video_learner.failures` asks for any: they never push a success out"

    def __post_init__(self) -> None:
        require(self.max_bytes > 0, "store.max_bytes", self.max_bytes, "use a positive number of bytes")
        failures = self.max_failure_bytes
        require(failures > 0, "store.max_failure_bytes", failures, "use a positive number of bytes")


@dataclass(frozen=True, kw_only=True)
class BrokerConfig:
    max_feature_drift: float = 1.0
    "largest mean feature KL between a world and the one its actor was trained against; beyond it the pair is refused"
    keep_pairs: int = 4
    "published pairs whose weights stay available beside the leased ones"
    lease_s: float = 600.0
    "seconds without renewal after which a worker's hold on a pair ends"

    def __post_init__(self) -> None:
        require(self.max_feature_drift >= 0, "broker.max_feature_drift", self.max_feature_drift, "use 0 or more nats")
        require(self.keep_pairs >= 1, "broker.keep_pairs", self.keep_pairs, "use at least 1")
        require(self.lease_s > 0, "broker.lease_s", self.lease_s, "use a positive number of seconds")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    episodes: int = 20
    "episodes per evaluation, spread evenly over tasks, then initial states; base and final use the same ones"
    every: int = 0
    "iterations between evaluations; 0 = base and final only"
    split: Split = "held_out"
    "which initial states"

    def __post_init__(self) -> None:
        require(self.episodes >= 0, "evaluation.episodes", self.episodes, "use 0 (no evaluation) or more")
        require(self.every >= 0, "evaluation.every", self.every, "use 0 (base and final only) or more")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int = 1
    "iterations between checkpoints; the last iteration is always saved"
    keep: int = 3
    "checkpoints kept; older ones are deleted after a newer one is complete"

    def __post_init__(self) -> None:
        require(self.every >= 1, "checkpoint.every", self.every, "use at least 1")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "use at least 1")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything a synchronous run is a function of, beside the code and the worker count."""

    seed: int = 0
    iterations: int = 10
    base: str = "tiny_libero_object"
    "shipped checkpoint name or a directory: architecture, normaliser and starting weights"
    env: EnvConfig = field(default_factory=LiberoConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    video_learner: VideoSFTConfig = field(default_factory=VideoSFTConfig)
    actor_learner: ActorFlowSDEConfig = field(default_factory=ActorFlowSDEConfig)
    broker: BrokerConfig = field(default_factory=BrokerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    threads: int = 1
    "CPU threads of every worker and learner; part of the config because it may change the last bits of a sum"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    "of the learners; auto: one GPU each where there are two, shared where there is one, else CPU"

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed", self.seed, "use 0 or a positive number")
        require(self.iterations >= 0, "iterations", self.iterations, "use 0 (evaluate only) or more")
        self.actor_learner.check_sampler(self.sampler)
        require(self.threads >= 1, "threads", self.threads, "use at least 1 thread")
        alone = self.rollout.group_size == 1 and self.actor_learner.advantage.kind == "group"
        remedy = "an episode alone has nothing to be compared with; use 2 or more, or actor_learner.advantage.kind gae"
        require(not alone, "rollout.group_size", self.rollout.group_size, remedy)
        versions = self.video_learner.probe_versions
        remedy = "use at least 4: the newest world, the published one, and those that two actors were trained against"
        require(versions >= 4, "video_learner.probe_versions", versions, remedy)


# ------------------------------------------------------------------------------------------------ loading


def load_config(files: Sequence[Path | str] = (), overrides: Sequence[str] = ()) -> Config:
    """Defaults, then each YAML file, then the overrides (`["--seed", "3", "--actor-learner.lr=1e-4"]`); later wins.

    A file is a path or the name of a shipped preset ("debug", "learners/grpo").  A section that names another `kind`
    than the one below it replaces that section whole.  Raises ConfigError: one message with file, key, value, remedy.
    """
    return load_tree(Config, files, overrides)


def to_json(config: Config) -> str:
    """The whole resolved config; `from_json` gives back an equal one."""
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(text: str) -> Config:
    """Read `to_json`'s text, with the same checks as `load_config`."""
    tree = ConfigTree(Config)
    tree.add(json.loads(text), "config.json")
    return tree.build()
