"""One gradient step's windows, from episodes and from demonstrations alike.  n rows; axis letters as in `types.py`.

    Episodes, picks ──► of_episodes ─┐
    Windows, picks ──► of_windows ───┴─► join ──► VideoBatch ──► `VideoSFTLearner.loss_terms`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learners.batching import Pick, gather
from learners.windows import Windows
from wamrl_ray.types import Episode, PolicySpec


@dataclass(frozen=True, kw_only=True)
class VideoBatch:
    """On the CPU.

    Example (tiny LIBERO, 12 successful and 4 failed rows): memory (16, 1, 2, 64, 64, 3), future (16, 1, 2, 64, 64, 3),
    seen (16, 1), failed [False] * 12 + [True] * 4.
    """

    memory: Tensor
    "(n, M, V, h, w, 3) uint8"
    future: Tensor
    "(n, F, V, h, w, 3) uint8, anything where not seen"
    seen: Tensor
    "(n, F) bool"
    instruction: tuple[str, ...]
    world_seed: Tensor
    "(n,) int64: the future noise that acting read; 0 for demonstrations"
    failed: Tensor
    "(n,) bool: of an episode that did not succeed"
    demonstrated: Tensor
    "(n,) bool: of the pretraining data"

    def __len__(self) -> int:
        return len(self.memory)

    def shares(self) -> dict[str, float]:
        """What the batch is made of, as metrics."""
        return {
            "failed_window_share": float(self.failed.float().mean()),
            "pretraining_window_share": float(self.demonstrated.float().mean()),
        }


def of_episodes(episodes: Sequence[Episode], picks: Sequence[Pick], spec: PolicySpec) -> VideoBatch:
    """Raises ValueError on an empty pick or frames that do not fit `spec`."""
    decisions = gather(episodes, picks, spec)
    return VideoBatch(
        memory=decisions.memory,
        future=decisions.future,
        seen=decisions.seen,
        instruction=decisions.instruction,
        world_seed=decisions.world_seed,
        failed=torch.tensor([not episodes[e].success for e, _ in picks]),
        demonstrated=torch.zeros(len(picks), dtype=torch.bool),
    )


def of_windows(windows: Windows, picks: NDArray[np.int64]) -> VideoBatch:
    """Demonstrations, which count as successes: their windows are ordinary motion, whatever came later."""
    at = torch.from_numpy(picks)
    return VideoBatch(
        memory=windows.frames[windows.memory[at]],
        future=windows.frames[windows.future[at]],
        seen=windows.seen[at] > 0,
        instruction=tuple(windows.instruction[i] for i in picks.tolist()),
        world_seed=torch.zeros(len(picks), dtype=torch.int64),
        failed=torch.zeros(len(picks), dtype=torch.bool),
        demonstrated=torch.ones(len(picks), dtype=torch.bool),
    )


def join(parts: Sequence[VideoBatch]) -> VideoBatch:
    """One behind the other."""
    names = ("memory", "future", "seen", "world_seed", "failed", "demonstrated")
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return VideoBatch(instruction=tuple(text for part in parts for text in part.instruction), **tensors)
