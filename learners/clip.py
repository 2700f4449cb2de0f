"""What one episode imagined and what happened, decision by decision: the run folder's clip.

`labels.py` adds the first episode's decisions as it labels them; the run driver asks `ActorFlowSDELearner.clip`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from learners.batching import Decisions


@dataclass(kw_only=True)
class ClipFrames:
    """Gathers in whatever order micro-batches come."""

    decision: list[int] = field(default_factory=list)
    imagined: list[NDArray[np.uint8]] = field(default_factory=list)
    "(F, V, h, w, 3) each"
    executed: list[NDArray[np.uint8]] = field(default_factory=list)
    "(F, V, h, w, 3) each; the frame at decision time where nothing was executed"
    reached: list[NDArray[np.bool_]] = field(default_factory=list)
    "(F,) each"
    reward: list[float] = field(default_factory=list)

    def add(self, batch: Decisions, imagined: Tensor, reward: Tensor) -> None:
        """Of a batch's decisions those of episode 0: imagined (n, F, V, h, w, 3) in [0, 1], reward (n,)."""
        for i in torch.nonzero(batch.episode == 0).flatten().tolist():
            self.decision.append(int(batch.decision[i]))
            self.imagined.append((imagined[i] * 255.0).round().to(torch.uint8).cpu().numpy())
            self.executed.append(batch.future[i].numpy())
            self.reached.append(batch.reached[i].numpy())
            self.reward.append(float(reward[i]))

    def arrays(self) -> dict[str, NDArray[Any]] | None:
        """In the order of the decisions: imagined, executed (T, F, V, h, w, 3) uint8, reached (T, F), reward (T,)."""
        if not self.decision:
            return None
        order = np.argsort(self.decision)
        return {
            "imagined": np.stack(self.imagined)[order],
            "executed": np.stack(self.executed)[order],
            "reached": np.stack(self.reached)[order],
            "reward": np.asarray(self.reward, dtype=np.float32)[order],
        }
