"""What every environment must do, checked on all of them; and what reach and counting add."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env

from envs.base import ChunkEnv
from envs.build import EnvConfig, make_env
from envs.counting import CountingConfig
from envs.libero import LiberoConfig
from envs.reach import ReachConfig, layout
from envs.rlbench import RLBenchConfig
from envs.water_plants import WaterPlantsConfig
from tests.rlbench_fake import install

CONFIGS: dict[str, EnvConfig] = {
    "reach": ReachConfig(),
    "counting": CountingConfig(),
    "water_plants": WaterPlantsConfig(resolution=32, max_steps=12),
    "libero": LiberoConfig(tasks=(0,), resolution=32, settle_steps=2, max_steps=12),
    "rlbench": RLBenchConfig(resolution=32, max_steps=12),
}


@pytest.fixture(scope="module")
def fake_rlbench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The adapter is real, RLBench and CoppeliaSim are our stand-ins."""
    with pytest.MonkeyPatch.context() as patch:
        install(patch, tmp_path_factory.mktemp("rlbench"))
        yield


@pytest.fixture(
    scope="module",
    params=[
        "reach",
        "counting",
        "rlbench",
        pytest.param("water_plants", marks=pytest.mark.sim),
        pytest.param("libero", marks=[pytest.mark.sim, pytest.mark.timeout(600)]),
    ],
)
def env(request: pytest.FixtureRequest) -> Iterator[ChunkEnv]:
    if request.param == "rlbench":
        request.getfixturevalue("fake_rlbench")
    env = make_env(CONFIGS[request.param], "train")
    yield env
    env.close()


def some_actions(env: ChunkEnv, steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (steps, env.env_spec.action_dim)).astype(np.float32)


# ------------------------------------------------------------------------------------------------ all environments


def test_it_passes_the_checker_of_gymnasium(env: ChunkEnv) -> None:
    with warnings.catch_warnings():
        # Proprioception has no finite bounds; the checker finds that improbable.
        warnings.filterwarnings("ignore", message=".*Box observation space (minimum|maximum) value is.*")
        check_env(env, skip_render_check=True)


def test_observations_and_chunks_have_the_shapes_of_the_spec(env: ChunkEnv) -> None:
    spec = env.env_spec
    observation = env.reset_to(0, 1, seed=3)
    assert observation.frames.shape == (len(spec.views), spec.resolution, spec.resolution, 3)
    assert observation.frames.dtype == np.uint8 and observation.frames.std() >= 0
    assert observation.state.shape == (spec.state_dim,) and observation.state.dtype == np.float32
    chunk = env.step_chunk(some_actions(env, 4), capture_at=(2, 4))
    assert sorted(chunk.captures) == [2, 4] and chunk.steps == 4
    assert chunk.states.shape == (4, spec.state_dim) and chunk.states.dtype == np.float32
    assert np.array_equal(chunk.captures[2].state, chunk.states[1])
    assert set(spec.init_states["train"]).isdisjoint(spec.init_states["held_out"])


def test_an_episode_is_a_function_of_its_start_and_its_actions(env: ChunkEnv) -> None:
    actions = some_actions(env, 4)

    def run() -> tuple[bytes, ...]:
        first = env.reset_to(0, 2, seed=5)
        last = env.step_chunk(actions, capture_at=(4,)).captures[4]
        return first.frames.tobytes(), first.state.tobytes(), last.frames.tobytes(), last.state.tobytes()

    expected = run()
    env.reset_to(0, 7, seed=6)
    env.step_chunk(some_actions(env, 3, seed=9), capture_at=(1,))
    assert run() == expected
    assert env.reset_to(0, 3, seed=5).state.tobytes() + env._frames().tobytes() != expected[1] + expected[0]


def test_one_step_at_a_time_is_the_same_as_a_chunk(env: ChunkEnv) -> None:
    actions = some_actions(env, 3)
    env.reset_to(0, 2, seed=5)
    chunk = env.step_chunk(actions, capture_at=(1, 2, 3))
    env.reset_to(0, 2, seed=5)
    for offset, action in enumerate(actions, start=1):
        obs, *_ = env.step(action)
        assert np.array_equal(obs["frames"], chunk.captures[offset].frames)
        assert np.array_equal(obs["state"], chunk.states[offset - 1])


