"""What installing RLBench takes is pinned, and docs/rlbench.md names only what exists."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from envs.rlbench import RLBenchConfig
from envs.rlbench_process import FAULTS
from wamrl_ray.__main__ import main
from wamrl_ray.config_files import shipped_presets

ROOT = Path(__file__).parent.parent
DOCS = (ROOT / "docs" / "rlbench.md").read_text(encoding="utf-8")
REQUIREMENTS = ROOT / "requirements" / "rlbench.txt"
RECIPE = ROOT / "deploy" / "rlbench.Dockerfile"
PINNED = r"(pyrep|rlbench) @ git\+https://github\.com/stepjam/(PyRep|RLBench)@([0-9a-f]{40})"


def requirements(path: Path) -> list[str]:
    lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line]


def project(requirement: str) -> str:
    """The name that pip would look up, in the form in which names are compared."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\s\[<>=!~;@]", requirement)[0]).lower()


def code(text: str) -> list[str]:
    """Every command of the shell blocks, continued lines joined, without comments."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    lines = "".join(block for language, block in blocks if language == "bash").replace("\\\n", " ").splitlines()
    return [" ".join(line.partition(" #")[0].split()) for line in lines if line and not line.startswith("#")]


def test_pyrep_and_rlbench_are_pinned_to_commits_pyrep_first() -> None:
    direct = [line for line in requirements(REQUIREMENTS) if "@" in line]
    matches = [re.fullmatch(PINNED, line) for line in direct]
    assert [match and match[1] for match in matches] == ["pyrep", "rlbench"]


def test_no_file_that_pip_reads_asks_an_index_for_pyrep_or_rlbench() -> None:
    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    declared = metadata["project"]
    asked = [*declared["dependencies"], *metadata["build-system"]["requires"]]
    for group in (*declared["optional-dependencies"].values(), *metadata.get("dependency-groups", {}).values()):
        asked += [entry for entry in group if isinstance(entry, str)]
    assert not [line for line in asked if project(line) in ("pyrep", "rlbench") or "git+" in line]
    for path in (ROOT / "constraints.txt", *(ROOT / "requirements").glob("*.txt")):
        for line in requirements(path):
            if project(line) in ("pyrep", "rlbench") or "git+" in line:
                assert re.fullmatch(PINNED, line), f"{path.name}: {line}"


def test_no_command_asks_an_index_for_pyrep_or_rlbench() -> None:
    shell = RECIPE.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    commands = [line for line in [*code(DOCS), *shell] if "pip install" in line and not line.startswith("#")]
    assert commands
    for command in commands:
        words = {project(word.strip("\"'")) for word in command.split()}
        assert not words & {"pyrep", "rlbench"}, command


def test_docs_recipe_and_requirements_install_with_the_same_two_commands() -> None:
    commands = [line for line in code(DOCS) if line.startswith("pip install -c")]
    assert len(commands) == 2 and "--no-deps" in commands[1] and REQUIREMENTS.name in commands[1]
    header = REQUIREMENTS.read_text(encoding="utf-8")
    recipe = RECIPE.read_text(encoding="utf-8").replace(" --no-cache-dir", "")
    for command in commands:
        assert command in header and command in recipe, command


def test_the_docs_check_out_the_pinned_commit() -> None:
    pins = dict(re.findall(r"^(pyrep|rlbench) @ .+@([0-9a-f]{40})$", REQUIREMENTS.read_text(encoding="utf-8"), re.M))
    assert f"checkout {pins['rlbench']}" in DOCS


def test_every_environment_variable_in_the_docs_is_known_somewhere() -> None:
    named = set(re.findall(r"\b([A-Z][A-Z0-9]*_[A-Z0-9_]+)\b", DOCS)) | {"DISPLAY"}
    sources = "\n".join(
        path.read_text(encoding="utf-8")
        for folder in ("envs", "wamrl_ray", "tests", "deploy", "requirements")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".yaml", ".txt", ".Dockerfile") and path != Path(__file__)
    )
    of_others = {"LP_NUM_THREADS", "QT_QPA_PLATFORM"}  # Mesa's and Qt's
    assert sorted(name for name in named - of_others if not re.search(rf"\b{name}\b", sources)) == []


def test_every_wamrl_command_in_the_docs_has_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [
        re.split(r"wamrl_ray |wamrl ", line)[-1].split() for line in code(DOCS) if "wamrl" in line.split("/")[0]
    ]
    commands = [words for words in commands if words[0] in ("train", "eval", "doctor")]
    assert {words[0] for words in commands} == {"train", "eval", "doctor"}
    for name, *words in commands:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        known = capsys.readouterr().out
        assert not [word for word in words if word.startswith("--") and word not in known], name
        configs = [words[i + 1] for i, word in enumerate(words) if word == "--config"]
        assert set(configs) <= set(shipped_presets())


def test_the_table_of_settings_is_the_config_with_its_defaults() -> None:
    def written(value: object) -> str:
        if isinstance(value, tuple):
            return f"[{', '.join(value)}]"
        return f"{value:g}" if isinstance(value, float) else str(value) or '""'

    table = re.findall(r"^\| `(\w+)` \| `(.*?)` \| .+ \|$", DOCS, flags=re.M)
    config = RLBenchConfig()
    fields = [field.name for field in dataclasses.fields(config) if field.name != "kind"]
    assert table == [(name, written(getattr(config, name))) for name in fields]


def test_every_fault_is_explained() -> None:
    cells = re.findall(r"^\| (`.+?`) \| .+ \|$", DOCS.split("| fault |")[1].split("\n\n")[0], flags=re.M)
    assert sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell)) == sorted(FAULTS)


def test_every_file_and_marker_the_docs_name_exists() -> None:
    files = re.findall(r"`((?:configs|deploy|envs|requirements|tests|wamrl_ray)/[\w./-]+)`", DOCS)
    files += re.findall(r"\b(?:configs|deploy|envs|requirements|tests)/[\w./-]+\.\w+", DOCS)
    assert files and sorted({name for name in files if not (ROOT / name).exists()}) == []
    markers = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f'"{marker}:' in markers for marker in re.findall(r"-m (rlbench_\w+)", DOCS))


def test_readme_and_docs_do_not_claim_that_rlbench_was_run() -> None:
    status = "written against RLBench's sources, not yet run on CoppeliaSim"
    assert status in " ".join(DOCS.split())
    assert status in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
