"""`wamrl doctor` on RLBench: absent is fine, half installed is not, and PyPI's `pyrep` is told from the real one.

Every case is a folder of packages of its own, put before the installed ones for a fresh interpreter.  The packages hold
no code: the check must not import them, so each would end the interpreter if it were.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rlbench_fake import FAKE, Machine, install

ROOT = Path(__file__).parent.parent
CHECK = """
from wamrl_ray import doctor
checks = [(name, check) for name, check in doctor._checks() if "rlbench" in name.lower()]
doctor._checks = lambda: iter(checks)
raise SystemExit(0 if doctor.doctor() else 1)
"""
SUICIDE = "import os\nos._exit(70)\n"
IMPOSTOR = ("pyrep/__init__.py", "pyrep/Repository.py", "pyrep/__pkginfo__.py")
"""The files of PyPI's `pyrep` 3.2.0, which keeps Python objects in folders."""
PYREP = ("pyrep/__init__.py", "pyrep/pyrep.py", "pyrep/backend/__init__.py", "pyrep/backend/_sim_cffi.so")
RLBENCH = ("rlbench/__init__.py", "rlbench/action_modes/__init__.py", "rlbench/action_modes/action_mode.py")
LIBRARIES = ("pyquaternion/__init__.py", "natsort/__init__.py")
ABSENT, HALF = "--    RLBench: not installed (optional)", "FAIL  RLBench: half installed"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An empty folder of packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    return folder


def put(folder: Path, *files: str) -> None:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SUICIDE if path.suffix == ".py" else "", encoding="utf-8")


def simulator(folder: Path) -> Path:
    """A folder that looks like CoppeliaSim's."""
    root = folder / "CoppeliaSim_Edu_V4_1_0_Ubuntu20_04"
    put(root, "libcoppeliaSim.so")
    return root


def display_server(folder: Path) -> Path:
    """A folder for PATH with a program called Xvfb."""
    put(folder / "bin", "Xvfb")
    (folder / "bin" / "Xvfb").chmod(0o755)
    return folder / "bin"


def examine(site: Path, *, root: Path | None = None, programs: Path | str | None = None) -> tuple[int, str]:
    """Exit code and output of the check where these are installed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("COPPELIASIM")}
    env |= {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "PATH": str(programs or site)}
    if root is not None:
        env["COPPELIASIM_ROOT"] = str(root)
    done = subprocess.run([sys.executable, "-c", CHECK], env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_a_machine_without_rlbench_passes_and_reads_every_step(site: Path) -> None:
    code, out = examine(site)
    assert code == 0 and out.startswith(ABSENT)
    first, *steps = out.splitlines()
    assert "docs/rlbench.md" in first
    for step, named in zip(steps, ("COPPELIASIM_ROOT", "Xvfb", "pyrep", "rlbench"), strict=True):
        assert named in step and ": " in step, "finding: remedy"


def test_a_step_already_done_is_not_named(site: Path, tmp_path: Path) -> None:
    code, out = examine(site, root=simulator(tmp_path), programs=display_server(tmp_path))
    assert code == 0 and out.startswith(ABSENT)
    assert "libcoppeliaSim.so" not in out and "Xvfb" not in out


def test_the_pyrep_of_pypi_is_called_an_impostor_and_fails(site: Path, tmp_path: Path) -> None:
    put(site, *IMPOSTOR)
    code, out = examine(site, root=simulator(tmp_path), programs=display_server(tmp_path))
    assert code == 1 and out.startswith(HALF)
    assert "pyrep is another project of that name" in out and "uninstall it" in out


def test_the_real_pyrep_is_not_called_an_impostor(site: Path, tmp_path: Path) -> None:
    put(site, *PYREP)
    code, out = examine(site, root=simulator(tmp_path), programs=display_server(tmp_path))
    assert code == 1 and out.startswith(HALF)
    assert "another project" not in out and "rlbench is not installed" in out


@pytest.mark.parametrize("built", ["", "pyrep/backend/_sim_cffi.cpython-38-x86_64-linux-gnu.so"])
def test_a_pyrep_whose_backend_was_not_compiled_for_this_python_fails(site: Path, tmp_path: Path, built: str) -> None:
    put(site, *PYREP[:-1], *RLBENCH, *LIBRARIES, *filter(None, [built]))
    code, out = examine(site, root=simulator(tmp_path), programs=display_server(tmp_path))
    assert code == 1 and out.startswith(HALF) and out.count("\n") == 2
    assert f"pyrep in {site / 'pyrep'} is not compiled (it has no pyrep.backend._sim_cffi" in out
    assert "install requirements/rlbench.txt" in out


def test_rlbench_without_a_simulator_folder_fails(site: Path, tmp_path: Path) -> None:
    put(site, *PYREP, *RLBENCH, *LIBRARIES)
    code, out = examine(site, programs=display_server(tmp_path))
    assert code == 1 and out.startswith(HALF)
    assert "COPPELIASIM_ROOT is not set" in out and out.count("\n") == 2


def test_rlbench_from_before_its_action_modes_fails(site: Path, tmp_path: Path) -> None:
    put(site, *PYREP, "rlbench/__init__.py", "rlbench/action_modes.py", *LIBRARIES)
    code, out = examine(site, root=simulator(tmp_path), programs=display_server(tmp_path))
    assert code == 1 and "rlbench is too old" in out


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """The fake RLBench, whole: it can be launched."""
    return install(monkeypatch, tmp_path, display="stand_in")


def test_a_whole_installation_is_launched_and_passes(machine: Machine) -> None:
    code, out = examine(FAKE, root=machine.root, programs=os.environ["PATH"])
    installed, started = out.splitlines()
    assert installed.startswith("ok    RLBench: installed") and started.startswith("ok    env rlbench_water_plants: ")
    assert code == 0 and "frames (2, 64, 64, 3)" in started
    assert machine.all_gone()


def test_an_installation_that_does_not_launch_fails_with_one_line(machine: Machine) -> None:
    machine.plan(fault="launch_error")
    code, out = examine(FAKE, root=machine.root, programs=os.environ["PATH"])
    assert code == 1 and out.count("\n") == 2
    assert "FAIL  env rlbench_water_plants: does not start: SimulatorFault: simulator fault launch_failed" in out
    assert "deliberate, in launch" in out and "see docs/rlbench.md" in out
    assert machine.all_gone()


def test_its_line_ends_with_what_a_dying_simulator_printed_last(machine: Machine) -> None:
    machine.plan(fault="launch_crash")
    code, out = examine(FAKE, root=machine.root, programs=os.environ["PATH"])
    assert code == 1 and out.count("\n") == 2
    assert "during launch by SIGSEGV; printed last: 'the fake simulator meets launch_crash'; see docs/" in out
