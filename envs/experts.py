"""Scripted experts that solve an environment from simulator state: the source of demonstrations and of labels.

An environment feeds them its current simulator state; demonstration collection and imitation learning read `act()`.
All our experts are memoryless: the action is a function of the present state alone, with no timer and no phase
variable, so that everything an action depends on can be seen in an image. A demonstrator with hidden phases
teaches a network to hover where the phase would change.

The pick-and-place expert is a funnel. All of it follows from where hand, fingers and object are:

    not held   aim above the object; the less the lateral error, the lower the target height: a cone over the object.
               Below the cone no sideways motion, only up, so that a miss is left upwards and tried again.
               At the bottom of the cone: close, along the short side or where the basket leaves room for the palm.
    held       the fingers have stopped on the object: up, and the higher, the faster towards the basket.
    over it    open. A dropped object is "not held" again, wherever it lies.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from envs.libero import LiberoEnv

Vec = NDArray[np.float64]

ACTION_SCALE_M, ACTION_SCALE_RAD = 0.05, 0.5
"robosuite OSC_POSE: an action of 1 moves the controller's goal this far from the current pose"
PALM_DEPTH_M = 0.034
"how far below an object's top the grip site may go before the palm touches it"
PALM_HEIGHT_M, PALM_HALF_M = 0.024, (0.103, 0.034)
"the palm's underside above the grip site; half its size along and across the closing axis"
FLOOR_CLEARANCE_M = 0.013
"grip site above the floor with the finger tips just off it"
MAX_OPENING_M = 0.076
"between the finger pads, fully open"
PREFERRED = np.array([-0.17, 0.98])
"of the two equal ways to close along an axis the one nearer to this; 10 degrees off the rest pose, where few boxes lie"
RIM_HEIGHT_M = 0.15
"top of the basket's walls above its base"


@dataclass(frozen=True, kw_only=True)
class Gains:
    """Shape of the funnel; lengths in metres. The defaults are what the success figures were measured with."""

    approach: float = 1.5
    "proportional gain of position: action = gain x error / 0.05 m, clipped to 1"
    turn: float = 0.5
    "the same for orientation: gain x error / 0.5 rad"
    top_margin: float = 0.025
    "finger tips over the object's top until the lateral error is within tolerance"
    cruise: float = 0.20
    "highest grip-site height of the approach, clear of everything that stands on the floor"
    breadth_tolerance: float = 0.012
    "allowed error across the fingers' breadth, where the object is not between the pads but beside them"
    grasp_height_tolerance: float = 0.010
    "grip site above the grasp height at which the fingers may close"
    width_margin: float = 0.004
    "fingers count as stopped on the object when their opening is this close to the object's width"
    carry_margin: float = 0.025
    "object's lowest point above the basket's rim"
    release_radius: float = 0.03
    "lateral distance from the basket's centre within which the fingers open"


def smoothstep(x: float, low: float, high: float) -> float:
    """0 below `low`, 1 above `high`, 3u^2 - 2u^3 between."""
    u = min(max((x - low) / (high - low), 0.0), 1.0)
    return u * u * (3.0 - 2.0 * u)


def rotation_vector(matrix: Vec) -> Vec:
    """(3,) axis times angle (rad) of a rotation matrix (3, 3)."""
    axis = np.array([matrix[2, 1] - matrix[1, 2], matrix[0, 2] - matrix[2, 0], matrix[1, 0] - matrix[0, 1]]) / 2
    sine = float(np.sqrt(axis @ axis))
    angle = float(np.arctan2(sine, (np.trace(matrix) - 1.0) / 2))
    return axis * (angle / sine if sine > 1e-9 else 1.0)


@dataclass(frozen=True, kw_only=True)
class Grasp:
    """Where the object would be grasped as it lies now. Lengths in metres, world frame."""

    xy: Vec
    "(2,) middle of the object's slice at grasp height"
    height: float
    "grip-site height"
    closing: Vec
    "(2,) unit vector along which the fingers close: the object's short horizontal side"
    width: float
    "of the object along `closing`, at grasp height"
    length: float
    "of the object across `closing`, at grasp height"
    bottom: float
    top: float


def box_corners(model: Any, geom: int) -> Vec:
    """(8, 3) corners of a geom's bounding box, geom frame."""
    aabb = model.geom_aabb[geom]
    signs = np.array(list(itertools.product((-1.0, 1.0), repeat=3)))
    return np.asarray(aabb[:3] + signs * aabb[3:], dtype=np.float64)


