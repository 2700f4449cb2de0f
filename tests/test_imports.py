"""Who may import whom: the layers as a test.  A new file fails here until it is given a layer."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

RUNTIME = {
    "broker", "checkpoint", "demonstrations", "evaluate", "imagination", "lerobot", "metrics", "report",
    "rollout", "run", "store", "tickets", "training",
}  # fmt: skip
SHELLS = {"local", "cluster", "algorithm", "jobs", "pretraining"}
COMMANDS = {"__main__", "commands", "collect", "doctor", "preflight", "progress"}

# Layer -> the project's layers it may import.  "types" is wamrl_ray/types.py, digest.py and atomic.py.
MAY_IMPORT: dict[str, set[str]] = {
    "types": {"types"},
    "policy": {"types", "policy"},
    "rewards": {"types", "rewards"},
    "envs": {"types", "envs"},
    "learners": {"types", "policy", "rewards", "learners"},
    "config": {"types", "policy", "rewards", "envs", "learners", "config", "configs"},
    "runtime": {"types", "config", "runtime"},
}
# The top of the project may import everything.
MAY_IMPORT["shells"] = MAY_IMPORT["commands"] = {*MAY_IMPORT, "configs", "shells", "commands"}
PROJECT = {"wamrl_ray", "envs", "learners", "configs", "benchmarks"}
MAY_IMPORT_RAY = ("wamrl_ray.cluster", "wamrl_ray.algorithm", "wamrl_ray.jobs")
"""Modules whose names start with one of these."""
SIMULATORS = {"mujoco", "robosuite", "libero", "OpenGL", "rlbench", "pyrep"}


def sources() -> list[Path]:
    return sorted(p for folder in ("wamrl_ray", "envs", "learners") for p in (ROOT / folder).rglob("*.py"))


def layer_of(module: str) -> str:
    """"wamrl_ray.policy.wam" -> "policy"; raises KeyError for a module that has no layer yet."""
    head, *rest = module.split(".")
    if head in ("envs", "learners", "configs"):
        return head
    name = rest[0] if rest else "__init__"
    if name in ("types", "digest", "atomic", "__init__"):
        return "types"
    if name in ("policy", "rewards"):
        return name
    if name in ("config", "config_files"):
        return "config"
    for layer, names in (("runtime", RUNTIME), ("shells", SHELLS), ("commands", COMMANDS)):
        if any(name == known or name.startswith(f"{known}_") for known in names):
            return layer
    raise KeyError(f"{module} has no layer: add it to tests/test_imports.py")


def imported(tree: ast.AST) -> set[str]:
    """Modules imported anywhere in a file, those for type checkers alone left out."""
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            assert node.module is not None
            # `from wamrl_ray import store` names a module, `from wamrl_ray.store import EpisodeStore` does not.
            whole = node.module in PROJECT
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if whole else {node.module}
    return found


def violations(module: str, imports: set[str]) -> list[str]:
    allowed = MAY_IMPORT[layer_of(module)]
    return [
        f"{module} imports {name}"
        for name in sorted(imports)
        if name.split(".")[0] in PROJECT and layer_of(name) not in allowed
    ]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    imports = imported(ast.parse(path.read_text(encoding="utf-8")))
    assert violations(module_name(path), imports) == []


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_ray_and_simulators_are_imported_only_where_they_belong(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(ast.parse(path.read_text(encoding="utf-8")))}
    name = module_name(path)
    assert "ray" not in roots or name.startswith(MAY_IMPORT_RAY)
    assert not roots & SIMULATORS or name.startswith("envs.")


@pytest.mark.parametrize("name", ["returns", "losses"])
def test_the_pure_functions_of_the_learners_import_torch_only(name: str) -> None:
    tree = ast.parse((ROOT / "learners" / f"{name}.py").read_text(encoding="utf-8"))
    assert {module.split(".")[0] for module in imported(tree)} <= {"__future__", "collections", "math", "torch"}


def test_the_walk_sees_a_forbidden_import() -> None:
    body = ("from wamrl_ray.local import x", "from wamrl_ray import cluster", "import envs.reach")
    tree = ast.parse("def f():\n" + "".join(f"    {line}\n" for line in body))
    assert violations("learners.losses", imported(tree)) == [
        "learners.losses imports envs.reach",
        "learners.losses imports wamrl_ray.cluster",
        "learners.losses imports wamrl_ray.local",
    ]
    typing_only = ast.parse("if TYPE_CHECKING:\n    from wamrl_ray.local import x\n")
    assert violations("learners.losses", imported(typing_only)) == []


STAGES: tuple[tuple[str, set[str]], ...] = (
    ("import wamrl_ray.__main__", {"ray", "mujoco", "torch", "pydantic"}),
    ("import wamrl_ray.run, wamrl_ray.evaluate", {"ray", "mujoco", "envs", "learners"}),
    ("import learners.video_sft, learners.actor_flow_sde, learners.pretrain", {"ray", "mujoco", "gymnasium"}),
    ("import wamrl_ray.config, envs.build", {"ray", "mujoco", "robosuite", "libero"}),
)
"""In one process, because importing torch and diffusers is most of the cost: later stages may have what earlier had."""


def test_importing_a_layer_does_not_load_what_it_has_no_use_for() -> None:
    lines = [f"{stage}; print(sorted(m for m in {unwanted!r} if m in sys.modules))" for stage, unwanted in STAGES]
    code = "import sys\n" + "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    loaded = dict(zip([stage for stage, _ in STAGES], done.stdout.splitlines(), strict=True))
    assert loaded == {stage: "[]" for stage, _ in STAGES}
