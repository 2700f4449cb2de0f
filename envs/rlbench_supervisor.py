"""Which simulator process answers: launched when needed, replaced after a fault, renewed before it grows old.

Between `envs/rlbench.py` and `envs/rlbench_process.py`.  A fault ends the episode it hits, as `SimulatorFault`; the
next reset finds a new process.  Nothing here waits without a deadline.

    reset ──► none alive, too old or too large? ──► back off, launch ──► ask ──► reply, frames
    step  ──► ask ──► reply                             └─ `max_restarts` faults in a row without an episode: gave_up
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.rlbench_process import SimulatorFault, SimulatorProcess
from envs.rlbench_wire import Message

MAX_RSS_BYTES = 4 * 1024**3
"A simulator above this is renewed at the next reset: CoppeliaSim keeps buffers it will not use again."
MAX_BACKOFF_S = 30.0


@dataclass
class History:
    """What befell the simulators of this process: a worker builds a new environment after a fault, this stays."""

    counts: Counter[str] = field(default_factory=Counter)
    "launches, recycled, episodes, and one for each kind of fault"
    in_a_row: int = 0
    "faults since the last episode that came to its end"
    last: str = ""
    "the last fault in a line"


HISTORY = History()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Deadlines in wall seconds, and when a simulator is replaced."""

    launch_s: float
    reset_s: float
    step_s: float
    recycle_after: int
    "episodes"
    max_restarts: int
    "faults in a row without an episode in between; after them nothing is launched any more"
    backoff_s: float
    "before the first restart; doubled for each further one in a row, up to `MAX_BACKOFF_S`"


class Supervisor:
    """One simulator at a time."""

    def __init__(
        self,
        launch: Mapping[str, Any],
        *,
        frames_shape: tuple[int, ...],
        limits: Limits,
        history: History = HISTORY,
    ) -> None:
        """Launches nothing yet.  `launch` is what the child is told, `frames_shape` (V, h, w, 3)."""
        self._launch, self._frames_shape, self._limits, self._history = launch, frames_shape, limits, history
        self._process: SimulatorProcess | None = None
        self._episodes, self._rss_bytes = 0, 0

    @property
    def process(self) -> SimulatorProcess | None:
        """The simulator that is alive, if any."""
        return self._process

    def reset(self, request: Mapping[str, Any]) -> tuple[Message, NDArray[np.uint8]]:
        """The child's answer and the first frames (V, h, w, 3) uint8.  Raises SimulatorFault."""
        if self._episodes >= self._limits.recycle_after or self._rss_bytes > MAX_RSS_BYTES:
            self.close()
            self._history.counts["recycled"] += 1
        with self._counted():
            process = self._process or self._start()
            reply = process.call("reset", request, self._limits.reset_s)
            frames = process.frames()
            for view, image in enumerate(frames):
                if image.var() == 0:
                    process.fail("black_frames", f"view {view} is one colour after reset: OpenGL draws nothing")
        self._episodes += 1
        self._rss_bytes = int(reply["rss_bytes"])
        return reply, frames

    def step(self, request: Mapping[str, Any]) -> Message:
        """The child's answer.  Raises SimulatorFault."""
        assert self._process is not None, "an episode that was not started cannot be stepped"
        with self._counted():
            reply = self._process.call("step", request, self._limits.step_s)
        return reply

    def frames(self) -> NDArray[np.uint8]:
        """(V, h, w, 3) uint8 of the last captured step."""
        assert self._process is not None, "there is no simulator"
        return self._process.frames()

    def episode_done(self) -> None:
        """An episode came to its end: the simulator works."""
        self._history.counts["episodes"] += 1
        self._history.in_a_row = 0

    def close(self) -> None:
        process, self._process = self._process, None
        self._episodes, self._rss_bytes = 0, 0
        if process is not None:
            process.close()

    def _start(self) -> SimulatorProcess:
        history, limits = self._history, self._limits
        if history.in_a_row > limits.max_restarts:
            most = f"max_restarts = {limits.max_restarts}"
            raise SimulatorFault("gave_up", f"{history.in_a_row} faults in a row, {most}; the last: {history.last}")
        if history.in_a_row:
            time.sleep(min(limits.backoff_s * 2 ** (history.in_a_row - 1), MAX_BACKOFF_S))
        history.counts["launches"] += 1
        self._process = SimulatorProcess(self._launch, frames_shape=self._frames_shape, launch_s=limits.launch_s)
        return self._process

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except SimulatorFault as fault:
            self._lost(fault)
            raise
        except BaseException:
            self.close()  # Ctrl-C: the answer may yet come, and would be taken for the next one's
            raise

    def _lost(self, fault: SimulatorFault) -> None:
        self._history.counts[fault.kind] += 1
        if fault.kind == "invalid_action":  # the policy's fault: the simulator is sound
            return
        if fault.kind != "gave_up":
            self._history.in_a_row += 1
            self._history.last = str(fault).splitlines()[0]
        self.close()
