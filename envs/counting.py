"""An environment that shows its step counter in state and frames, and fails on demand: it proves ordering and recovery.

Fed by the tests' rollouts; feeds observations from which a test can tell which step of which start they are of.

    state   (step, init_state_id)
    frames  every pixel is (step, task_id, init_state_id), each modulo 256
    reward  1 at the step `success_step`, in episodes from an even initial state; odd ones never succeed
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envs.base import ChunkEnv
from wamrl_ray.types import EnvSpec, Frames, Split

INIT_STATES: dict[Split, range] = {"train": range(0, 40), "held_out": range(40, 50)}


@dataclass(frozen=True, kw_only=True)
class CountingConfig:
    """The fault fires at the first step of every episode from `fault_init_state`; with a marker file, only once."""

    kind: Literal["counting"] = "counting"
    resolution: int = 16
    max_steps: int = 24
    success_step: int = 12
    ends_on_success: bool = True
    "False: the episode goes on to `max_steps`, so that success and termination come apart"
    fault: Literal["none", "raise", "exit", "hang"] = "none"
    "raise RuntimeError, end the process with code 13, or never return"
    fault_init_state: int = 0
    fault_marker: str = ""
    "a file created when the fault fires; while it exists the fault does not fire.  Empty: fires every time"

    def __post_init__(self) -> None:
        for name in ("resolution", "max_steps", "success_step"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")


class CountingEnv(ChunkEnv):
    """Two tasks that differ in name only; actions (1,) are checked and otherwise ignored."""

    def __init__(self, config: CountingConfig, split: Split) -> None:
        spec = EnvSpec(
            name="counting",
            simulator="none",
            instructions=("count", "count again"),
            views=("counter",),
            resolution=config.resolution,
            state_dim=2,
            action_dim=1,
            max_steps=config.max_steps,
            init_states=INIT_STATES,
        )
        super().__init__(spec, split)
        self._config = config

    def _reset(self, task_id: int, init_state_id: int, seed: int) -> None:
        self._start = (task_id, init_state_id)
        self._count = 0

    def _step(self, action: NDArray[np.float32], capture: bool) -> tuple[float, bool, bool]:
        if self._count == 0 and self._start[1] == self._config.fault_init_state:
            self._fail()
        self._count += 1
        success = self._count == self._config.success_step and self._start[1] % 2 == 0
        return float(success), success, success and self._config.ends_on_success

    def _frames(self) -> Frames:
        size = self._config.resolution
        pixel = np.array([self._count, *self._start]) % 256
        return np.broadcast_to(pixel.astype(np.uint8), (1, size, size, 3)).copy()

    def _state(self) -> NDArray[np.float32]:
        return np.array([self._count, self._start[1]], np.float32)

    def _fail(self) -> None:
        if self._config.fault == "none":
            return
        if self._config.fault_marker:
            marker = Path(self._config.fault_marker)
            if marker.exists():
                return
            marker.touch()
        match self._config.fault:
            case "raise":
                raise RuntimeError(f"counting: the fault asked for at init_state_id = {self._start[1]}")
            case "exit":
                os._exit(13)
            case "hang":
                threading.Event().wait()