def test_a_captured_frame_is_the_rendered_one_whatever_else_is_captured(env: ChunkEnv) -> None:
    actions = some_actions(env, 4)
    env.reset_to(0, 2, seed=5)
    every = env.step_chunk(actions, capture_at=(1, 2, 3, 4)).captures
    env.reset_to(0, 2, seed=5)
    last = env.step_chunk(actions, capture_at=(4,)).captures
    assert sorted(last) == [4]
    assert np.array_equal(last[4].frames, every[4].frames) and np.array_equal(last[4].frames, env._frames())
    assert not np.array_equal(every[1].frames, every[4].frames)


def test_rewards_lie_between_0_and_1_and_starts_are_drawn(env: ChunkEnv) -> None:
    starts = set()
    for seed in range(4):
        obs, info = env.reset(seed=seed)
        starts.add((info["task_id"], info["init_state_id"], obs["state"].tobytes(), obs["frames"].tobytes()))
        for action in some_actions(env, 3, seed):
            _, reward, terminated, truncated, info = env.step(action)
            assert np.isfinite(reward) and 0.0 <= reward <= 1.0 and (reward == 0.0 or info["success"])
            if terminated or truncated:
                break
    assert len(starts) == 4


def test_what_it_returned_never_changes_and_can_be_written_to(env: ChunkEnv) -> None:
    actions = some_actions(env, 4)
    first = env.reset_to(0, 2, seed=5)
    chunk = env.step_chunk(actions[:2], capture_at=(1, 2))
    arrays = [first.frames, first.state, chunk.states, chunk.captures[1].frames, chunk.captures[2].state]
    copies = [array.copy() for array in arrays]
    env.step_chunk(actions[2:3], capture_at=(1,))
    assert all(np.array_equal(a, c) for a, c in zip(arrays, copies, strict=True))
    expected = env.step_chunk(actions[3:], capture_at=(1,)).captures[1]
    env.reset_to(0, 2, seed=5)
    for array in arrays:
        array.fill(0)
    written = env.step_chunk(actions[:3], capture_at=(1, 2, 3))
    written.captures[3].frames.fill(0)
    written.states.fill(0)
    again = env.step_chunk(actions[3:], capture_at=(1,)).captures[1]
    assert np.array_equal(again.frames, expected.frames) and np.array_equal(again.state, expected.state)


def test_a_training_environment_refuses_held_out_initial_states(env: ChunkEnv) -> None:
    held_out = env.env_spec.init_states["held_out"]
    for init_state_id in (held_out.start, held_out.stop - 1, held_out.stop, -1):
        with pytest.raises(ValueError, match=f"init_state_id = {init_state_id} is outside of split 'train'"):
            env.reset_to(0, init_state_id, seed=0)
        with pytest.raises(ValueError, match="outside of split 'train'"):
            env.reset(seed=0, options={"task_id": 0, "init_state_id": init_state_id})


@pytest.mark.parametrize("name", CONFIGS)
def test_a_held_out_environment_refuses_training_states_and_unknown_splits_do_not_exist(
    name: str, fake_rlbench: None
) -> None:
    env = make_env(CONFIGS[name], "held_out")
    with pytest.raises(ValueError, match="outside of split 'held_out'"):
        env.reset_to(0, 0, seed=0)
    with pytest.raises(ValueError, match="split = 'test'"):
        make_env(CONFIGS[name], "test")  # type: ignore[arg-type]


