"""The scripted experts: they solve, they recover, and they have no memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from envs.experts import LiberoObjectExpert, smoothstep
from envs.libero import LiberoConfig, LiberoEnv
from envs.reach import ReachConfig, ReachEnv
from envs.reach_expert import ReachExpert

BUTTER, ORANGE_JUICE = 6, 9


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoEnv]:
    """Tests that use it stand in the order of their tasks: the first reset to another task builds it for seconds."""
    built = LiberoEnv(LiberoConfig(resolution=16, tasks=(BUTTER, ORANGE_JUICE)), "train")
    yield built
    built.close()


def run(env: LiberoEnv, expert: LiberoObjectExpert, steps: int) -> tuple[bool, int]:
    """Let the expert act until the episode is over, `steps` at most: (success, steps taken)."""
    for step in range(1, steps + 1):
        chunk = env.step_chunk(expert.act()[None], capture_at=())
        if chunk.terminated or chunk.truncated:
            return chunk.success, step
    return False, steps


def object_joint(env: LiberoEnv) -> int:
    """Address of the target object's free joint in qpos."""
    model = env.inner.sim.model._model
    body = model.body(f"{env.inner.obj_of_interest[0]}_main")
    return int(model.jnt_qposadr[body.jntadr[0]])


def finger_opening(env: LiberoEnv) -> float:
    data, model = env.inner.sim.data._data, env.inner.sim.model._model
    left, right = (model.joint(f"gripper0_finger_joint{i}").qposadr[0] for i in (1, 2))
    return float(data.qpos[left] - data.qpos[right])


@pytest.fixture(scope="module")
def held_out_env() -> Iterator[LiberoEnv]:
    built = LiberoEnv(LiberoConfig(resolution=16), "held_out")
    yield built
    built.close()


@pytest.mark.sim
def test_a_displaced_grasp_point_displaces_the_approach_and_nothing_else(env: LiberoEnv) -> None:
    env.reset_to(BUTTER, 0, seed=0)
    true, displaced = LiberoObjectExpert(env), LiberoObjectExpert(env, grasp_offset_m=(0.0, 0.3))
    for _ in range(12):
        env.step_chunk(true.act()[None], capture_at=())
    change = displaced.act() - true.act()
    assert change[1] > 0.5
    np.testing.assert_array_equal(change[[0, 3, 4, 5, 6]], 0.0)


@pytest.mark.sim
@pytest.mark.parametrize(("task", "init_state"), [(BUTTER, 0), (ORANGE_JUICE, 31)])
def test_the_expert_puts_the_object_into_the_basket_within_120_steps(
    env: LiberoEnv, task: int, init_state: int
) -> None:
    env.reset_to(task, init_state, seed=0)
    success, steps = run(env, LiberoObjectExpert(env), 120)
    assert success, f"no success after {steps} steps"


@pytest.mark.sim
@pytest.mark.slow
@pytest.mark.parametrize("task", range(10))
def test_every_task_is_solved_from_a_held_out_initial_state(held_out_env: LiberoEnv, task: int) -> None:
    held_out_env.reset_to(task, 40 + task, seed=0)
    success, steps = run(held_out_env, LiberoObjectExpert(held_out_env), 120)
    assert success, f"no success after {steps} steps"


@pytest.mark.sim
def test_the_expert_leaves_a_grasp_that_closed_on_nothing_and_tries_again(env: LiberoEnv) -> None:
    env.reset_to(ORANGE_JUICE, 12, seed=0)
    address = object_joint(env)
    place = np.array(env.inner.sim.data._data.qpos[address : address + 3])
    misjudging = LiberoObjectExpert(env, grasp_offset_m=(0.0, -0.09))
    while finger_opening(env) > 0.005:
        assert not env.step_chunk(misjudging.act()[None], capture_at=()).truncated, "the fingers never closed"
    np.testing.assert_allclose(env.inner.sim.data._data.qpos[address : address + 3], place, atol=0.002)
    success, steps = run(env, LiberoObjectExpert(env), 150)
    assert success, f"no success {steps} steps after the miss"


@pytest.mark.sim
def test_the_expert_tries_again_when_the_object_is_taken_from_between_the_fingers(env: LiberoEnv) -> None:
    env.reset_to(ORANGE_JUICE, 3, seed=0)
    expert = LiberoObjectExpert(env)
    while finger_opening(env) > 0.056:
        assert not env.step_chunk(expert.act()[None], capture_at=()).truncated
    for _ in range(3):
        env.step_chunk(expert.act()[None], capture_at=())
    address = object_joint(env)
    env.inner.sim.data._data.qpos[address] += 0.06
    env.inner.sim.forward()
    success, steps = run(env, expert, 200)
    assert success, f"no success {steps} steps after the object was taken"


@pytest.mark.sim
def test_the_expert_picks_up_again_what_it_dropped(env: LiberoEnv) -> None:
    env.reset_to(ORANGE_JUICE, 3, seed=0)
    expert = LiberoObjectExpert(env)
    height = object_joint(env) + 2
    qpos = env.inner.sim.data._data.qpos
    rest = float(qpos[height])
    while qpos[height] < rest + 0.03:
        assert not env.step_chunk(expert.act()[None], capture_at=()).truncated
    for _ in range(12):
        action = expert.act()
        action[6] = -1.0
        env.step_chunk(action[None], capture_at=())
    assert qpos[height] < rest + 0.02, "the test did not make it drop the object"
    success, steps = run(env, expert, 200)
    assert success, f"no success {steps} steps after the drop"


