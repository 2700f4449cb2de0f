"""One run of the simulator, from launch to the death of its process group: the supervisor's side of the socket.

Started and replaced by `envs/rlbench_supervisor.py`.  The simulator has an interpreter and a display of its own
(`envs/rlbench_keeper.py`), because CoppeliaSim hangs, crashes and clashes with torch, and two of them cannot share one.

    call(request) ──► reply, within its deadline          frames() ──► what the last captured reply drew
         └─ else SimulatorFault: the whole group is dead, the message ends with what the simulator printed last

Frames lie in a memory file without a name: nothing is left in /dev/shm, however either side dies.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from envs.rlbench_answers import Operation, check_reply
from envs.rlbench_wire import BadMessage, Decoder, Message, encode

FAULTS = (
    "launch_timeout", "reset_timeout", "step_timeout", "measure_timeout",  # no answer within the deadline
    "launch_failed", "reset_failed", "step_failed", "measure_failed",  # an exception, whose stack the message holds
    "crashed", "display_failed", "bad_message", "black_frames", "invalid_action", "gave_up",
)  # fmt: skip

LOG_BYTES = 16_384
"of the simulator's output that are kept; messages quote the last lines of it"
LINE_CHARS = 200
"of the last printed line that stand in a message's first line"
DEATH_S = 2.0
"from the end of a socket to the word of how the process ended, and from SIGKILL to the end of the keeper"

_KEPT_VARIABLES = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "OMP_NUM_THREADS", "COPPELIASIM_ROOT")
_KEPT_PREFIXES = ("LIBGL_", "LP_", "MESA_", "GALLIUM_")


class SimulatorFault(RuntimeError):
    """The simulator failed in the middle of an episode: the episode is lost, the next reset may start another.

    `kind` is one of `FAULTS`, for counting.
    """

    def __init__(self, kind: str, message: str) -> None:
        assert kind in FAULTS, kind
        # What cannot be written as UTF-8 would fail in whatever log it comes to.
        message = message.encode(errors="backslashreplace").decode()
        # Both are kept as `args`, which is how an exception travels between processes.
        super().__init__(kind, message)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return f"simulator fault {self.kind}: {self.message}"


class SimulatorProcess:
    """Launched by the constructor, killed by `close` or by the first fault; used by one thread at a time.

    It belongs to the process that launched it: a forked copy can only be closed, which leaves the simulator alone.
    """

    def __init__(self, launch: Mapping[str, Any], *, frames_shape: tuple[int, ...], launch_s: float) -> None:
        """`launch` are the arguments of the child's launch.  Raises SimulatorFault; then nothing is left running."""
        self._number, self._log, self.display = 0, bytearray(), -1
        self._ended: Message | None = None
        self._replies, self._notes = Decoder(), Decoder()
        self._frames_shape, self._owner = frames_shape, os.getpid()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._files = contextlib.ExitStack()
        try:
            self._start()
            self.call("launch", launch, launch_s)
        except BaseException:  # Ctrl-C too: nobody else could close it
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the keeper, which is also the id of the process group."""
        assert self._keeper is not None, "not started"
        return self._keeper.pid

    @property
    def ended(self) -> bool:
        """Whether the keeper is gone, and with it the group."""
        return self._keeper is None or self._keeper.poll() is not None

    def frames(self) -> NDArray[np.uint8]:
        """What the last captured reply drew; all zero before."""
        frames = np.zeros(self._frames_shape, np.uint8)
        os.preadv(self._memory.fileno(), [frames.data], 0)
        return frames

    def call(self, operation: Operation, request: Mapping[str, Any], deadline_s: float) -> Message:
        """The child's answer.  SimulatorFault if there is none within `deadline_s` wall seconds or it is an error.

        Every fault kills the process, except an action that RLBench refused: then the simulator is sound.
        """
        assert os.getpid() == self._owner, "a forked copy has no simulator: close it and launch another"
        self._number += 1
        due = time.monotonic() + deadline_s
        try:
            self._socket.settimeout(deadline_s)
            self._socket.sendall(encode({"n": self._number, "op": operation, **request}))
            reply = self._receive(due)
            if reply is not None:
                check_reply(reply, operation, self._number)
        except TimeoutError:
            self.fail(f"{operation}_timeout", f"no answer to {operation} within {deadline_s:g} s")
        except BadMessage as error:
            self.fail("bad_message", f"in answer to {operation}: {error}")
        except OSError:  # the socket is closed at the other end
            reply = None
        if reply is None:
            self._report_end(operation)
        if not self._replies.empty:
            self.fail("bad_message", f"something follows the answer to {operation}")
        if "error" in reply:
            self._raise_remote(operation, reply["error"])
        answer: Message = reply["ok"]
        return answer

    def fail(self, kind: str, message: str) -> NoReturn:
        """Kill the process and raise SimulatorFault: also for whoever finds an answer that cannot be true."""
        self.close()
        lines = self._log.decode(errors="replace").strip().splitlines()[-20:]
        if lines:
            # The first line stands alone in a summary, so it holds the last that was printed.
            first, newline, rest = message.partition("\n")
            message = f"{first}; printed last: {lines[-1][-LINE_CHARS:]!r}{newline}{rest}"
            message += "\nthe simulator's last output:\n" + "\n".join(lines)
        raise SimulatorFault(kind, message) from None

    def close(self) -> None:
        """Kill the group and free everything; does nothing the second time.  A forked copy frees its own files only."""
        with self._files.pop_all():
            if self._keeper is not None and self._control.fileno() >= 0 and os.getpid() == self._owner:
                self._end_group(self._keeper)

    # ------------------------------------------------------------------------------------ inside

    def _start(self) -> None:
        """Open what both sides share and start the keeper, which starts the rest."""
        try:
            with contextlib.ExitStack() as theirs:
                ours = self._files
                self._memory = ours.enter_context(open(os.memfd_create("rlbench_frames"), "r+b", buffering=0))
                self._memory.truncate(int(np.prod(self._frames_shape)))
                self._socket, replies = socket.socketpair()
                ours.enter_context(self._socket)
                theirs.enter_context(replies)
                self._control, notes = socket.socketpair()
                ours.enter_context(self._control)
                theirs.enter_context(notes)
                output_fd, print_fd = os.pipe()
                self._output = ours.enter_context(open(output_fd, "rb", buffering=0))
                printed = theirs.enter_context(open(print_fd, "wb", buffering=0))
                os.set_blocking(output_fd, False)
                fds = (notes.fileno(), replies.fileno(), self._memory.fileno())
                self._keeper = subprocess.Popen(
                    [sys.executable, "-P", "-m", "envs.rlbench_keeper", *map(str, (fds[0], os.getpid(), *fds[1:]))],
                    env=clean_environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=printed,
                    stderr=printed,
                    pass_fds=fds,
                    start_new_session=True,
                )
        except OSError as error:
            self.fail("launch_failed", f"the simulator's process does not start: {error}")

    def _receive(self, due: float) -> Message | None:
        """The next reply, None at the end of the socket; TimeoutError when `due` has passed, BadMessage for garbage."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._output, select.POLLIN)
        poll.register(self._control, select.POLLIN)
        while True:
            if (reply := self._replies.next()) is not None:
                return reply
            left = due - time.monotonic()
            if left <= 0:
                raise TimeoutError
            for fd, _ in poll.poll(left * 1000):
                if fd == self._socket.fileno():
                    data = self._socket.recv(1 << 16)
                    if not data:
                        return None
                    self._replies.feed(data)
                elif fd == self._output.fileno():
                    # A full pipe would stop the simulator, so it is read while an answer is waited for.
                    if self._read_log() == 0:
                        poll.unregister(self._output)
                elif not self._read_note():
                    return None

    def _read_log(self) -> int:
        """Keep the tail of what one look finds; the number of bytes, 0 if there are none."""
        data = self._output.read(1 << 16) or b""
        self._log += data
        del self._log[:-LOG_BYTES]
        return len(data)

    def _read_note(self) -> bool:
        """Hear the keeper; False once it has told of an end or has ended itself."""
        data = self._control.recv(1 << 12)
        self._notes.feed(data)
        while (note := self._notes.next()) is not None:
            self.display = note.get("display", self.display)
            if "ended" in note:
                self._ended = note
        return bool(data) and self._ended is None

    def _report_end(self, operation: Operation) -> NoReturn:
        """The other end is gone: say who ended and how."""
        self._control.settimeout(DEATH_S)
        with contextlib.suppress(OSError, BadMessage):
            while self._ended is None and self._read_note():
                pass
        ended = self._ended or {"ended": "simulator's keeper", "status": None}
        kind = "display_failed" if ended["ended"] == "display" else "crashed"
        self.fail(kind, f"the {ended['ended']} {_how(ended, operation)}")

    def _raise_remote(self, operation: Operation, error: Mapping[str, str]) -> NoReturn:
        what = f"{error['module']}.{error['type']} in {operation}: {error['message'].strip()}\n{error['stack']}"
        if operation == "step" and error["type"] == "InvalidActionError":
            raise SimulatorFault("invalid_action", what)
        self.fail(f"{operation}_failed", what)

    def _end_group(self, keeper: subprocess.Popen[bytes]) -> None:
        """SIGKILL to all that is left of it, `DEATH_S` after the keeper was asked to end it at the latest."""
        # The keeper ends all at this, and lets the display tidy up.  Shut down, as a fork may hold a copy open.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        due = time.monotonic() + DEATH_S
        # Looked at without being reaped: until then its number, and so its group's, belongs to nobody else.
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ours = True
        try:
            while os.waitid(os.P_PID, keeper.pid, ended) is None and time.monotonic() < due:
                time.sleep(0.002)
        except ChildProcessError:
            # Reaped by others, or by the kernel where SIGCHLD is ignored: ended, and its number may be another's.
            ours = False
        finally:  # also when this wait is interrupted
            with contextlib.suppress(ProcessLookupError):
                if ours:
                    os.killpg(keeper.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                keeper.wait(DEATH_S)
        # One look finds all that a pipe holds; whoever still writes has left the group, and is not listened to.
        self._read_log()


def clean_environment() -> dict[str, str]:
    """Of the simulator: no foreign Qt or GL libraries (conda's crash it), imports from where this process imports."""
    kept = {
        name: value for name, value in os.environ.items() if name in _KEPT_VARIABLES or name.startswith(_KEPT_PREFIXES)
    }
    return {**kept, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}


def _how(ended: Message, operation: Operation) -> str:
    if "reason" in ended:
        return f"failed during {operation}: {ended['reason']}"
    status = ended["status"]
    if status is None:
        return f"ended during {operation}, how is unknown"
    if status >= 0:
        return f"ended during {operation} with exit code {status}"
    try:
        return f"ended during {operation} by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended during {operation} by signal {-status}"
