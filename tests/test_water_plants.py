"""Water Plants (MuJoCo): RLBench's numbers where they are known, its rules, the expert, and the two ways of scoring."""

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.rlbench_contract import INIT_STATES, NUM_JOINTS, TICK_S
from envs.water_plants import RELEASE_TICKS, WaterPlantsConfig, WaterPlantsEnv
from envs.water_plants_expert import WaterPlantsExpert
from envs.water_plants_geometry import (
    CAN_GEOMS,
    DROPS,
    HOME_JOINTS_RAD,
    SPAWN_CENTRE_M,
    SPAWN_HALF_M,
    Geometry,
    layout,
)
from envs.water_plants_scene import build_model
from wamrl_ray.collect_expert import make_expert

pytestmark = pytest.mark.sim

VIEWS = ("front", "left_shoulder", "right_shoulder", "wrist")
STILL_OPEN, STILL_CLOSED = (np.array([0] * NUM_JOINTS + [grip], np.float32) for grip in (1, -1))


@pytest.fixture(scope="module")
def env() -> Iterator[WaterPlantsEnv]:
    env = WaterPlantsEnv(WaterPlantsConfig(views=VIEWS), "train")
    yield env
    env.close()


@pytest.fixture(scope="module")
def compat() -> Iterator[WaterPlantsEnv]:
    env = WaterPlantsEnv(WaterPlantsConfig(scoring="rlbench_compat", resolution=16), "train")
    yield env
    env.close()


def step(env: WaterPlantsEnv, action: np.ndarray) -> Any:
    return env.step_chunk(action[None], ())


def until(env: WaterPlantsEnv, condition: Any, steps: int = 200) -> None:
    """Let the expert act until the condition holds."""
    expert = WaterPlantsExpert(env)
    for _ in range(steps):
        if condition():
            return
        step(env, expert.act())
    raise AssertionError("the expert did not get there")


# ------------------------------------------------------------------------------------------------ published numbers


def test_the_tip_at_home_is_where_rlbench_has_it(env: WaterPlantsEnv) -> None:
    import mujoco

    env.reset_to(0, 0, 0)
    tip = env.data.site("tip")
    assert np.abs(tip.xpos - (0.2783, -0.0082, 1.4728)).max() < 0.002
    mine, published = np.zeros(4), np.array([0.1214, 0.0, 0.9926, 0.0])
    mujoco.mju_mat2Quat(mine, tip.xmat)
    apart = min(np.linalg.norm(mine - published), np.linalg.norm(mine + published))
    assert np.rad2deg(2 * apart) < 0.2


@pytest.mark.parametrize(
    ("view", "position", "right", "up", "focal_px"),
    [
        ("front", (1.35, 0, 1.58), (0, 1, 0), (-0.4226, 0, 0.9063), 351.68),
        ("left_shoulder", (-0.175, 0.2, 1.98), (-0.1736, -0.9848, 0), (0.8925, -0.1574, 0.4226), 351.68),
        ("right_shoulder", (-0.175, -0.2, 1.98), (0.1736, -0.9848, 0), (0.8925, 0.1574, 0.4226), 351.68),
        ("wrist", (0.3046, -0.0062, 1.5743), (0, -1, 0), (0.9877, 0, 0.1564), 221.70),
    ],
)
def test_the_cameras_are_where_rlbench_has_them(
    env: WaterPlantsEnv, view: str, position: Any, right: Any, up: Any, focal_px: float
) -> None:
    env.reset_to(0, 0, 0)
    camera = env.data.camera(view)
    axes = camera.xmat.reshape(3, 3)
    assert np.abs(camera.xpos - position).max() < 0.002
    assert np.abs(axes[:, 0] - right).max() < 0.003 and np.abs(axes[:, 1] - up).max() < 0.003
    fovy = np.deg2rad(env.model.camera(view).fovy[0])
    assert 128 / np.tan(fovy / 2) == pytest.approx(focal_px, abs=0.02)


