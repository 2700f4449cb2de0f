"""Our LIBERO against the stock one, bit for bit, and what stock does not promise: quiet, small, one thread, splits."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.libero import CAMERAS, DUMMY_ACTION, LiberoConfig, LiberoEnv
from envs.libero_stock import load_suite, quiet

pytestmark = [pytest.mark.sim, pytest.mark.timeout(900)]

RESOLUTION, SEED = 48, 11


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoEnv]:
    env = LiberoEnv(LiberoConfig(resolution=RESOLUTION, max_steps=60), split="train")
    yield env
    env.close()


def some_actions(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (steps, 7)).astype(np.float32)


def stock_env(suite: str, task_id: int, *, cameras: bool) -> Any:
    """The package's own environment; without cameras its physics is the same and it builds in half the time."""
    tasks = load_suite(suite)
    with quiet():
        import libero.libero.envs  # noqa: F401 - bridges robosuite 1.4 to this mujoco
        from libero.libero.envs.env_wrapper import ControlEnv

        return ControlEnv(
            bddl_file_name=tasks.get_task_bddl_file_path(task_id), camera_heights=RESOLUTION, camera_widths=RESOLUTION,
            has_offscreen_renderer=cameras, use_camera_obs=cameras,
        )  # fmt: skip


def hard_reset(stock: Any, init_state: np.ndarray, seed: int) -> dict[str, Any]:
    """Public evaluations' order: seed, reset (which compiles the scene), set_init_state, settle."""
    make_current(stock)
    stock.seed(seed)
    with quiet():
        stock.reset()
    stock.set_init_state(init_state)
    for _ in range(10):
        obs = stock_step(stock, DUMMY_ACTION)
    return obs


def stock_step(stock: Any, action: np.ndarray) -> dict[str, Any]:
    make_current(stock)
    return stock.step(action.astype(np.float64))[0]


def make_current(stock: Any) -> None:
    """Two GL contexts live in this process, and robosuite draws into, and frees, whatever is the current one's."""
    if stock.env.has_offscreen_renderer:
        stock.sim._render_context_offscreen.gl_ctx.make_current()


def assert_same_physics(env: LiberoEnv, stock: Any) -> None:
    for name in ("qpos", "qvel", "qacc_warmstart", "time"):
        ours, theirs = getattr(env.inner.sim.data._data, name), getattr(stock.sim.data._data, name)
        assert np.array_equal(ours, theirs), f"{name} differs by up to {np.abs(ours - theirs).max()}"


def disturb(env: LiberoEnv, task_id: int) -> None:
    """Leave behind what a soft reset must undo: a half-closed gripper, moved arm and objects."""
    env.reset_to(task_id, 39, seed=1)
    actions = some_actions(16, seed=5)
    actions[:, 6] = 1.0
    env.step_chunk(actions, capture_at=())


# ------------------------------------------------------------------------------------------------ equal to stock


def test_soft_reset_and_lazy_frames_equal_hard_reset_and_stock_frames(env: LiberoEnv) -> None:
    stock = stock_env("libero_object", 0, cameras=True)
    disturb(env, 0)
    ours = env.reset_to(0, 7, SEED)
    obs = hard_reset(stock, load_suite("libero_object").get_task_init_states(0)[7], SEED)
    assert_same_physics(env, stock)
    assert_same_observation(ours, obs)
    for seed in range(2):
        actions = some_actions(8, seed)
        chunk = env.step_chunk(actions, capture_at=(4, 8))
        for offset, action in enumerate(actions, start=1):
            obs = stock_step(stock, action)
            if offset in (4, 8):
                assert_same_observation(chunk.captures[offset], obs)
        assert_same_physics(env, stock)
    make_current(stock)
    stock.close()


def assert_same_observation(ours: Any, obs: dict[str, Any]) -> None:
    for view, camera in enumerate(CAMERAS):
        theirs = obs[f"{camera}_image"][::-1, ::-1]
        assert theirs.std() > 10, "a black picture proves nothing"
        assert np.array_equal(ours.frames[view], theirs)
    assert np.array_equal(ours.state[:3], obs["robot0_eef_pos"].astype(np.float32))
    assert np.array_equal(ours.state[6:], obs["robot0_gripper_qpos"].astype(np.float32))
    # Axis-angle of the quaternion (x, y, z, w): angle 2 acos(w) about (x, y, z).
    *axis, w = obs["robot0_eef_quat"]
    assert np.allclose(ours.state[3:6], 2 * np.arccos(w) * np.array(axis) / np.linalg.norm(axis), atol=1e-6)


def test_soft_reset_equals_hard_reset_after_the_task_changed(env: LiberoEnv) -> None:
    compare_physics(env, "libero_object", 1, init_states=(12,), steps=16)


@pytest.mark.slow
@pytest.mark.parametrize("task_id", range(10))
def test_soft_reset_equals_hard_reset_for_forty_random_steps(env: LiberoEnv, task_id: int) -> None:
    compare_physics(env, "libero_object", task_id, init_states=(0, 13, 39), steps=40)


@pytest.mark.slow
@pytest.mark.parametrize(("suite", "task_id"), [("libero_goal", 0), ("libero_10", 3), ("libero_10", 2)])
def test_soft_reset_equals_hard_reset_with_drawers_and_stoves(suite: str, task_id: int) -> None:
    """These place fixtures at random and start with a drawer open, which draws from the same generator."""
    env = LiberoEnv(LiberoConfig(suite=suite, resolution=RESOLUTION), split="train")
    compare_physics(env, suite, task_id, init_states=(3,), steps=20)
    env.close()


