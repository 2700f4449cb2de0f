"""From what RLBench's running scene says about itself to the geometry of our stand-in.  `wamrl calibrate` runs it.

    read_rlbench(seeds) ──► one reading per seed ──► calibrate ──► Geometry, and what of it is measured
                            envs/rlbench_measure.py                 save ──► the file WaterPlantsConfig.geometry names

Mapping.  Our task frame lies on the table, z up, its origin halfway between the can's axis and the pot's middle, x
along the can's spout: from the can to the pot where the spout points at it.  It is found anew in every reading, so it
does not matter where and how turned RLBench placed the task.  The table is where the can's lowest corner is; the pot's
middle is the middle of what the success sensor detects.  Heights are those of bounding boxes in the world frame; widths
are taken along a box's own axes, each assigned to the nearer one of the task frame.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from envs import rlbench_install
from envs.rlbench_contract import CAMERAS
from envs.rlbench_measure import Reading, rotation
from envs.rlbench_process import SimulatorProcess
from envs.rlbench_scene import Scene
from envs.water_plants_geometry import Geometry, layout

ATTRIBUTION = (
    "These numbers were obtained using RLBench: The Robot Learning Benchmark & Learning Environment, copyright "
    "Imperial College of Science, Technology and Medicine (Imperial College London), made available for use under "
    "licence from Imperial College London, for non-commercial and academic research only.  Its licence (2f) asks that "
    "whoever publishes them says so and sends Imperial College London a copy."
)
RIGID_M = 0.003
"how far can, head and sensors may differ between two seeds; a can that has settled moves by less"
_DEADLINES_S = {"launch": 120.0, "reset": 60.0, "measure": 120.0}
_RESOLUTION = 64

RULES = {
    "can_m": "middle of the can's body, felt out near its bottom",
    "can_radius_m": "half the width of the can's body near its bottom, mean of two directions",
    "can_height_m": "highest part over the can's body",
    "can_mass_kg": "mass of waterer",
    "head_m": "origin of head, where the drops appear, from the can's body and above the table",
    "head_radius_m": "half the middle one of the sides of head's bounding box",
    "pot_m": "middle of what success detects",
    "pot_half_m": "half the width of what success detects, mean of two directions",
    "pot_height_m": "top of the lowest shape that stands on the table around the middle of success",
    "pot_wall_m": "half the width of that shape less pot_half_m",
    "plant_height_m": "top of the highest shape over the middle of success, above pot_height_m",
    "pour_half_m": "half sizes of what pour_point detects",
    "pour_height_m": "middle of what pour_point detects, above the table",
    "success_height_m": "top of what success detects, above the table",
}
UNKNOWN = {
    "can_m": "the can's body could not be felt out; its place behind the head is chosen",
    "can_radius_m": "the can's body could not be felt out",
    "can_height_m": "the can's body could not be felt out",
    "head_m": "its height is measured; its distance from the can's body is chosen",
    "handle_m": "no object of its own; chosen, over the can's measured height",
    "handle_radius_m": "no object of its own",
    "pot_height_m": "no shape stands on the table around success and ends below the middle of pour_point",
    "pot_wall_m": "no shape of the pot, or one narrower than what success detects",
    "plant_height_m": "no shape over the pot",
}


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A geometry and where each of its fields comes from."""

    geometry: Geometry
    measured: dict[str, str]
    "field: by which rule"
    not_measured: dict[str, str]
    "field: why; it keeps the chosen value"
    measurement: dict[str, Any]
    "seeds; spread_mm between them; what the stand-in cannot hold, such as the sensors' offsets"
    cameras: dict[str, Any]

    def save(self, path: Path) -> None:
        report = {"attribution": ATTRIBUTION, **asdict(self)}
        path.write_text(json.dumps({**report.pop("geometry"), **report}, indent=2) + "\n")


