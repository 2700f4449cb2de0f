"""The display of a simulator when it does not come up as it should: named, over, and never waited for without end."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs import rlbench_keeper
from envs.rlbench import SimulatorFault
from envs.rlbench_wire import Decoder, receive
from tests.rlbench_fake import DEATH_S, LAUNCH_S, Machine, build, display_program, install, run_episode


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with pytest.MonkeyPatch.context() as patch:
        yield install(patch, tmp_path_factory.mktemp("machine"))


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("echo no screens >&2; exit 1", "display_failed", "(?s)display ended during launch with exit code 1.*screens"),
        ("exec sleep 1000", "launch_timeout", "no answer to launch within 1 s"),
        ("yes 1 | tr -d '\\n' > $number", "display_failed", "display failed during launch: .*'1111.* for its number"),
        ("echo abc > $number; sleep 1000", "display_failed", r"'abc\\n' for its number"),
        ("echo > $number; sleep 1000", "display_failed", r"'\\n' for its number"),
        ('eval "exec $2>&-; exec sleep 1000"', "display_failed", "display failed during launch: .*'' for its number$"),
    ],
)  # fmt: skip
def test_a_display_that_does_not_come_up_is_a_fault_of_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, kind: str, message: str
) -> None:
    machine.plan()
    display_program(monkeypatch, tmp_path, script)
    with pytest.raises(SimulatorFault, match=message) as caught:
        build(launch_s=1.0 if kind == "launch_timeout" else LAUNCH_S).reset_to(0, 0, seed=0)
    assert caught.value.kind == kind and machine.all_gone()


def test_it_works_the_same_beside_a_display_of_any_make(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        machine = install(patch, tmp_path, display="stand_in")
        env = build()
        run_episode(env)
        assert env._simulator.process is not None and env._simulator.process.display == 4242
        env.close()
        assert machine.all_gone()


def test_a_display_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    display_program(monkeypatch, tmp_path, 'printf 1 > "$number"; exec sleep 1000')
    monkeypatch.setattr(rlbench_keeper, "DISPLAY_S", 0.5)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keeper = rlbench_keeper.Keeper(theirs, os.getppid())
        began = time.monotonic()
        try:
            assert keeper._start_display() is None and 0.5 <= time.monotonic() - began < 0.5 + DEATH_S
        finally:
            assert keeper._display is not None
            keeper._display.kill()
            keeper._display.wait(10)
        ours.settimeout(10)
        said = receive(ours, Decoder())
    assert said == {"ended": "display", "reason": "it gave b'1' for its number within 0.5 s"}