def compare_physics(env: LiberoEnv, suite: str, task_id: int, init_states: tuple[int, ...], steps: int) -> None:
    stock = stock_env(suite, task_id, cameras=False)
    for init_state_id in init_states:
        disturb(env, task_id)
        env.reset_to(task_id, init_state_id, SEED + init_state_id)
        states = load_suite(suite).get_task_init_states(task_id)
        hard_reset(stock, states[init_state_id], SEED + init_state_id)
        assert_same_physics(env, stock)
        for body in ("body_pos", "body_quat", "site_rgba"):
            assert np.array_equal(getattr(env.inner.sim.model, body), getattr(stock.sim.model, body)), body
        for start in range(0, steps, 8):
            actions = some_actions(min(8, steps - start), seed=start)
            env.step_chunk(actions, capture_at=())
            for action in actions:
                stock_step(stock, action)
        assert_same_physics(env, stock)
        if suite != "libero_object":
            break  # stock's later resets draw from a longer list each time and are no reference
    stock.close()


# ------------------------------------------------------------------------------------------------ lazy, quiet, careful


def test_only_captured_steps_are_drawn(env: LiberoEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    env.reset_to(1, 0, SEED)
    sim, drawn = env.inner.sim, []
    render = sim.render
    monkeypatch.setattr(sim, "render", lambda **kw: drawn.append(kw["camera_name"]) or render(**kw), raising=False)
    env.step_chunk(some_actions(8), capture_at=())
    assert drawn == []
    env.step_chunk(some_actions(8), capture_at=(4, 8))
    assert drawn == [*CAMERAS, *CAMERAS]
    env.reset_to(1, 0, SEED)
    assert drawn == [*CAMERAS] * 3


def test_numpys_global_generator_is_left_alone(env: LiberoEnv) -> None:
    np.random.seed(3)
    expected = np.random.random(2)
    np.random.seed(3)
    env.reset_to(1, 4, seed=99)
    env.step_chunk(some_actions(2), capture_at=(2,))
    assert np.array_equal(np.random.random(2), expected)


def test_another_thread_is_refused(env: LiberoEnv) -> None:
    env.reset_to(1, 4, seed=0)
    messages: list[str] = []

    def use() -> None:
        for call in (lambda: env.step_chunk(some_actions(1), ()), lambda: env.reset_to(1, 0, 0)):
            with pytest.raises(RuntimeError) as error:
                call()
            messages.append(str(error.value))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(timeout=60)
    assert len(messages) == 2 and all("belongs to one thread" in message for message in messages)


def test_a_worker_asks_nothing_prints_nothing_and_leaves_no_settings_in_the_home_folder(tmp_path: Path) -> None:
    code = (
        "from envs.libero import *; env = LiberoEnv(LiberoConfig(), 'train')\n"
        "import libero.libero.envs, os, sys; print(len(env.env_spec.instructions))"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop("LIBERO_CONFIG_PATH", None)
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "10\n", "")
    assert list(tmp_path.rglob("*libero*")) == []


# ------------------------------------------------------------------------------------------------ success, spec


def test_success_ends_the_episode_and_is_not_truncation(env: LiberoEnv) -> None:
    env.reset_to(1, 0, SEED)
    inner = env.inner
    target, basket = inner.parsed_problem["goal_state"][0][1], inner.objects_dict["basket_1"]
    assert env.step_chunk(DUMMY_ACTION[None], capture_at=()).success is False
    position = inner.sim.data.body_xpos[inner.obj_body_id[basket.name]] + np.array([0, 0, 0.06])
    inner.sim.data.set_joint_qpos(inner.objects_dict[target].joints[-1], np.concatenate([position, [1, 0, 0, 0]]))
    chunk = env.step_chunk(np.tile(DUMMY_ACTION, (8, 1)), capture_at=(8,))
    assert (chunk.success, chunk.terminated, chunk.truncated, chunk.reward) == (True, True, False, 1.0)
    assert chunk.steps < 8 and chunk.captures == {}


def test_the_spec_follows_the_public_conventions(env: LiberoEnv) -> None:
    spec = LiberoEnv(LiberoConfig(), split="train").env_spec
    assert (spec.name, spec.views, spec.state_dim, spec.action_dim) == ("libero_object", ("agent", "wrist"), 8, 7)
    assert (spec.max_steps, len(spec.instructions)) == (280, 10)
    assert spec.instructions[0] == "pick up the alphabet soup and place it in the basket"
    assert spec.init_states == {"train": range(40), "held_out": range(40, 50)}
    assert LiberoEnv(LiberoConfig(suite="libero_spatial"), split="train").env_spec.max_steps == 220
    assert LiberoEnv(LiberoConfig(suite="libero_goal_swap"), split="train").env_spec.max_steps == 300
    with pytest.raises(ValueError, match="suite = 'libero_nothing' is not in the installed libero package"):
        LiberoEnv(LiberoConfig(suite="libero_nothing"), split="train")
    with pytest.raises(ValueError, match=r"tasks = \[3, 10\] names task 10, but libero_object has tasks 0..9"):
        LiberoEnv(LiberoConfig(tasks=(3, 10)), split="train")


@pytest.mark.slow
def test_memory_does_not_grow_with_task_changes_and_stays_under_its_bound() -> None:
    code = (
        "from envs.libero import *; from benchmarks.env_speed import resident_mib\n"
        "env = LiberoEnv(LiberoConfig(), 'train')\n"
        "for task in (0, 1, 2, 3): env.reset_to(task, 0, 0); print(resident_mib())"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=800, check=True)
    first, *later = (float(line) for line in done.stdout.split())
    assert first <= 1400 and max(later) <= first + 60
