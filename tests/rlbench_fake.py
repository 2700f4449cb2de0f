"""An RLBench installation for tests: `tests/fake_rlbench` on the path, an empty CoppeliaSim folder, a display.

    machine = install(patch, folder) ──► RLBenchEnv runs against the fake;  machine.plan(fault="step_hang") breaks it
    env = build(); run_episode(env); left_behind()  ──► an environment with short deadlines, and what it may not leave

The display is a real Xvfb where there is one.  Elsewhere, or with `display="stand_in"`, it is a program of that name
that only answers with a number: the fake draws without OpenGL, so all but Xvfb itself is tested either way.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from envs.rlbench import RLBenchConfig, RLBenchEnv
from envs.rlbench_supervisor import History

FAKE = Path(__file__).parent / "fake_rlbench"

DEADLINE_S = 0.4
LAUNCH_S = 20.0
"Generous: on a busy machine two interpreters and a display take a while."
DEATH_S = 1.5
"What ending a group may add to a deadline."
STILL = np.zeros((4, 8), np.float32)

_FIND_NUMBER = 'while [ "$1" != "-displayfd" ]; do shift; done; number="/proc/self/fd/$2"'
_STAND_IN = 'echo 4242 > "$number"; exec sleep 100000'


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
        display_program(patch, folder, _STAND_IN)
    return Machine(root)


def display_program(patch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Put a shell script called Xvfb before any other; in it, $number is a file: where the display's number goes."""
    program = folder / "bin" / "Xvfb"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{_FIND_NUMBER}\n{script}\n")
    program.chmod(0o755)
    patch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


def build(history: History | None = None, **values: Any) -> RLBenchEnv:
    settings = {"reset_s": DEADLINE_S, "step_s": DEADLINE_S, "launch_s": LAUNCH_S, "backoff_s": 0.0, "max_steps": 8}
    return RLBenchEnv(RLBenchConfig(**{**settings, **values}), "train", history or History())


def run_episode(env: RLBenchEnv) -> None:
    """To its end at the clock: standing still never succeeds."""
    env.reset_to(0, 0, seed=0)
    assert not env.step_chunk(STILL, capture_at=(4,)).truncated
    assert env.step_chunk(STILL, capture_at=()).truncated


def left_behind() -> tuple[set[str], int, set[str]]:
    """Names in /dev/shm, open files of this process, X sockets that nobody answers."""
    dead = set()
    for path in Path("/tmp/.X11-unix").glob("X*"):
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                dead.add(path.name)
    return set(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd")), dead