@pytest.mark.parametrize("view", VIEWS)
def test_every_camera_sees_table_and_robot_and_the_policys_also_the_can(env: WaterPlantsEnv, view: str) -> None:
    import mujoco

    env.reset_to(0, 0, 0)
    until(env, lambda: env.data.site("tip").xpos[2] < 1.1)  # at home the hand is above the front camera's picture
    renderer = env._renderer
    renderer.enable_segmentation_rendering()
    try:
        renderer.update_scene(env.data, view)
        ids = renderer.render()
    finally:
        renderer.disable_segmentation_rendering()
    seen = {env.model.geom(int(i)).name for i in np.unique(ids[ids[..., 1] == mujoco.mjtObj.mjOBJ_GEOM][:, 0])}
    assert "table" in seen and ("can_body" in seen or view.endswith("shoulder"))
    assert any(name.startswith(("link", "gripper")) for name in seen)


def test_the_state_speaks_of_joints_as_rlbench_does(env: WaterPlantsEnv) -> None:
    observation = env.reset_to(0, 0, 0)
    assert observation.state.shape == (11,)
    assert observation.state[:7] == pytest.approx(HOME_JOINTS_RAD, abs=1e-6)
    assert observation.state[7:10] == pytest.approx(env.data.site("tip").xpos, abs=1e-6)
    assert observation.state[10] == 1.0
    step(env, STILL_CLOSED)
    assert env._state()[10] == 0.0


# ------------------------------------------------------------------------------------------------ robot


def test_an_arm_that_is_told_nothing_does_not_sag(env: WaterPlantsEnv) -> None:
    env.reset_to(0, 0, 0)
    until(env, lambda: env.held and env.data.body("can").xpos[2] > 0.775)
    for _ in range(3):
        step(env, STILL_CLOSED)
    before, height = env.data.qpos[:NUM_JOINTS].copy(), env.data.body("can").xpos[2]
    for _ in range(60):
        step(env, STILL_CLOSED)
    assert np.abs(env.data.qpos[:NUM_JOINTS] - before).max() < 2e-3
    assert env.data.body("can").xpos[2] == pytest.approx(height, abs=2e-3)


@pytest.mark.parametrize("arm", ["joint_velocity", "joint_position"])
def test_an_action_moves_the_joints_by_its_velocity_for_one_tick(arm: Any) -> None:
    env = WaterPlantsEnv(WaterPlantsConfig(arm=arm, max_joint_velocity=0.5, resolution=16), "train")
    env.reset_to(0, 0, 0)
    wanted = np.array([0.4, -0.2, 0.6, 0.3, -0.8, 0.5, 1.0])
    start = env.data.qpos[:NUM_JOINTS].copy()
    for _ in range(10):
        step(env, np.array([*wanted, 1.0], np.float32))
    moved = env.data.qpos[:NUM_JOINTS] - start
    env.close()
    assert moved == pytest.approx(10 * TICK_S * 0.5 * wanted, rel=0.08, abs=2e-3)


def test_beyond_its_range_an_action_is_clipped(env: WaterPlantsEnv) -> None:
    states = []
    for scale in (1.0, 5.0):
        env.reset_to(0, 0, 0)
        for _ in range(5):  # at full speed, beyond the limit on acceleration
            step(env, np.array([scale, 0, 0, 0, 0, 0, 0, 1.0], np.float32))
        states.append(env._state())
    assert np.array_equal(*states)


def test_physics_that_explodes_is_an_error_and_not_a_silent_restart(env: WaterPlantsEnv) -> None:
    env.reset_to(0, 0, 0)
    env.data.qvel[2] = 1e12
    with pytest.raises(RuntimeError, match="the physics diverged after 0 ticks"):
        step(env, STILL_OPEN)
    env.reset_to(0, 0, 0)
    assert not step(env, STILL_OPEN).terminated


# ------------------------------------------------------------------------------------------------ the fake grasp


def test_closing_on_the_handle_holds_the_can_where_it_is(env: WaterPlantsEnv) -> None:
    env.reset_to(0, 3, 0)
    expert = WaterPlantsExpert(env)
    while (action := expert.act())[-1] > 0:
        step(env, action)
    can, ticks = env.data.body("can").xpos.copy(), env._info()["ticks"]
    step(env, np.array([0] * NUM_JOINTS + [-1], np.float32))
    assert env.held and np.abs(env.data.body("can").xpos - can).max() < 0.004
    assert env._info()["ticks"] > ticks + 1, "fingers that move take ticks of their own"


