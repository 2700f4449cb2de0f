"""The RLlib façade: `algo.train()`, checkpoints, callbacks and `tune.Tuner(WAMRL)` as Ray users know them.

    WAMRLConfig().wamrl(config) ──build_algo──► WAMRL ──owns──► System (cluster.py) ──step──► metrics ──► result dict

RLlib drives iterations, results and checkpoints; the rollout pool, both learners and the broker are ours.  Its own
environment runners and learner group do not fit (one module, one update call, a fixed number of runners in a trial, a
weight version that survives a rollback), so the config switches them off and a stub takes the learner group's place.

All contact with RLlib's interfaces is in this file, and `tests/test_algorithm.py` goes through each of them.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import ray
from ray import tune
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_METRICS_LOGGER, COMPONENT_RL_MODULE
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.utils.checkpoints import Checkpointable
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from wamrl_ray import checkpoint as checkpoints
from wamrl_ray.cluster import build_cluster, learner_gpus
from wamrl_ray.config import Config, to_json
from wamrl_ray.config_files import ConfigTree, parse_overrides
from wamrl_ray.jobs import connect
from wamrl_ray.run import System, find_checkpoint
from wamrl_ray.store import EpisodeStore
from wamrl_ray.types import Metrics

CHECKPOINT = "wamrl"
"""Folder of our own checkpoint inside an Algorithm's."""
TRAINING_ITERATION = "training_iteration"


def build_wamrl(config: Config, run_dir: Path) -> WAMRL:
    """What `wamrl train` drives: connect to Ray, build everything.  Drive `.system`, step with `.step_metrics`, then
    `.shutdown()`."""
    started = connect(config.rollout.num_workers, config.threads)
    algo = WAMRLConfig().wamrl(config, run_dir=run_dir).build_algo()
    assert isinstance(algo, WAMRL)
    algo.owns_ray = started
    return algo


class WAMRLConfig(AlgorithmConfig):
    """An AlgorithmConfig that carries a `wamrl_ray.config.Config`.

    >>> rates = tune.loguniform(1e-6, 1e-4)
    >>> config = WAMRLConfig().wamrl(load_config(["debug"]), overrides={"actor_learner.lr": rates})
    >>> tune.Tuner(WAMRL, param_space=config).fit()
    """

    def __init__(self, algo_class: type | None = None) -> None:
        super().__init__(algo_class or WAMRL)
        self.wamrl_config = Config()
        self.wamrl_overrides: dict[str, Any] = {}
        self.wamrl_run_dir: str | None = None
        # Neither RLlib's environment runners nor its checks of them: rollouts are ours.
        self._is_online = False
        self._validate_config = False
        self.log_level = "ERROR"

    def wamrl(
        self, config: Config | None = None, *, overrides: Mapping[str, Any] | None = None, run_dir: Path | None = None
    ) -> Self:
        """Set the run's config, dotted overrides of it (values may be Tune search spaces) and its folder.

        The folder is the trial's own by default; it must be on a disk that all nodes with learners can read if `base`
        is a path.
        """
        if config is not None:
            self.wamrl_config = config
        if overrides is not None:
            self.wamrl_overrides = dict(overrides)
        if run_dir is not None:
            self.wamrl_run_dir = str(Path(run_dir).resolve())
        return self

    def resolved(self) -> Config:
        """The run's config with its overrides; ConfigError names a wrong one."""
        config: Config = self.wamrl_config
        if not self.wamrl_overrides:
            return config
        return override(config, self.wamrl_overrides)

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        return RLModuleSpec(module_class=RLModule)

    def get_multi_rl_module_spec(self, **kwargs: Any) -> MultiRLModuleSpec:
        return MultiRLModuleSpec(rl_module_specs={})

    def get_default_learner_class(self) -> type:
        return object

    def build_learner_group(self, **kwargs: Any) -> Any:
        return _NoLearnerGroup()


