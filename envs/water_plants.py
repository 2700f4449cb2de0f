"""Water Plants (MuJoCo): our stand-in for RLBench's task, which anyone can run.  Not RLBench, and never named so.

Fed by rollout and the scripted expert; feeds observations, as every `ChunkEnv`.  The interface is RLBench's
(`envs/rlbench_contract.py`), the scene and what of it is chosen is in `envs/water_plants_scene.py`.

    reset   can and pot are placed together at random on the table, any yaw; the arm is at home, gripper open
    step    the arm command holds for one tick of 50 ms; then, if the gripper changes, more ticks until it has:
            closing welds the can to the hand if any part of it is in the grasp box, before the fingers move;
            opening lets it go and gives it 10 ticks to fall
    tick    as soon as the spout's head is in the pour volume over the pot, five drops appear at it, once
    success the five drops are in the pot at the same instant

Scoring has two forms.  In `strict`, the default, that is all.  `rlbench_compat` reproduces a hole of the original: as
long as nothing was poured, success is a can detected where the drops should be, so holding its body over the pot pays.
Neither looks at how far the can is tilted.  The environment's name says which form it is.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from envs.base import ChunkEnv
from envs.libero_stock import free_compiler_memory
from envs.render import check_thread, choose_renderer, halve
from envs.rlbench_contract import (
    ACTION_DIM,
    CAMERAS,
    INIT_STATES,
    NUM_JOINTS,
    STATE_DIM,
    TICK_S,
    ArmMode,
    arm_command,
    opens,
    policy_state,
)
from envs.water_plants_geometry import (
    ACCELERATION_LIMITS_RAD_S2,
    CAN_GEOMS,
    DROPS,
    FINGER_OPEN_M,
    HOME_JOINTS_RAD,
    JOINT_OFFSET_RAD,
    TABLE_TOP_Z_M,
    Geometry,
    layout,
)
from envs.water_plants_scene import build_model, touchable_by_arm
from wamrl_ray.types import EnvSpec, Frames, Split

Vec = NDArray[np.float64]
Scoring = Literal["strict", "rlbench_compat"]

DROP_STD_M = 0.0005
RELEASE_TICKS = 10
"after opening, for what was held to fall"
GRIPPER_TICKS = 8
"at most, for the fingers to come to rest"


@dataclass(frozen=True, kw_only=True)
class WaterPlantsConfig:
    """How Water Plants (MuJoCo) is scored, driven and looked at."""

    kind: Literal["water_plants"] = "water_plants"
    scoring: Scoring = "strict"
    "strict: water in the pot; rlbench_compat: also the original's success without pouring"
    arm: ArmMode = "joint_velocity"
    max_joint_velocity: float = 1.0
    "rad/s that an action of 1 stands for"
    views: tuple[str, ...] = ("front", "wrist")
    "cameras in the order of the frames; there is no overhead one, its pose is not public"
    resolution: int = 64
    "pixels, h = w of every camera"
    max_steps: int = 300
    "env steps until truncation: 15 s of simulated time; RLBench has no limit"
    geometry: str | None = None
    "file of `wamrl calibrate water_plants`; None: the sizes chosen in `envs/water_plants_geometry.py`"

    def __post_init__(self) -> None:
        known = [camera for camera in CAMERAS if camera != "overhead"]
        if not self.views or not set(self.views) <= set(known) or len(set(self.views)) < len(self.views):
            raise ValueError(f"views = {list(self.views)} must name one or more of {known}, each once")
        if not 16 <= self.resolution <= 1024:
            raise ValueError(f"resolution = {self.resolution} pixels: use 16 to 1024")
        for name, choices in (("scoring", get_args(Scoring)), ("arm", get_args(ArmMode))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be one of {', '.join(choices)}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps = {self.max_steps} must be at least 1")
        if not 0 < self.max_joint_velocity <= 2.175:
            limit = f"max_joint_velocity = {self.max_joint_velocity} must lie in (0, 2.175] rad/s"
            raise ValueError(f"{limit}, the Panda's own limit")


class WaterPlantsEnv(ChunkEnv):
    """One task; an initial state is a placement, and `seed` the scatter of the drops.  Used by one thread only."""

    model: Any = None
    data: Any = None
    _thread: int | None = None

    def __init__(self, config: WaterPlantsConfig, split: Split) -> None:
        choose_renderer()
        geometry = Geometry.load(Path(config.geometry)) if config.geometry else Geometry()
        spec = EnvSpec(
            name="water_plants" if config.scoring == "strict" else f"water_plants_{config.scoring}",
            simulator=f"mujoco {version('mujoco')} (geometry {geometry.source})",
            instructions=("water the plant",),
            views=config.views,
            resolution=config.resolution,
            state_dim=STATE_DIM,
            action_dim=ACTION_DIM,
            max_steps=config.max_steps,
            init_states=INIT_STATES,
        )
        super().__init__(spec, split)
        self.geometry = geometry
        self._config = config

    # ------------------------------------------------------------------------------------ hooks

    def _reset(self, task_id: int, init_state_id: int, seed: int) -> None:
        import mujoco

        check_thread(self.env_spec.name, self._thread)
        if self.model is None:
            self._build()
        mujoco.mj_resetData(self.model, self.data)
        self._drop_noise = np.random.default_rng(seed)
        self._open, self._poured, self._drops_in_pot, self._ticks = True, False, 0, 0
        self._success_without_pour = False
        self._let_go()
        self.model.body_gravcomp[self._drop_bodies] = 1.0
        self.data.qpos[self._arm] = np.array(HOME_JOINTS_RAD) + JOINT_OFFSET_RAD
        self.data.qpos[self._fingers] = (FINGER_OPEN_M, -FINGER_OPEN_M)
        self._place(*layout(init_state_id, self.geometry))
        mujoco.mj_forward(self.model, self.data)

    def _step(self, action: NDArray[np.float32], capture: bool) -> tuple[float, bool, bool]:
        check_thread(self.env_spec.name, self._thread)
        self._drive(arm_command(action, self._config.max_joint_velocity))
        if opens(action) != self._open:
            self._move_gripper(opens(action))
        success = self._judge()
        return float(success), success, success

    def _frames(self) -> Frames:
        return np.stack([self._draw(view) for view in self.env_spec.views])

    def _draw(self, view: str) -> Frames:
        """(h, w, 3) uint8, drawn twice as fine: a third of the cost of OpenGL's own four samples."""
        self._renderer.update_scene(self.data, view)
        return halve(self._renderer.render())

    def _state(self) -> NDArray[np.float32]:
        opening = (self.data.qpos[self._fingers[0]] - self.data.qpos[self._fingers[1]]) / (2 * FINGER_OPEN_M)
        joints = self.data.qpos[self._arm] - JOINT_OFFSET_RAD
        return policy_state(joints, self.data.site_xpos[self._tip], float(opening > 0.9))

    def _info(self) -> dict[str, float]:
        return {
            "poured": float(self._poured),
            "drops_in_pot": float(self._drops_in_pot),
            "success_without_pour": float(self._success_without_pour),
            "ticks": float(self._ticks),
        }

    def close(self) -> None:
        if self.model is not None:
            # MuJoCo frees its pictures in whatever context is current: another environment's, if that drew last.
            self._renderer._gl_context.make_current()
            self._renderer.close()
            self.model, self._thread = None, None

    def __del__(self) -> None:
        # MuJoCo's renderer would free itself, but see above.
        if self._thread == threading.get_ident() and not sys.is_finalizing():
            self.close()

    # ------------------------------------------------------------------------------------ task

    @property
    def held(self) -> bool:
        """Whether the can is welded to the hand."""
        return bool(self.data.eq_active[0])

    def _judge(self) -> bool:
        """Count the drops in the pot; whether this instant is a success by the scoring of this environment."""
        self._drops_in_pot = sum(self._detects("success", drop) for drop in self._drop_geoms) if self._poured else 0
        if self._poured:
            return self._drops_in_pot == DROPS
        can_detected = any(self._detects("success", geom) for geom in self._can_geoms)
        self._success_without_pour = self._success_without_pour or can_detected
        return can_detected and self._config.scoring == "rlbench_compat"

    def _pour_if_there(self) -> None:
        import mujoco

        if self._poured or not self._detects("pour", self._head):
            return
        self._poured = True
        self.model.body_gravcomp[self._drop_bodies] = 0.0
        for i in range(DROPS):
            joint = self.data.joint(f"drop{i}")
            joint.qpos[:3] = self.data.geom_xpos[self._head] + self._drop_noise.normal(0.0, DROP_STD_M, 3)
            joint.qpos[3:] = (1, 0, 0, 0)
            joint.qvel[:] = 0.0
        mujoco.mj_kinematics(self.model, self.data)  # for who looks before the next tick

    def _detects(self, volume: str, geom: int) -> bool:
        """RLBench's proximity sensor: does the shape reach into the volume?"""
        import mujoco

        return bool(mujoco.mj_geomDistance(self.model, self.data, self._volumes[volume], geom, 1e-3, None) <= 0.0)

    # ------------------------------------------------------------------------------------ robot

    def _drive(self, velocity: Vec) -> None:
        """One tick of the arm at `velocity` (7,) rad/s, or to where it leads in position mode."""
        import mujoco

        timestep = self.model.opt.timestep
        target = self.data.qpos[self._arm] + velocity * TICK_S
        for _ in range(self._substeps):
            if self._config.arm == "joint_position":
                velocity = (target - self.data.qpos[self._arm]) / (4 * timestep)
            # A step in velocity would saturate the motors, which then swing about it.
            change = np.clip(velocity - self.data.ctrl[:NUM_JOINTS], -self._gain, self._gain)
            self.data.ctrl[:NUM_JOINTS] += change
            mujoco.mj_step(self.model, self.data)
        if any(self.data.warning[bad].number for bad in self._broken):
            raise RuntimeError(f"{self.env_spec.name}: the physics diverged after {self._ticks} ticks; reset")
        self._ticks += 1
        self._pour_if_there()

    def _move_gripper(self, wide: bool) -> None:
        """Attach or detach first, then move the fingers, tick by tick, as RLBench's `Discrete` does."""
        self._open = wide
        grasped = None if wide else next((g for g in self._can_geoms if self._detects("grasp_box", g)), None)
        if wide:
            self._let_go()
        elif grasped is not None:
            self._hold()
        # No collision stops the fingers on what is held, so they are told how wide it is.
        thin = grasped is not None and self.model.geom(grasped).name.startswith("handle")
        width = FINGER_OPEN_M if wide else 0.0 if grasped is None else self.geometry.handle_radius_m if thin else 0.035
        self.data.ctrl[NUM_JOINTS:] = (width, -width)
        still = np.zeros(NUM_JOINTS)
        for tick in range(GRIPPER_TICKS):
            before = self.data.qpos[self._fingers].copy()
            self._drive(still)
            if tick > 0 and np.abs(self.data.qpos[self._fingers] - before).max() < 5e-4:
                break
        if wide:
            for _ in range(RELEASE_TICKS):
                self._drive(still)

    def _hold(self) -> None:
        """Weld the can to the hand as it is; a held can has no weight and does not rub at the hand."""
        hand, can = self.data.body("gripper_right_gripper"), self.data.body("can")
        turn = hand.xmat.reshape(3, 3)
        weld = self.model.eq_data[0]
        weld[:3] = 0.0
        weld[3:6] = turn.T @ (can.xpos - hand.xpos)
        weld[6:10] = _relative_quaternion(hand.xquat, can.xquat)
        self.data.eq_active[0] = 1
        self.model.body_gravcomp[self._can_body] = 1.0
        touchable_by_arm(self.model, self._can_geoms, False)

    def _let_go(self) -> None:
        self.data.eq_active[0] = 0
        self.model.body_gravcomp[self._can_body] = 0.0
        touchable_by_arm(self.model, self._can_geoms, True)
        self.data.ctrl[NUM_JOINTS:] = (FINGER_OPEN_M, -FINGER_OPEN_M)

    # ------------------------------------------------------------------------------------ simulator

    def _place(self, position: Vec, yaw: float) -> None:
        turn = np.array([[np.cos(yaw), -np.sin(yaw)], [np.sin(yaw), np.cos(yaw)]])
        upright = np.array([np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2)])
        can, pot = (position + turn @ np.array(at) for at in (self.geometry.can_m, self.geometry.pot_m))
        self.data.joint("can").qpos[:] = (*can, TABLE_TOP_Z_M, *upright)
        self.data.mocap_pos[0], self.data.mocap_quat[0] = (*pot, TABLE_TOP_Z_M), upright

    def _build(self) -> None:
        import mujoco

        self._thread = threading.get_ident()
        self.model = model = build_model(self.geometry)
        self.data = mujoco.MjData(model)
        self._substeps = round(TICK_S / model.opt.timestep)
        kinds = mujoco.mjtWarning
        # MuJoCo starts the scene again by itself when numbers explode, and notes it here.
        self._broken = [int(kind) for kind in (kinds.mjWARN_BADQPOS, kinds.mjWARN_BADQVEL, kinds.mjWARN_BADQACC)]
        self._gain = np.array(ACCELERATION_LIMITS_RAD_S2) * model.opt.timestep
        self._arm = np.array([model.joint(f"joint{i}").qposadr[0] for i in range(1, NUM_JOINTS + 1)])
        self._fingers = np.array([model.joint(f"gripper_finger_joint{i}").qposadr[0] for i in (1, 2)])
        self._tip, self._head, self._can_body = model.site("tip").id, model.geom("head").id, model.body("can").id
        self._can_geoms = [model.geom(name).id for name in CAN_GEOMS]
        self._drop_geoms = [model.geom(f"drop{i}").id for i in range(DROPS)]
        self._drop_bodies = [model.body(f"drop{i}").id for i in range(DROPS)]
        self._volumes = {name: model.geom(name).id for name in ("grasp_box", "pour", "success")}
        fine = 2 * self.env_spec.resolution
        model.vis.global_.offwidth = model.vis.global_.offheight = fine
        self._renderer = mujoco.Renderer(model, fine, fine)
        # A shadow costs another pass over the scene.
        self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        self._renderer.scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        free_compiler_memory()


def _relative_quaternion(a: Vec, b: Vec) -> Vec:
    """Orientation (4,) wxyz of b in a's frame."""
    import mujoco

    inverse, relative = np.zeros(4), np.zeros(4)
    mujoco.mju_negQuat(inverse, a)
    mujoco.mju_mulQuat(relative, inverse, b)
    return relative
