"""RLBench on CoppeliaSim as a `ChunkEnv`: any of its Panda tasks, in joint space, in a supervised process.

Fed by rollout as every environment; feeds observations in the units of `envs/rlbench_contract.py`, which the MuJoCo
stand-in shares.  The simulator hangs and crashes now and then, so it runs behind `envs/rlbench_supervisor.py`: a fault
raises `SimulatorFault`, whose episode is lost and counted, and the next reset finds a new simulator.

    actions ──► arm command, gripper ──► child process: RLBench ──► joints, tip, gripper, frames ──► Observation

Written against RLBench's sources and tested on a fake of them; it has not yet been run on CoppeliaSim.
RLBench promises the same start for a seed, not the same bits: physics, planner and drops are its own.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from envs import rlbench_install
from envs.base import ChunkEnv
from envs.rlbench_contract import (
    ACTION_DIM,
    CAMERAS,
    INIT_STATES,
    STATE_DIM,
    TICK_S,
    ArmMode,
    arm_command,
    opens,
    policy_state,
)
from envs.rlbench_process import SimulatorFault
from envs.rlbench_supervisor import HISTORY, History, Limits, Supervisor
from envs.rlbench_wire import Message
from wamrl_ray.types import EnvSpec, Frames, Split

RESET_ATTEMPTS = 3
"Resets of RLBench, each with 40 placements of its own, before a start is given up."
INSTRUCTIONS = {"WaterPlants": "water the plant"}
"As the MuJoCo stand-in says it, so that a policy is told the same in both."


@dataclass(frozen=True, kw_only=True)
class RLBenchConfig:
    """Which RLBench task, how it is looked at and driven, and how long the simulator may take."""

    kind: Literal["rlbench"] = "rlbench"
    task: str = "WaterPlants"
    "a class of rlbench.tasks; the environment's name is rlbench_ and this in snake case"
    variation: int = 0
    "of the task, as RLBench numbers them; WaterPlants has one"
    instruction: str = ""
    "what the policy is told; empty: that of `INSTRUCTIONS`, else the words of the task's name, as in close jar"
    arm: ArmMode = "joint_velocity"
    views: tuple[str, ...] = ("front", "wrist")
    "cameras the policy reads: left_shoulder, right_shoulder, overhead, wrist, front; all others are off"
    resolution: int = 64
    "pixels, h = w of every camera"
    max_steps: int = 300
    "env steps of 50 ms until truncation; RLBench itself has no limit"
    max_joint_velocity: float = 1.0
    "rad/s of a full action"
    recycle_after: int = 200
    "episodes after which the simulator is replaced, because it grows and crashes with age"
    launch_s: float = 120.0
    "wall seconds the simulator may take to start"
    reset_s: float = 60.0
    step_s: float = 10.0
    max_restarts: int = 5
    "simulator faults in a row without an episode in between, after which none is started any more"
    backoff_s: float = 1.0
    "wall seconds before a simulator is started after a fault, doubled for each further one in a row, at most 30"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", self.task):
            raise ValueError(f"task = {self.task!r} is no class name: use one of rlbench.tasks, such as WaterPlants")
        unknown = [view for view in self.views if view not in CAMERAS]
        if unknown or not self.views or len(set(self.views)) != len(self.views):
            raise ValueError(f"views = {self.views!r}: use different ones of {', '.join(CAMERAS)}, at least one")
        if self.arm not in ("joint_velocity", "joint_position"):
            raise ValueError(f"arm = {self.arm!r}: use joint_velocity or joint_position")
        if self.resolution < 16:
            raise ValueError(f"resolution = {self.resolution} pixels is too small: use at least 16")
        for name in ("max_steps", "recycle_after"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)} must be at least 1")
        for name in ("variation", "max_restarts", "backoff_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        for name in ("max_joint_velocity", "launch_s", "reset_s", "step_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be positive")

    @property
    def words(self) -> list[str]:
        """Of the task's name, in lower case."""
        return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]*|[0-9]+", self.task)]


