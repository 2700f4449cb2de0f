"""Water Plants (MuJoCo) in numbers: what is known of RLBench's scene, what is chosen, and where things are placed.

Read by `envs/water_plants_scene.py`, which builds it, and by the environment and its expert.  The robot, its place, the
tick and the spawn plane are RLBench's (published data and PyRep's MIT-licensed model).  Nothing is known here about
RLBench's can and pot: all of `Geometry` is chosen, not measured, until `wamrl calibrate water_plants` replaces it.

Frames: world z up, metres.  The task frame lies on the table, x from the can to the pot; can, pot and their sensors are
placed in it and move together.  The tip frame is RLBench's: z out of the hand, the fingers close along y.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Vec = NDArray[np.float64]

# RLBench's scene: published data, PyRep's MIT-licensed Panda model.
TABLE_TOP_Z_M = 0.75
ROBOT_POSITION_M = (-0.268, -0.0064, TABLE_TOP_Z_M)
SPAWN_CENTRE_M, SPAWN_HALF_M = (0.25, 0.0), (0.324, 0.455)
HOME_JOINTS_RAD = (0.0, 0.175, 0.0, -0.8729, 0.0, 1.2216, 0.7854)
"in RLBench's convention"
JOINT_OFFSET_RAD = np.array([0.0, 0.0, 0.0, 0.069, 0.0, 0.0, 0.0])
"standard Panda kinematics minus RLBench's: its fourth joint reads 0.069 rad less"
TIP_M = 0.110
"the tip beyond the flange"
TORQUE_LIMITS_NM = (87.0,) * 4 + (12.0,) * 3
ACCELERATION_LIMITS_RAD_S2 = (15.0, 7.5, 10.0, 12.5, 15.0, 20.0, 20.0)
"the Panda's own, published by Franka; commanded velocities change no faster"
GRASP_BOX_M = (0.02, 0.10, 0.045)
"ends 1 mm before the tip"
FINGER_OPEN_M = 0.04
CAN_GEOMS = ("handle", "handle_back", "handle_front", "can_body", "spout", "head")
DROPS, DROP_SIDE_M, DROP_MASS_KG = 5, 0.005, 1e-4
REACH_M = (0.32, 0.70)
"chosen: can and pot stand at this distance from the robot's first axis; beyond it no hand points down at them"
LAYOUT_TRIES = 10_000
"placements that are drawn before a geometry counts as one that fits nowhere; the chosen one fits at about one of five"
NOTES = ("attribution", "measured", "not_measured", "measurement", "cameras")
"keys of a geometry file beside the fields: where its numbers come from; the scene is built without them"

BOUNDS = {
    "can_m": (-0.5, 0.5), "can_radius_m": (0.01, 0.2), "can_height_m": (0.01, 0.5), "can_mass_kg": (0.01, 5.0),
    "head_m": (0.0, 0.5), "head_radius_m": (0.001, 0.05), "handle_m": (0.001, 0.6), "handle_radius_m": (0.001, 0.03),
    "pot_m": (-0.5, 0.5), "pot_half_m": (0.01, 0.3), "pot_height_m": (0.01, 0.5), "pot_wall_m": (0.001, 0.05),
    "plant_height_m": (0.001, 1.0), "pour_half_m": (0.005, 0.3), "pour_height_m": (0.0, 1.0),
    "success_height_m": (0.01, 0.5),
}  # fmt: skip
"of the fields of `Geometry`: what stands on a table within a Panda's reach; metres, kilograms"


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What RLBench's scene file holds and cannot be read here.  Metres; every default is chosen, not measured.

    Positions are in the task frame; `head_m`, `handle_m` and the can's body are relative to the can.
    """

    source: str = "chosen, not measured"
    "where the numbers come from; part of `EnvSpec.simulator`"
    can_m: tuple[float, float] = (-0.12, 0.0)
    "the can's axis on the table"
    can_radius_m: float = 0.04
    can_height_m: float = 0.10
    can_mass_kg: float = 0.2
    head_m: tuple[float, float] = (0.12, 0.135)
    "end of the spout, where the water comes out: forward, up"
    head_radius_m: float = 0.012
    handle_m: tuple[float, float] = (0.03, 0.165)
    "the grip bar over the can: half length, height"
    handle_radius_m: float = 0.008
    pot_m: tuple[float, float] = (0.13, 0.0)
    pot_half_m: float = 0.06
    "half the inner width; the pot is square"
    pot_height_m: float = 0.10
    pot_wall_m: float = 0.006
    plant_height_m: float = 0.13
    "above the rim; drawn only, nothing touches it"
    pour_half_m: tuple[float, float, float] = (0.045, 0.045, 0.04)
    "half sizes of the volume in which the head pours"
    pour_height_m: float = 0.26
    "its centre above the table, over the middle of the pot; too high for the head of a can that was not lifted"
    success_height_m: float = 0.13
    "the volume that detects drops and can: the pot's inside, up to this height above the table"

    def __post_init__(self) -> None:
        """Raises ValueError for what is no such size, or what could not be played: water that flows at the start."""
        if not isinstance(self.source, str) or not 0 < len(self.source) <= 200 or not self.source.isprintable():
            raise ValueError(f"geometry.source = {self.source!r:.80} must be one line of text, at most 200 characters")
        for name, (low, high) in BOUNDS.items():
            value, default = getattr(self, name), getattr(type(self), name)
            numbers, count = _numbers(value), len(_numbers(default))
            if len(numbers) != count or isinstance(value, tuple) != isinstance(default, tuple):
                raise ValueError(f"geometry.{name} = {value!r:.80} must be {count} number{'s' * (count > 1)}")
            if not all(low <= number <= high for number in numbers):
                unit = "kg" if name.endswith("_kg") else "m"
                raise ValueError(f"geometry.{name} = {value!r} must lie within [{low}, {high}] {unit}")
        self._check_start()

    def _check_start(self) -> None:
        can, head = (*self.can_m, 0.0), (self.can_m[0] + self.head_m[0], self.can_m[1], self.head_m[1])
        half, rim, deep = self.pot_half_m, self.pot_half_m + self.pot_wall_m, self.success_height_m / 2
        from_pot = _distance(can, (*self.pot_m, 0.0), (rim, rim, 0.0))
        from_pour = _distance(head, (*self.pot_m, self.pour_height_m), self.pour_half_m)
        from_success = _distance(head, (*self.pot_m, deep), (half, half, deep))
        bar_in_can, spout_in_can = self.handle_m[1] <= self.can_height_m, self.head_m[0] <= self.can_radius_m
        for wrong, remedy in (
            (bar_in_can, "the bar is gripped from above: raise handle_m[1] over can_height_m"),
            (spout_in_can, "the spout ends inside the can: move head_m[0] beyond can_radius_m"),
            (from_pot <= self.can_radius_m, "the can stands in the pot: move can_m and pot_m apart"),
            (from_pour <= self.head_radius_m, "water would flow at the start: raise pour_height_m, or move can_m away"),
            (from_success <= self.head_radius_m, "the spout stands in the pot: move can_m and pot_m apart"),
        ):
            if wrong:
                raise ValueError(f"geometry: {remedy}")

    @property
    def footprint_m(self) -> tuple[Vec, Vec]:
        """Lower and upper corner (2,) of what stands on the table, task frame."""
        can, pot = np.array(self.can_m), np.array(self.pot_m)
        rim = self.pot_half_m + self.pot_wall_m
        low = np.minimum(can - self.can_radius_m, pot - rim)
        spout = can + (self.head_m[0] + self.head_radius_m, self.can_radius_m)
        return low, np.maximum(spout, pot + rim)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Geometry:
        """Raises ValueError, naming the file, for one that cannot be read or is not a geometry."""
        where, remedy = f"geometry = {path}", "name a file of `wamrl calibrate water_plants`, or leave it out"
        try:
            values = json.loads(path.read_text())
        except OSError as error:
            raise ValueError(f"{where}: {error.strerror}; {remedy}") from None
        except (ValueError, RecursionError) as error:  # no text, no JSON
            raise ValueError(f"{where}: not a file of `wamrl calibrate water_plants` ({error})") from None
        if not isinstance(values, dict):
            raise ValueError(f"{where}: not a file of `wamrl calibrate water_plants` (it is no object)")
        known = [field.name for field in fields(cls)]
        if unknown := sorted(values.keys() - {*known, *NOTES}):
            raise ValueError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
        sizes: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items() if name in known
        }
        try:
            return cls(**sizes)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def _numbers(value: object) -> tuple[float, ...]:
    """The number or the tuple of numbers; nothing for anything else."""
    values = value if isinstance(value, tuple) else (value,)
    return values if all(type(v) in (int, float, np.float64) for v in values) else ()


