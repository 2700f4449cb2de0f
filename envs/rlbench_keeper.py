"""One display and one simulator in one process group that ends with whoever asked for it.

Started by `envs/rlbench_process.py` as the leader of a new session; starts Xvfb, then `envs/rlbench_child.py` in a
fresh interpreter that has display and library paths in its environment from its first instruction.  Standard library
only: this process must answer whatever the simulator does, also when that holds its interpreter's lock for ever.

    supervisor ─control─► keeper ─┬─► Xvfb :N        first free number, chosen by the server itself
        │                         └─► simulator ◄──── requests, replies ───┐
        └──────────────────────────────────────────────────────────────────┘

It says on the control socket which display it got and how the simulator or the display ended.  When one of the two
ends, when the control socket closes or when the supervisor is gone, it kills the whole group, itself included.  The two
get SIGKILL from the kernel if the keeper itself is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from envs.rlbench_wire import Message, encode

POLL_S = 0.05
GOODBYE_S = 1.0
"for Xvfb to remove its socket"
DISPLAY_S = 60.0
"for Xvfb to come up, which takes it a second; the supervisor's deadline for the launch may end sooner"
NUMBER_BYTES = 16
"of the display's number and the line's end, at most"

XVFB = ("-screen", "0", "1280x1024x24", "+extension", "GLX", "-noreset", "-nolisten", "tcp")
_PR_SET_PDEATHSIG = 1


def simulator_environment(env: Mapping[str, str], display: int) -> dict[str, str]:
    """What the simulator's interpreter starts with: CoppeliaSim's libraries only, and the display."""
    root = env["COPPELIASIM_ROOT"]
    return {**env, "LD_LIBRARY_PATH": root, "QT_QPA_PLATFORM_PLUGIN_PATH": root, "DISPLAY": f":{display}"}


class Keeper:
    def __init__(self, control: socket.socket, supervisor_pid: int) -> None:
        self._control, self._supervisor = control, supervisor_pid
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        self._display: subprocess.Popen[bytes] | None = None
        self._simulator: subprocess.Popen[bytes] | None = None

    def run(self, simulator: list[str], inherited: tuple[int, ...]) -> None:
        """Start both and wait for an end; does not return, because the group it kills is its own."""
        # Where our parent ignores it so do we, and with us Xvfb, which waits for a program it starts.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        try:
            number = self._start_display()
            if number is not None:
                self._say({"display": number})
                self._simulator = subprocess.Popen(
                    simulator,
                    env=simulator_environment(os.environ, number),
                    stdin=subprocess.DEVNULL,
                    pass_fds=inherited,
                    preexec_fn=self._die_with_me,
                )
                self._watch()
        finally:
            self._end()

    def _start_display(self) -> int | None:
        """The number of a display that answers; None if there will be none, which has been said then."""
        read_fd, write_fd = os.pipe()
        command = ["Xvfb", "-displayfd", str(write_fd), *XVFB]
        try:
            self._display = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(write_fd,), preexec_fn=self._die_with_me
            )
        except OSError as error:
            self._say({"ended": "display", "reason": str(error)})
            return None
        os.close(write_fd)
        answer, due = b"", time.monotonic() + DISPLAY_S
        while not answer.endswith(b"\n") and len(answer) < NUMBER_BYTES and time.monotonic() < due:
            if self._abandoned(read_fd):
                return None
            if not select.select([read_fd], [], [], 0)[0]:
                continue
            data = os.read(read_fd, NUMBER_BYTES - len(answer))
            if not data:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._say({"ended": "display", "status": self._display.wait(GOODBYE_S)})
                    return None
                break  # it closed the pipe and lives on
            answer += data
        os.close(read_fd)
        number, end, _ = answer.partition(b"\n")
        if not (end and number.isdigit()):
            late = f" within {DISPLAY_S:g} s" if time.monotonic() >= due else ""
            self._say({"ended": "display", "reason": f"it gave {answer!r} for its number{late}"})
            return None
        return int(number)

    def _watch(self) -> None:
        """Until one of the two ends or nobody wants them any more."""
        assert self._simulator is not None and self._display is not None
        while not self._abandoned():
            for name, process in (("simulator", self._simulator), ("display", self._display)):
                if process.poll() is not None:
                    self._say({"ended": name, "status": process.returncode})
                    return

    def _abandoned(self, *others: int) -> bool:
        """Wait a moment, or until there is something on `others`; True once the supervisor has hung up or is gone."""
        control = self._control.fileno()
        ready, _, _ = select.select([control, *others], [], [], POLL_S)
        # The supervisor never writes: readable means closed.  A forked copy of it may hold the socket open.
        return control in ready or os.getppid() != self._supervisor

    def _end(self) -> None:
        if self._simulator is not None:
            self._simulator.kill()
        if self._display is not None:
            # Politely first: a killed X server leaves its socket in /tmp.
            self._display.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._display.wait(GOODBYE_S)
        self._control.close()
        os.killpg(0, signal.SIGKILL)

    def _die_with_me(self) -> None:
        """Runs in the new process before its program."""
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def _say(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: the next look at the socket ends everything
            self._control.sendall(encode(message))


def main(argv: list[str]) -> None:
    control_fd, supervisor_pid, *inherited = (int(word) for word in argv)
    # A crashed simulator would leave gigabytes.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    fds = tuple(inherited)
    program = [sys.executable, "-P", "-m", "envs.rlbench_child", *map(str, fds)]
    Keeper(socket.socket(fileno=control_fd), supervisor_pid).run(program, fds)
    time.sleep(GOODBYE_S)  # until the signal that was just sent arrives


if __name__ == "__main__":
    main(sys.argv[1:])