def test_a_bad_action_is_named_and_not_executed(env: ChunkEnv) -> None:
    env.reset_to(0, 2, seed=5)
    before = env._state()
    bad = some_actions(env, 3)
    bad[1, -1] = np.nan
    with pytest.raises(ValueError, match=rf"actions\[1, {env.env_spec.action_dim - 1}\] = nan is not finite"):
        env.step_chunk(bad, capture_at=())
    with pytest.raises(ValueError, match=r"actions have shape \(3, 9\)"):
        env.step_chunk(np.zeros((3, 9), np.float32), capture_at=())
    with pytest.raises(ValueError, match=r"actions have shape \(0, "):
        env.step_chunk(some_actions(env, 0), capture_at=())
    for offset in (0, 4):
        with pytest.raises(ValueError, match=rf"capture_at = \[{offset}\] must lie within 1..3"):
            env.step_chunk(some_actions(env, 3), capture_at=(offset,))
    assert np.array_equal(env._state(), before)


def test_it_truncates_at_its_own_clock_and_must_then_be_reset(env: ChunkEnv) -> None:
    env.reset_to(0, 1, seed=0)
    limit = env.env_spec.max_steps
    still = np.zeros((limit + 5, env.env_spec.action_dim), np.float32)
    chunk = env.step_chunk(still, capture_at=(limit + 5,))
    assert (chunk.steps, chunk.truncated, chunk.terminated, chunk.success) == (limit, True, False, False)
    assert chunk.captures == {} and len(chunk.states) == limit
    with pytest.raises(ResetNeeded, match=r"call reset_to\(\) first"):
        env.step_chunk(still[:1], capture_at=())


def test_unknown_tasks_and_options_are_refused(env: ChunkEnv) -> None:
    with pytest.raises(ValueError, match="task_id = 99 is not one of"):
        env.reset_to(99, 0, seed=0)
    with pytest.raises(ValueError, match="unknown key 'task'"):
        env.reset(options={"task": 0})