class WAMRL(Algorithm):
    """One run behind RLlib's interface.  `system` is the run; everything it started dies with `stop()`."""

    metrics: MetricsLogger
    config: WAMRLConfig
    owns_ray = False
    "whether `shutdown` ends Ray too"

    @classmethod
    def get_default_config(cls) -> WAMRLConfig:
        return WAMRLConfig()

    @classmethod
    def default_resource_request(cls, config: Any) -> tune.PlacementGroupFactory:
        """A trial holds its driver and its learners' GPUs.  Workers are left out, so that a trial starts before all of
        them have room and their number may change; trials at the same time compete for worker CPUs."""
        if not isinstance(config, AlgorithmConfig):
            config = cls.get_default_config().update_from_dict(config)
        gpus = learner_gpus(config.resolved().device) if ray.is_initialized() else 0.0
        return tune.PlacementGroupFactory([{"CPU": 1}, *([{"GPU": gpus}] * (2 if gpus else 0))], strategy="PACK")

    def setup(self, config: Any) -> None:
        super().setup(config)
        run_dir = Path(self.config.wamrl_run_dir or Path(self.logdir) / "run")
        self.system: System = build_cluster(self.config.resolved(), run_dir)
        self.last_metrics: Metrics = {}
        self._begun = False

    def begin(self, checkpoint: Path | None = None) -> None:
        """Publish the base pair, or what a checkpoint of ours holds; the first `train()` does the former."""
        self.system.start(checkpoint)
        self._begun = True

    def training_step(self) -> None:
        """One synchronous iteration: rollout, both updates, commit."""
        if not self._begun:
            self.begin()
        # A resumed run goes on counting where it was.
        self._iteration = self.system.iteration
        self.last_metrics = self.system.step()
        for name, value in self.last_metrics.items():
            self.metrics.log_value(tuple(name.split("/")), value, reduce="item")
        steps, reward = self.last_metrics["rollout/total_env_steps"], self.last_metrics["rollout/env_reward"]
        self.metrics.log_value("num_env_steps_sampled_lifetime", steps, reduce="item")
        self.metrics.log_value(("env_runners", "episode_return_mean"), reward, reduce="item")

    def step_metrics(self) -> Metrics:
        """`train()` for `run.run_training`, which has started the system itself and wants our metrics."""
        self._begun = True
        self.train()  # type: ignore[no-untyped-call]
        return self.last_metrics

    def restore_env_runners(self, env_runner_group: object) -> list[int]:
        """None of RLlib's to restore; our pool minds its own workers."""
        return []

    def cleanup(self) -> None:
        if hasattr(self, "system"):
            self.system.close()
        super().cleanup()

    def shutdown(self) -> None:
        """`stop()`, and the end of Ray if it was started for this run."""
        self.stop()  # type: ignore[no-untyped-call]
        if self.owns_ray:
            ray.shutdown()

    # ------------------------------------------------------------------------------------------------ checkpoints

    def save_to_path(self, path: str | Path | None = None, **kwargs: Any) -> str:
        """Our checkpoint (see `checkpoint.py`) in `path`/wamrl, and beside it what RLlib needs to rebuild this object.

        `path` is a local folder.  Raises CheckpointError if the disk does not take it.
        """
        if not self._begun:
            self.begin()
        target = Path(path) if path is not None else Path(tempfile.mkdtemp(prefix="wamrl_"))
        _copy_checkpoint(self.system.save(), target / CHECKPOINT)
        return str(super().save_to_path(target, **kwargs))

    def restore_from_path(self, path: str | Path, *args: Any, **kwargs: Any) -> None:
        """Continue from a folder `save_to_path` wrote, under a new epoch.  ValueError if it holds no run of ours."""
        self.begin(find_checkpoint(self.system.run_dir, str(Path(path) / CHECKPOINT)))
        Checkpointable.restore_from_path(self, path, *args, **kwargs)

    def get_checkpointable_components(self) -> list[tuple[str, Checkpointable]]:
        return []

    def get_state(self, components: Any = None, *, not_components: Any = None, **kwargs: Any) -> dict[str, Any]:
        return {COMPONENT_METRICS_LOGGER: self.metrics.get_state(), TRAINING_ITERATION: self.training_iteration}

    def set_state(self, state: Mapping[str, Any]) -> None:
        self.metrics.set_state(state[COMPONENT_METRICS_LOGGER])
        self._iteration = state[TRAINING_ITERATION]


class _NoLearnerGroup:
    """Stands where RLlib expects a learner group; `Algorithm.setup` asks it for its weights once."""

    is_remote = False
    is_local = True

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {COMPONENT_LEARNER: {COMPONENT_RL_MODULE: {}}}

    def shutdown(self) -> None:
        """The learners are the system's."""


def override(config: Config, overrides: Mapping[str, Any]) -> Config:
    """`config` with dotted keys replaced, checked as the command line's are."""
    tree = ConfigTree(Config)
    tree.add(json.loads(to_json(config)), "config")
    for values in parse_overrides([f"--{key}={value}" for key, value in overrides.items()]):
        tree.add(values, "overrides")
    return tree.build()


def _copy_checkpoint(folder: Path, target: Path) -> None:
    """A checkpoint folder and the episodes it lists, complete or not there at all."""
    temporary = target.with_name(f".{target.name}.tmp")
    for leftover in (temporary, target):
        if leftover.exists():
            shutil.rmtree(leftover)
    shutil.copytree(folder, temporary / "checkpoints" / folder.name)
    (temporary / "episodes").mkdir()
    for name in EpisodeStore.files(checkpoints.read_json(folder / "run.json")["store"]):
        shutil.copy2(folder.parent.parent / "episodes" / name, temporary / "episodes" / name)
    temporary.rename(target)
