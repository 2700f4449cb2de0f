"""Demonstrations: what ran, what the expert would have done, and files that can be trusted."""

from pathlib import Path

import numpy as np
import pytest

from envs.build import make_env
from envs.counting import CountingConfig
from envs.reach import ReachConfig
from wamrl_ray.collect import (
    CollectConfig,
    Disturbance,
    collect,
    demonstrate,
    load_demonstration,
    load_demonstrations,
    make_expert,
    save_demonstration,
)
from wamrl_ray.policy.wam import WAM, WAMConfig

NOISY = CollectConfig(capture_every=2, noise_share=1.0)


def test_a_label_is_the_clean_expert_at_the_state_that_the_noise_led_to() -> None:
    env = make_env(ReachConfig(), "train")
    demo = demonstrate(env, 0, 5, 7, NOISY)
    assert demo.obs_step.tolist() == list(range(0, len(demo.obs_step) * 2, 2))
    assert len(demo.state) == len(demo.label) + 1 == len(demo.action) + 1
    assert (demo.action != demo.label).any() and np.abs(demo.action).max() <= 1
    env.reset_to(0, 5, 7)
    expert = make_expert(env)
    for state, action, label in zip(demo.state, demo.action, demo.label, strict=False):
        np.testing.assert_array_equal(expert.act(), label)
        np.testing.assert_array_equal(env._state(), state)
        env.step_chunk(action[None], ())


def test_without_noise_the_expert_acts_itself_and_a_seed_repeats_a_demonstration() -> None:
    env = make_env(ReachConfig(), "train")
    clean = demonstrate(env, 1, 3, 0, CollectConfig(noise_share=0.0))
    np.testing.assert_array_equal(clean.action, clean.label)
    assert clean.success and clean.instruction == "go to the blue disc"
    one, two, other = (demonstrate(env, 1, 3, seed, NOISY) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.action, two.action)
    assert one.action.shape != other.action.shape or (one.action != other.action).any()


def test_a_policy_acts_in_chunks_and_the_expert_labels() -> None:
    env, policy = make_env(ReachConfig(), "train"), WAM(WAMConfig.debug(), seed=0)
    demo = demonstrate(env, 0, 5, 7, CollectConfig(capture_every=4, max_steps=8), policy)
    assert len(demo.action) <= 8 and (demo.action != demo.label).any()
    with pytest.raises(ValueError, match="no scripted expert"):
        demonstrate(make_env(CountingConfig(), "train"), 0, 0, 0, NOISY)


def test_the_gripper_is_forced_open_now_and_then_and_never_gets_noise() -> None:
    config = CollectConfig(open_rate=0.05, noise_share=1.0)
    disturb = Disturbance(config, np.random.default_rng(0), action_dim=7)
    closing = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
    gripper = [float(disturb(closing)[6]) for _ in range(400)]
    assert set(gripper) == {-1.0, 1.0} and 0.1 < gripper.count(-1.0) / 400 < 0.6


def test_a_file_round_trips_and_collection_keeps_what_is_there(tmp_path: Path) -> None:
    demo = demonstrate(make_env(ReachConfig(), "train"), 0, 1, 2, NOISY)
    save_demonstration(demo, tmp_path / "demo_x.npz")
    for name, value in vars(load_demonstration(tmp_path / "demo_x.npz")).items():
        np.testing.assert_array_equal(value, getattr(demo, name))

    out = tmp_path / "out"
    assert collect(ReachConfig(), (0,), 2, out, workers=1) == (2, 2)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    assert collect(ReachConfig(), (0,), 3, out, workers=1)[1] == 1
    assert all((out / name).stat().st_mtime_ns == stamp for name, stamp in before.items())
    assert len(list(load_demonstrations(out))) == 3
    with pytest.raises(ValueError, match="wamrl collect"):
        load_demonstrations(tmp_path / "nothing")
