"""The scripted expert of `reach`: straight to the named disc, and without memory, as `envs/experts.py` explains.

Fed by the state of `envs/reach.py`; feeds `wamrl collect` through `act()`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.reach import ReachEnv


class ReachExpert:
    """Moves straight to the named disc of `envs/reach.py`, as fast as it may. Reads the point and the disc."""

    action_noise = np.ones(2, np.float32)
    opening: tuple[int, float] | None = None

    def __init__(self, env: ReachEnv) -> None:
        self._env = env

    def act(self) -> NDArray[np.float32]:
        """(2,) float32 in [-1, 1], displacement in units of `speed`; shortened as a whole: the way is straight."""
        env = self._env
        wanted = (env._discs[env._goal] - env._point) / env._config.speed
        return np.asarray(wanted / max(1.0, float(np.abs(wanted).max())), dtype=np.float32)
