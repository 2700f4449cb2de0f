"""Water Plants of boxes, each with a frame of its own, placed as a whole: what PyRep's objects say and detect of it.

Also built by tests in their own process, so nothing of the fake's other modules is imported.  `TABLE` is in the task
frame (x along the spout, z up from the table): numbers made up here, with the can's handle behind its body.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from scipy.spatial.transform import Rotation

TABLE_TOP_Z = 0.75
TIPPED, TURNED, FLIPPED = (0.5, 0.5, 0.5, 0.5), (0.0, 0.0, 0.70710678, 0.70710678), (1.0, 0.0, 0.0, 0.0)
"xyzw: axes exchanged in a ring, a quarter turn, upside down"
# name: type, origin, orientation, low and high corner of the bounding box, parts (low, high) that can be touched
TABLE: dict[str, Any] = {
    "water_plants": ("DUMMY", (0.05, 0.02, 0), TURNED, None, ()),
    "waterer": (
        "SHAPE", (-0.1, 0, 0.07), TIPPED, ((-0.21, -0.045, 0), (0.01, 0.045, 0.14)),
        (
            ((-0.165, -0.045, 0), (-0.075, 0.045, 0.11)),
            ((-0.21, -0.01, 0.03), (-0.165, 0.01, 0.09)),
            ((-0.075, -0.008, 0.05), (0.01, 0.008, 0.14)),
        ),
    ),
    "waterer_visual": ("SHAPE", (-0.1, 0, 0.07), TIPPED, ((-0.21, -0.045, 0), (0.01, 0.045, 0.14)), ()),
    "head": ("SHAPE", (0.01, 0, 0.14), TURNED, ((0, -0.012, 0.125), (0.02, 0.012, 0.155)), ()),
    # Bounding boxes of sensors hold the symbol they are drawn with; what they detect is the part.
    "success": (
        "PROXIMITY_SENSOR", (0.12, 0.01, 0.12), FLIPPED, ((0.07, -0.04, 0), (0.17, 0.06, 0.14)),
        (((0.07, -0.04, 0), (0.17, 0.06, 0.12)),),
    ),
    "pour_point": (
        "PROXIMITY_SENSOR", (0.125, 0, 0.125), TURNED, ((0.085, -0.05, 0.115), (0.165, 0.05, 0.215)),
        (((0.085, -0.05, 0.125), (0.165, 0.05, 0.215)),),
    ),
    "soil": ("SHAPE", (0.12, 0.01, 0), TURNED, ((0.07, -0.04, 0), (0.17, 0.06, 0.015)), ()),
    "base_visual": ("SHAPE", (0.12, 0.01, 0.05), FLIPPED, ((0.062, -0.048, 0), (0.178, 0.068, 0.1)), ()),
    "plant_visual": ("SHAPE", (0.12, 0.01, 0.15), TIPPED, ((0.08, -0.03, 0.03), (0.16, 0.05, 0.24)), ()),
}  # fmt: skip


class Thing:
    def __init__(self, name: str, row: Any, world: World) -> None:
        self.name, self.world = name, world
        self.kind, origin, orientation, box, self.parts = row
        self.own = Rotation.from_quat(orientation)
        self.position, self.rotation = world.turn.apply(origin) + world.shift, world.turn * self.own
        at = np.array(box or ((0, 0, 0), (0, 0, 0))) - origin
        ends = self.own.inv().apply(at)
        self.box = np.stack([ends.min(axis=0), ends.max(axis=0)], axis=1).ravel().tolist()

    def get_name(self) -> str:
        return self.name

    def get_type(self) -> Any:
        return SimpleNamespace(name=self.kind)

    def get_pose(self) -> list[float]:
        return [*self.position, *self.rotation.as_quat()]

    def get_bounding_box(self) -> list[float]:
        return self.box

    def get_mass(self) -> float:
        return 0.35

    def get_objects_in_tree(self, exclude_base: bool = True) -> list[Thing]:
        assert not exclude_base and self.name == "waterer"
        return [self.world.things[name] for name in ("waterer", "waterer_visual")]

    def is_detected(self, probe: Probe) -> bool:
        return any(probe.reaches(part, self.world) for part in self.parts)


class Probe:
    """A cuboid; turned by quarter turns against the task, as the code that uses it turns it."""

    def __init__(self, kind: Any, size: list[float], static: bool, respondable: bool, renderable: bool) -> None:
        assert static and not respondable and not renderable
        self.size, self.flags, self.gone = np.array(size), set(), False

    def set_collidable(self, value: bool) -> None:
        self.flags.add("collidable")

    def set_detectable(self, value: bool) -> None:
        self.flags.add("detectable")

    def set_pose(self, pose: list[float], relative_to: Thing | None = None) -> None:
        position, rotation = np.array(pose[:3]), Rotation.from_quat(pose[3:])
        if relative_to is not None:
            position = relative_to.rotation.apply(position) + relative_to.position
            rotation = relative_to.rotation * rotation
        self.position, self.rotation = position, rotation

    def check_collision(self, thing: Thing) -> bool:
        return "collidable" in self.flags and thing.is_detected(self)

    def reaches(self, part: Any, world: World) -> bool:
        turn = (world.turn.inv() * self.rotation).as_matrix()
        half = np.abs(turn) @ self.size / 2
        middle = world.turn.inv().apply(self.position - world.shift)
        low, high = np.array(part)
        return bool((middle + half >= low).all() and (middle - half <= high).all())

    def remove(self) -> None:
        assert not self.gone
        self.gone = True


class Camera:
    def __init__(self, name: str) -> None:
        assert name.startswith("cam_")

    def get_pose(self) -> list[float]:
        # RLBench's front camera: x left, y up, z forward.
        axes = np.array([[0, -0.4226, -0.9063], [-1, 0, 0], [0, 0.9063, -0.4226]])
        return [1.35, 0.0, 1.58, *Rotation.from_matrix(axes).as_quat()]

    def get_perspective_angle(self) -> float:
        return 40.0

    def get_near_clipping_plane(self) -> float:
        return 0.01

    def get_far_clipping_plane(self) -> float:
        return 4.5


class World:
    latest: ClassVar[World]

    def __init__(self, x: float = 0.25, y: float = 0.0, yaw: float = 0.0, table: dict[str, Any] = TABLE) -> None:
        self.turn, self.shift = Rotation.from_rotvec([0, 0, yaw]), np.array([x, y, TABLE_TOP_Z])
        self.things = {name: Thing(name, row, self) for name, row in table.items()}
        World.latest = self

    @classmethod
    def drawn(cls) -> World:
        return cls(*np.random.uniform(-0.2, 0.4, 2), np.random.uniform(-3.1, 3.1))


class Tree:
    def __init__(self, world: World) -> None:
        self.world = world

    def get_objects_in_tree(self, exclude_base: bool = True) -> list[Thing]:
        assert not exclude_base
        return list(self.world.things.values())


def api(world: World) -> SimpleNamespace:
    """What `envs.rlbench_measure.measure` is given."""

    class Shape:
        def __new__(cls, name: str) -> Thing:
            return world.things[name]

        create = Probe

    return SimpleNamespace(Dummy=lambda name: Tree(world), Shape=Shape, VisionSensor=Camera, CUBOID=0)
