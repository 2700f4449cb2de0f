from __future__ import annotations

import numpy as np

from rlbench.backend.scene import Scene


class Discrete:
    def action(self, scene: Scene, action: np.ndarray) -> None:
        scene.gripper = float(action[0] > 0.5)