class RLBenchEnv(ChunkEnv):
    """One simulator, launched at the first reset; one task."""

    def __init__(self, config: RLBenchConfig, split: Split, history: History = HISTORY) -> None:
        """RuntimeError, at once, naming everything this machine lacks."""
        rlbench_install.require()
        self._config = config
        version = ".".join(map(str, rlbench_install.COPPELIASIM_VERSION))
        spec = EnvSpec(
            name="rlbench_" + "_".join(config.words),
            simulator=f"coppeliasim {version}, rlbench",
            instructions=(config.instruction or INSTRUCTIONS.get(config.task, " ".join(config.words)),),
            views=config.views,
            resolution=config.resolution,
            state_dim=STATE_DIM,
            action_dim=ACTION_DIM,
            max_steps=config.max_steps,
            init_states=INIT_STATES,
        )
        super().__init__(spec, split)
        launch = {
            "task": config.task, "arm_mode": config.arm, "views": list(config.views), "resolution": config.resolution,
            "variation": config.variation,
        }  # fmt: skip
        limits = Limits(
            launch_s=config.launch_s,
            reset_s=config.reset_s,
            step_s=config.step_s,
            recycle_after=config.recycle_after,
            max_restarts=config.max_restarts,
            backoff_s=config.backoff_s,
        )
        shape = (len(config.views), config.resolution, config.resolution, 3)
        self._simulator = Supervisor(launch, frames_shape=shape, limits=limits, history=history)
        self._history = history
        self._shown: Frames | None = None
        self._reset_attempts, self._succeeded = 0, False
        self._poured: bool | None = None

    @property
    def counts(self) -> Counter[str]:
        """Of this process: launches, recycled, episodes, and one for each kind of fault."""
        return self._history.counts.copy()

    # ------------------------------------------------------------------------------------ hooks

    def _reset(self, task_id: int, init_state_id: int, seed: int) -> None:
        """Raises SimulatorFault."""
        reply, self._shown = self._simulator.reset(
            {"placement_seed": init_state_id, "seed": seed, "attempts": RESET_ATTEMPTS}
        )
        self._observe(reply)
        self._reset_attempts, self._succeeded, self._poured = int(reply["attempts"]), False, reply["poured"]

    def _step(self, action: NDArray[np.float32], capture: bool) -> tuple[float, bool, bool]:
        """Raises SimulatorFault; the episode is over then."""
        arm = arm_command(action, self._config.max_joint_velocity)
        if self._config.arm == "joint_position":
            arm = arm * TICK_S
        # Over until the simulator has answered: a step that failed is not taken again.
        self._over = True
        reply = self._simulator.step({"arm": arm.tolist(), "gripper": float(opens(action)), "capture": capture})
        self._observe(reply)
        self._over = False
        self._shown = self._simulator.frames() if capture else None
        reward, terminated = float(reply["reward"]), bool(reply["terminate"])
        self._succeeded, self._poured = reward > 0, reply["poured"]
        if terminated or self._steps + 1 >= self.env_spec.max_steps:
            self._simulator.episode_done()
        # RLBench's sparse reward is its success; it ends where it succeeds and where it fails for good.
        return reward, reward > 0, terminated

    def _frames(self) -> Frames:
        if self._shown is None:
            # Asked for a step that was not captured: only what was drawn last can be shown.
            return self._simulator.frames()
        return self._shown.copy()

    def _state(self) -> NDArray[np.float32]:
        return self._low_dim.copy()

    def close(self) -> None:
        """Kill the simulator; the next reset launches another."""
        self._simulator.close()

    def _info(self) -> dict[str, float]:
        """How many placements the start took and, of WaterPlants, whether water was poured.

        Its rule also pays for the can itself held over the pot: `success_without_pour` tells the two apart.
        """
        figures = {"reset_attempts": float(self._reset_attempts)}
        if self._poured is not None:
            figures["poured"] = float(self._poured)
            figures["success_without_pour"] = float(self._succeeded and not self._poured)
        return figures

    # ------------------------------------------------------------------------------------ inside

    def _observe(self, reply: Message) -> None:
        joints, tip = (np.array(reply[name], np.float64) for name in ("joints", "tip"))
        self._low_dim = policy_state(joints, tip, float(reply["gripper_open"]))


__all__ = ["RLBenchConfig", "RLBenchEnv", "SimulatorFault"]
