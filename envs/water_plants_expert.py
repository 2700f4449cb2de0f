"""The scripted expert of Water Plants (MuJoCo): down over the handle, close, lift, across to the pot, tilting.

Fed by the simulator state of `envs/water_plants.py`; feeds `wamrl collect` through `act()`.  As all our experts it is
memoryless (`envs/experts.py` says why): where hand, can and pot are decides what it does.

    not held, gripper open     aim over the grip bar; the nearer sideways, the lower: a funnel.  At its bottom: close.
    not held, gripper closed   open, wherever it is: the grasp was a miss
    held                       the spout's head up to pouring height, then across to the pot's middle, tilting
    poured                     stand still

What it wants of the tip or of the head is a velocity (6,), turned into joint velocities by damped least squares, with
what is free spent on staying near a comfortable posture.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from envs.experts import rotation_vector, smoothstep
from envs.rlbench_contract import ACTION_DIM, NUM_JOINTS
from envs.water_plants import WaterPlantsEnv
from envs.water_plants_geometry import TABLE_TOP_Z_M

Vec = NDArray[np.float64]

POSTURE_RAD = np.array([0.0, 0.2, 0.0, -2.0, 0.0, 2.2, 0.785])
"upright over the middle of the table, standard Panda kinematics"
APPROACH_GAIN, TURN_GAIN, POSTURE_GAIN = 4.0, 3.0, 0.5
"1/s"
MAX_SPEED_M_S, MAX_TURN_RAD_S = 0.5, 1.5
DAMPING = 0.05
BELOW_BAR_M, OVER_BAR_M, CRUISE_M = 0.018, 0.03, 0.12
"tip under the grip bar where it closes; over it while still beside; over it while far"
TOLERANCE_M, TOLERANCE_RAD = 0.018, 0.3
"error sideways and in yaw at which an open gripper still comes down around the bar"
PREFERRED_YAW_RAD = 0.785
"of the closing axis to the arm's direction, counter-clockwise, at which the last joint is in its middle"
POUR_ABOVE_M = 0.015
"the head's aim over the middle of the pour volume"
TILT_RAD = 0.6


class WaterPlantsExpert:
    """`grasp_offset_m` (x, y) displaces where it believes the handle: a deliberate, reproducible misjudgement."""

    action_noise = np.array([1] * NUM_JOINTS + [0], np.float32)
    opening: tuple[int, float] | None = (NUM_JOINTS, 1.0)

    def __init__(self, env: WaterPlantsEnv, *, grasp_offset_m: tuple[float, float] = (0.0, 0.0)) -> None:
        self._env = env
        self._offset = np.array([*grasp_offset_m, 0.0])

    def act(self) -> NDArray[np.float32]:
        """(8,) float32 in [-1, 1]: joint velocities in units of `max_joint_velocity`, gripper +1 open, -1 close."""
        env = self._env
        poured = bool(env._info()["poured"])
        if poured:
            velocity, gripper = np.zeros(NUM_JOINTS), -1.0
        elif env.held:
            velocity, gripper = self._carry(), -1.0
        else:
            velocity, gripper = self._approach()
        action = np.empty(ACTION_DIM, np.float32)
        scaled = velocity / env._config.max_joint_velocity
        action[:NUM_JOINTS] = scaled / max(1.0, float(np.abs(scaled).max()))
        action[NUM_JOINTS] = gripper
        return action

    def _approach(self) -> tuple[Vec, float]:
        """Joint velocities (7,) and gripper command while nothing is held."""
        data, geometry = self._env.data, self._env.geometry
        tip, hand = data.site("tip").xpos, data.site("tip").xmat.reshape(3, 3)
        turn = data.body("can").xmat.reshape(3, 3)
        bar = data.body("can").xpos + turn @ (0.0, 0.0, geometry.handle_m[1]) + self._offset
        goal = self._grasp_orientation(turn)
        rotation = rotation_vector(goal @ hand.T)
        error = (bar - tip)[:2]
        off = float(np.hypot(np.hypot(*error) / TOLERANCE_M, np.linalg.norm(rotation) / TOLERANCE_RAD))
        height = bar[2] - BELOW_BAR_M + smoothstep(off, 0.7, 1.4) * (OVER_BAR_M + BELOW_BAR_M)
        height += smoothstep(float(np.hypot(*error)), 0.02, 0.15) * (CRUISE_M - OVER_BAR_M)
        rise = height - tip[2]
        # Beside the bar and below the funnel: up before sideways.
        free = 1.0 - smoothstep(rise, 0.01, 0.04) * smoothstep(off, 0.7, 1.2)
        wide = bool(self._env._state()[-1])
        near = wide and off < 1.0 and tip[2] - (bar[2] - BELOW_BAR_M) < 0.012
        return self._joints(tip, np.array([*(free * error), rise]), rotation), -1.0 if near else 1.0

    def _carry(self) -> Vec:
        """Joint velocities (7,) while the can is held: head up, then across, tilted the more the nearer."""
        data, geometry = self._env.data, self._env.geometry
        head, turn = data.geom("head").xpos, data.body("can").xmat.reshape(3, 3)
        pot, task = data.body("pot").xpos, data.body("pot").xmat.reshape(3, 3)
        across = (pot - head)[:2]
        rise = TABLE_TOP_Z_M + geometry.pour_height_m + POUR_ABOVE_M - head[2]
        free = 1.0 - smoothstep(abs(rise), 0.02, 0.05)
        tilt = TILT_RAD * (1.0 - smoothstep(float(np.hypot(*across)), 0.05, 0.13)) * free
        forward = np.array([[np.cos(tilt), 0, np.sin(tilt)], [0, 1, 0], [-np.sin(tilt), 0, np.cos(tilt)]])
        return self._joints(head, np.array([*(free * across), rise]), rotation_vector(task @ forward @ turn.T))

    def _grasp_orientation(self, can: Vec) -> Vec:
        """(3, 3): hand down, closing across the bar; of the two ways the one that turns the last joint less."""
        across = np.array([*can[:2, 1], 0.0]) / max(float(np.hypot(*can[:2, 1])), 1e-6)
        down = np.array([0.0, 0.0, -1.0])
        tip = self._env.data.body("can").xpos[:2] - self._env.data.body("link0").xpos[:2]
        # At home the last joint is at 45 degrees of +-166 and the fingers close along y: keep it near its middle.
        ahead = np.arctan2(tip[1], tip[0]) + PREFERRED_YAW_RAD
        preferred = np.array([-np.sin(ahead), np.cos(ahead), 0.0])
        closing = across if across @ preferred > 0 else -across
        return np.stack([np.cross(closing, down), closing, down], axis=1)

    def _joints(self, point: Vec, shift: Vec, rotation: Vec) -> Vec:
        """(7,) rad/s that move `point` of the hand by `shift` (m) and turn the hand by `rotation` (axis times rad)."""
        import mujoco

        model, data = self._env.model, self._env.data
        linear, angular = np.zeros((3, model.nv)), np.zeros((3, model.nv))
        mujoco.mj_jac(model, data, linear, angular, point, model.body("gripper_right_gripper").id)
        jacobian = np.concatenate([linear, angular])[:, :NUM_JOINTS]
        wanted = np.concatenate(
            [_at_most(APPROACH_GAIN * shift, MAX_SPEED_M_S), _at_most(TURN_GAIN * rotation, MAX_TURN_RAD_S)]
        )
        inverse = jacobian.T @ np.linalg.inv(jacobian @ jacobian.T + DAMPING**2 * np.eye(6))
        posture = POSTURE_GAIN * (POSTURE_RAD - data.qpos[:NUM_JOINTS])
        joints: Vec = inverse @ wanted + posture - inverse @ (jacobian @ posture)
        return joints


def _at_most(vector: Vec, length: float) -> Vec:
    return vector * min(1.0, length / max(float(np.linalg.norm(vector)), 1e-9))