@pytest.mark.sim
def test_what_lies_before_the_basket_is_grasped_with_the_palm_turned_out_of_its_way(env: LiberoEnv) -> None:
    env.reset_to(ORANGE_JUICE, 5, seed=0)
    address = object_joint(env)
    env.inner.sim.data._data.qpos[address : address + 2] = 0.01, 0.135
    env.inner.sim.forward()
    success, steps = run(env, LiberoObjectExpert(env), 120)
    assert success, f"no success after {steps} steps"


@pytest.mark.sim
def test_the_same_simulator_state_gives_the_same_action_bits_whatever_came_before(env: LiberoEnv) -> None:
    env.reset_to(ORANGE_JUICE, 7, seed=0)
    veteran = LiberoObjectExpert(env)
    states = []
    for step in range(60):
        if step % 6 == 0:
            states.append(env.inner.sim.get_state().flatten())
        env.step_chunk(veteran.act()[None], capture_at=())

    def act_in(expert: LiberoObjectExpert, state: np.ndarray) -> np.ndarray:
        env.inner.sim.set_state_from_flattened(state)
        env.inner.sim.forward()
        return expert.act()

    in_order = [act_in(veteran, state) for state in states]
    fresh = [act_in(LiberoObjectExpert(env), state) for state in reversed(states)][::-1]
    assert all(a.dtype == np.float32 and a.shape == (7,) for a in in_order)
    assert np.stack(in_order).tobytes() == np.stack(fresh).tobytes()
    assert len({a.tobytes() for a in in_order}) == len(in_order)


@pytest.mark.sim
def test_the_expert_reads_the_simulator_and_neither_observations_nor_clock(env: LiberoEnv) -> None:
    env.reset_to(ORANGE_JUICE, 7, seed=0)
    expert = LiberoObjectExpert(env)
    for _ in range(20):
        env.step_chunk(expert.act()[None], capture_at=())
    before = expert.act()
    for observable in env.inner._observables.values():
        observable._current_observed_value = np.full_like(observable.obs, 123)
    env._steps, env._success, env.inner.timestep, env.inner.cur_time = 250, True, 7, 99.0
    assert env._state()[0] == 123.0, "the observations are as they were: the test shows nothing"
    assert expert.act().tobytes() == LiberoObjectExpert(env).act().tobytes() == before.tobytes()


def test_of_two_ways_to_close_that_fit_the_one_with_the_palm_clear_of_the_basket_is_taken() -> None:
    along_x, along_y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    can = np.array([[x, y] for x in (-0.03, 0.03) for y in (-0.03, 0.03)])
    wall = np.array([[x, y] for x in (-0.08, 0.08) for y in (0.0, 0.01)] * 2)[None]

    def taken(points: np.ndarray, wall_m: float) -> str:
        walls = wall + np.array([0.0, wall_m])
        costs = {name: LiberoObjectExpert._awkward(a, points, walls) for name, a in (("x", along_x), ("y", along_y))}
        return min(costs, key=lambda name: costs[name])

    # The palm is 0.103 m to either side along the closing axis and 0.034 m across it; the rest pose closes along y.
    assert [taken(can, m) for m in (0.104, 0.097, 0.05, 0.033)] == ["y", "x", "x", "x"]
    too_long = can * np.array([1.3, 1.0])
    assert taken(too_long, 0.05) == "y"


@pytest.mark.parametrize("task", [0, 1])
def test_the_reach_expert_enters_the_named_disc_and_not_the_other(task: int) -> None:
    env = ReachEnv(ReachConfig(), "train")
    expert = ReachExpert(env)
    for init_state in range(20):
        env.reset_to(task, init_state, seed=0)
        for _ in range(13):
            chunk = env.step_chunk(expert.act()[None], capture_at=())
            if chunk.terminated:
                break
        assert chunk.success, f"init state {init_state}"


def test_the_wrist_is_turned_back_by_the_angle_it_is_off() -> None:
    # At rest the hand's axes lie along world y, x and -z; the fingers close along the first.
    rest = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])
    c, s = np.cos(0.3), np.sin(0.3)
    about_z = np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])
    about_x = np.array([[1.0, 0.0, 0.0], [0.0, c, -s], [0.0, s, c]])
    closing = np.array([0.0, 1.0])
    np.testing.assert_allclose(LiberoObjectExpert._turn(rest, closing), [0.0, 0.0, 0.0], atol=1e-12)
    np.testing.assert_allclose(LiberoObjectExpert._turn(about_z @ rest, closing), [0.0, 0.0, -0.3], atol=1e-12)
    np.testing.assert_allclose(LiberoObjectExpert._turn(about_x @ rest, closing), [-0.3, 0.0, 0.0], atol=1e-12)


def test_smoothstep_has_its_hand_values() -> None:
    assert [smoothstep(x, 1.0, 3.0) for x in (0.0, 1.0, 1.5, 2.0, 3.0, 9.0)] == [0.0, 0.0, 0.15625, 0.5, 1.0, 1.0]
