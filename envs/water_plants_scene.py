"""The scene of Water Plants (MuJoCo): robosuite's Panda over RLBench's table, and our own can, pot and plant.

`build_model` compiles it for `envs/water_plants.py` from the numbers of `envs/water_plants_geometry.py`.  Cameras as
RLBench's; can, pot and plant are built from primitives, so nobody's mesh is needed but robosuite's robot.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from envs.water_plants_geometry import (
    DROP_MASS_KG,
    DROP_SIDE_M,
    DROPS,
    GRASP_BOX_M,
    ROBOT_POSITION_M,
    TABLE_TOP_Z_M,
    TIP_M,
    TORQUE_LIMITS_NM,
    Geometry,
)

_FIXED_CAMERAS = {
    "front": ((1.35, 0.0, 1.58), (0, 1, 0, -0.4226, 0, 0.9063)),
    "left_shoulder": ((-0.175, 0.2, 1.98), (-0.1736, -0.9848, 0, 0.8925, -0.1574, 0.4226)),
    "right_shoulder": ((-0.175, -0.2, 1.98), (0.1736, -0.9848, 0, 0.8925, 0.1574, 0.4226)),
}
"position, MJCF xyaxes; fovy 40 degrees"
_WRIST_CAMERA_M, _WRIST_TILT_RAD = (-0.05, 0.0, -0.092), np.deg2rad(5.0)
"in the tip frame; fovy 60 degrees"

_WHITE, _DARK = (0.93, 0.94, 0.95, 1), (0.25, 0.25, 0.27, 1)
_WOOD, _FLOOR, _CLAY, _SOIL = (0.62, 0.45, 0.31, 1), (0.36, 0.38, 0.4, 1), (0.72, 0.33, 0.2, 1), (0.2, 0.13, 0.09, 1)
_CAN, _HANDLE = (0.16, 0.36, 0.75, 1), (0.95, 0.70, 0.15, 1)
_STEM, _LEAF, _DROP = (0.24, 0.45, 0.16, 1), (0.27, 0.62, 0.22, 1), (0.1, 0.1, 0.9, 1)
_SCENE, _ARM, _WATER = 1, 2, 4
"""Collision bits: the arm meets the scene and not itself; drops meet table and pot.  Chosen: not each other and not
what pours them, for they appear inside one another and MuJoCo would throw them apart."""
_ALL = _SCENE | _ARM | _WATER
_VOLUME_GROUP = 4
"of sensor volumes: neither drawn nor touched"


def build_model(geometry: Geometry) -> Any:
    """The compiled `mujoco.MjModel`: 7 arm joints with velocity servos, 2 fingers, can, pot and five drops."""
    import mujoco

    spec = mujoco.MjSpec.from_file(str(_robosuite_assets() / "robots/panda/robot.xml"))
    spec.body("link7").add_geom(name="link7_collision", type=mujoco.mjtGeom.mjGEOM_MESH, meshname="link7")
    _make_low_poly(spec)
    hand = mujoco.MjSpec.from_file(str(_robosuite_assets() / "grippers/panda_gripper.xml"))
    hand.compiler.degree = False
    _make_low_poly(hand)
    spec.body("right_hand").add_frame().attach_body(hand.body("right_gripper"), "gripper_", "")
    # robosuite's part files count on its own scene file to say so.
    spec.compiler.degree = False
    spec.option.timestep = 0.005
    spec.option.integrator = mujoco.mjtIntegrator.mjINT_IMPLICITFAST
    spec.option.cone = mujoco.mjtCone.mjCONE_ELLIPTIC
    spec.visual.quality.offsamples = 0
    spec.visual.map.znear = 0.01
    _arm(spec)
    _tip(spec)
    _surroundings(spec)
    _can(spec, geometry)
    _pot(spec, geometry)
    _drops(spec)
    weld = spec.add_equality(type=mujoco.mjtEq.mjEQ_WELD, name="grasp", objtype=mujoco.mjtObj.mjOBJ_BODY)
    weld.name1, weld.name2, weld.active = "gripper_right_gripper", "can", False
    weld.solref = (0.01, 1.0)
    return spec.compile()


def _robosuite_assets() -> Path:
    package = importlib.util.find_spec("robosuite")
    if package is None or not package.submodule_search_locations:
        raise ImportError("robosuite is not installed: pip install robosuite==1.4.0")
    return Path(package.submodule_search_locations[0]) / "models/assets"


def _make_low_poly(spec: Any) -> None:
    """Draw the collision meshes (200 to 300 triangles a link) in place of the visual ones, 130 thousand together."""
    for geom in [geom for geom in spec.geoms if geom.contype == 0 and geom.conaffinity == 0]:
        spec.delete(geom)
    used = {geom.meshname for geom in spec.geoms}
    for mesh in [mesh for mesh in spec.meshes if mesh.name not in used]:
        spec.delete(mesh)
    for camera in list(spec.cameras):
        spec.delete(camera)
    for site in list(spec.sites):
        for sensor in list(spec.sensors):
            spec.delete(sensor)
        spec.delete(site)


def _arm(spec: Any) -> None:
    """Place the robot, hold it up against gravity, and drive its joints by velocity within their torque limits."""
    import mujoco

    spec.body("base").pos = ROBOT_POSITION_M
    for actuator in list(spec.actuators):
        spec.delete(actuator)
    for body in spec.bodies[1:]:
        body.gravcomp = 1.0
    for geom in spec.geoms:
        geom.contype, geom.conaffinity, geom.group = _ARM, 0, 0
        dark = geom.name.startswith(("gripper_finger", "link7"))
        geom.rgba = _DARK if dark else _WHITE
    # Of 12 thousand triangles; its neighbour is the same casting, turned.
    shoulder, twin = spec.geom("link1_collision"), spec.geom("link2_collision")
    shoulder.meshname, shoulder.quat = twin.meshname, (np.sqrt(0.5), -np.sqrt(0.5), 0, 0)
    for i, limit in enumerate(TORQUE_LIMITS_NM, start=1):
        servo = spec.add_actuator(name=f"joint{i}", target=f"joint{i}", trntype=mujoco.mjtTrn.mjTRN_JOINT)
        servo.set_to_velocity(kv=400.0 if i <= 4 else 60.0)
        servo.forcerange, servo.forcelimited = (-limit, limit), True
    for i in (1, 2):
        finger = spec.joint(f"gripper_finger_joint{i}")
        finger.armature, finger.frictionloss, finger.damping = 0.1, 0.0, (5.0, 0.0, 0.0)
        servo = spec.add_actuator(name=f"finger{i}", target=finger.name, trntype=mujoco.mjtTrn.mjTRN_JOINT)
        servo.set_to_position(kp=400.0, kv=20.0)
        servo.forcerange, servo.forcelimited = (-20.0, 20.0), True


def _tip(spec: Any) -> None:
    """The tip site, the volume of the fake grasp and the wrist camera, all in the tip frame."""
    import mujoco

    # robosuite turns its gripper by -90 degrees to the hand; the fingers close along RLBench's y after turning back.
    turn = (np.sqrt(0.5), 0, 0, -np.sqrt(0.5))
    hand = spec.body("gripper_right_gripper")
    flange_to_hand = TIP_M - 0.0005 + 0.001
    frame = hand.add_frame(pos=(0, 0, flange_to_hand), quat=turn)
    hand.add_site(name="tip", group=_VOLUME_GROUP).set_frame(frame)
    half = np.array(GRASP_BOX_M) / 2
    box = _volume(hand, "grasp_box", half, (0, 0, -0.001 - half[2]))
    box.set_frame(frame)
    look = np.array([np.sin(_WRIST_TILT_RAD), 0, np.cos(_WRIST_TILT_RAD)])
    right = np.array([0.0, -1.0, 0.0])
    camera = hand.add_camera(name="wrist", pos=_WRIST_CAMERA_M, fovy=60.0)
    camera.alt.type = mujoco.mjtOrientation.mjORIENTATION_XYAXES
    camera.alt.xyaxes = (*right, *np.cross(-look, right))
    camera.set_frame(frame)


def _surroundings(spec: Any) -> None:
    import mujoco

    world = spec.worldbody
    spec.add_texture(
        name="sky", type=mujoco.mjtTexture.mjTEXTURE_SKYBOX, builtin=mujoco.mjtBuiltin.mjBUILTIN_GRADIENT,
        rgb1=(0.78, 0.82, 0.86), rgb2=(0.55, 0.60, 0.66), width=32, height=192,
    )  # fmt: skip
    world.add_geom(type=mujoco.mjtGeom.mjGEOM_PLANE, size=(3, 3, 0.1), rgba=_FLOOR, contype=_SCENE, conaffinity=_ALL)
    world.add_geom(
        name="table", type=mujoco.mjtGeom.mjGEOM_BOX, size=(0.55, 0.75, 0.025), pos=(0.30, 0, TABLE_TOP_Z_M - 0.025),
        rgba=_WOOD, contype=_SCENE, conaffinity=_ALL, friction=(0.8, 0.005, 1e-4),
    )  # fmt: skip
    sun = mujoco.mjtLightType.mjLIGHT_DIRECTIONAL
    world.add_light(type=sun, dir=(-0.3, 0.2, -0.9), pos=(1, 0, 3), diffuse=(0.6,) * 3)
    spec.visual.headlight.ambient, spec.visual.headlight.diffuse = (0.35,) * 3, (0.3,) * 3
    for name, (position, xyaxes) in _FIXED_CAMERAS.items():
        camera = world.add_camera(name=name, pos=position, fovy=40.0)
        camera.alt.type = mujoco.mjtOrientation.mjORIENTATION_XYAXES
        camera.alt.xyaxes = xyaxes


def _can(spec: Any, geometry: Geometry) -> None:
    import mujoco

    shape = mujoco.mjtGeom
    radius, height = geometry.can_radius_m, geometry.can_height_m
    (forward, up), (half_bar, bar) = geometry.head_m, geometry.handle_m
    can = spec.worldbody.add_body(name="can", pos=(*geometry.can_m, TABLE_TOP_Z_M))
    can.add_freejoint(name="can")
    body = (0, 0, height / 2)
    can.add_geom(name="can_body", type=shape.mjGEOM_CYLINDER, size=(radius, height / 2, 0), pos=body, rgba=_CAN)
    end, ball = (forward, 0, up), (geometry.head_radius_m, 0, 0)
    can.add_geom(name="head", type=shape.mjGEOM_SPHERE, size=ball, pos=end, rgba=_HANDLE)
    thick = geometry.handle_radius_m
    for name, start, stop, radius_m, rgba in (
        ("spout", (radius - 0.01, 0, 0.4 * height), end, 0.009, _CAN),
        ("handle", (-half_bar, 0, bar), (half_bar, 0, bar), thick, _HANDLE),
        ("handle_back", (-radius + 0.006, 0, height), (-half_bar, 0, bar), thick, _HANDLE),
        ("handle_front", (radius - 0.006, 0, height), (half_bar, 0, bar), thick, _HANDLE),
    ):
        tube = {"type": shape.mjGEOM_CAPSULE, "fromto": (*start, *stop), "size": (radius_m, 0, 0)}
        can.add_geom(name=name, rgba=rgba, **tube)
    for part in can.geoms:
        part.contype, part.conaffinity = _SCENE, _SCENE | _ARM
        part.mass = geometry.can_mass_kg if part.name == "can_body" else 0.0


def _pot(spec: Any, geometry: Geometry) -> None:
    """Four walls and a floor that keep drops in, the two sensor volumes, and a plant that nothing touches."""
    import mujoco

    box = mujoco.mjtGeom.mjGEOM_BOX
    half, wall, height = geometry.pot_half_m, geometry.pot_wall_m, geometry.pot_height_m
    pot = spec.worldbody.add_body(name="pot", pos=(*geometry.pot_m, TABLE_TOP_Z_M), mocap=True)
    solid = {"type": box, "contype": _SCENE, "conaffinity": _ALL, "rgba": _CLAY}
    for axis in (0, 1):
        for sign in (-1, 1):
            position, size = np.array([0, 0, height / 2]), np.array([half + wall, half + wall, height / 2])
            position[axis], size[axis] = sign * (half + wall / 2), wall / 2
            pot.add_geom(pos=position, size=size, **solid)
    pot.add_geom(pos=(0, 0, 0.01), size=(half, half, 0.01), **{**solid, "rgba": _SOIL})
    _volume(pot, "pour", geometry.pour_half_m, (0, 0, geometry.pour_height_m))
    inside = geometry.success_height_m / 2
    _volume(pot, "success", (half, half, inside), (0, 0, inside))
    top = height + geometry.plant_height_m
    untouched = {"contype": 0, "conaffinity": 0}
    for x, y, share in ((0.02, 0.0, 1.0), (-0.02, 0.02, 0.8), (0.0, -0.03, 0.7)):
        tip = np.array([1.6 * x, 1.6 * y, height + share * (top - height)])
        pot.add_geom(
            type=mujoco.mjtGeom.mjGEOM_CAPSULE, fromto=(x, y, 0.02, *tip), size=(0.004, 0, 0), rgba=_STEM, **untouched
        )
        pot.add_geom(type=mujoco.mjtGeom.mjGEOM_ELLIPSOID, pos=tip, size=(0.026, 0.016, 0.008), rgba=_LEAF, **untouched)


def _drops(spec: Any) -> None:
    import mujoco

    half = DROP_SIDE_M / 2
    for i in range(DROPS):
        drop = spec.worldbody.add_body(name=f"drop{i}", pos=(0.1 * i, 2.5, 0.5), gravcomp=1.0)
        drop.add_freejoint(name=f"drop{i}")
        drop.add_geom(
            name=f"drop{i}", type=mujoco.mjtGeom.mjGEOM_BOX, size=(half,) * 3, mass=DROP_MASS_KG, rgba=_DROP,
            contype=_WATER, conaffinity=0,
        )  # fmt: skip


def _volume(body: Any, name: str, half: Iterable[float], position: Iterable[float]) -> Any:
    import mujoco

    return body.add_geom(
        name=name, type=mujoco.mjtGeom.mjGEOM_BOX, size=tuple(half), pos=tuple(position), contype=0, conaffinity=0,
        group=_VOLUME_GROUP, mass=0.0, rgba=(1, 1, 0, 0.2),
    )  # fmt: skip


def touchable_by_arm(model: Any, geoms: list[int], touchable: bool) -> None:
    """Whether the arm collides with `geoms`."""
    model.geom_conaffinity[geoms] = _SCENE | _ARM if touchable else _SCENE
