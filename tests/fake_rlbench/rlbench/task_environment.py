from __future__ import annotations

from typing import Any

from rlbench import plan
from rlbench.backend.exceptions import BoundaryError, TaskEnvironmentError
from rlbench.backend.scene import HOME, Scene


class TaskEnvironment:
    def __init__(self, scene: Scene, task: Any, action_mode: Any) -> None:
        self._scene, self._task, self._action_mode = scene, task, action_mode
        self._refused = 0

    def set_variation(self, variation: int) -> None:
        if variation >= self._task.variation_count():
            raise TaskEnvironmentError(f"requested variation {variation}")

    def reset(self) -> tuple[list[str], Any]:
        plan.read()
        scene = self._scene
        scene.joints, scene.gripper, scene.ticks = HOME.copy(), 1.0, 0
        descriptions = self._task.init_episode(scene)
        if self._refused < plan.get("refused_resets", 0):
            self._refused += 1
            raise TaskEnvironmentError("could not place the task") from BoundaryError()
        self._refused = 0
        plan.strike("reset")
        return descriptions, scene.get_observation()

    def step(self, action: Any) -> tuple[Any, float, bool]:
        scene = self._scene
        scene.ticks += 1
        if scene.ticks == plan.get("at_step", 1):
            plan.strike("step")
        self._action_mode.action(scene, action)
        self._task.step(scene)
        success, terminate = self._task.success()
        return scene.get_observation(), float(success), terminate
