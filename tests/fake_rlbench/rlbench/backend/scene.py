"""Seven joints that do what they are told, and a pot to be turned to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from rlbench import plan
from rlbench.observation_config import ObservationConfig

HOME = np.array([0, 0.175, 0, -0.8729, 0, 1.2216, 0.7854])
TICK_S = 0.05


class Scene:
    def __init__(self, config: ObservationConfig) -> None:
        self.config = config
        self._attempts = 0
        self.joints, self.gripper, self.pot = HOME.copy(), 1.0, 0.0
        self.ticks, self.drops = 0, []

    def get_observation(self) -> Any:
        images = {}
        for place, (name, camera) in enumerate(sorted(self.config.cameras().items())):
            images[f"{name}_rgb"] = self._render(place, camera.image_size) if camera.rgb else None
        joints = self.joints.copy()
        if plan.wants("step_nan") and self.ticks >= plan.get("at_step", 1):
            joints[2] = np.nan
        tip = np.array([0.28 + 0.1 * joints[0], joints[1], 1.47, 0, 1, 0, 0])
        return SimpleNamespace(**images, joint_positions=joints, gripper_pose=tip, gripper_open=self.gripper)

    def _render(self, place: int, size: tuple[int, int]) -> np.ndarray:
        if plan.get("count_renders"):
            with open(plan.ROOT / "renders", "ab") as file:
                file.write(b"r")
        if plan.wants("black"):
            return np.zeros((*size, 3), np.uint8)
        height, width = size
        image = np.full((height, width, 3), 40 + 20 * place, np.uint8)
        for value, colour in ((self.pot, (30, 160, 60)), (self.joints[0], (200, 200, 220))):
            column = int(np.clip((value + 1) / 2 * (width - 3), 0, width - 3))
            image[:, column : column + 3] = colour
        image[0, 0] = int(255 * np.clip(abs(self.joints[1:]).sum() % 1, 0, 1))
        # Also in the last bits of the pot's place two starts differ.
        image[-1, :8] = np.frombuffer(np.float64(self.pot).tobytes(), np.uint8)[:, None]
        # So are drops, which fall at random.
        for place, drop in enumerate(self.drops):
            image[-1, 8 + place] = int(abs(drop) * 1e6) % 256
        return image