class LiberoObjectExpert:
    """Picks up the task's object and drops it into the basket. Reads only the simulator state of `env.inner`.

    `grasp_offset_m` (x, y) displaces the grasp point the expert believes in: a deliberate, reproducible misjudgement
    for measuring grasp tolerance and for demonstrations that miss.
    """

    action_noise = np.array([1, 1, 1, 0.3, 0.3, 0.3, 0], np.float32)
    opening: tuple[int, float] | None = (6, -1.0)

    def __init__(
        self, env: LiberoEnv, *, gains: Gains | None = None, grasp_offset_m: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self._env = env
        self._gains = gains or Gains()
        self._offset = np.array(grasp_offset_m, dtype=np.float64)
        self._model: Any = None

    def act(self) -> NDArray[np.float32]:
        """(7,) float32 in [-1, 1]: position delta / 0.05 m, axis-angle delta / 0.5 rad, gripper -1 open, +1 close."""
        self._bind()
        data, gains = self._data, self._gains
        hand = np.array(data.site_xpos[self._hand])
        rotation = np.array(data.site_xmat[self._hand]).reshape(3, 3)
        width = float(data.qpos[self._fingers[0]] - data.qpos[self._fingers[1]])
        corners = self._corners()
        grasp = self._grasp(corners)
        middle = (corners.min(axis=(0, 1)) + corners.max(axis=(0, 1)))[:2] / 2
        to_basket = np.array(data.site_xpos[self._basket_site][:2]) - middle
        if self._held(hand, rotation, width, corners, grasp):
            delta = self._carry(to_basket, grasp)
            over = float(np.hypot(*to_basket)) < gains.release_radius and grasp.bottom > self._rim()
            gripper = -1.0 if over else 1.0
        else:
            delta, gripper = self._approach(hand, rotation, width, grasp)
        action = np.empty(7, dtype=np.float32)
        action[:3] = np.clip(gains.approach * delta / ACTION_SCALE_M, -1.0, 1.0)
        action[3:6] = np.clip(gains.turn * self._turn(rotation, grasp.closing) / ACTION_SCALE_RAD, -1.0, 1.0)
        action[6] = gripper
        return action

    def _approach(self, hand: Vec, rotation: Vec, width: float, grasp: Grasp) -> tuple[Vec, float]:
        """Position error (3,) and gripper command while the object is not held."""
        gains = self._gains
        error = grasp.xy + self._offset - hand[:2]
        off = self._lateral(error, rotation, grasp)
        above = grasp.top + gains.top_margin
        surface = grasp.height + smoothstep(off, 0.6, 1.2) * (above - grasp.height)
        surface += smoothstep(float(np.hypot(*error)), 0.01, 0.10) * max(gains.cruise - above, 0.0)
        # Half-closed fingers must not come down on the object; around it they may be as they are.
        narrow = 1.0 - smoothstep(width, grasp.width + 0.006, min(grasp.width + 0.012, MAX_OPENING_M - 0.002))
        outside = smoothstep(hand[2], grasp.top - 0.005, grasp.top + 0.005)
        surface = max(surface, grasp.height + narrow * outside * (above - grasp.height))
        free = 1.0 - smoothstep(surface - hand[2], 0.01, 0.04) * smoothstep(off, 0.6, 1.0)
        near = off < 1.0 and hand[2] - grasp.height < gains.grasp_height_tolerance
        return np.array([*(free * error), surface - hand[2]]), 1.0 if near else -1.0

    def _carry(self, to_basket: Vec, grasp: Grasp) -> Vec:
        """Position error (3,) while the object is held: up first, sideways the faster the higher."""
        goal = self._rim() + self._gains.carry_margin
        rise = goal - grasp.bottom
        free = 1.0 - smoothstep(rise, 0.02, 0.08)
        return np.array([*(free * to_basket), rise])

    def _held(self, hand: Vec, rotation: Vec, width: float, corners: Vec, grasp: Grasp) -> bool:
        """The object is between the pads and the fingers are as far apart as it is wide there."""
        if not grasp.bottom - 0.005 < hand[2] < grasp.top + 0.004:
            return False
        local = (corners - hand) @ rotation
        level = (local[..., 2].min(axis=1) < 0.006) & (local[..., 2].max(axis=1) > -0.006)
        if not level.any():
            return False
        low, high = local[level].min(axis=(0, 1)), local[level].max(axis=(0, 1))
        span = float(high[0] - low[0])
        between = abs(low[0] + high[0]) / 2 < 0.01 and low[1] < 0.004 and high[1] > -0.004
        return bool(between and 0.4 * span < width < span + self._gains.width_margin)

    def _grasp(self, corners: Vec) -> Grasp:
        """Grasp by the short horizontal side, as low as the middle but no deeper than the palm allows."""
        bottom, top = float(corners[..., 2].min()), float(corners[..., 2].max())
        height = max(bottom + FLOOR_CLEARANCE_M, (bottom + top) / 2, top - PALM_DEPTH_M)
        level = (corners[..., 2].min(axis=1) < height + 0.006) & (corners[..., 2].max(axis=1) > height - 0.006)
        points = corners[level if level.any() else slice(None)][..., :2].reshape(-1, 2)
        body = np.array(self._data.xmat[self._body]).reshape(3, 3)
        axis = body[:2, int(np.argmin(np.abs(body[2])))]
        axis = axis / np.hypot(*axis)
        obstacles, walls = self._standing(height)
        closing, other = sorted((axis, np.array([-axis[1], axis[0]])), key=lambda a: self._awkward(a, points, walls))
        along, beside = points @ closing, points @ other
        middle = closing * (along.min() + along.max()) / 2 + other * (beside.min() + beside.max()) / 2
        room = max(float(np.ptp(beside)) / 2 - 0.018, 0.0)
        middle = middle + other * np.clip(self._sidestep(middle, closing, other, obstacles), -room, room)
        return Grasp(
            xy=middle,
            height=height,
            closing=closing if closing @ PREFERRED > 0 else -closing,
            width=float(np.ptp(along)),
            length=float(np.ptp(beside)),
            bottom=bottom,
            top=top,
        )

    def _standing(self, height: float) -> tuple[Vec, Vec]:
        """(N, 8, 2) corners of all that would meet the palm of a hand at `height`, and of the basket's walls in it."""
        turns = np.array(self._data.geom_xmat[self._obstacles]).reshape(-1, 3, 3)
        corners = np.einsum("gij,gcj->gci", turns, self._obstacle_boxes)
        corners += self._data.geom_xpos[self._obstacles][:, None]
        tall = corners[..., 2].max(axis=1) > height + PALM_HEIGHT_M
        return corners[tall, :, :2], corners[tall & self._of_basket, :, :2]

    @staticmethod
    def _sidestep(xy: Vec, closing: Vec, other: Vec, obstacles: Vec) -> float:
        """How far to move the grasp across the closing axis so that the palm, wide and low, misses what stands near."""
        across, beside = (obstacles - xy) @ closing, (obstacles - xy) @ other
        gap = np.maximum(across.min(axis=1), -across.max(axis=1)) - PALM_HALF_M[0]
        side = np.sign(beside.min(axis=1) + beside.max(axis=1))
        near = np.minimum(np.abs(beside.min(axis=1)), np.abs(beside.max(axis=1)))
        step = -side * np.maximum(PALM_HALF_M[1] - near, 0.0) * np.clip(1.0 - gap / 0.02, 0.0, 1.0)
        return float(step.min(initial=0.0) + step.max(initial=0.0))

    @staticmethod
    def _awkward(closing: Vec, points: Vec, walls: Vec) -> float:
        """Smaller is the better way to close: it fits, then the palm is clear of the basket, then less turn."""
        too_wide = max(float(np.ptp(points @ closing)) - (MAX_OPENING_M - 0.004), 0.0)
        from_middle = walls - (points.min(axis=0) + points.max(axis=0)) / 2
        across, beside = from_middle @ closing, from_middle @ np.array([-closing[1], closing[0]])
        deep = PALM_HALF_M[0] - np.maximum(across.min(axis=1), -across.max(axis=1))
        broad = PALM_HALF_M[1] - np.maximum(beside.min(axis=1), -beside.max(axis=1))
        blocked = smoothstep(float(np.minimum(deep, broad).max(initial=0.0)), 0.0, 0.01)
        return 1e3 * too_wide + 2.0 * blocked + 1.0 - abs(float(closing[1]))

    def _lateral(self, error: Vec, rotation: Vec, grasp: Grasp) -> float:
        """How far off the hand is in units of tolerance: 1 where a finger would land on the object."""
        closing = rotation[:2, 0] / np.hypot(*rotation[:2, 0])
        clearance = max((MAX_OPENING_M - grasp.width) / 2 - 0.001, 0.003)
        breadth = max(grasp.length / 2 - 0.004, self._gains.breadth_tolerance)
        twist = float(np.arccos(np.clip(abs(closing @ grasp.closing), 0.0, 1.0)))
        across = error - closing * (error @ closing)
        return float(np.sqrt((error @ closing / clearance) ** 2 + (across @ across) / breadth**2 + (twist / 0.3) ** 2))

    @staticmethod
    def _turn(rotation: Vec, closing: Vec) -> Vec:
        """(3,) axis-angle, world frame, that turns the hand straight down with its closing axis along `closing`."""
        first, down = np.array([*closing, 0.0]), np.array([0.0, 0.0, -1.0])
        return rotation_vector(np.stack([first, np.cross(down, first), down], axis=1) @ rotation.T)

    def _corners(self) -> Vec:
        """(G, 8, 3) corners of the object's collision boxes, world frame."""
        body = np.array(self._data.xmat[self._body]).reshape(3, 3)
        return np.asarray(self._boxes @ body.T + self._data.xpos[self._body])

    def _rim(self) -> float:
        return float(self._data.xpos[self._basket][2]) + RIM_HEIGHT_M

    def _bind(self) -> None:
        """Look up ids and shapes whenever the simulator's model is another one: a new task, or a hard reset."""
        import mujoco

        inner: Any = self._env.inner
        if self._model is inner.sim.model._model:
            return
        self._model = model = inner.sim.model._model
        target, basket = inner.obj_of_interest
        self._body = model.body(f"{target}_main").id
        self._basket = model.body(f"{basket}_main").id
        self._basket_site = model.site(f"{basket}_contain_region").id
        self._hand = inner.robots[0].eef_site_id
        self._fingers = [int(model.joint(f"gripper0_finger_joint{i}").qposadr[0]) for i in (1, 2)]
        solid = [g for g in range(model.ngeom) if model.geom_contype[g] + model.geom_conaffinity[g] > 0]
        free = set(model.jnt_bodyid[model.jnt_type == mujoco.mjtJoint.mjJNT_FREE].tolist()) - {self._body}
        self._obstacles = [g for g in solid if model.geom_bodyid[g] in free]
        self._obstacle_boxes = np.array([box_corners(model, g) for g in self._obstacles])
        self._of_basket = np.array(model.geom_bodyid[self._obstacles]) == self._basket
        boxes = []
        for geom in (g for g in solid if model.geom_bodyid[g] == self._body):
            turn = np.zeros(9)
            mujoco.mju_quat2Mat(turn, model.geom_quat[geom])
            boxes.append(box_corners(model, geom) @ turn.reshape(3, 3).T + model.geom_pos[geom])
        self._boxes = np.array(boxes)

    @property
    def _data(self) -> Any:
        return self._env.inner.sim.data._data