def test_no_simulator_is_imported_to_read_or_build_a_toy() -> None:
    code = (
        "import sys; from envs.build import *; make_env(ReachConfig(), 'train').reset_to(0, 0, 0); LiberoConfig();"
        "sys.exit(any(m in sys.modules for m in ('mujoco', 'robosuite', 'libero', 'rlbench', 'pyrep')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)


# ------------------------------------------------------------------------------------------------ drawing starts


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_resets_draw_only_from_the_split_and_are_seeded(split: str) -> None:
    env = make_env(CountingConfig(), split)  # type: ignore[arg-type]
    drawn = [(i["task_id"], i["init_state_id"]) for _, i in (env.reset(seed=4), *(env.reset() for _ in range(199)))]
    assert {init for _, init in drawn} == set(env.env_spec.init_states[env.split])
    assert {task for task, _ in drawn} == {0, 1}
    assert drawn[:3] == [(i["task_id"], i["init_state_id"]) for _, i in (env.reset(seed=4), env.reset(), env.reset())]


# ------------------------------------------------------------------------------------------------ three booleans


def run_counting(config: CountingConfig, init_state_id: int) -> list[tuple[int, float, bool, bool, bool]]:
    env = make_env(config, "train")
    env.reset_to(0, init_state_id, seed=0)
    outcomes = []
    while not (outcomes and any(outcomes[-1][3:])):
        c = env.step_chunk(np.zeros((5, 1), np.float32), capture_at=(5,))
        outcomes.append((c.steps, c.reward, c.success, c.terminated, c.truncated))
    return outcomes


def test_success_termination_and_truncation_are_three_things() -> None:
    ends = CountingConfig(max_steps=12, success_step=7)
    goes_on = CountingConfig(max_steps=12, success_step=7, ends_on_success=False)
    assert run_counting(ends, 0) == [(5, 0.0, False, False, False), (2, 1.0, True, True, False)]
    # Success is latched, and the episode runs into the clock.
    assert run_counting(goes_on, 0)[1:] == [(5, 1.0, True, False, False), (2, 0.0, True, False, True)]
    assert run_counting(ends, 1)[2:] == [(2, 0.0, False, False, True)]
    # Success in the very last step is the task's end, not the clock's.
    assert run_counting(CountingConfig(max_steps=7, success_step=7), 0)[1:] == [(2, 1.0, True, True, False)]


# ------------------------------------------------------------------------------------------------ counting


def test_counting_shows_step_and_start_in_state_and_frames() -> None:
    env = make_env(CountingConfig(max_steps=300, success_step=300), "train")
    env.reset_to(1, 6, seed=0)
    capture = env.step_chunk(np.zeros((260, 1), np.float32), capture_at=(260,)).captures[260]
    assert capture.state.tolist() == [260, 6]
    assert np.unique(capture.frames.reshape(-1, 3), axis=0).tolist() == [[260 - 256, 1, 6]]


def test_counting_fails_as_asked_and_once_with_a_marker(tmp_path: Path) -> None:
    config = CountingConfig(fault="raise", fault_init_state=3, fault_marker=str(tmp_path / "fired"))
    env, action = make_env(config, "train"), np.zeros((1, 1), np.float32)
    env.reset_to(0, 2, seed=0)
    env.step_chunk(action, ())
    env.reset_to(0, 3, seed=0)
    with pytest.raises(RuntimeError, match="init_state_id = 3"):
        env.step_chunk(action, ())
    env.reset_to(0, 3, seed=0)
    assert env.step_chunk(action, ()).steps == 1
    hanging = make_env(CountingConfig(fault="hang"), "train")
    hanging.reset_to(0, 0, seed=0)
    thread = threading.Thread(target=hanging.step_chunk, args=(action, ()), daemon=True)
    thread.start()
    thread.join(timeout=0.3)
    assert thread.is_alive()
    code = (
        "from envs.build import *; import numpy as np; e = make_env(CountingConfig(fault='exit'), 'train');"
        "e.reset_to(0, 0, 0); e.step_chunk(np.zeros((1, 1)), ())"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=150).returncode == 13


# ------------------------------------------------------------------------------------------------ reach


def test_reach_is_solved_by_the_straight_way_from_every_held_out_start() -> None:
    env = make_env(ReachConfig(), "held_out")
    for init_state_id in env.env_spec.init_states["held_out"]:
        start, discs = layout(init_state_id, ReachConfig().radius)
        for task_id in (0, 1):
            env.reset_to(task_id, init_state_id, seed=0)
            way = discs[task_id] - start
            chunk = env.step_chunk(np.tile(way / np.abs(way).max(), (32, 1)), capture_at=())
            assert (chunk.success, chunk.terminated, chunk.reward) == (True, True, 1.0)
            assert np.linalg.norm(discs[task_id] - chunk.states[-1]) < ReachConfig().radius
            # The same way is the end, without success, if the other colour was named.
            env.reset_to(1 - task_id, init_state_id, seed=0)
            chunk = env.step_chunk(np.tile(way / np.abs(way).max(), (32, 1)), capture_at=())
            assert (chunk.success, chunk.terminated, chunk.reward) == (False, True, 0.0)


def test_reach_draws_the_discs_where_they_are() -> None:
    env = make_env(ReachConfig(), "train")
    for init_state_id in range(20):
        frame = env.reset_to(0, init_state_id, seed=0).frames[0]
        start, (red, blue) = layout(init_state_id, ReachConfig().radius)

        def pixel(position: np.ndarray, frame: np.ndarray = frame) -> list[int]:
            column, row = int((position[0] + 1) * 16), int((1 - position[1]) * 16)
            return frame[row, column].tolist()

        assert (pixel(red), pixel(blue), pixel(start)) == ([220, 60, 50], [60, 90, 230], [255, 255, 255])
        assert env.env_spec.instructions == ("go to the red disc", "go to the blue disc")


# ------------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (ReachConfig, {"resolution": 4}), (ReachConfig, {"speed": 0.0}), (ReachConfig, {"radius": 0.4}),
        (ReachConfig, {"max_steps": 0}), (CountingConfig, {"success_step": 0}), (LiberoConfig, {"resolution": 0}),
        (LiberoConfig, {"settle_steps": -1}), (LiberoConfig, {"max_steps": 0}), (LiberoConfig, {"asset_cache_mib": -1}),
    ],
)  # fmt: skip
def test_a_wrong_config_value_is_named(config: type, values: dict[str, float]) -> None:
    (name, value), *_ = values.items()
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        config(**values)
