"""An RLBench installation for tests: `tests/fake_rlbench` on the path, an empty CoppeliaSim folder, a display.

    machine = install(patch, folder) ──► RLBenchEnv runs against the fake;  machine.plan(fault="step_hang") breaks it

The display is a real Xvfb where there is one.  Elsewhere, or with `display="stand_in"`, it is a program of that name
that only answers with a number: the fake draws without OpenGL, so all but Xvfb itself is tested either way.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

FAKE = Path(__file__).parent / "fake_rlbench"

_STAND_IN = """#!/bin/sh
while [ "$1" != "-displayfd" ]; do shift; done
echo 4242 > "/proc/self/fd/$2"
exec sleep 100000
"""


@dataclass(frozen=True)
class Machine:
    root: Path
    "COPPELIASIM_ROOT"

    def plan(self, **plan: Any) -> None:
        """What the fake does from its next launch or reset on; nothing: all goes well."""
        (self.root / "plan.json").write_text(json.dumps(plan))

    def processes(self) -> list[psutil.Process]:
        """Keepers, simulators and displays of this machine that are alive, whoever started them."""
        found = []
        for process in psutil.process_iter():
            try:
                alive = process.status() != psutil.STATUS_ZOMBIE
                if alive and process.environ().get("COPPELIASIM_ROOT") == str(self.root) and process.pid != os.getpid():
                    found.append(process)
            except psutil.Error:  # gone meanwhile
                continue
        return found

    def simulators(self) -> list[psutil.Process]:
        """Those of them that run the child's program."""
        found = []
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                found += [process] if "envs.rlbench_child" in process.cmdline() else []
        return found

    def all_gone(self, within_s: float = 3.0) -> bool:
        due = time.monotonic() + within_s
        while self.processes() and time.monotonic() < due:
            time.sleep(0.02)
        # Looked at twice: a process that is just being replaced by its program has no environment for a moment.
        time.sleep(0.02)
        return not self.processes()

    def renders(self) -> int:
        path = self.root / "renders"
        return len(path.read_bytes()) if path.exists() else 0


def install(patch: pytest.MonkeyPatch, folder: Path, display: str = "auto") -> Machine:
    root = folder / "CoppeliaSim"
    root.mkdir()
    (root / "libcoppeliaSim.so").touch()
    patch.setenv("COPPELIASIM_ROOT", str(root))
    patch.syspath_prepend(str(FAKE))
    if display == "stand_in" or shutil.which("Xvfb") is None:
        (folder / "bin").mkdir()
        program = folder / "bin" / "Xvfb"
        program.write_text(_STAND_IN)
        program.chmod(0o755)
        patch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return Machine(root)
