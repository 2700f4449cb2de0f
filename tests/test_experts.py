"""The scripted experts: they solve, they recover, and they have no memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from envs.experts import LiberoObjectExpert, ReachExpert, smoothstep
from envs.libero import LiberoConfig, LiberoEnv
from envs.reach import ReachConfig, ReachEnv

BUTTER, ORANGE_JUICE = 6, 9


@pytest.fixture(scope="module")
def env() -> Iterator[LiberoEnv]:
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


@pytest.mark.sim
@pytest.mark.parametrize("task", [BUTTER, ORANGE_JUICE])
@pytest.mark.parametrize("init_state", [0, 31])
def test_the_expert_puts_the_object_into_the_basket_within_120_steps(
    env: LiberoEnv, task: int, init_state: int
) -> None:
    env.reset_to(task, init_state, seed=0)
    success, steps = run(env, LiberoObjectExpert(env), 120)
    assert success, f"no success after {steps} steps"


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
def test_a_displaced_grasp_point_displaces_the_approach_and_nothing_else(env: LiberoEnv) -> None:
    env.reset_to(BUTTER, 0, seed=0)
    true, displaced = LiberoObjectExpert(env), LiberoObjectExpert(env, grasp_offset_m=(0.0, 0.3))
    for _ in range(12):
        env.step_chunk(true.act()[None], capture_at=())
    change = displaced.act() - true.act()
    assert change[1] > 0.5
    np.testing.assert_array_equal(change[[0, 3, 4, 5, 6]], 0.0)


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