def _distance(point: ArrayLike, centre: ArrayLike, half: ArrayLike) -> float:
    """From a point to a box, metres; 0 inside."""
    beyond = np.abs(np.subtract(point, centre)) - half
    return float(np.linalg.norm(np.maximum(beyond, 0.0)))


def layout(init_state_id: int, geometry: Geometry) -> tuple[Vec, float]:
    """Task frame of an initial state: origin (2,), metres in the world frame, and yaw, radians.

    Uniform on RLBench's spawn plane, yaw in [-pi, pi), with all that stands on the table inside the plane (RLBench's
    rule) and can and pot within `REACH_M` of the robot (chosen).  ValueError for a geometry that fits nowhere.
    """
    generator = np.random.default_rng(init_state_id)
    centre, half = np.array(SPAWN_CENTRE_M), np.array(SPAWN_HALF_M)
    low, high = geometry.footprint_m
    corners = np.array([(x, y) for x in (low[0], high[0]) for y in (low[1], high[1])])
    for _ in range(LAYOUT_TRIES):
        position, yaw = centre + generator.uniform(-half, half), float(generator.uniform(-np.pi, np.pi))
        turn = np.array([[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]])
        inside = np.all(np.abs(position + corners @ turn.T - centre) <= half)
        things = position + np.array([geometry.can_m, geometry.pot_m]) @ turn.T
        distance = np.linalg.norm(things - ROBOT_POSITION_M[:2], axis=1)
        if inside and distance.min() >= REACH_M[0] and distance.max() <= REACH_M[1]:
            return position, yaw
    size = np.round(high - low, 3).tolist()
    raise ValueError(
        f"geometry.can_m = {geometry.can_m}, geometry.pot_m = {geometry.pot_m}: {size} m on the table fit on the spawn "
        f"plane within {REACH_M} m of the robot at none of {LAYOUT_TRIES} placements; bring can and pot closer together"
    )
