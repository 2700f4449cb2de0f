"""Every touch point with RLlib: config, Tune, result dict, checkpoints, restore in place, clean-up."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import ray
from ray import tune
from ray.rllib.callbacks.callbacks import RLlibCallback

from tests.test_cluster import digests, reach
from wamrl_ray.algorithm import WAMRL, WAMRLConfig, override
from wamrl_ray.config import ConfigError
from wamrl_ray.local import build_local
from wamrl_ray.run import run_training

pytestmark = pytest.mark.usefixtures("ray_cluster")


class CountResults(RLlibCallback):
    """A user's callback."""

    results = 0

    def on_train_result(self, *, algorithm: WAMRL, result: dict, **kwargs: object) -> None:
        result["seen_by_callback"] = algorithm.system.iteration


def pair_digests(algo: WAMRL) -> tuple[str, str]:
    pair = algo.system.broker.current()
    return pair.world, pair.actor


def test_overrides_are_checked_like_the_command_line() -> None:
    config = reach(num_workers=1)
    changed = override(config, {"actor_learner.lr": 1e-3, "seed": 3})
    assert (changed.actor_learner.lr, changed.seed, changed.env) == (1e-3, 3, config.env)
    with pytest.raises(ConfigError, match="actor_learner.lr"):
        WAMRLConfig().wamrl(config, overrides={"actor_learner.rl": 1e-3}).resolved()
    assert WAMRLConfig().wamrl(config).resolved() is config


def test_a_trial_reserves_its_driver_and_no_workers() -> None:
    request = WAMRL.default_resource_request(WAMRLConfig().wamrl(reach(num_workers=3)))
    assert request.bundles == [{"CPU": 1.0}]


def test_tune_checkpoint_continue_and_restore_in_place(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One long test, because each start of a run costs the start of its processes."""
    base = reach(num_workers=1)
    local = build_local(override(base, {"actor_learner.lr": 1e-4}), tmp_path / "local")
    expected = digests(run_training(local, iterations=2))
    local.close()

    space = WAMRLConfig().wamrl(base, overrides={"actor_learner.lr": tune.grid_search([1e-4])})
    space.callbacks(CountResults)
    outcome = tune.Tuner(
        WAMRL,
        param_space=space,
        run_config=tune.RunConfig(
            storage_path=str(tmp_path / "tune"),
            stop={"training_iteration": 1},
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=True),
            verbose=0,
        ),
    ).fit()
    assert not outcome.errors
    result = outcome[0].metrics
    assert result["training_iteration"] == result["seen_by_callback"] == 1
    assert result["rollout"]["episodes"] == 4.0 and result["broker"]["committed"] == 1.0
    assert result["num_env_steps_sampled_lifetime"] == result["rollout"]["total_env_steps"] > 0
    assert 0.0 <= result["env_runners"]["episode_return_mean"] <= 1.0

    with caplog.at_level(logging.WARNING):
        algo = WAMRL.from_checkpoint(outcome[0].checkpoint)
    assert [record.message for record in caplog.records] == []
    assert algo.config.resolved().actor_learner.lr == 1e-4
    assert (algo.training_iteration, algo.system.iteration) == (1, 1)
    first, epoch = pair_digests(algo), algo.system.broker.current().epoch
    saved = algo.save_to_path(tmp_path / "saved")
    result = algo.train()
    assert result["training_iteration"] == 2 and pair_digests(algo) == expected

    algo.restore_from_path(saved)
    assert pair_digests(algo) == first and algo.system.broker.current().epoch > epoch
    assert algo.system.iteration == 1
    assert algo.train()["training_iteration"] == 2 and pair_digests(algo) == expected

    with pytest.raises(ValueError, match="no checkpoint there"):
        algo.restore_from_path(tmp_path)
    learner = algo.system.video._actor
    algo.stop()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(learner.call.remote("export"), timeout=60)
