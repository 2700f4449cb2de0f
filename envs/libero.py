"""LIBERO (any suite) on robosuite and MuJoCo, as a `ChunkEnv`: soft resets, and cameras drawn only where asked.

Fed by rollout and the scripted experts; feeds observations in the conventions public LIBERO policies use: both cameras
turned by 180 degrees, 8-D state (eef position 3 m, eef axis-angle 3 rad, gripper qpos 2 m), raw OSC_POSE actions
(6 deltas and the gripper's sign: -1 opens, +1 closes), 10 settle steps after the initial state is set.

What it does differently from the stock `OffScreenRenderEnv`, bit for bit to the same effect (`tests/test_libero.py`):
- a reset does not compile the scene again (stock: a second or more, ours: milliseconds);
- the cameras are drawn in captured steps only (drawing two cameras costs ten times what the physics of a step does);
- MuJoCo's asset cache is off, and memory that was freed goes back to the system.

`LiberoConfig` can be imported without a simulator; mujoco, robosuite and libero are imported at construction.
Scripted experts read the simulator itself through `LiberoEnv.inner`, the robosuite environment (`inner.sim.data`, ...).
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from envs.base import ChunkEnv
from envs.libero_stock import (
    free_compiler_memory,
    global_seed,
    limit_asset_cache,
    load_suite,
    place_objects,
    quiet,
)
from envs.render import check_thread, choose_renderer
from wamrl_ray.types import EnvSpec, Frames, Split

CAMERAS = ("agentview", "robot0_eye_in_hand")
DUMMY_ACTION = np.array([0, 0, 0, 0, 0, 0, -1], np.float32)
"Stand still, gripper open: what public evaluations settle with."
INIT_STATES: dict[Split, range] = {"train": range(0, 40), "held_out": range(40, 50)}
MAX_STEPS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"Env steps of public evaluations (the longest demonstration plus a margin); a suite's variants use their base suite's."

_STATE_OBSERVABLES = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
_IMAGE_OBSERVABLES = tuple(f"{camera}_image" for camera in CAMERAS)


@dataclass(frozen=True, kw_only=True)
class LiberoConfig:
    """Which LIBERO suite, and how it is looked at."""

    kind: Literal["libero"] = "libero"
    suite: str = "libero_object"
    "a suite of the installed libero package; also the environment's name"
    resolution: int = 64
    "pixels, h = w of both cameras"
    max_steps: int | None = None
    "env steps until truncation, settle steps not counted; None: the suite's usual limit (280 for libero_object)"
    settle_steps: int = 10
    "steps of the dummy action after the initial state is set, so that objects come to rest"
    tasks: tuple[int, ...] = ()
    "task ids of the suite to draw from and to accept; empty: all"
    asset_cache_mib: int = 0
    "decoded meshes and textures kept for the next task: 400 saves a third of a task change and costs 370 MiB"

    def __post_init__(self) -> None:
        if self.resolution < 16:
            raise ValueError(f"resolution = {self.resolution} pixels is too small: use at least 16")
        if self.settle_steps < 0:
            raise ValueError(f"settle_steps = {self.settle_steps} must not be negative")
        if self.asset_cache_mib < 0:
            raise ValueError(f"asset_cache_mib = {self.asset_cache_mib} must not be negative; 0 keeps nothing")
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"max_steps = {self.max_steps} must be at least 1, or None for the suite's usual limit")


class LiberoEnv(ChunkEnv):
    """One live simulator: built at the first reset, replaced when the task changes, used by one thread only."""

    def __init__(self, config: LiberoConfig, split: Split) -> None:
        choose_renderer()
        self._config = config
        self._suite = load_suite(config.suite)
        spec = EnvSpec(
            name=config.suite,
            simulator=f"mujoco {version('mujoco')}",
            instructions=tuple(task.language for task in self._suite.tasks),
            views=("agent", "wrist"),
            resolution=config.resolution,
            state_dim=8,
            action_dim=7,
            max_steps=config.max_steps or _usual_max_steps(config.suite),
            init_states=INIT_STATES,
        )
        super().__init__(spec, split, config.tasks)
        self._inner: Any = None
        self._built_task: int | None = None
        self._thread: int | None = None

    @property
    def inner(self) -> Any:
        """The robosuite environment of the current task; RuntimeError before the first reset."""
        if self._inner is None:
            raise RuntimeError("there is no simulator before the first reset_to()")
        return self._inner

    # ------------------------------------------------------------------------------------ hooks

    def _reset(self, task_id: int, init_state_id: int, seed: int) -> None:
        check_thread(self.env_spec.name, self._thread)
        if self._built_task != task_id:
            self._build(task_id)
        self.soft_reset(init_state_id, seed)
        settle_steps = self._config.settle_steps
        for step in range(settle_steps):
            self._step(DUMMY_ACTION, capture=step == settle_steps - 1)

    def _step(self, action: NDArray[np.float32], capture: bool) -> tuple[float, bool, bool]:
        check_thread(self.env_spec.name, self._thread)
        with self._cameras(on=capture):
            _, reward, success, _ = self._inner.step(action.astype(np.float64))
        # LIBERO calls success "done": an episode ends there, and nowhere else but at our own clock.
        return float(reward), bool(success), bool(success)

    def _frames(self) -> Frames:
        images = [self._inner._observables[name].obs for name in _IMAGE_OBSERVABLES]
        return np.stack([image[::-1, ::-1] for image in images])

    def _state(self) -> NDArray[np.float32]:
        from robosuite.utils.transform_utils import quat2axisangle

        position, quaternion, gripper = (self._inner._observables[name].obs for name in _STATE_OBSERVABLES)
        # quat2axisangle clips its argument in place.
        return np.concatenate([position, quat2axisangle(quaternion.copy()), gripper]).astype(np.float32)

    def close(self) -> None:
        if self._inner is not None:
            # The GL objects must be freed in the context that holds them.
            self._make_current()
            self._inner.close()
            self._inner, self._built_task, self._thread = None, None, None
            # The sensors close over the environment: a cycle of 0.7 GiB that only the collector can free.
            gc.collect()
            free_compiler_memory()

    # ------------------------------------------------------------------------------------ simulator

    def _build(self, task_id: int) -> None:
        self.close()
        self._thread = threading.get_ident()
        limit_asset_cache(self._config.asset_cache_mib)
        with quiet(), global_seed(0):
            from libero.libero.envs import OffScreenRenderEnv

            wrapper = OffScreenRenderEnv(
                bddl_file_name=self._suite.get_task_bddl_file_path(task_id),
                camera_names=list(CAMERAS),
                camera_heights=self._config.resolution,
                camera_widths=self._config.resolution,
                hard_reset=False,
                # Our own clock truncates; robosuite's would raise in a step after its horizon.
                ignore_done=True,
            )
        self._inner = wrapper.env
        self._init_states = self._suite.get_task_init_states(task_id)
        self._gripper_start = self._inner.robots[0].gripper.current_action.copy()
        self._site_rgba_start = self._inner.sim.model.site_rgba.copy()
        # A stock environment has loaded its model twice by the end of its first reset, and appends these each time.
        self._inner.object_property_initializers *= 2
        for name, observable in self._inner._observables.items():
            observable._enabled = name in _STATE_OBSERVABLES
        self._built_task = task_id
        free_compiler_memory()

    def soft_reset(self, init_state_id: int, seed: int) -> None:
        """Stock's `seed`, hard `reset` and `set_init_state`, in this order and to the same bits, for the task at hand.

        Neither compiles the scene again nor draws the cameras; `reset_to` settles after it.  The order matters: a reset
        after the initial state is set would scramble the scene.
        """
        check_thread(self.env_spec.name, self._thread)
        inner = self._inner
        # What a hard reset renews and robosuite's soft reset leaves: the gripper's integrator, and markers such as the
        # stove's burner, which tasks switch on and off in the model.
        inner.robots[0].gripper.current_action = self._gripper_start.copy()
        inner.sim.model.site_rgba[:] = self._site_rgba_start
        with global_seed(seed):
            place_objects(inner)
        inner.sim.set_state_from_flattened(self._init_states[init_state_id])
        inner.sim.forward()
        inner._check_success()
        inner._post_process()
        with self._cameras(on=self._config.settle_steps == 0):
            inner._update_observables(force=True)

    @contextlib.contextmanager
    def _cameras(self, *, on: bool) -> Iterator[None]:
        """Draw the cameras in this step, at the very substep at which stock would."""
        if not on:
            yield
            return
        self._make_current()
        observables = self._inner._observables
        clock = observables[_STATE_OBSERVABLES[0]]
        images = [observables[name] for name in _IMAGE_OBSERVABLES]
        for image in images:
            # All observables sample at one rate and were reset together, so one that never slept tells the phase.
            image._time_since_last_sample, image._sampled = clock._time_since_last_sample, clock._sampled
            image._enabled = True
        try:
            yield
        finally:
            for image in images:
                image._enabled = False

    def _make_current(self) -> None:
        """robosuite draws into whatever GL context is current, which another environment may have changed."""
        self._inner.sim._render_context_offscreen.gl_ctx.make_current()


def _usual_max_steps(suite: str) -> int:
    for name, steps in MAX_STEPS.items():
        if suite == name or suite.startswith(name + "_"):
            return steps
    raise ValueError(f"max_steps = None, but no usual limit is known for suite {suite!r}: set max_steps")
