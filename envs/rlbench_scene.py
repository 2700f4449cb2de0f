"""One reading of RLBench's Water Plants in the stand-in's own task frame.

Fed by `envs/rlbench_measure.py`, read by `envs/rlbench_calibration.py`, which describes the frame and averages what
several readings say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.rlbench_measure import CAN, HEAD, POUR, SUCCESS, Reading, corners, rotation
from envs.water_plants_geometry import TABLE_TOP_Z_M, Geometry

Vec = NDArray[np.float64]

TABLE_M = 0.03
"how far the can's bottom may be from the table top"
LOW_M, HIGHER_M = 0.02, 0.01
"a pot is higher than this; a plant is what rises further than this over it"


@dataclass(frozen=True)
class Box:
    """Upright in the task frame: half sizes along and across the spout, heights in the world, middle (2,) in it."""

    along: float
    across: float
    low: float
    high: float
    middle: Vec


class Scene:
    """One reading in its own task frame."""

    def __init__(self, reading: Reading, seed: int) -> None:
        self._objects = _checked(reading, seed)
        self._reading = reading
        body, can = reading["body"], self._objects[CAN]
        points = corners(can["pose"], can["box"])
        self.table, head = float(points[:, 2].min()), np.array(self._objects[HEAD]["pose"][:3])
        if abs(self.table - TABLE_TOP_Z_M) > TABLE_M:
            what = (
                f"seed {seed}: {CAN} has its lowest corner at z = {self.table:.3f} m, the table is at {TABLE_TOP_Z_M} m"
            )
            raise ValueError(f"{what}: it does not stand; use another seed")
        behind = np.array(body["centre"]) if body else points.mean(axis=0)[:2]
        ahead = head[:2] - behind
        distance = float(np.linalg.norm(ahead))
        if distance < 0.01:
            what = f"seed {seed}: {HEAD} is {1000 * distance:.0f} mm beside the middle of {CAN}"
            raise ValueError(f"{what}: no direction of the spout can be told; use another seed")
        self._forward = ahead / distance
        self._left = np.array([-self._forward[1], self._forward[0]])
        reach = distance if body else Geometry().head_m[0]
        self.axis = head[:2] - reach * self._forward
        self.head = (reach, float(head[2]) - self.table)
        self.success, self.pour = (self._box(name, reading["volumes"][name]) for name in (SUCCESS, POUR))
        self._pot_box, self._plant_top = self._pot()

    @property
    def pot_shape(self) -> str | None:
        return self._pot_box[0] if self._pot_box else None

    @property
    def bearing_deg(self) -> float:
        """Of the pot, seen from the can; 0 where the spout points, left positive."""
        along, across = self._in_frame(self.success.middle, self.axis)
        return float(np.rad2deg(np.arctan2(across, along)))

    def offset(self, box: Box) -> tuple[float, float]:
        """Of the box's middle from the pot's, task frame, m."""
        return self._in_frame(box.middle, self.success.middle)

    def key_points(self) -> dict[str, Vec]:
        """(3,) each, task frame with its origin at the can's axis: what must be the same at every seed."""
        points = {
            name: np.array([*self._in_frame(box.middle, self.axis), (box.low + box.high) / 2 - self.table])
            for name, box in ((CAN, self._box(CAN, None)), (SUCCESS, self.success), (POUR, self.pour))
        }
        return {**points, HEAD: np.array([self.head[0], 0.0, self.head[1]])}

    def fields(self) -> dict[str, Any]:
        """Every field of `RULES`, None where it could not be measured."""
        body = self._reading["body"]
        origin = (self.axis + self.success.middle) / 2
        half = (self.success.along + self.success.across) / 2
        pot = self._pot_box[1] if self._pot_box else None
        wall = (pot.along + pot.across) / 2 - half if pot else 0.0
        top = pot.high if pot else None
        plant = self._plant_top
        sides = np.diff(np.reshape(self._objects[HEAD]["box"], (3, 2)))
        return {
            "can_m": self._in_frame(self.axis, origin),
            "can_radius_m": body["radius"] if body else None,
            "can_height_m": body["top"] - self.table if body else None,
            "can_mass_kg": self._reading["mass_kg"],
            "head_m": self.head,
            "head_radius_m": float(np.median(sides)) / 2,
            "pot_m": self._in_frame(self.success.middle, origin),
            "pot_half_m": half,
            "pot_height_m": top - self.table if top is not None else None,
            "pot_wall_m": wall if wall > 1e-3 else None,
            "plant_height_m": plant - top if plant is not None and top is not None and plant - top > HIGHER_M else None,
            "pour_half_m": (self.pour.along, self.pour.across, (self.pour.high - self.pour.low) / 2),
            "pour_height_m": (self.pour.low + self.pour.high) / 2 - self.table,
            "success_height_m": self.success.high - self.table,
        }

    def _in_frame(self, point: Vec, origin: Vec) -> tuple[float, float]:
        return float((point - origin) @ self._forward), float((point - origin) @ self._left)

    def _box(self, name: str, box: Sequence[float] | None) -> Box:
        """`box` in the frame of the object, its bounding box if None."""
        pose, box = self._objects[name]["pose"], box or self._objects[name]["box"]
        axes, sides = rotation(pose), np.diff(np.reshape(box, (3, 2)))[:, 0] / 2
        flat = [axis for axis in range(3) if axis != int(np.argmax(np.abs(axes[2])))]
        along, across = sorted(flat, key=lambda axis: -abs(float(axes[:2, axis] @ self._forward)))
        points = corners(pose, box)
        low, high = float(points[:, 2].min()), float(points[:, 2].max())
        return Box(float(sides[along]), float(sides[across]), low, high, points.mean(axis=0)[:2])

    def _pot(self) -> tuple[tuple[str, Box] | None, float | None]:
        """Name and box of what is taken for the pot, and the top of the highest shape around its middle."""
        around = []
        for name, thing in self._objects.items():
            if thing["type"] != "SHAPE" or name == HEAD or name in self._reading["can"]:
                continue
            box = self._box(name, None)
            along, across = self._in_frame(self.success.middle, box.middle)
            if abs(along) < box.along and abs(across) < box.across:
                around.append((name, box))
        pour = (self.pour.low + self.pour.high) / 2
        standing = [(n, box) for n, box in around if _stands(box, self.table) and box.high < pour]
        pot = min(standing, key=lambda named: named[1].high, default=None)
        return pot, max((box.high for _, box in around), default=None)


def _checked(reading: Reading, seed: int) -> Mapping[str, Any]:
    """The reading's objects; ValueError for what is absent or no number."""
    remedy = "measure again with RLBench's own WaterPlants"
    for key in ("objects", "can", "mass_kg", "volumes", "body", "cameras"):
        if key not in reading:
            raise ValueError(f"seed {seed}: the measurement has no {key!r}: {remedy}")
    objects: Mapping[str, Any] = reading["objects"]
    for name in (CAN, HEAD, SUCCESS, POUR):
        if name not in objects:
            raise ValueError(f"seed {seed}: the measurement has no object {name!r}: {remedy}")
    for name, thing in objects.items():
        for key, size in (("pose", 7), ("box", 6)):
            value = thing.get(key)
            if key == "box" and value is None and name not in (CAN, HEAD, SUCCESS, POUR):
                continue
            if value is None or np.shape(value) != (size,) or not np.isfinite(np.array(value, np.float64)).all():
                raise ValueError(f"seed {seed}: {name}.{key} = {value} must be {size} finite numbers: {remedy}")
    return objects


def _stands(box: Box, table: float) -> bool:
    """Whether the box begins at the table and is no mere plate on it."""
    return abs(box.low - table) < LOW_M and box.high - table > LOW_M
