"""However supervisor, keeper or simulator end: no process is left, no open file, no shared memory, no socket."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from envs.rlbench import RLBenchEnv, SimulatorFault
from tests.rlbench_fake import DEATH_S, LAUNCH_S, STILL, Machine, build, install, left_behind, run_episode

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
def undisturbed() -> Iterator[None]:
    """By what other tests left: objects to finalize, and Ray Tune's own handler of Ctrl-C."""
    gc.collect()
    gc.disable()
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, earlier)
    gc.enable()


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


@pytest.mark.parametrize("place", ["subprocess.Popen", "os.pipe", "os.memfd_create", "socket.socketpair"])
def test_a_process_that_cannot_be_started_is_a_counted_fault_and_leaves_no_open_file(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BlockingIOError(errno.EAGAIN, "deliberate")

    before, env = left_behind(), build()
    with monkeypatch.context() as patch:
        patch.setattr(f"envs.rlbench_process.{place}", refuse)
        with pytest.raises(SimulatorFault, match="the simulator's process does not start: .*deliberate") as caught:
            env.reset_to(0, 0, seed=0)
        # While the exception is still held, with every frame of its stack.
        assert left_behind()[:2] == before[:2]
    assert caught.value.kind == "launch_failed" and env.counts == {"launches": 1, "launch_failed": 1}
    machine.plan()
    run_episode(env)
    env.close()


def test_an_interpreter_that_cannot_be_executed_is_one_too(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    before, env = left_behind(), build()
    for path in (str(ROOT / "README.md"), "/nowhere/python"):
        with monkeypatch.context() as patch, pytest.raises(SimulatorFault, match=path) as caught:
            patch.setattr(sys, "executable", path)
            env.reset_to(0, 0, seed=0)
        assert caught.value.kind == "launch_failed" and left_behind()[:2] == before[:2]


@pytest.mark.usefixtures("undisturbed")
def test_a_forked_copy_closes_its_own_files_and_not_the_simulator(env: RLBenchEnv) -> None:
    env.reset_to(0, 0, seed=0)
    pid = os.fork()
    if pid == 0:
        try:
            before = left_behind()[1]
            env.close()
            os._exit(before - left_behind()[1])
        finally:
            os._exit(77)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 4, "two sockets, the frames and the output"
    env.step_chunk(STILL, capture_at=())
    assert env.counts == {"launches": 1}


@pytest.mark.usefixtures("undisturbed")
def test_an_interrupted_launch_leaves_nothing(machine: Machine) -> None:
    """As Ctrl-C does it: a signal while the answer is waited for."""
    machine.plan(fault="launch_hang")
    before, env = left_behind(), build()

    def interrupt() -> None:
        due = time.monotonic() + LAUNCH_S
        while not machine.simulators() and time.monotonic() < due:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        env.reset_to(0, 0, seed=0)
    thread.join()
    assert left_behind()[:2] == before[:2], caught
    assert not [child for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
    assert machine.all_gone()


@pytest.mark.usefixtures("undisturbed")
def test_an_interrupted_step_leaves_no_answer_for_the_next_reset(env: RLBenchEnv, machine: Machine) -> None:
    env.reset_to(0, 0, seed=0)
    machine.plan(fault="step_hang")
    thread = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_episode(env)
    thread.join()
    assert env._simulator.process is None and machine.all_gone()
    machine.plan()
    env.reset_to(0, 0, seed=0)
    assert env.counts["launches"] == 2 and sum(env.counts.values()) - env.counts["episodes"] == 2


@pytest.mark.parametrize("crash", [True, False])
def test_where_nobody_may_wait_for_the_keeper_it_still_ends_and_is_counted(machine: Machine, crash: bool) -> None:
    """SIGCHLD is ignored in a process whose parent ignored it: the kernel reaps then."""
    machine.plan()
    before, env = left_behind(), build()
    old = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        env.reset_to(0, 0, seed=0)
        if crash:
            process = env._simulator.process
            assert process is not None
            os.kill(process.pid, signal.SIGKILL)
            assert machine.all_gone(), "the simulator would answer until it is gone too"
            with pytest.raises(SimulatorFault, match="crashed"):
                env.step_chunk(STILL, capture_at=())
            assert env.counts == {"launches": 1, "crashed": 1}
            env.reset_to(0, 0, seed=0)
        env.close()
    finally:
        signal.signal(signal.SIGCHLD, old)
    assert machine.all_gone() and left_behind()[:2] == before[:2]


def test_the_text_of_a_fault_can_be_written_and_its_first_line_says_what(env: RLBenchEnv) -> None:
    env.reset_to(0, 0, seed=0)
    process = env._simulator.process
    assert process is not None
    error = {"module": "m", "type": "E", "message": "\n\ud800 broke", "stack": "here"}
    with pytest.raises(SimulatorFault) as caught:
        process._raise_remote("step", error)
    assert str(caught.value).encode().startswith(rb"simulator fault step_failed: m.E in step: \ud800 broke")


@pytest.mark.timeout(60)
def test_output_without_end_does_not_keep_a_supervisor_from_closing(env: RLBenchEnv) -> None:
    """Of a program that left the group, say: nothing that is still written is waited for."""
    env.reset_to(0, 0, seed=0)
    process, began = env._simulator.process, time.monotonic()
    assert process is not None
    process._read_log = lambda: 1 << 16  # type: ignore[method-assign]
    env.close()
    assert time.monotonic() - began < DEATH_S and process.ended
