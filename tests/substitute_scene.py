"""A scene of boxes in memory: what CoppeliaSim would hold of RLBench's Panda and its Water Plants task.

Seen through `tests/substitute_objects.py`.  No physics and no image: the arm's tip moves along x, y and z with its
first three joints, fingers travel at the commanded speed, what falls falls straight down.  Sizes are invented.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TICK_S, FALL_M, FLOOR_Z = 0.05, 0.05, 0.76
HOME = np.array([0.0, 0.175, 0.0, -0.8729, 0.0, 1.2216, 0.7854])
HOME_TIP = np.array([0.278, -0.008, 1.473])
METRES_PER_RADIAN = 0.5
FINGERS_M = 0.04

ObjectType = enum.Enum("ObjectType", "ALL SHAPE JOINT DUMMY PROXIMITY_SENSOR PATH VISION_SENSOR FORCE_SENSOR")


@dataclass(eq=False)
class Body:
    """One object of the scene; `pose` is its (4, 4) matrix in the world."""

    name: str
    kind: Any
    size: Array
    pose: Array = field(default_factory=lambda: np.eye(4))
    parent: Body | None = None
    falls: bool = False


class World:
    """All that CoppeliaSim would hold; `ticks` and `captures` count what RLBench asks of it."""

    def __init__(self) -> None:
        self.load_scene()

    def load_scene(self) -> None:
        """The robot at home, the cameras and the workspace; no task."""
        self.bodies: dict[str, Body] = {}
        self.ticks = self.captures = 0
        self.running = False
        self.joints, self.velocities, self.targets = HOME.copy(), np.zeros(7), HOME.copy()
        self.fingers, self.finger_velocities = np.full(2, FINGERS_M), np.zeros(2)
        self.position_control = True
        for name in ("over_shoulder_left", "over_shoulder_right", "overhead", "wrist", "front"):
            self.add(f"cam_{name}", ObjectType.VISION_SENSOR)
            self.add(f"cam_{name}_mask", ObjectType.VISION_SENSOR)
        self.add("workspace", ObjectType.SHAPE, size=(0.648, 0.91, 0.0), at=(0.25, 0.0, 0.752))
        tip = self.add("Panda_tip", ObjectType.DUMMY, at=HOME_TIP)
        self.add("Panda_gripper_attachProxSensor", ObjectType.PROXIMITY_SENSOR, tip, (0.06, 0.1, 0.06), HOME_TIP)
        self.add("Panda_gripper_attachPoint", ObjectType.FORCE_SENSOR, tip, at=HOME_TIP)
        for i in range(1, 8):
            self.add(f"Panda_joint{i}", ObjectType.JOINT)

    def add(
        self, name: str, kind: Any, parent: Body | None = None, size: Sequence[float] = (0.02,) * 3, at: Any = (0, 0, 0)
    ) -> Body:
        body = self.bodies[name] = Body(name, kind, np.array(size), parent=parent)
        body.pose[:3, 3] = at
        return body

    def load_task(self, name: str) -> Body:
        """The can, the pot and the two sensors of Water Plants, around a base in the origin."""
        base = self.add(name, ObjectType.DUMMY, size=(0.4, 0.5, 0.2))
        can = self.add("waterer", ObjectType.SHAPE, base, (0.1, 0.1, 0.1), (0.0, -0.1, 0.05))
        self.add("head", ObjectType.SHAPE, can, (0.02, 0.02, 0.02), (0.12, -0.1, 0.13))
        self.add("plant", ObjectType.SHAPE, base, (0.12, 0.12, 0.12), (0.0, 0.12, 0.06))
        self.add("success", ObjectType.PROXIMITY_SENSOR, base, (0.12, 0.12, 0.14), (0.0, 0.12, 0.07))
        self.add("pour_point", ObjectType.PROXIMITY_SENSOR, base, (0.06, 0.06, 0.06), (0.0, 0.12, 0.30))
        return base

    def below(self, root: Body) -> Iterator[Body]:
        for body in [body for body in self.bodies.values() if body.parent is root]:
            yield body
            yield from self.below(body)

    def move(self, body: Body, pose: Array) -> None:
        change = pose @ np.linalg.inv(body.pose)
        for part in [body, *self.below(body)]:
            part.pose = change @ part.pose

    def place_tip(self) -> None:
        pose = np.eye(4)
        pose[:3, 3] = HOME_TIP + METRES_PER_RADIAN * (self.joints - HOME)[:3]
        self.move(self.bodies["Panda_tip"], pose)

    def tick(self) -> None:
        self.ticks += 1
        if not self.running:
            return
        self.joints = self.targets.copy() if self.position_control else self.joints + TICK_S * self.velocities
        self.fingers = np.clip(self.fingers + TICK_S * self.finger_velocities, 0.0, FINGERS_M)
        self.place_tip()
        for body in self.bodies.values():
            if body.falls:
                body.pose[2, 3] = max(FLOOR_Z, body.pose[2, 3] - FALL_M)
