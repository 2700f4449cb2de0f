"""The substitute for PyRep against PyRep's own source; opt-in: PYREP_SRC=CHECKOUT python -m pytest -m rlbench_src.

Nothing of PyRep is imported, which would need CoppeliaSim: its files are parsed.
"""

from __future__ import annotations

import ast
import inspect
import os
from pathlib import Path

import pytest

from tests import substitute_pyrep

pytestmark = pytest.mark.rlbench_src

PYREP_FILES = {
    "Object": "objects/object.py", "Dummy": "objects/dummy.py", "Shape": "objects/shape.py",
    "ProximitySensor": "objects/proximity_sensor.py", "VisionSensor": "objects/vision_sensor.py",
    "RobotComponent": "robots/robot_component.py", "Arm": "robots/arms/arm.py",
    "Gripper": "robots/end_effectors/gripper.py", "PyRep": "pyrep.py",
}  # fmt: skip


def offered_by_pyrep(folder: Path, kind: str) -> dict[str, set[str] | None]:
    """{method: its parameters, None for any} of a class in a checkout of PyRep and of those it inherits from."""
    tree = ast.parse((folder / PYREP_FILES[kind]).read_text(encoding="utf-8"))
    definition = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == kind)
    found: dict[str, set[str] | None] = {}
    for base in definition.bases:
        if isinstance(base, ast.Name) and base.id in PYREP_FILES:
            found |= offered_by_pyrep(folder, base.id)
    for node in definition.body:
        if isinstance(node, ast.FunctionDef):
            named = {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
            found[node.name] = None if node.args.kwarg else named
    return found


@pytest.mark.parametrize("kind", [kind for kind in PYREP_FILES if kind != "RobotComponent"])
def test_the_substitute_offers_nothing_that_pyrep_has_not(kind: str) -> None:
    root = os.environ.get("PYREP_SRC")
    if not root:
        pytest.skip("no PyRep: set PYREP_SRC to a checkout of it, see docs/rlbench.md")
    theirs, ours = offered_by_pyrep(Path(root) / "pyrep", kind), getattr(substitute_pyrep, kind)
    for name in [name for name in vars(ours) if not name.startswith("_")]:
        assert name in theirs, f"{kind}.{name}"
        given = inspect.signature(getattr(ours, name)).parameters.values()
        named = {parameter.name for parameter in given if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
        assert theirs[name] is None or named - {"self"} <= theirs[name], f"{kind}.{name}"