def test_closing_on_nothing_holds_nothing_and_only_the_closing_edge_counts(env: WaterPlantsEnv) -> None:
    env.reset_to(0, 3, 0)
    step(env, STILL_CLOSED)
    assert not env.held
    expert = WaterPlantsExpert(env)
    for _ in range(120):  # all the way down with closed fingers
        step(env, np.array([*expert.act()[:-1], -1], np.float32))
        assert not env.held


def test_the_expert_opens_a_hand_that_closed_on_nothing_even_around_the_handle(env: WaterPlantsEnv) -> None:
    env.reset_to(0, 3, 0)
    expert = WaterPlantsExpert(env)
    while (action := expert.act())[-1] > 0:
        step(env, action)
    env.data.qpos[env._fingers] = 0.0
    assert expert.act()[-1] > 0


@pytest.mark.parametrize("part", CAN_GEOMS)
def test_any_part_of_the_can_in_the_box_is_held_and_the_hand_is_not_open_then(env: WaterPlantsEnv, part: str) -> None:
    import mujoco

    env.reset_to(0, 3, 0)
    env.data.joint("can").qpos[:3] += env.data.geom("grasp_box").xpos - env.data.geom(part).xpos
    mujoco.mj_forward(env.model, env.data)
    env._move_gripper(False)  # and not a step, in whose tick the can would fall
    assert env.held and env._state()[-1] == 0.0


def test_a_held_can_does_not_rub_at_the_hand_and_a_reset_makes_it_solid_again(env: WaterPlantsEnv) -> None:
    solid = build_model(env.geometry).geom_conaffinity[env._can_geoms]
    env.reset_to(0, 3, 0)
    until(env, lambda: env.held)
    can, world = env.model.body("can").id, 0
    for _ in range(10):
        step(env, STILL_CLOSED)
        pairs = [set(env.model.geom_bodyid[contact.geom]) for contact in env.data.contact]
        assert all(world in pair for pair in pairs if can in pair), "it touches the table only"
    env.reset_to(0, 3, 0)
    assert not env.held and np.array_equal(env.model.geom_conaffinity[env._can_geoms], solid)


def test_opening_lets_the_can_fall_and_gives_it_time(env: WaterPlantsEnv) -> None:
    env.reset_to(0, 3, 0)
    until(env, lambda: env.held and env.data.body("can").xpos[2] > 0.77)
    ticks = env._info()["ticks"]
    step(env, STILL_OPEN)
    assert not env.held and env._info()["ticks"] > ticks + RELEASE_TICKS
    assert env.data.body("can").xpos[2] < 0.76


# ------------------------------------------------------------------------------------------------ pouring and scoring


def test_water_appears_once_at_the_head_and_success_is_all_of_it_in_the_pot(env: WaterPlantsEnv) -> None:
    env.reset_to(0, 5, 7)
    until(env, lambda: env._info()["poured"] == 1.0)
    head = env.data.geom("head").xpos
    drops = np.array([env.data.body(f"drop{i}").xpos for i in range(DROPS)])
    assert len(drops) == 5 and np.abs(drops[:, :2] - head[:2]).max() < 0.02
    assert env._info()["drops_in_pot"] < 5
    rewards = []
    for _ in range(40):
        chunk = step(env, STILL_CLOSED)
        rewards.append(chunk.reward)
        if chunk.terminated:
            break
    assert chunk.success and chunk.terminated and not chunk.truncated and rewards == [0.0] * (len(rewards) - 1) + [1.0]
    assert chunk.info == {**chunk.info, "poured": 1.0, "drops_in_pot": 5.0, "success_without_pour": 0.0}
    pot = env.data.body("pot").xpos
    landed = np.array([env.data.body(f"drop{i}").xpos for i in range(DROPS)]) - pot
    assert np.abs(landed[:, :2]).max() < 0.06 * np.sqrt(2) and landed[:, 2].max() < 0.13


