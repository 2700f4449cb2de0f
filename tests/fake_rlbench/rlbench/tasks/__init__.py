"""One task, under the name of a real one: turn the first joint to the pot."""

from __future__ import annotations

import numpy as np

from rlbench import plan
from rlbench.backend.scene import Scene


class WaterPlants:
    def __init__(self) -> None:
        self.drops: list[float] = []

    def init_episode(self, scene: Scene) -> list[str]:
        self.drops = scene.drops = []
        scene.pot = np.random.choice([-1, 1]) * np.random.uniform(0.2, 0.6)
        return ["water plant", "water the soil"]

    def step(self, scene: Scene) -> None:
        if not self.drops and abs(scene.joints[0] - scene.pot) < 0.05:
            self.drops = np.random.normal(0, 0.0005, 5).tolist()
            scene.drops = self.drops

    def success(self) -> tuple[bool, bool]:
        done = bool(self.drops) or plan.get("can_over_pot", False)
        return done, done

    def variation_count(self) -> int:
        return 1
