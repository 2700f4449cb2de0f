"""PyRep's objects over the boxes of `tests/substitute_scene.py`: shapes, sensors, cameras, by PyRep's names.

Used by `tests/substitute_pyrep.py`, which adds robot and simulator and puts all of it in PyRep's place.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.spatial.transform import Rotation

from tests.substitute_scene import Array, ObjectType, World

PrimitiveShape = enum.Enum("PrimitiveShape", "CUBOID SPHERE CYLINDER CONE")
RenderMode = enum.Enum("RenderMode", "OPENGL OPENGL3")
TextureMappingMode = enum.Enum("TextureMappingMode", "PLANE CUBE")
ConfigurationPathAlgorithms = enum.Enum("ConfigurationPathAlgorithms", "RRTConnect")


class PyRepError(Exception): ...


class IKError(Exception): ...


class ConfigurationPathError(Exception): ...


WORLD = World()


class Object:
    """A name in the scene, as PyRep's objects are handles."""

    def __init__(self, name: str) -> None:
        if name not in WORLD.bodies:
            raise RuntimeError(f"the scene has no {name}")
        self._body = WORLD.bodies[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Object) and other._body is self._body

    def __hash__(self) -> int:
        return id(self._body)

    @staticmethod
    def exists(name: str) -> bool:
        return name in WORLD.bodies

    @staticmethod
    def get_object_type(name: str) -> Any:
        return WORLD.bodies[name].kind

    def still_exists(self) -> bool:
        return WORLD.bodies.get(self._body.name) is self._body

    def remove(self) -> None:
        for body in [self._body, *WORLD.below(self._body)]:
            del WORLD.bodies[body.name]

    def get_name(self) -> str:
        return self._body.name

    def get_handle(self) -> int:
        return id(self._body)

    def get_type(self) -> Any:
        return self._body.kind

    def is_model(self) -> bool:
        return False

    def get_bounding_box(self) -> list[float]:
        x, y, z = self._body.size / 2
        return [-x, x, -y, y, -z, z]

    def get_parent(self) -> Object | None:
        return Object(self._body.parent.name) if self._body.parent else None

    def set_parent(self, parent_object: Object | None, keep_in_place: bool = True) -> None:
        assert keep_in_place
        self._body.parent = parent_object._body if parent_object else None

    def get_position(self, relative_to: Object | None = None) -> Array:
        return self.get_matrix(relative_to)[:3, 3]

    def set_position(self, position: Sequence[float], relative_to: Object | None = None) -> None:
        frame = relative_to._body.pose if relative_to else np.eye(4)
        pose = self._body.pose.copy()
        pose[:3, 3] = (frame @ np.array([*position, 1.0]))[:3]
        WORLD.move(self._body, pose)

    def get_orientation(self) -> Array:
        return Rotation.from_matrix(self._body.pose[:3, :3]).as_euler("XYZ")

    def set_orientation(self, orientation: Sequence[float]) -> None:
        pose = self._body.pose.copy()
        pose[:3, :3] = Rotation.from_euler("XYZ", orientation).as_matrix()
        WORLD.move(self._body, pose)

    def rotate(self, rotation: Sequence[float]) -> None:
        pose = self._body.pose.copy()
        pose[:3, :3] = pose[:3, :3] @ Rotation.from_euler("XYZ", rotation).as_matrix()
        WORLD.move(self._body, pose)

    def get_pose(self) -> Array:
        return np.concatenate([self.get_position(), Rotation.from_matrix(self._body.pose[:3, :3]).as_quat()])

    def get_matrix(self, relative_to: Object | None = None) -> Array:
        return np.linalg.inv(relative_to._body.pose) @ self._body.pose if relative_to else self._body.pose.copy()

    def get_objects_in_tree(
        self, root_object: Any = None, object_type: Any = None, exclude_base: bool = True, **_: Any
    ) -> list[Object]:
        bodies = [*([] if exclude_base else [self._body]), *WORLD.below(self._body)]
        return [Object(body.name) for body in bodies if object_type in (None, ObjectType.ALL, body.kind)]

    def get_configuration_tree(self) -> bytes:
        return pickle.dumps({body.name: body.pose for body in [self._body, *WORLD.below(self._body)]})

    def check_collision(self, obj: Object | None = None) -> bool:
        return False


class Dummy(Object):
    @staticmethod
    def create(size: float = 0.01) -> Dummy:
        WORLD.add("Dummy", ObjectType.DUMMY)
        return Dummy("Dummy")


class Shape(Object):
    @staticmethod
    def create(type: Any, size: Sequence[float], mass: float = 1.0, **_: Any) -> Shape:
        body = WORLD.add(f"Shape{len(WORLD.bodies)}", ObjectType.SHAPE, size=size)
        body.falls = True
        return Shape(body.name)

    def set_color(self, color: Sequence[float]) -> None: ...


class ProximitySensor(Object):
    def is_detected(self, obj: Object) -> bool:
        return bool(np.all(np.abs(obj.get_position(self)) <= self._body.size / 2))


class VisionSensor(Object):
    def set_resolution(self, resolution: Sequence[int]) -> None:
        self._body.size = np.array(resolution)

    def capture_rgb(self) -> Array:
        WORLD.captures += 1
        width, height = self._body.size.astype(int)
        return np.linspace(0.0, 1.0, height * width * 3).reshape(height, width, 3)

    def get_intrinsic_matrix(self) -> Array:
        return np.eye(3)

    def get_near_clipping_plane(self) -> float:
        return 0.01

    def get_far_clipping_plane(self) -> float:
        return 10.0

    def set_explicit_handling(self, value: int) -> None:
        self._explicit = bool(value)

    def handle_explicitly(self) -> None:
        if not getattr(self, "_explicit", False):
            raise RuntimeError("explicit handling is off")

    def set_render_mode(self, render_mode: Any) -> None: ...


class Joint(Object): ...


class ForceSensor(Object): ...


class CartesianPath(Object): ...
