"""PyRep without CoppeliaSim: enough of its interface for RLBench's own Python code to run on a scene of boxes.

Used by `tests/test_rlbench_source.py` only.  `install` puts these classes into `sys.modules` under the names RLBench
imports.  What passes on them says that RLBench's Python was understood, never that RLBench was run.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterable
from typing import Any

import numpy as np

from tests.substitute_objects import (
    WORLD,
    CartesianPath,
    ConfigurationPathAlgorithms,
    ConfigurationPathError,
    Dummy,
    ForceSensor,
    IKError,
    Joint,
    Object,
    PrimitiveShape,
    ProximitySensor,
    PyRepError,
    RenderMode,
    Shape,
    TextureMappingMode,
    VisionSensor,
)
from tests.substitute_scene import FINGERS_M, ObjectType, World


class ArmConfigurationPath: ...


class Arm(Object):
    def __init__(self) -> None:
        super().__init__("Panda_tip")
        self.joints = [Joint(f"Panda_joint{i}") for i in range(1, 8)]

    def get_tip(self) -> Dummy:
        return Dummy("Panda_tip")

    def get_joint_positions(self) -> list[float]:
        return [float(x) for x in WORLD.joints]

    def set_joint_positions(self, positions: Iterable[float], **_: bool) -> None:
        """`disable_dynamics`, or in older code `allow_force_mode`, has no meaning without dynamics."""
        WORLD.joints = WORLD.targets = np.array(list(positions))
        WORLD.place_tip()

    def set_joint_target_positions(self, positions: Iterable[float]) -> None:
        WORLD.targets = np.array(list(positions))

    def set_joint_target_velocities(self, velocities: Iterable[float]) -> None:
        WORLD.velocities = np.array(list(velocities), np.float64)

    def set_control_loop_enabled(self, value: bool) -> None:
        WORLD.position_control = value

    def set_motor_locked_at_zero_velocity(self, value: bool) -> None: ...

    def check_arm_collision(self, obj: Object | None = None) -> bool:
        return False


class Gripper(Object):
    def __init__(self) -> None:
        super().__init__("Panda_gripper_attachPoint")
        self.joints = [None, None]
        self._held: list[tuple[Object, Object | None]] = []

    def get_joint_positions(self) -> list[float]:
        return [float(x) for x in WORLD.fingers]

    def set_joint_positions(self, positions: Iterable[float], **_: bool) -> None:
        WORLD.fingers = np.array(list(positions))

    def set_joint_target_velocities(self, velocities: Iterable[float]) -> None:
        WORLD.finger_velocities = np.array(list(velocities), np.float64)

    def get_open_amount(self) -> list[float]:
        return [float(x) for x in WORLD.fingers / FINGERS_M]

    def actuate(self, amount: float, velocity: float) -> bool:
        left = amount * FINGERS_M - WORLD.fingers
        WORLD.finger_velocities = np.where(np.abs(left) < 0.001, 0.0, np.sign(left) * velocity)
        return not WORLD.finger_velocities.any()

    def grasp(self, obj: Object) -> bool:
        seen = ProximitySensor("Panda_gripper_attachProxSensor").is_detected(obj)
        if seen and obj not in self.get_grasped_objects():
            self._held.append((obj, obj.get_parent()))
            obj.set_parent(self)
        return seen

    def release(self) -> None:
        for obj, parent in self._held:
            obj.set_parent(parent)
        self._held = []

    def get_grasped_objects(self) -> list[Object]:
        return [obj for obj, _ in self._held]


class PyRep:
    def launch(self, scene_file: str = "", headless: bool = False) -> None:
        WORLD.load_scene()

    def start(self) -> None:
        WORLD.running = True

    def step(self) -> None:
        WORLD.tick()

    def shutdown(self) -> None:
        WORLD.running = False

    def import_model(self, filename: str) -> Object:
        return Object(WORLD.load_task(filename.rsplit("/", 1)[-1].removesuffix(".ttm")).name)

    def set_configuration_tree(self, config_tree: bytes) -> None:
        for name, pose in pickle.loads(config_tree).items():
            WORLD.bodies[name].pose = pose


def _robots() -> dict[str, dict[str, Any]]:
    """RLBench imports every arm and gripper it supports; only the Panda is ever made."""
    arms = {"arm": "Arm", "panda": "Panda", "jaco": "Jaco", "mico": "Mico", "sawyer": "Sawyer", "ur5": "UR5"}
    hands = {
        "gripper": "Gripper", "panda_gripper": "PandaGripper", "jaco_gripper": "JacoGripper",
        "mico_gripper": "MicoGripper", "baxter_gripper": "BaxterGripper", "robotiq85_gripper": "Robotiq85Gripper",
    }  # fmt: skip
    return {f"robots.arms.{module}": {name: Arm} for module, name in arms.items()} | {
        f"robots.end_effectors.{module}": {name: Gripper} for module, name in hands.items()
    }


def install() -> World:
    """Put the substitute in place of `pyrep` and return its scene; undo by restoring `sys.modules`."""
    errors = {kind.__name__: kind for kind in (PyRepError, IKError, ConfigurationPathError)}
    enums = {
        kind.__name__: kind
        for kind in (ObjectType, PrimitiveShape, RenderMode, TextureMappingMode, ConfigurationPathAlgorithms)
    }
    objects = {
        "object": Object, "dummy": Dummy, "shape": Shape, "proximity_sensor": ProximitySensor,
        "vision_sensor": VisionSensor, "joint": Joint, "force_sensor": ForceSensor, "cartesian_path": CartesianPath,
    }  # fmt: skip
    sim = {"simGetInt32Parameter": lambda parameter: 40100, "sim_intparam_program_version": 0}
    contents: dict[str, dict[str, Any]] = {
        "": {"PyRep": PyRep, "__version__": "4.1.0.3"}, "const": enums, "errors": errors,
        "backend": {}, "backend.sim": sim, "objects": {kind.__name__: kind for kind in objects.values()},
        **{f"objects.{module}": {kind.__name__: kind} for module, kind in objects.items()},
        "robots": {}, "robots.arms": {}, "robots.end_effectors": {}, "robots.configuration_paths": {}, **_robots(),
        "robots.configuration_paths.arm_configuration_path": {"ArmConfigurationPath": ArmConfigurationPath},
    }  # fmt: skip
    for name, attributes in contents.items():
        module = types.ModuleType(f"pyrep.{name}".rstrip("."))
        module.__path__ = []
        module.__dict__.update(attributes)
        sys.modules[module.__name__] = module
        parent, _, child = module.__name__.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return WORLD
