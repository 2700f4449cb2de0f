"""How big RLBench's watering can, pot and sensors are and where: asked of the running simulator by PyRep's public API.

Called in the simulator's process by `envs/rlbench_child.py` after a reset; what it returns is turned into a geometry by
`envs/rlbench_calibration.py`.  Positions, bounding boxes, sensors and cameras are asked for; RLBench's files are not
looked at.  Numpy and PyRep only, as everything in that process.

    objects  {name: {type, pose, box}}      of the task's tree; type as PyRep names it, such as SHAPE
    can      names of the watering can's own objects;  mass_kg: its mass
    volumes  {success, pour_point}          what a sensor detects, a box as above; None where it could not be felt out
    body     {centre, radius, top} or None  of the can without spout and handle: (2,) m, m and m above the world's floor
    cameras  {view: {pose, fovy_deg, near_m, far_m}}
    versions {rlbench, coppeliasim}

A pose is position (3) in m and quaternion (4) xyzw, in the world frame.  A box is min x, max x, min y, max y, min z,
max z in m, in the object's own frame: PyRep's conventions.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Vec = NDArray[np.float64]
Reading = dict[str, Any]

CAN, HEAD, SUCCESS, POUR = "waterer", "head", "success", "pour_point"
"RLBench's names for can, spout head and the two proximity sensors"
CAMERA_OBJECTS = {
    "left_shoulder": "cam_over_shoulder_left", "right_shoulder": "cam_over_shoulder_right",
    "overhead": "cam_overhead", "wrist": "cam_wrist", "front": "cam_front",
}  # fmt: skip

PROBE_M = 0.002
"side of the cube that feels out a sensor"
STEP_M = 0.001
"thickness of the plates that feel out the can, and how far they move at a time"
BAND_M = (0.003, 0.013)
"above the can's bottom: where the plates look for its body, below spout and handle"


def pyrep_api() -> SimpleNamespace:
    """The classes `measure` needs."""
    from pyrep.const import PrimitiveShape
    from pyrep.objects.dummy import Dummy
    from pyrep.objects.shape import Shape
    from pyrep.objects.vision_sensor import VisionSensor

    return SimpleNamespace(Dummy=Dummy, Shape=Shape, VisionSensor=VisionSensor, CUBOID=PrimitiveShape.CUBOID)


def versions(coppeliasim: int) -> dict[str, str]:
    """Of RLBench, its commit where pip knows it, and of CoppeliaSim, which reports 4.1.0 as 40100."""
    import rlbench

    found = str(getattr(rlbench, "__version__", "of unknown version"))
    try:
        distribution = importlib.metadata.distribution("rlbench")
        found = json.loads(distribution.read_text("direct_url.json") or "{}")["vcs_info"]["commit_id"]
    except (importlib.metadata.PackageNotFoundError, KeyError, ValueError):
        pass  # not installed by pip from its repository
    return {"rlbench": found, "coppeliasim": f"{coppeliasim // 10000}.{coppeliasim // 100 % 100}.{coppeliasim % 100}"}


def measure(api: Any) -> Reading:
    """All but the versions.  RuntimeError if the task lacks an object it must have."""
    tree = {thing.get_name(): thing for thing in api.Dummy("water_plants").get_objects_in_tree(exclude_base=False)}
    absent = [name for name in (CAN, HEAD, SUCCESS, POUR) if name not in tree]
    if absent:
        raise RuntimeError(f"water_plants holds no {', '.join(absent)}, only {', '.join(sorted(tree))}")
    objects = {}
    for name, thing in tree.items():
        kind = thing.get_type().name
        box = _floats(thing.get_bounding_box()) if kind in ("SHAPE", "PROXIMITY_SENSOR") else None
        objects[name] = {"type": kind, "pose": _floats(thing.get_pose()), "box": box}
    can = api.Shape(CAN)
    return {
        "objects": objects,
        "can": [thing.get_name() for thing in can.get_objects_in_tree(exclude_base=False)],
        "mass_kg": float(can.get_mass()),
        "volumes": {name: _volume(api, tree[name], objects[name]["box"]) for name in (SUCCESS, POUR)},
        "body": _body(api, can, objects),
        "cameras": {view: _camera(api.VisionSensor(name)) for view, name in CAMERA_OBJECTS.items()},
    }


# ------------------------------------------------------------------------------------ shared with the other side


def rotation(pose: Sequence[float]) -> Vec:
    """(3, 3) of a pose; its columns are the object's axes in the world."""
    x, y, z, w = np.array(pose[3:], np.float64) / np.linalg.norm(pose[3:])
    return np.array([
        [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
        [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
        [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
    ])  # fmt: skip


def corners(pose: Sequence[float], box: Sequence[float]) -> Vec:
    """(8, 3) corners of a box in the world."""
    own = np.array([(x, y, z) for x in box[:2] for y in box[2:4] for z in box[4:]])
    return np.array(pose[:3]) + own @ rotation(pose).T


# ------------------------------------------------------------------------------------ inside


def _volume(api: Any, sensor: Any, box: Sequence[float]) -> list[float] | None:
    """What the sensor detects along its own axes.  Its bounding box also holds the symbol it is drawn with."""
    probe = _probe(api, [PROBE_M] * 3)

    def detected(point: Vec) -> bool:
        probe.set_pose([*point.tolist(), 0.0, 0.0, 0.0, 1.0], relative_to=sensor)
        return bool(sensor.is_detected(probe))

    try:
        low, high = np.array(box[::2]), np.array(box[1::2])
        middle = (low + high) / 2
        if not detected(middle):
            return None
        faces: list[float] = []
        for axis in range(3):
            for sign in (-1, 1):
                step = sign * np.eye(3)[axis]
                reach = _furthest(
                    lambda way, step=step: detected(middle + way * step), high[axis] - middle[axis] + 0.01
                )
                faces.append(float(middle[axis] + sign * (reach - PROBE_M / 2)))
        return faces
    finally:
        probe.remove()


def _furthest(holds: Callable[[float], bool], beyond: float) -> float:
    """The last distance from 0 at which `holds`, to 0.05 mm, if it holds up to there and not at `beyond`."""
    near, far = 0.0, beyond
    while far - near > 5e-5:
        half = (near + far) / 2
        near, far = (half, far) if holds(half) else (near, half)
    return near


def _body(api: Any, can: Any, objects: dict[str, Any]) -> Reading | None:
    """Feel out the can near its bottom, along the spout and across it, and then its top over that spot."""
    points = corners(objects[CAN]["pose"], objects[CAN]["box"])
    bottom, top = points[:, 2].min(), points[:, 2].max()
    middle = points.mean(axis=0)[:2]
    ahead = np.array(objects[HEAD]["pose"][:2]) - middle
    yaw = float(np.arctan2(ahead[1], ahead[0]))
    plate = _probe(api, [STEP_M, 1.0, BAND_M[1] - BAND_M[0]])
    edges = []
    try:
        for turn in (yaw, yaw + np.pi / 2):
            along = np.array([np.cos(turn), np.sin(turn)])
            ways = (points[:, :2] - middle) @ along
            touching = [
                way
                for way in np.arange(ways.min() - STEP_M, ways.max() + 2 * STEP_M, STEP_M)
                if _touches(plate, can, [*(middle + way * along), bottom + sum(BAND_M) / 2], turn)
            ]
            if not touching:
                return None
            edges.append((touching[0], touching[-1], along))
    finally:
        plate.remove()
    centre = middle + sum((first + last) / 2 * along for first, last, along in edges)
    radius = float(np.mean([(last - first) / 2 for first, last, _ in edges]))
    # A square that stays within the body where spout and handle begin and reaches beyond a round rim at its corners.
    slab = _probe(api, [1.8 * radius, 1.8 * radius, STEP_M])
    try:
        heights = np.arange(top + STEP_M, bottom, -STEP_M)
        found = next((float(z) for z in heights if _touches(slab, can, [*centre, z], yaw)), None)
    finally:
        slab.remove()
    return None if found is None else {"centre": _floats(centre), "radius": radius, "top": found}


def _touches(plate: Any, can: Any, position: Sequence[float], yaw: float) -> bool:
    plate.set_pose([*map(float, position), 0.0, 0.0, float(np.sin(yaw / 2)), float(np.cos(yaw / 2))])
    return bool(plate.check_collision(can))


def _probe(api: Any, size: list[float]) -> Any:
    """A cuboid that nothing bumps into, to be removed by whoever asked for it."""
    probe = api.Shape.create(api.CUBOID, size=size, static=True, respondable=False, renderable=False)
    probe.set_collidable(True)
    probe.set_detectable(True)
    return probe


def _camera(camera: Any) -> Reading:
    return {
        "pose": _floats(camera.get_pose()),
        "fovy_deg": float(camera.get_perspective_angle()),
        "near_m": float(camera.get_near_clipping_plane()),
        "far_m": float(camera.get_far_clipping_plane()),
    }


def _floats(values: Any) -> list[float]:
    return [float(value) for value in values]
