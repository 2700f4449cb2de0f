from __future__ import annotations

import numpy as np

from rlbench.backend.exceptions import InvalidActionError
from rlbench.backend.scene import TICK_S, Scene


def _check(action: np.ndarray) -> None:
    if np.shape(action) != (7,):
        raise InvalidActionError(f"expected the action shape (7,), got {np.shape(action)}")


class JointVelocity:
    def action(self, scene: Scene, action: np.ndarray) -> None:
        _check(action)
        scene.joints = scene.joints + TICK_S * action


class JointPosition:
    def __init__(self, absolute_mode: bool = True) -> None:
        self._absolute = absolute_mode

    def action(self, scene: Scene, action: np.ndarray) -> None:
        _check(action)
        scene.joints = action if self._absolute else scene.joints + action
