"""What RLBench fixes about a Panda task and both our environments share: cameras, state, action, tick, starts.

Used by `envs/rlbench.py` (RLBench itself) and `envs/water_plants.py` (the MuJoCo stand-in): one policy fits both.

    state   (11,) float32: 7 joint positions (rad), tip position x y z (m, world), gripper open (1) or closed (0)
    action  (8,) in [-1, 1]: 7 joint velocities in units of `max_joint_velocity`; gripper, > 0 opens, else closes

An action holds for one control tick.  In `joint_velocity` mode the arm runs at the commanded velocity and stops; in
`joint_position` mode it goes to the measured position plus what that velocity covers in a tick.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wamrl_ray.types import Split

ArmMode = Literal["joint_velocity", "joint_position"]

TICK_S = 0.05
"seconds of simulated time per action; RLBench's 20 Hz"
CAMERAS = ("left_shoulder", "right_shoulder", "overhead", "wrist", "front")
NUM_JOINTS, STATE_DIM, ACTION_DIM = 7, 11, 8
INIT_STATES: dict[Split, range] = {"train": range(0, 10_000), "held_out": range(10_000, 11_000)}
"An initial state is a seed: RLBench places a task at random and has no list of starts."


def policy_state(
    joint_positions: NDArray[np.float64], tip: NDArray[np.float64], gripper_open: float
) -> NDArray[np.float32]:
    """(11,) float32 from joints (7,) rad, tip position (3,) m and gripper opening (1 open, 0 closed)."""
    return np.concatenate([joint_positions, tip, [float(gripper_open > 0.5)]]).astype(np.float32)


def arm_command(action: NDArray[np.float32], max_joint_velocity: float) -> NDArray[np.float64]:
    """(7,) joint velocities in rad/s that the action (8,) asks for; beyond [-1, 1] it is clipped."""
    return max_joint_velocity * np.clip(action[:NUM_JOINTS].astype(np.float64), -1.0, 1.0)


def opens(action: NDArray[np.float32]) -> bool:
    """Whether the action (8,) opens the gripper (RLBench's `Discrete`: 1 open, 0 closed, threshold in the middle)."""
    return bool(action[NUM_JOINTS] > 0.0)