def test_the_drops_scatter_by_the_seed(env: WaterPlantsEnv) -> None:
    def poured(seed: int) -> np.ndarray:
        env.reset_to(0, 5, seed)
        until(env, lambda: env._info()["poured"] == 1.0)
        return np.array([env.data.body(f"drop{i}").xpos for i in range(DROPS)])

    first, again, other = poured(1), poured(1), poured(2)
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    spread = first - first.mean(axis=0)
    assert 1e-5 < spread.std() < 3e-3 and np.linalg.matrix_rank(spread, tol=1e-5) == 3, "in every direction"
    env.reset_to(0, 5, 1)
    step(env, STILL_OPEN)
    assert env.data.body("drop0").xpos == pytest.approx([0.0, 2.5, 0.5]), "unpoured drops float out of sight"


def test_drops_beside_the_pot_are_no_success(env: WaterPlantsEnv) -> None:
    env.reset_to(0, 5, 7)
    until(env, lambda: env._info()["poured"] == 1.0)
    env.data.joint("drop0").qpos[0] += 0.3
    for _ in range(40):
        chunk = step(env, STILL_CLOSED)
    assert not chunk.success and chunk.info["drops_in_pot"] == 4.0


def test_a_can_that_was_not_lifted_does_not_pour_however_it_leans_on_the_pot(env: WaterPlantsEnv) -> None:
    import mujoco

    env.reset_to(0, 5, 0)
    model, data, can = env.model, env.data, env.data.joint("can")
    pot, turn = data.body("pot").xpos.copy(), data.body("pot").xmat.reshape(3, 3).copy()
    stands = 0
    for tilt, distance in itertools.product(np.radians(np.arange(-90, 91, 5)), np.arange(0.0, 0.3, 0.01)):
        leaning = np.array([[np.cos(tilt), 0, np.sin(tilt)], [0, 1, 0], [-np.sin(tilt), 0, np.cos(tilt)]])
        mujoco.mju_mat2Quat(can.qpos[3:], (turn @ leaning).ravel())
        can.qpos[:3] = pot + turn @ (-distance, 0, 0.5)
        mujoco.mj_kinematics(model, data)
        apart = [mujoco.mj_geomDistance(model, data, model.geom("table").id, g, 1.0, None) for g in env._can_geoms]
        can.qpos[2] -= min(apart)
        mujoco.mj_forward(model, data)
        touching = [set(model.geom_bodyid[contact.geom]) for contact in data.contact if contact.dist < -0.002]
        if {model.body("can").id, model.body("pot").id} not in touching:
            stands += 1
            assert not env._detects("pour", env._head), (np.rad2deg(tilt), distance)
    assert stands > 300


def test_holding_the_cans_body_over_the_pot_pays_in_compat_and_not_in_strict(
    env: WaterPlantsEnv, compat: WaterPlantsEnv
) -> None:
    for world in (env, compat):
        world.reset_to(0, 9, 0)
        until(world, lambda world=world: world.held)
        expert = WaterPlantsExpert(world)
        success = False
        for _ in range(150):
            can, pot = world.data.body("can"), world.data.body("pot")
            # Up first, the head over the volume it would pour in, then across and down, the head beyond the pot.
            beside = np.hypot(*(pot.xpos - can.xpos)[:2]) > 0.05
            height = 0.96 if beside else 0.87
            side = (pot.xpos - can.xpos)[:2] * (can.xpos[2] > 0.94 or not beside)
            velocity = expert._joints(can.xpos, np.array([*side, height - can.xpos[2]]), np.zeros(3))
            scaled = velocity / max(1.0, np.abs(velocity).max())
            chunk = step(world, np.array([*scaled, -1], np.float32))
            success = success or chunk.success
            if chunk.terminated or chunk.info["success_without_pour"]:
                break
        assert chunk.info["success_without_pour"] == 1.0 and chunk.info["poured"] == 0.0
        assert success == (world is compat) and chunk.reward == float(world is compat)