def read_rlbench(seeds: Sequence[int]) -> list[Reading]:
    """A reading after a reset with each seed.  RuntimeError naming what is not installed, SimulatorFault."""
    rlbench_install.require()
    launch = {
        "task": "WaterPlants", "arm_mode": "joint_velocity", "views": list(CAMERAS), "resolution": _RESOLUTION,
        "variation": 0,
    }  # fmt: skip
    shape = (len(CAMERAS), _RESOLUTION, _RESOLUTION, 3)
    simulator = SimulatorProcess(launch, frames_shape=shape, launch_s=_DEADLINES_S["launch"])
    try:
        readings = []
        for seed in seeds:
            simulator.call("reset", {"placement_seed": seed, "seed": seed, "attempts": 3}, _DEADLINES_S["reset"])
            readings.append(simulator.call("measure", {}, _DEADLINES_S["measure"]))
        return readings
    finally:
        simulator.close()


def calibrate(readings: Sequence[Reading], seeds: Sequence[int]) -> Calibration:
    """ValueError for a reading that lacks something, for things that move against each other, for no usable result."""
    scenes = [Scene(reading, seed) for reading, seed in zip(readings, seeds, strict=True)]
    spread = _spread(scenes, seeds)
    found = [scene.fields() for scene in scenes]
    mean = {
        name: np.mean([values[name] for values in found], axis=0)
        for name in RULES
        if all(values[name] is not None for values in found)
    }
    values = {name: tuple(value.tolist()) if value.ndim else float(value) for name, value in mean.items()}
    versions = readings[0].get("versions", {})
    source = (
        f"RLBench {versions.get('rlbench', 'of unknown version')} by PyRep's API on "
        f"CoppeliaSim {versions.get('coppeliasim', 'of unknown version')}"
    )
    chosen = Geometry()
    radius, height = (values.get(name, getattr(chosen, name)) for name in ("can_radius_m", "can_height_m"))
    bar = (min(chosen.handle_m[0], 0.75 * radius), height + chosen.handle_m[1] - chosen.can_height_m)
    geometry = replace(chosen, source=source, handle_m=bar, **values)
    layout(0, geometry)  # one that fits on the table nowhere is refused here
    names = [field.name for field in fields(Geometry) if field.name != "source"]
    # Without the can's body only the head's own place is known, and both fields lean on a chosen distance.
    partly = set() if all(reading["body"] for reading in readings) else {"can_m", "head_m"}
    return Calibration(
        geometry=geometry,
        measured={name: RULES[name] for name in names if name in values and name not in partly},
        not_measured={name: UNKNOWN[name] for name in names if name not in values or name in partly},
        measurement={
            "seeds": list(seeds),
            "spread_mm": spread,
            "pot_shape": scenes[0].pot_shape,
            "pour_offset_m": scenes[0].offset(scenes[0].pour),
            "pot_bearing_deg": scenes[0].bearing_deg,
            "felt_out": [name for name, volume in readings[0]["volumes"].items() if volume is not None],
            "table_z_m": scenes[0].table,
        },
        cameras={view: _camera(camera) for view, camera in readings[0]["cameras"].items()},
    )


def _spread(scenes: Sequence[Scene], seeds: Sequence[int]) -> dict[str, float]:
    """Millimetres between the two seeds that differ most; ValueError beyond `RIGID_M`."""
    points = [scene.key_points() for scene in scenes]
    spread = {name: float(np.linalg.norm(np.ptp([at[name] for at in points], axis=0))) for name in points[0]}
    name = max(spread, key=lambda which: spread[which])
    if spread[name] > RIGID_M:
        apart = f"{1000 * spread[name]:.1f} mm between seeds {list(seeds)}, more than {1000 * RIGID_M:g}"
        remedy = "can and pot are not rigidly related; use seeds at which the can stands still"
        raise ValueError(f"{name} differs by {apart}: {remedy}")
    return {name: round(1000 * metres, 3) for name, metres in spread.items()}


def _camera(camera: Mapping[str, Any]) -> dict[str, Any]:
    """Position and `xyaxes` as MJCF has them: CoppeliaSim's cameras have z forward and x left."""
    axes = rotation(camera["pose"])
    xyaxes = [round(float(number), 6) for number in (*-axes[:, 0], *axes[:, 1])]
    rest = {name: camera[name] for name in ("fovy_deg", "near_m", "far_m")}
    return {"position_m": camera["pose"][:3], "xyaxes": xyaxes, **rest}
