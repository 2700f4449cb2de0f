"""RLBench's own Python code against what our child and our fake of it believe; opt-in, because it cannot be shipped.

    RLBENCH_SRC=CHECKOUT python -m pytest -m rlbench_src tests/test_rlbench_source.py

`RLBENCH_SRC` is a checkout of RLBench at the commit in requirements/rlbench.txt (or `rlbench` is installed), with the
package `pyquaternion` beside it.  PyRep and CoppeliaSim are not needed: `tests/substitute_pyrep.py` stands
in for both, so a success says that RLBench's Python was understood, not that RLBench was run.  RLBench's `__init__` and
that of its tasks are left out: they would import 105 other tasks and register them with gymnasium.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs import rlbench_child as child
from tests import substitute_pyrep
from tests.substitute_scene import METRES_PER_RADIAN, TICK_S, World

pytestmark = pytest.mark.rlbench_src

FAKE = Path(__file__).parent / "fake_rlbench"
VIEWS, RESOLUTION = ["front", "wrist"], 32
STAY = [0.0] * 7
CLOSING_TICKS, SETTLING_TICKS = 5, 10
"""4 cm at 0.2 m/s and 50 ms a tick, and one more in which the fingers are found to be there; the same to open."""


def source() -> Path:
    """The folder `rlbench` of the real package; skips if there is none."""
    if root := os.environ.get("RLBENCH_SRC"):
        folder = Path(root) / "rlbench"
    else:
        spec = importlib.util.find_spec("rlbench")
        folder = Path(spec.origin).parent if spec and spec.origin else Path()
    if not (folder / "tasks" / "water_plants.py").is_file():
        pytest.skip("no RLBench: set RLBENCH_SRC to a checkout of it, see docs/rlbench.md")
    if importlib.util.find_spec("pyquaternion") is None:
        pytest.skip("RLBench's code needs pyquaternion: pip install pyquaternion")
    return folder


@contextlib.contextmanager
def other_modules() -> Iterator[None]:
    """No `rlbench`, `pyrep` or torch before, none of the new ones after; the global random numbers are kept."""

    def concerned(name: str) -> bool:
        return name.partition(".")[0] in ("rlbench", "pyrep") or name == "torch"

    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if concerned(name)}
    numbers, python_numbers = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        for name in [name for name in sys.modules if concerned(name)]:
            del sys.modules[name]
        sys.modules.update(kept)
        np.random.set_state(numbers)
        random.setstate(python_numbers)


def use_real() -> World:
    folder = source()
    world = substitute_pyrep.install()
    for name, path in (("rlbench", folder), ("rlbench.tasks", folder / "tasks")):
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules[name] = module
    sys.modules["rlbench"].tasks = sys.modules["rlbench.tasks"]  # type: ignore[attr-defined]
    task = importlib.import_module("rlbench.tasks.water_plants")
    sys.modules["rlbench.tasks"].WaterPlants = task.WaterPlants  # type: ignore[attr-defined]
    return world


def use_fake(patch: pytest.MonkeyPatch, folder: Path) -> None:
    source()  # alone it would compare nothing
    patch.syspath_prepend(str(FAKE))
    patch.setenv("COPPELIASIM_ROOT", str(folder))


@pytest.fixture
def world() -> Iterator[World]:
    """RLBench's own code on an empty scene."""
    with other_modules():
        yield use_real()


