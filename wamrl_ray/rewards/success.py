"""Success reward: what of the task's success each decision is paid for.  Scores in, gains out; the learner weighs them.

A success that can be lost again (an object dropped after it counted) makes two forms differ.  Paying the difference of
the score telescopes: an episode that succeeds and loses it sums to nothing, as if it had never succeeded.  Paying the
best so far pays each advance once.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray


def gain(score: NDArray[np.float32], form: Literal["best_so_far", "difference"]) -> NDArray[np.float32]:
    """Score after each decision of one episode, (T,), 0 before the first -> reward of each decision, (T,).

    best_so_far: increments of the running maximum; difference: of the score itself.
    """
    if form == "best_so_far":
        score = np.maximum.accumulate(score)
    return np.diff(score, prepend=np.float32(0.0)).astype(np.float32)
