"""Training windows: each captured observation of a demonstration with the frames and labels that follow it.

    demonstrations ──► make_windows ──► Windows ──► `pretrain_batch.make_batch`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wamrl_ray.policy.wam import WAMConfig
from wamrl_ray.types import Demonstration

DEVICE_SHARE = 0.5
"""of the device's free memory that windows may take; beyond it they stay in the host's and travel batch by batch"""
BLOCK_BYTES = 64 * 2**20


@dataclass(frozen=True, kw_only=True)
class Windows:
    """All training windows of a set of demonstrations, frames stored once.  n windows, X frames in all."""

    frames: Tensor
    "(X, V, h, w, 3) uint8"
    memory: Tensor
    "(n, M) int64 into frames"
    future: Tensor
    "(n, F) int64 into frames; the current frame where there is none"
    seen: Tensor
    "(n, F) 1 where the future frame exists"
    state: Tensor
    "(n, S)"
    action: Tensor
    "(n, H, A) labels, env units"
    next_state: Tensor
    "(n, H, S)"
    valid: Tensor
    "(n, H) 1 on steps that were executed"
    instruction: tuple[str, ...]
    still_error: float
    "mean squared difference of newest memory frame and future, latent units: what imagining no motion would cost"

    def __len__(self) -> int:
        return len(self.memory)

    @property
    def device(self) -> torch.device:
        return self.frames.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to(self, device: torch.device) -> Windows:
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self._tensors().items()}
        return replace(self, **moved)

    def near(self, device: torch.device) -> Windows:
        """On `device` if they fit beside what it has to do, else where they are."""
        if device.type == "cuda" and self.nbytes > DEVICE_SHARE * torch.cuda.mem_get_info(device)[0]:
            return self
        return self.to(device)

    def _tensors(self) -> dict[str, Tensor]:
        values = ((f.name, getattr(self, f.name)) for f in fields(self))
        return {name: value for name, value in values if isinstance(value, Tensor)}


def make_windows(demonstrations: Iterable[Demonstration], config: WAMConfig) -> Windows:
    """One window per captured observation.  Raises ValueError where data and policy sizes differ, or without data.

    Demonstrations are let go one by one: an iterator that loads them needs their memory once.
    """
    names = ("memory", "future", "seen", "state", "action", "next_state", "valid")
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in names}
    store = _FrameStore()
    instructions: list[str] = []
    offset = 0
    for demo in demonstrations:
        _check_sizes(demo, config)
        index_of = {int(step): n for n, step in enumerate(demo.obs_step)}
        for n, step in enumerate(int(s) for s in demo.obs_step):
            if step >= len(demo.label):
                continue
            steps = np.minimum(np.arange(step, step + config.horizon), len(demo.label) - 1)
            future = [index_of.get(step + o) for o in config.imagined_offsets]
            past = [index_of.get(max(step - back * config.executed, 0), n) for back in reversed(range(config.memory))]
            parts["memory"].append(offset + np.array(past))
            parts["future"].append(offset + np.array([n if f is None else f for f in future]))
            parts["seen"].append(np.array([f is not None for f in future], np.float32))
            parts["state"].append(demo.state[step])
            parts["action"].append(demo.label[steps])
            parts["next_state"].append(demo.state[steps + 1])
            parts["valid"].append((np.arange(step, step + config.horizon) < len(demo.label)).astype(np.float32))
            instructions.append(demo.instruction)
        store.add(demo.frames)
        offset += len(demo.frames)
    if not instructions:
        raise ValueError("demonstrations: none to train on, or none with a step; collect some, or name other tasks")
    tensors = {name: torch.from_numpy(np.stack(rows)) for name, rows in parts.items()}
    stored = store.join()
    error = _still_error(stored, tensors["memory"][:, -1], tensors["future"], tensors["seen"])
    return Windows(frames=stored, instruction=tuple(instructions), still_error=error, **tensors)


def _check_sizes(demo: Demonstration, config: WAMConfig) -> None:
    wanted = (len(config.views), config.resolution, config.resolution, 3)
    if demo.frames.shape[1:] != wanted:
        raise ValueError(
            f"policy.views, policy.resolution: the policy asks for frames {wanted}, a demonstration of {demo.env} has "
            f"{demo.frames.shape[1:]}: use the config that goes with the data, or collect with another --resolution"
        )
    for name, width in (("action_dim", demo.label.shape[1]), ("state_dim", demo.state.shape[1])):
        if getattr(config, name) != width:
            raise ValueError(
                f"policy.{name} = {getattr(config, name)}: a demonstration of {demo.env} has {width}; "
                "use the config that goes with the data"
            )


class _FrameStore:
    """Frames copied one behind the other, then joined with hardly more memory than they take.

    Blocks this large are given back to the system as they are let go; demonstrations' own arrays would leave holes.
    """

    def __init__(self) -> None:
        self._blocks: list[NDArray[np.uint8]] = []
        self._room = 0
        "frames that still fit into the last block"

    def add(self, frames: NDArray[np.uint8]) -> None:
        while len(frames):
            if self._room == 0:
                self._room = max(1, BLOCK_BYTES // frames[0].nbytes)
                self._blocks.append(np.empty((self._room, *frames.shape[1:]), np.uint8))
            fit, used = frames[: self._room], len(self._blocks[-1]) - self._room
            self._blocks[-1][used : used + len(fit)] = fit
            self._room -= len(fit)
            frames = frames[len(fit) :]

    def join(self) -> Tensor:
        """All of them; the store is empty afterwards."""
        end = sum(len(block) for block in self._blocks) - self._room
        joined = np.empty((end, *self._blocks[0].shape[1:]), np.uint8)
        while self._blocks:
            block = self._blocks.pop()[: -self._room or None]
            self._room = 0
            joined[end - len(block) : end] = block
            end -= len(block)
        return torch.from_numpy(joined)


def _still_error(frames: Tensor, now: Tensor, future: Tensor, seen: Tensor) -> float:
    """See `Windows.still_error`; 1 where nothing moves or nothing was seen."""
    total, count = 0.0, 0
    for f in range(future.shape[1]):
        rows = zip(now.tolist(), future[:, f].tolist(), seen[:, f].tolist(), strict=True)
        pairs = [(a, b) for a, b, s in rows if s > 0]
        total += sum(float((frames[a].float() - frames[b].float()).div(127.5).square().mean()) for a, b in pairs)
        count += len(pairs)
    return total / count if total > 0 else 1.0
