"""The world model's prediction error on starts it is never trained on, before and after each update.

`VideoSFTLearner` feeds it the successful episodes of held-out starts.  The error is that of a one-step imagination, as
acting would make it, in the codec's latents; the yardstick is the newest memory frame, copied (`imagination.py` does
the same in pixels, on expert episodes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from learners.batching import decisions_with_future
from learners.losses import masked_mean
from learners.optim import to_cpu
from learners.video_batch import VideoBatch, join, of_episodes
from wamrl_ray.types import Episode

if TYPE_CHECKING:
    from wamrl_ray.policy.wam import WAM

PER_START = 4
"""windows of one start, spread evenly over its episode: neighbours tell the same"""


class HeldOutWindows:
    """At most `capacity` windows; a start comes in once, and when they are full nothing changes any more."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._starts: list[tuple[int, int]] = []
        "(task, initial state)"
        self._windows: VideoBatch | None = None

    def __len__(self) -> int:
        return 0 if self._windows is None else len(self._windows)

    def add(self, episodes: Sequence[Episode], policy: WAM) -> None:
        """Windows of each episode whose start is new, while there is room."""
        for episode in episodes:
            start = (episode.ticket.task_id, episode.ticket.init_state_id)
            picks = decisions_with_future([episode], policy.spec)
            count = min(PER_START, len(picks), self._capacity - len(self))
            if start in self._starts or count < 1:
                continue
            spread = np.linspace(0, len(picks) - 1, count).round().astype(int)
            new = of_episodes([episode], [picks[i] for i in spread], policy.spec)
            self._windows = new if self._windows is None else join([self._windows, new])
            self._starts.append(start)

    @torch.no_grad()
    def errors(self, policy: WAM) -> tuple[float, float]:
        """Mean squared latent error of (the frame imagined in one step, the newest memory frame copied), seen frames.

        One step from sigma = 1 with velocity v gives x - v.  `len` must not be 0.
        """
        windows = self._windows
        assert windows is not None, "no held-out windows yet"
        obs = policy.encode(windows.memory, windows.instruction)
        clean = policy.encode_future(windows.future)
        noise = policy.world_noise(windows.world_seed)
        imagined = noise - policy.world_forward(obs, noise, torch.ones(len(noise), device=noise.device)).velocity
        seen = windows.seen.to(noise.device)[:, None, :, None, None, None]

        def error(frames: Tensor) -> float:
            return float(masked_mean((frames - clean).square(), seen))

        return error(imagined), error(obs.memory[:, :, -1:])

    def state(self) -> dict[str, Any]:
        windows = None if self._windows is None else to_cpu(vars(self._windows))
        return {"starts": [list(start) for start in self._starts], "windows": windows}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._starts = [(int(task), int(init_state)) for task, init_state in state["starts"]]
        self._windows = None if state["windows"] is None else VideoBatch(**to_cpu(state["windows"]))
