"""An answer of the simulator's process that is not what was agreed is a `bad_message`, whatever is wrong with it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from envs.rlbench import SimulatorFault
from envs.rlbench_answers import ANSWERS, check_reply
from envs.rlbench_calibration import read_rlbench
from envs.rlbench_contract import CAMERAS
from envs.rlbench_wire import BadMessage
from tests.rlbench_fake import STILL, Machine, build, install, run_episode

OBSERVED = {"joints": [0.5] * 7, "tip": [0.28, 0, 1.47], "gripper_open": 1.0, "poured": False}
POSE, BOX = [0.0] * 6 + [1.0], [-0.1, 0.1] * 3
SOUND: dict[str, dict[str, Any]] = {
    "launch": {"version": 40100},
    "reset": {**OBSERVED, "attempts": 1, "rss_bytes": 1 << 33},
    "step": {**OBSERVED, "poured": None, "reward": 0.0, "terminate": False},
    "measure": {
        "objects": {
            "waterer": {"type": "SHAPE", "pose": POSE, "box": BOX},
            "waypoint0": {"type": "DUMMY", "pose": POSE, "box": None},
        },
        "can": ["waterer", "head"],
        "mass_kg": 0.1,
        "volumes": {"success": BOX, "pour_point": None},
        "body": {"centre": [0.1, 0.2], "radius": 0.05, "top": 0.9},
        "cameras": {view: {"pose": POSE, "fovy_deg": 40.0, "near_m": 0.01, "far_m": 10.0} for view in CAMERAS},
        "versions": {"rlbench": "1.2.0", "coppeliasim": "4.1.0"},
    },
}  # fmt: skip
ERROR = {"type": "ValueError", "module": "builtins", "message": "m", "stack": "s"}
NUMBERS = (math.nan, math.inf, -math.inf, 1e39, 10**400)


def wrong(value: Any, name: str = "") -> Iterator[Any]:
    """Everything that differs from `value` in one place so that it is no longer sound."""
    match value:
        case dict():
            yield from ([], "x", 1.0, {**value, "more": 0})
            for key in value:
                if name != "objects":  # which may be any
                    yield {other: kept for other, kept in value.items() if other != key}
                yield from ({**value, key: bad} for bad in wrong(value[key], key))
        case list():
            yield from ({}, "x", True, 1.0)
            yield from ([*value[:-1], bad] for bad in wrong(value[-1]))
            if not isinstance(value[0], str):
                yield from ([], value[:-1], [*value, value[0]], [value])
        case bool() | None:
            yield from (0, 1, 1.0, "x", {}, [])
        case float():
            yield from (*NUMBERS, True, None, "1", [1.0], {})
        case int():
            yield from (*NUMBERS, 1.5, -1, True, None, "1", [1], {})
        case str():
            yield from (None, 1, True, ["x"], {})


@pytest.mark.parametrize("operation", SOUND)
def test_every_way_in_which_an_answer_can_be_wrong_is_refused(operation: Any) -> None:
    sound = SOUND[operation]
    check_reply({"n": 5, "ok": sound}, operation, 5)
    bad = list(wrong(sound))
    assert len(bad) > 10
    for answer in bad:
        with pytest.raises(BadMessage, match=operation):
            check_reply({"n": 5, "ok": copy.deepcopy(answer)}, operation, 5)


def test_a_reply_is_an_answer_or_an_error_to_this_very_request() -> None:
    check_reply({"n": 1, "error": ERROR}, "launch", 1)
    ok = SOUND["launch"]
    wrongs: list[Any] = [{}, {"n": 1}, {"ok": ok}, {"error": ERROR}, {"n": 1, "ok": ok, "error": ERROR}]
    wrongs += [{"n": 1, "ok": ok, "more": 0}, {"n": 0, "error": ERROR}]
    wrongs += [{"n": number, "ok": ok} for number in (0, 2, True, "1", 1.0, None, math.nan)]
    wrongs += [{"n": 1, "error": error} for error in wrong(ERROR)]
    for reply in wrongs:
        with pytest.raises(BadMessage, match="launch"):
            check_reply(reply, "launch", 1)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch, tmp_path_factory.mktemp("machine"))


def reply(number: int, operation: str, **change: Any) -> str:
    return json.dumps({"n": number, "ok": {**SOUND[operation], **change}})


@pytest.mark.parametrize(
    ("fault", "text", "message"),
    [
        ("launch_says", '{"n":1,"ok":{}}', "launch must have exactly version"),
        ("launch_says", '{"n":1,"error":{"type":"ValueError"}}', "launch must have exactly type, module"),
        ("reset_says", reply(2, "reset", joints=[math.nan] * 7), r"reset\.joints = \[nan, .* must be 7 numbers"),
        ("reset_says", reply(2, "reset", rss_bytes="big"), r"reset\.rss_bytes = 'big' must be"),
        ("step_says", reply(3, "step", tip=[0.0, 1.0]), r"step\.tip = \[0.0, 1.0\] must be 3 numbers"),
        ("step_says", reply(3, "step", reward=math.inf), r"step\.reward = inf must be"),
        ("step_says", reply(3, "step").replace('"poured": null, ', ""), "step must have exactly joints, tip"),
        ("step_says", '{"n":3,"ok":' + "[" * 100_000, "is not JSON"),
    ],
)  # fmt: skip
def test_it_ends_the_episode_as_a_counted_fault(machine: Machine, fault: str, text: str, message: str) -> None:
    env = build(max_restarts=9)
    machine.plan(fault=fault, text=text)
    with pytest.raises(SimulatorFault, match=message) as caught:
        env.reset_to(0, 0, seed=0)
        env.step_chunk(STILL, capture_at=(1,))
    assert caught.value.kind == "bad_message" and env.counts == {"launches": 1, "bad_message": 1}
    assert machine.all_gone() and len(str(caught.value)) < 3000
    machine.plan()
    run_episode(env)
    env.close()


def test_a_wrong_measurement_is_one_too(machine: Machine) -> None:
    machine.plan(fault="measure_says", text=reply(3, "measure", mass_kg=None))
    with pytest.raises(SimulatorFault, match=r"measure\.mass_kg = None must be") as caught:
        read_rlbench([0])
    assert caught.value.kind == "bad_message" and machine.all_gone()


def test_every_operation_has_its_answer() -> None:
    assert set(ANSWERS) == set(SOUND)