@pytest.mark.parametrize("part", CAN_GEOMS)
def test_any_part_of_the_can_where_the_drops_should_be_is_seen(compat: WaterPlantsEnv, part: str) -> None:
    compat.reset_to(0, 9, 0)
    volume = compat.data.geom("success").xpos
    compat.data.joint("can").qpos[:3] += volume - compat.data.geom(part).xpos
    assert step(compat, STILL_OPEN).success and compat._info()["success_without_pour"] == 1.0


def test_the_name_says_which_scoring_and_the_simulator_whose_geometry(
    env: WaterPlantsEnv, compat: WaterPlantsEnv
) -> None:
    assert env.env_spec.name == "water_plants" and compat.env_spec.name == "water_plants_rlbench_compat"
    assert env.env_spec.simulator.startswith("mujoco 3.") and "chosen, not measured" in env.env_spec.simulator


def test_another_thread_is_refused(env: WaterPlantsEnv) -> None:
    env.reset_to(0, 0, 0)
    with ThreadPoolExecutor(1) as other, pytest.raises(RuntimeError, match="an OpenGL context belongs to one thread"):
        other.submit(step, env, STILL_OPEN).result()


# ------------------------------------------------------------------------------------------------ expert


def test_the_expert_waters_at_least_nine_of_ten_plants(env: WaterPlantsEnv) -> None:
    expert, successes = make_expert(env), 0
    for seed in range(100):
        env.reset_to(0, seed, seed)
        chunk = step(env, expert.act())
        while not (chunk.terminated or chunk.truncated):
            chunk = step(env, expert.act())
        successes += chunk.success
    assert successes >= 90


def test_an_expert_that_aims_beside_the_handle_misses_and_a_sighted_one_recovers(env: WaterPlantsEnv) -> None:
    env.reset_to(0, 4, 0)
    blind = make_expert(env, (0.06, 0.0))
    for _ in range(100):
        action = blind.act()
        step(env, action)
        if action[-1] < 0:
            break
    assert action[-1] < 0 and not env.held
    until(env, lambda: env._info()["poured"] == 1.0)


# ------------------------------------------------------------------------------------------------ placement


def test_placements_fill_the_spawn_plane_and_stay_on_it() -> None:
    geometry = Geometry()
    low, high = geometry.footprint_m
    corners = np.array([(x, y) for x in (low[0], high[0]) for y in (low[1], high[1])])
    places = [layout(i, geometry) for i in range(500)]
    for position, yaw in places:
        turn = np.array([[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]])
        world = position + corners @ turn.T
        assert np.all(np.abs(world - SPAWN_CENTRE_M) <= np.array(SPAWN_HALF_M) + 1e-9)
    yaws = np.array([yaw for _, yaw in places])
    assert all(np.mean((yaws >= a) & (yaws < a + np.pi / 2)) > 0.15 for a in np.arange(-2, 2) * np.pi / 2)
    assert np.ptp([position for position, _ in places], axis=0).min() > 0.25
    assert layout(7, geometry)[1] == layout(7, geometry)[1] != layout(8, geometry)[1]


def test_the_held_out_placements_are_others() -> None:
    held_out = {layout(i, Geometry())[1] for i in list(INIT_STATES["held_out"])[:200]}
    assert held_out.isdisjoint(layout(i, Geometry())[1] for i in list(INIT_STATES["train"])[:2000])


# ------------------------------------------------------------------------------------------------ geometry and config


