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

import numpy as np
from numpy.typing import NDArray

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
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if field.name != "source" and not all(np.isfinite(number) for number in numbers):
                raise ValueError(f"geometry.{field.name} = {value!r} must be finite, metres (kilograms for a mass)")
        positive = ("can_radius_m", "can_height_m", "can_mass_kg", "head_radius_m", "handle_radius_m", "pot_half_m")
        for name in (*positive, "pot_height_m", "pot_wall_m", "plant_height_m", "success_height_m"):
            if getattr(self, name) <= 0:
                raise ValueError(f"geometry.{name} = {getattr(self, name)!r} must be above 0")

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
        try:
            values = json.loads(path.read_text())
            values = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
                if name not in NOTES
            }
            return cls(**values)
        except OSError as error:
            remedy = "name a file of `wamrl calibrate water_plants`, or leave it out"
            raise ValueError(f"geometry = {path}: {error.strerror}; {remedy}") from None
        except (TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"geometry = {path}: not a file of `wamrl calibrate water_plants` ({error})") from None


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
