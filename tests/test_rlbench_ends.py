"""However supervisor, keeper or simulator end: no process is left, no open file, no shared memory, no socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.rlbench import RLBenchEnv, SimulatorFault
from tests.rlbench_fake import LAUNCH_S, STILL, Machine, build, install, left_behind, run_episode

ROOT = Path(__file__).parent.parent
_PARENT = """
import os, sys, time
from tests.rlbench_fake import STILL, build
env = build(launch_s=60, step_s=60)
print("built", flush=True)
env.reset_to(0, 0, seed=0)
if "fork" in sys.argv and os.fork() == 0:  # a copy of all its sockets, as a pool of processes has
    time.sleep(8)
    os._exit(0)
print("reset", flush=True)
env.step_chunk(STILL, capture_at=())
print("stepped", flush=True)
time.sleep(100)
"""


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch, tmp_path_factory.mktemp("machine"))


@pytest.fixture
def env(machine: Machine) -> Iterator[RLBenchEnv]:
    machine.plan()
    env = build()
    yield env
    env.close()
    assert machine.all_gone()


@pytest.mark.parametrize(
    ("fault", "word", "how"),
    [
        ("", "stepped", "alone"),
        ("", "stepped", "fork"),
        ("step_hang_with_the_lock", "reset", "alone"),
        ("launch_hang_with_the_lock", "built", "alone"),
    ],
)
def test_a_killed_supervisor_leaves_no_orphan(machine: Machine, fault: str, word: str, how: str) -> None:
    machine.plan(fault=fault)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-c", _PARENT, how]
    parent = subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        while parent.stdout.readline().strip() != word:
            assert parent.poll() is None
        due = time.monotonic() + LAUNCH_S
        while not machine.simulators() and time.monotonic() < due:
            time.sleep(0.02)
        assert machine.simulators()
    finally:
        parent.kill()
        parent.wait(10)
        parent.stdout.close()
    due = time.monotonic() + 3
    while machine.simulators() and time.monotonic() < due:
        time.sleep(0.02)
    assert not machine.simulators()
    assert machine.all_gone(within_s=3.0 if how == "alone" else 10.0)


def test_a_killed_keeper_takes_simulator_and_display_with_it(env: RLBenchEnv, machine: Machine) -> None:
    env.reset_to(0, 0, seed=0)
    assert env._simulator.process is not None
    os.kill(env._simulator.process.pid, signal.SIGKILL)
    assert machine.all_gone()
    with pytest.raises(SimulatorFault, match="keeper ended|simulator ended") as caught:
        env.step_chunk(STILL, capture_at=())
    assert caught.value.kind == "crashed"


def test_faults_leave_no_shared_memory_no_open_file_and_no_socket(machine: Machine) -> None:
    before = left_behind()
    env = build(max_restarts=99)
    for fault in ("step_crash", "step_hang", "step_garbage", "reset_error", "launch_crash"):
        machine.plan(fault=fault)
        with pytest.raises(SimulatorFault):
            run_episode(env)
    assert machine.all_gone()
    shared_memory, files, sockets = left_behind()
    assert (shared_memory, files) == before[:2] and sockets <= before[2]
