"""What RLBench needs on this machine, and how to get what is missing; nothing is imported or launched to find out.

Asked by `envs/rlbench.py` before it starts anything, by the checks before a run and by `wamrl doctor`.  None of it
comes with this project: CoppeliaSim is a simulator of its own, RLBench and PyRep are on no package registry.  The PyPI
project called `pyrep` is another one, told apart here by its contents.

    missing() ──► one line for each thing that is missing        require() ──► RuntimeError with all of them
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

COPPELIASIM_VERSION = (4, 1, 0)
"The one version PyRep works with."
LIBRARY = "libcoppeliaSim.so"
BACKEND = "_sim_cffi"
"What PyRep's build compiles: its way into the library."
INSTALL = "install requirements/rlbench.txt as its first lines say, with COPPELIASIM_ROOT set"

_RLBENCH_NEEDS = ("numpy", "scipy", "PIL", "pyquaternion", "natsort", "gymnasium")
"What `import rlbench` itself imports; its own metadata would pull PyRep from an unpinned address."


def missing() -> list[str]:
    """What is missing, one "what: remedy" each, in the order to install; empty if RLBench can be launched here.

    Takes milliseconds.  The version of CoppeliaSim is seen here only if the folder's name tells it; the launched
    simulator is asked again (`envs/rlbench_child.py`).
    """
    found = (_coppeliasim(), _display(), _pyrep(), _rlbench())
    return [line for line in found if line is not None]


def require() -> None:
    """RuntimeError that names everything missing in one message."""
    lines = missing()
    if lines:
        raise RuntimeError("RLBench cannot run on this machine (docs/rlbench.md): " + "; ".join(lines))


def _coppeliasim() -> str | None:
    version = ".".join(map(str, COPPELIASIM_VERSION))
    remedy = f"unpack CoppeliaSim Edu {version} (coppeliarobotics.com) and set COPPELIASIM_ROOT to its folder"
    root = os.environ.get("COPPELIASIM_ROOT")
    if not root:
        return f"COPPELIASIM_ROOT is not set: {remedy}"
    if not (Path(root) / LIBRARY).is_file():
        return f"COPPELIASIM_ROOT = {root!r} holds no {LIBRARY}: {remedy}"
    named = re.search(r"V(\d+)_(\d+)_(\d+)", Path(root).resolve().name)
    if named and tuple(map(int, named.groups())) != COPPELIASIM_VERSION:
        return f"COPPELIASIM_ROOT = {root!r} is CoppeliaSim {'.'.join(named.groups())}: {remedy}"
    return None


def _display() -> str | None:
    if sys.platform != "linux":
        return f"{sys.platform} cannot run CoppeliaSim unattended (it takes Xvfb and process groups): use Linux"
    if shutil.which("Xvfb"):
        return None
    return "Xvfb is not on PATH (CoppeliaSim draws on an X display): apt-get install xvfb"


def _pyrep() -> str | None:
    folders = _folders("pyrep")
    if folders is None:
        return f"pyrep is not installed: {INSTALL} (not PyPI's pyrep, which is another project)"
    if not any((folder / "backend").is_dir() for folder in folders):
        return f"pyrep is another project of that name (it has no pyrep.backend): uninstall it, then {INSTALL}"
    # Found by name, and only if it was compiled for this Python.
    if PathFinder.find_spec(BACKEND, [str(folder / "backend") for folder in folders]) is None:
        what = f"pyrep in {folders[0]} is not compiled (it has no pyrep.backend.{BACKEND} for this Python)"
        return f"{what}: {INSTALL}, and run outside any checkout of PyRep"
    return None


def _rlbench() -> str | None:
    folders = _folders("rlbench")
    if folders is None:
        return f"rlbench is not installed: {INSTALL}"
    if not any((folder / "action_modes" / "action_mode.py").is_file() for folder in folders):
        return f"rlbench is too old (it has no rlbench.action_modes.action_mode): {INSTALL}"
    absent = [name for name in _RLBENCH_NEEDS if importlib.util.find_spec(name) is None]
    return f"rlbench needs {', '.join(absent)}: {INSTALL}" if absent else None


def _folders(package: str) -> list[Path] | None:
    """Where the package lies, None if it cannot be imported.  Not imported: PyRep loads the simulator's library."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        return None
    return [Path(folder) for folder in spec.submodule_search_locations or ()]
