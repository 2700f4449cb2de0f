"""`wamrl calibrate water_plants`: what is read of a made-up world of boxes, and the geometry that comes of it.

The numbers are not RLBench's.  What the tests show is that whatever RLBench's are, they arrive in the stand-in; that
PyRep's objects answer as the fake's do, only a machine with CoppeliaSim can show.
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envs import rlbench_calibration
from envs.rlbench_calibration import ATTRIBUTION, RULES, UNKNOWN, Calibration, calibrate
from envs.rlbench_measure import measure
from envs.rlbench_process import SimulatorProcess
from envs.water_plants import WaterPlantsConfig, WaterPlantsEnv
from envs.water_plants_geometry import NOTES, Geometry, layout
from tests.fake_rlbench.pyrep.objects.world import TABLE, World, api
from tests.rlbench_fake import install
from wamrl_ray.__main__ import DONE, FAILED, WRONG_USAGE, main

VERSIONS = {"rlbench": "b80e51f", "coppeliasim": "4.1.0"}
# By hand from TABLE: origin halfway between the can's axis (-0.12, 0) and the middle of success (0.12, 0.01).
EXPECTED = {
    "can_m": (-0.12, -0.005), "can_radius_m": 0.045, "can_height_m": 0.11, "can_mass_kg": 0.35,
    "head_m": (0.13, 0.14), "head_radius_m": 0.012,
    "pot_m": (0.12, 0.005), "pot_half_m": 0.05, "pot_height_m": 0.10, "pot_wall_m": 0.008, "plant_height_m": 0.14,
    "pour_half_m": (0.04, 0.05, 0.045), "pour_height_m": 0.17, "success_height_m": 0.12,
    "handle_m": (0.03, 0.175), "handle_radius_m": 0.008,
}  # fmt: skip


def reading(x: float = 0.25, y: float = 0.0, yaw: float = 0.0, **rows: Any) -> dict[str, Any]:
    """What a simulator would say of the table placed there; felt out by hand."""
    things = World(x, y, yaw, {**TABLE, **rows}).things
    objects = {
        name: {"type": thing.kind, "pose": thing.get_pose(), "box": None if thing.kind == "DUMMY" else thing.box}
        for name, thing in things.items()
    }
    turn = np.array([[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]])
    return {
        "objects": objects,
        "can": ["waterer", "waterer_visual"],
        "mass_kg": 0.35,
        # In their own frames: success hangs upside down from its top, pour_point is turned by a quarter.
        "volumes": {
            "success": [-0.05, 0.05, -0.05, 0.05, 0.0, 0.12],
            "pour_point": [-0.05, 0.05, -0.04, 0.04, 0.0, 0.09],
        },
        "body": {"centre": (turn @ (-0.12, 0) + (x, y)).tolist(), "radius": 0.045, "top": 0.86},
        "cameras": {"front": {"pose": [0, 0, 1, 0, 0, 0, 1], "fovy_deg": 40.0, "near_m": 0.01, "far_m": 4.5}},
        "versions": VERSIONS,
    }


def three(**rows: Any) -> list[dict[str, Any]]:
    return [reading(*place, **rows) for place in ((0.25, 0, 0), (0.1, 0.2, 2.0), (0.4, -0.3, -1.1))]


def check(geometry: Geometry, tolerance: float) -> None:
    for name, value in EXPECTED.items():
        assert getattr(geometry, name) == pytest.approx(value, abs=tolerance), name


def test_every_field_is_where_the_world_has_it() -> None:
    found = calibrate(three(), [0, 1, 2])
    check(found.geometry, 1e-9)
    assert found.geometry.source == "RLBench b80e51f by PyRep's API on CoppeliaSim 4.1.0"
    assert set(found.measured) == set(EXPECTED) - {"handle_m", "handle_radius_m"}
    assert set(found.not_measured) == {"handle_m", "handle_radius_m"}
    assert found.measurement["pot_shape"] == "base_visual", "not the soil, which is a plate, and not the plant"
    assert found.measurement["pour_offset_m"] == pytest.approx((0.005, -0.01))
    assert found.measurement["pot_bearing_deg"] == pytest.approx(np.rad2deg(np.arctan2(0.01, 0.24)))
    assert max(found.measurement["spread_mm"].values()) < 1e-6


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(-0.3, 0.6), st.floats(-0.5, 0.5), st.floats(-np.pi, np.pi)), min_size=2, max_size=4)
)
def test_it_does_not_matter_where_and_how_turned_the_task_was_placed(places: list[tuple[float, float, float]]) -> None:
    check(calibrate([reading(*place) for place in places], range(len(places))).geometry, 1e-7)


@pytest.mark.parametrize("place", [(0.25, 0.0, 0.0), (0.1, 0.3, 2.3), (0.4, -0.2, -1.0)])
def test_what_is_read_of_the_objects_is_that_world(place: tuple[float, float, float]) -> None:
    world = World(*place)
    found = {**measure(api(world)), "versions": VERSIONS}
    json.dumps(found, allow_nan=False)
    assert found["volumes"]["success"] == pytest.approx([-0.05, 0.05, -0.05, 0.05, 0.0, 0.12], abs=1e-4)
    assert found["volumes"]["pour_point"] == pytest.approx([-0.05, 0.05, -0.04, 0.04, 0.0, 0.09], abs=1e-4)
    assert found["body"]["radius"] == pytest.approx(0.045, abs=1e-3)
    assert found["body"]["top"] == pytest.approx(0.86, abs=1e-3)
    assert found["can"] == ["waterer", "waterer_visual"] and found["objects"]["water_plants"]["box"] is None
    assert set(found["cameras"]) == {"left_shoulder", "right_shoulder", "overhead", "wrist", "front"}
    calibration = calibrate([found, found], [0, 1])
    check(calibration.geometry, 1.5e-3)
    assert calibration.cameras["front"]["xyaxes"] == pytest.approx((0, 1, 0, -0.4226, 0, 0.9063), abs=1e-4)


def test_a_task_without_its_objects_is_named_in_the_simulator() -> None:
    world = World()
    del world.things["pour_point"]
    with pytest.raises(RuntimeError, match="water_plants holds no pour_point, only base_visual, head"):
        measure(api(world))


def test_what_cannot_be_felt_out_stays_chosen_and_is_said() -> None:
    readings = three()
    for found in readings:
        found["body"] = None
        found["volumes"] = {"success": None, "pour_point": None}
        for name in ("base_visual", "plant_visual"):
            del found["objects"][name]
    result, chosen = calibrate(readings, [0, 1, 2]), Geometry()
    for name in ("can_radius_m", "can_height_m", "handle_m", "pot_height_m", "pot_wall_m", "plant_height_m"):
        assert name in result.not_measured and getattr(result.geometry, name) == getattr(chosen, name)
    # The head keeps its place: only the body behind it is chosen.
    assert {"can_m", "head_m"} <= set(result.not_measured) and result.geometry.head_m == pytest.approx((0.12, 0.14))
    apart = result.geometry.pot_m[0] - result.geometry.can_m[0] - result.geometry.head_m[0]
    assert apart == pytest.approx(0.11, abs=1e-9)
    # Bounding boxes in place of volumes: with the symbols on top and below.
    assert result.geometry.success_height_m == pytest.approx(0.14)
    assert result.measurement["felt_out"] == [] and result.measurement["pot_shape"] is None
    assert result.not_measured["can_m"] == UNKNOWN["can_m"]


def test_a_pot_that_cannot_be_told_from_its_plant_is_not_measured() -> None:
    kind, origin, orientation, ((x, y, z), top), parts = TABLE["base_visual"]
    one = (kind, origin, orientation, ((x, y, z), (*top[:2], 0.24)), parts)
    result = calibrate(three(base_visual=one), [0, 1, 2])
    assert {"pot_height_m", "pot_wall_m", "plant_height_m"} <= set(result.not_measured)
    assert result.geometry.pot_height_m == Geometry().pot_height_m


def test_what_hangs_over_the_pot_and_belongs_to_the_can_is_not_the_pot() -> None:
    over = ((-0.21, -0.045, 0), (0.25, 0.045, 0.08))
    kind, origin, orientation, _, parts = TABLE["waterer_visual"]
    found = calibrate(three(waterer_visual=(kind, origin, orientation, over, parts)), [0, 1, 2])
    assert found.measurement["pot_shape"] == "base_visual"


# ------------------------------------------------------------------------------------------------ refusals


def changed(path: tuple[Any, ...], value: Any) -> list[dict[str, Any]]:
    readings = copy.deepcopy(three())
    at: Any = readings[1]
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return readings


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("volumes",), None, "seed 1: the measurement has no 'volumes': measure again"),
        (("objects", "head"), None, "seed 1: the measurement has no object 'head': measure again"),
        (("objects", "head", "pose"), [0.0] * 6, r"seed 1: head.pose = \[0.0, .*must be 7 finite numbers: measure"),
        (("objects", "success", "box"), None, "seed 1: success.box = None must be 6 finite numbers"),
        (("objects", "soil", "pose"), [float("nan")] * 7, r"seed 1: soil.pose = \[nan.* must be 7 finite numbers"),
        (("objects", "waterer", "pose"), [0.25, 0, 0.5, 0, 0, 0, 1], "seed 1: waterer has its lowest corner at z = "),
        (("body", "centre"), three()[1]["objects"]["head"]["pose"][:2], "seed 1: head is 0 mm beside .*use another"),
    ],
)
def test_an_incomplete_measurement_is_refused(path: tuple[Any, ...], value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(changed(path, value), [0, 1, 2])


@pytest.mark.parametrize("name", ["success", "pour_point", "head"])
def test_things_that_move_against_each_other_are_refused(name: str) -> None:
    pose = three()[1]["objects"][name]["pose"]
    for shift, refused in ((0.002, False), (0.005, True)):
        readings = changed(("objects", name, "pose"), [pose[0], pose[1], pose[2] + shift, *pose[3:]])
        if refused:
            with pytest.raises(ValueError, match=rf"{name} differs by 5.0 mm between seeds \[0, 1, 2\], more than 3: "):
                calibrate(readings, [0, 1, 2])
        else:
            assert calibrate(readings, [0, 1, 2]).measurement["spread_mm"][name] == pytest.approx(2.0, abs=1e-6)


def test_the_bar_stays_over_a_can_that_is_higher_than_the_chosen_bar() -> None:
    readings = three()
    for each in readings:
        each["body"]["top"] = 0.95
    assert calibrate(readings, [0, 1, 2]).geometry.handle_m[1] == pytest.approx(0.065 + 0.20, abs=1e-3)


def test_a_geometry_that_fits_nowhere_on_the_table_is_refused_and_not_waited_for() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"geometry.can_m = .* fit on the spawn plane .*bring can and pot closer"):
        layout(0, Geometry(can_m=(-0.5, 0.0), pot_m=(0.5, 0.0)))
    assert time.monotonic() - began < 5


# ------------------------------------------------------------------------------------------------ file and command


@pytest.mark.sim
def test_the_file_builds_a_stand_in_with_these_sizes(tmp_path: Path) -> None:
    path = tmp_path / "geometry.json"
    found: Calibration = calibrate(three(), [0, 1, 2])
    found.save(path)
    assert Geometry.load(path) == found.geometry
    written = json.loads(path.read_text())
    assert set(NOTES) <= set(written) and written["attribution"] == ATTRIBUTION
    assert written["measured"]["pour_half_m"] == RULES["pour_half_m"] and "handle_m" in written["not_measured"]
    env = WaterPlantsEnv(WaterPlantsConfig(geometry=str(path), resolution=16), "train")
    env.reset_to(0, 0, 0)
    assert env.model.geom("success").size == pytest.approx((0.05, 0.05, 0.06))
    head = env.data.geom("head").xpos - env.data.body("can").xpos
    assert np.hypot(*head[:2]) == pytest.approx(0.13) and head[2] == pytest.approx(0.14)
    assert "RLBench b80e51f by PyRep's API" in env.env_spec.simulator
    env.close()


def test_without_an_installation_the_command_says_what_is_missing_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COPPELIASIM_ROOT", raising=False)
    out, began = tmp_path / "geometry.json", time.monotonic()
    assert main(["calibrate", "water_plants", "--out", str(out)]) == WRONG_USAGE
    assert time.monotonic() - began < 5
    printed = capsys.readouterr()
    begins = "wamrl calibrate: RLBench cannot run on this machine (docs/rlbench.md): COPPELIASIM_ROOT is not set"
    assert printed.err.startswith(begins)
    assert printed.err.count("\n") == 1 and printed.out == "" and not out.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--seeds", "3"], "--seeds 3: use at least two"),
        (["--seeds", "3", "3"], "--seeds 3 3: use at least two"),
        (["--out", "/nowhere/geometry.json"], "--out /nowhere/geometry.json: use a file in a folder that exists"),
    ],
)
def test_wrong_arguments_are_one_line(
    change: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "water_plants", "--out", str(tmp_path / "g.json"), *change]) == WRONG_USAGE
    assert capsys.readouterr().err.startswith(f"wamrl calibrate: {message}")


def test_the_command_measures_in_a_process_of_its_own_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, launched = install(monkeypatch, tmp_path), []

    class Kept(SimulatorProcess):
        """Outlives the command, so that nothing but `close` ends it."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            launched.append(self)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(rlbench_calibration, "SimulatorProcess", Kept)
    out = tmp_path / "geometry.json"
    assert main(["calibrate", "water_plants", "--out", str(out), "--seeds", "4", "7", "9"]) == DONE
    printed = capsys.readouterr().out
    assert "pour_height_m      0.1700" in printed and "not measured, left as chosen:\n  handle_m" in printed
    geometry = Geometry.load(out)
    check(geometry, 1.5e-3)
    assert geometry.source.endswith("on CoppeliaSim 4.1.0")
    assert json.loads(out.read_text())["measurement"]["seeds"] == [4, 7, 9]
    assert machine.all_gone()
    monkeypatch.setitem(rlbench_calibration._DEADLINES_S, "measure", 1.0)
    for fault, kind in (
        ("reset_error", "reset_failed"),
        ("measure_error", "measure_failed"),
        ("measure_hang", "measure_timeout"),
    ):
        machine.plan(fault=fault)
        assert main(["calibrate", "water_plants", "--out", str(tmp_path / "none.json")]) == FAILED
        assert f"simulator fault {kind}" in capsys.readouterr().err
        assert machine.all_gone() and not (tmp_path / "none.json").exists()
    assert len(launched) == 4


def test_the_docs_name_every_field_and_key_of_the_file() -> None:
    text = (Path(__file__).parent.parent / "docs" / "water_plants.md").read_text(encoding="utf-8")
    names = [field.name for field in fields(Geometry)] + list(NOTES)
    assert [name for name in names if f"`{name}`" not in text] == []
