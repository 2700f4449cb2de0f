from __future__ import annotations

from typing import Any

from rlbench import plan
from rlbench.backend.scene import Scene
from rlbench.observation_config import ObservationConfig
from rlbench.task_environment import TaskEnvironment


class Environment:
    def __init__(self, action_mode: Any, obs_config: ObservationConfig | None = None, headless: bool = False) -> None:
        assert headless and obs_config is not None
        self._action_mode, self._config = action_mode, obs_config

    def launch(self) -> None:
        plan.read()
        plan.strike("launch")
        self._scene = Scene(self._config)

    def get_task(self, task_class: type) -> TaskEnvironment:
        return TaskEnvironment(self._scene, task_class(), self._action_mode)
