from __future__ import annotations

from typing import Any

import numpy as np


class MoveArmThenGripper:
    def __init__(self, arm_action_mode: Any, gripper_action_mode: Any) -> None:
        self.arm_action_mode, self.gripper_action_mode = arm_action_mode, gripper_action_mode

    def action(self, scene: Any, action: np.ndarray) -> None:
        self.arm_action_mode.action(scene, action[:-1])
        self.gripper_action_mode.action(scene, action[-1:])
