"""What a sound reply of the simulator's process holds: judged here, once, where it comes in.

Called by `envs/rlbench_process.py` on what `envs/rlbench_wire.py` let through, which is any JSON object.  Afterwards
every key is there and no other, lists are as long as agreed, numbers are finite: no reader of an answer looks again.
What the keys mean is said in `envs/rlbench_child.py` and `envs/rlbench_measure.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from envs.rlbench_contract import CAMERAS, NUM_JOINTS
from envs.rlbench_wire import BadMessage, Message

Operation = Literal["launch", "reset", "step", "measure"]
Shape = Any
"{name: shape} exactly these; [shape] any number of them; bool; str; int: 0 to 2^53; float: finite in float32; or below"

LARGEST = 3.4e38
"A state is float32, where anything beyond is infinite."


@dataclass(frozen=True)
class Numbers:
    """A list of this many numbers."""

    count: int


@dataclass(frozen=True)
class Each:
    """An object with any names, for each of them this shape."""

    shape: Shape


@dataclass(frozen=True)
class OrNull:
    shape: Shape


_OBSERVATION = {"joints": Numbers(NUM_JOINTS), "tip": Numbers(3), "gripper_open": float, "poured": OrNull(bool)}
_POSE, _BOX = Numbers(7), OrNull(Numbers(6))
_CAMERA = {"pose": _POSE, "fovy_deg": float, "near_m": float, "far_m": float}

ANSWERS: dict[Operation, Shape] = {
    "launch": {"version": int},
    "reset": {**_OBSERVATION, "attempts": int, "rss_bytes": int},
    "step": {**_OBSERVATION, "reward": float, "terminate": bool},
    "measure": {
        "objects": Each({"type": str, "pose": _POSE, "box": _BOX}),
        "can": [str],
        "mass_kg": float,
        "volumes": {"success": _BOX, "pour_point": _BOX},
        "body": OrNull({"centre": Numbers(2), "radius": float, "top": float}),
        "cameras": dict.fromkeys(CAMERAS, _CAMERA),
        "versions": {"rlbench": str, "coppeliasim": str},
    },
}
ERROR = {"type": str, "module": str, "message": str, "stack": str}


def check_reply(reply: Message, operation: Operation, number: int) -> None:
    """BadMessage unless it answers this very request, with a sound answer or a described error."""
    if type(reply.get("n")) is not int or reply["n"] != number or reply.keys() not in ({"n", "ok"}, {"n", "error"}):
        raise BadMessage(f"{reply!r:.80} is no answer to {operation} number {number}")
    if "error" in reply:
        _check(reply["error"], ERROR, f"the error in {operation}")
    else:
        _check(reply["ok"], ANSWERS[operation], operation)


def _check(value: Any, shape: Shape, where: str) -> None:
    match shape:
        case dict():
            if not isinstance(value, dict) or value.keys() != shape.keys():
                raise BadMessage(f"{where} must have exactly {', '.join(shape)}, not be {value!r:.80}")
            for name, part in shape.items():
                _check(value[name], part, f"{where}.{name}")
        case Each():
            _require(isinstance(value, dict), value, "an object", where)
            for name, part in value.items():
                _check(part, shape.shape, f"{where}.{name}")
        case list():
            _require(isinstance(value, list), value, "a list", where)
            for place, part in enumerate(value):
                _check(part, shape[0], f"{where}[{place}]")
        case Numbers():
            sound = isinstance(value, list) and len(value) == shape.count and all(map(_is_number, value))
            _require(sound, value, f"{shape.count} numbers", where)
        case OrNull():
            if value is not None:
                _check(value, shape.shape, where)
        case _ if shape is float:
            _require(_is_number(value), value, "a finite number", where)
        case _ if shape is int:
            _require(type(value) is int and 0 <= value <= 2**53, value, "a whole number from 0 to 2^53", where)
        case _:
            _require(type(value) is shape, value, {bool: "true or false", str: "a text"}[shape], where)


def _is_number(value: Any) -> bool:
    """NaN is not: it compares as false."""
    return type(value) in (int, float) and abs(value) <= LARGEST


def _require(sound: bool, value: Any, wanted: str, where: str) -> None:
    if not sound:
        raise BadMessage(f"{where} = {value!r:.80} must be {wanted}")