def test_a_geometry_comes_back_from_its_file_and_changes_the_scene(tmp_path: Path) -> None:
    geometry = replace(Geometry(), source="RLBench at abc", pot_half_m=0.05, pot_m=(0.15, 0.01))
    path = tmp_path / "geometry.json"
    geometry.save(path)
    assert Geometry.load(path) == geometry
    env = WaterPlantsEnv(WaterPlantsConfig(geometry=str(path), resolution=16), "train")
    env.reset_to(0, 0, 0)
    assert env.model.geom("success").size[0] == 0.05
    assert env.env_spec.simulator.endswith("(geometry RLBench at abc)")
    env.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a file of `wamrl calibrate water_plants`"),
        ("[" * 100_000, "not a file of `wamrl calibrate water_plants`"),
        ("[1]", "not a file of `wamrl calibrate water_plants`"),
        ('{"can_weight": 1}', "unknown can_weight; known are source, can_m, "),
        (json.dumps({"pot_half_m": -0.1}), r"geometry.pot_half_m = -0.1 must lie within \[0.01, 0.3\] m"),
        ('{"pot_half_m": NaN}', "geometry.pot_half_m = nan must lie within"),
        ('{"can_mass_kg": 500}', r"geometry.can_mass_kg = 500 must lie within \[0.01, 5.0\] kg"),
        ('{"can_radius_m": "4 cm"}', "geometry.can_radius_m = '4 cm' must be 1 number"),
        ('{"can_radius_m": true}', "geometry.can_radius_m = True must be 1 number"),
        ('{"can_radius_m": [0.04]}', r"geometry.can_radius_m = \(0.04,\) must be 1 number"),
        ('{"pot_m": [0.1]}', r"geometry.pot_m = \(0.1,\) must be 2 numbers"),
        ('{"pot_m": [[0.1], 0]}', r"geometry.pot_m = .* must be 2 numbers"),
        ('{"pour_half_m": 0.04}', "geometry.pour_half_m = 0.04 must be 3 numbers"),
        ('{"source": 7}', "geometry.source = 7 must be one line of text"),
        ('{"source": "a\\nb"}', "geometry.source = .* must be one line of text"),
        ('{"handle_m": [0.03, 0.09]}', "geometry: the bar is gripped from above: raise handle_m"),
        ('{"head_m": [0.03, 0.135]}', "geometry: the spout ends inside the can: move head_m"),
        ('{"can_m": [0.03, 0.0]}', "geometry: the can stands in the pot: move can_m and pot_m apart"),
        (
            '{"can_m": [0.02, 0.0], "pour_height_m": 0.16}',
            "geometry: water would flow at the start: raise pour_height_m",
        ),
        ('{"can_m": [0.02, 0.0]}', "geometry: the spout stands in the pot: move can_m and pot_m apart"),
    ],
)
def test_a_broken_geometry_is_refused_in_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "geometry.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"^geometry = {path}: .*{message}"):
        WaterPlantsEnv(WaterPlantsConfig(geometry=str(path)), "train")


def test_a_geometry_that_is_not_there_is_refused_in_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "nope.json", tmp_path):
        with pytest.raises(ValueError, match=f"geometry = {path}: .*; name a file of `wamrl calibrate"):
            WaterPlantsEnv(WaterPlantsConfig(geometry=str(path)), "train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"views": ("front", "front")}, r"views = \['front', 'front'\] must name"),
        ({"views": ("overhead",)}, r"views = \['overhead'\] must name"),
        ({"views": ()}, r"views = \[\] must name"),
        ({"resolution": 8}, "resolution = 8 pixels: use 16 to 1024"),
        ({"resolution": 2048}, "resolution = 2048 pixels: use 16 to 1024"),
        ({"scoring": "compat"}, "scoring = 'compat' must be one of strict, rlbench_compat"),
        ({"arm": "torque"}, "arm = 'torque' must be one of joint_velocity, joint_position"),
        ({"max_steps": 0}, "max_steps = 0 must be at least 1"),
        ({"max_joint_velocity": 3.0}, "max_joint_velocity = 3.0 must lie in"),
    ],
)
def test_a_bad_setting_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WaterPlantsConfig(**change)


@pytest.mark.parametrize("closed", [True, False])
def test_one_environment_that_ends_leaves_the_pictures_of_another_alone(closed: bool) -> None:
    kept, other = (WaterPlantsEnv(WaterPlantsConfig(), "train") for _ in range(2))
    other.reset_to(0, 1, seed=0)
    expected = kept.reset_to(0, 0, seed=0).frames
    if closed:
        other.close()
    del other
    gc.collect()
    assert np.array_equal(kept.reset_to(0, 0, seed=0).frames, expected)
    kept.close()