@pytest.fixture(params=["real", "fake"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """RLBench's own code, then our fake of it."""
    with other_modules():
        if request.param == "real":
            use_real()
        else:
            use_fake(monkeypatch, tmp_path)
        yield request.param


def launched(arm_mode: str = "joint_velocity", **changes: Any) -> Any:
    """The child's simulator, launched in this process."""
    frames = os.memfd_create("frames")
    os.ftruncate(frames, len(VIEWS) * RESOLUTION**2 * 3)
    simulator = child.Simulator(frames)
    asked = {"task": "WaterPlants", "arm_mode": arm_mode, "views": VIEWS, "resolution": RESOLUTION, "variation": 0}
    simulator.launch(**asked | changes)
    return simulator


def started(**changes: Any) -> Any:
    simulator = launched(**changes)
    simulator.reset(placement_seed=1, seed=1, attempts=1)
    return simulator


def raised(call: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """(module, class) of the exception, as the child reports it."""
    with pytest.raises(Exception) as caught:  # noqa: B017 - which one is the question
        call(*args, **kwargs)
    return type(caught.value).__module__, type(caught.value).__name__


# ------------------------------------------------------------------- the fake says what RLBench says


def test_replies_have_the_same_fields_shapes_and_types(either: str) -> None:
    simulator = launched()
    reset = simulator.reset(placement_seed=3, seed=4, attempts=1)
    assert set(reset) == {"joints", "tip", "gripper_open", "poured", "attempts", "rss_bytes"}
    assert reset["attempts"] == 1
    step = simulator.step(arm=[0.5] + [0.0] * 6, gripper=1.0, capture=True)
    assert set(step) == {"joints", "tip", "gripper_open", "reward", "terminate", "poured"}
    assert (type(step["reward"]), type(step["terminate"]), type(step["poured"])) == (float, bool, bool)
    for reply in (reset, step):
        assert (len(reply["joints"]), len(reply["tip"]), reply["gripper_open"]) == (7, 3, 1.0)
    assert simulator._frames.shape == (2, RESOLUTION, RESOLUTION, 3) and simulator._frames.any(axis=(1, 2, 3)).all()


def test_what_rlbench_returns_has_the_same_types(either: str) -> None:
    task = launched()._task
    descriptions, observation = task.reset()
    assert isinstance(descriptions, list) and all(type(text) is str for text in descriptions)
    observation, reward, terminate = task.step(np.array([*STAY, 1.0]))
    assert (type(reward), type(terminate)) == (float, bool)
    assert observation.joint_positions.shape == (7,) and observation.gripper_pose.shape == (7,)
    assert observation.front_rgb.shape == (RESOLUTION, RESOLUTION, 3) and observation.front_rgb.dtype == np.uint8
    assert observation.overhead_rgb is None, "a camera that is off"


def test_a_radian_per_second_is_a_twentieth_of_a_radian_per_tick(either: str) -> None:
    simulator = launched()
    before = simulator.reset(placement_seed=3, seed=4, attempts=1)["joints"]
    for tick in (1, 2):
        after = simulator.step(arm=[1.0] + [0.0] * 6, gripper=1.0, capture=False)["joints"]
        assert np.allclose(np.subtract(after, before), [0.05 * tick] + [0.0] * 6)


def test_joint_positions_are_commanded_as_differences(either: str) -> None:
    simulator = launched("joint_position")
    before = simulator.reset(placement_seed=3, seed=4, attempts=1)["joints"]
    after = simulator.step(arm=[0.02] * 7, gripper=1.0, capture=False)["joints"]
    assert np.allclose(np.subtract(after, before), 0.02)


def test_the_gripper_is_one_when_open_and_nothing_when_closed(either: str) -> None:
    simulator = started()
    assert simulator.step(arm=STAY, gripper=0.0, capture=False)["gripper_open"] == 0.0
    assert simulator.step(arm=STAY, gripper=1.0, capture=False)["gripper_open"] == 1.0


def test_errors_have_the_names_the_supervisor_knows(either: str) -> None:
    simulator = started()
    module = "rlbench.backend.exceptions"
    assert raised(simulator.step, arm=[0.0] * 6, gripper=1.0, capture=False) == (module, "InvalidActionError")
    assert raised(simulator._task.set_variation, 1) == (module, "TaskEnvironmentError")
    assert raised(launched, task="WaterThePlants") == ("builtins", "AttributeError")


def test_resets_worth_repeating_are_named_as_in_rlbench(world: World) -> None:
    theirs = vars(importlib.import_module("rlbench.backend.exceptions"))
    assert all(issubclass(theirs[name], Exception) for name in set(child.RETRIED_RESETS) - {"RuntimeError"})


def test_every_call_of_the_child_fits_the_signature(either: str) -> None:
    """Bound, not called: (module, class or method, arguments)."""
    something = object()
    calls: list[tuple[str, str, tuple[Any, ...], dict[str, Any]]] = [
        ("environment", "Environment", (something,), {"obs_config": something, "headless": True}),
        ("environment", "Environment.launch", (something,), {}),
        ("environment", "Environment.get_task", (something, something), {}),
        ("action_modes.action_mode", "MoveArmThenGripper", (something, something), {}),
        ("action_modes.arm_action_modes", "JointVelocity", (), {}),
        ("action_modes.arm_action_modes", "JointPosition", (), {"absolute_mode": False}),
        ("action_modes.gripper_action_modes", "Discrete", (), {}),
        ("observation_config", "ObservationConfig", (), {}),
        ("observation_config", "ObservationConfig.set_all", (something, False), {}),
        ("task_environment", "TaskEnvironment.set_variation", (something, 0), {}),
        ("task_environment", "TaskEnvironment.reset", (something,), {}),
        ("task_environment", "TaskEnvironment.step", (something, something), {}),
    ]
    for module, name, args, kwargs in calls:
        called: Any = importlib.import_module(f"rlbench.{module}")
        for part in name.split("."):
            called = getattr(called, part)
        inspect.signature(called).bind(*args, **kwargs)


# ------------------------------------------------------------------- what the child relies on in RLBench


def test_cameras_that_are_not_read_leave_the_scene_at_launch(world: World) -> None:
    launched()
    left = {name for name in world.bodies if name.startswith("cam_")}
    assert left == {"cam_front", "cam_wrist"}


def test_a_step_that_is_not_captured_draws_nothing(world: World) -> None:
    simulator = started()
    drawn = world.captures
    simulator.step(arm=STAY, gripper=1.0, capture=False)
    assert world.captures == drawn
    simulator.step(arm=STAY, gripper=1.0, capture=True)
    assert world.captures == drawn + len(VIEWS)


def test_a_placement_is_a_function_of_its_seed(world: World) -> None:
    simulator = launched()
    poses = []
    for seed in (5, 6, 5):
        simulator.reset(placement_seed=seed, seed=0, attempts=1)
        poses.append(world.bodies["water_plants"].pose.copy())
    assert np.array_equal(poses[0], poses[2]) and not np.allclose(poses[0], poses[1])


def test_a_gripper_that_changes_costs_ticks_of_its_own(world: World) -> None:
    simulator = started()
    spent = []
    for gripper in (1.0, 0.0, 0.0, 1.0):
        before = world.ticks
        simulator.step(arm=STAY, gripper=gripper, capture=False)
        spent.append(world.ticks - before)
    assert spent == [1, 1 + CLOSING_TICKS, 1, 1 + CLOSING_TICKS + SETTLING_TICKS]


def carry_can(simulator: Any, world: World, part: str, to: str, above_m: float) -> dict[str, Any]:
    """Grasp the can and bring `part` of it above the object `to`, from above; the last reply."""

    def go(offset: np.ndarray, gripper: float) -> dict[str, Any]:
        """Move the tip by `offset` m: up first, then across, then down."""
        reply: dict[str, Any] = {}
        lift = np.array([0.0, 0.0, 0.6])
        for leg in (lift, offset * [1, 1, 0], offset * [0, 0, 1] - lift):
            ticks = int(np.ceil(np.abs(leg).max() / 0.02)) or 1
            velocity = leg / ticks / TICK_S / METRES_PER_RADIAN
            for _ in range(ticks):
                reply = simulator.step(arm=[*velocity, 0, 0, 0, 0], gripper=gripper, capture=False)
                if reply["terminate"] or reply["poured"]:
                    return reply
        return reply

    def place(name: str) -> np.ndarray:
        return world.bodies[name].pose[:3, 3]

    go(place("waterer") - place("Panda_tip"), 1.0)
    simulator.step(arm=STAY, gripper=0.0, capture=False)
    assert world.bodies["waterer"].parent is world.bodies["Panda_gripper_attachPoint"], "Discrete attaches"
    return go(place(to) + [0.0, 0.0, above_m] - place(part), 0.0)


def test_water_is_poured_where_the_head_is_and_counts_when_all_of_it_is_in_the_pot(
    world: World,
) -> None:
    simulator = started()
    reply = carry_can(simulator, world, "head", "pour_point", above_m=0.0)
    assert reply["poured"] and not reply["terminate"], "the drops are still in the air"
    drops = [body for body in world.bodies.values() if body.falls]
    assert len(drops) == 5 and all(np.allclose(drop.size, 0.005) for drop in drops)
    replies = [simulator.step(arm=STAY, gripper=0.0, capture=False) for _ in range(8)]
    assert replies[-1]["reward"] == 1.0 and replies[-1]["terminate"]
    drops[2].pose[:3, 3] = (0.0, 0.0, 5.0)
    after = simulator.step(arm=STAY, gripper=0.0, capture=False)
    assert (after["reward"], after["terminate"]) == (0.0, False), "one drop short, and RLBench latches nothing"
    simulator.reset(placement_seed=2, seed=2, attempts=1)
    assert not any(body.falls for body in world.bodies.values()), "the drops are gone"
    assert not simulator.step(arm=STAY, gripper=1.0, capture=False)["poured"]


def test_the_can_itself_in_the_pot_counts_without_water(world: World) -> None:
    reply = carry_can(started(), world, "waterer", "success", above_m=0.05)
    assert reply["reward"] == 1.0 and reply["terminate"] and not reply["poured"]
