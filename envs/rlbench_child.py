"""The program in the simulator's process: answers launch, reset, step and measure until its socket closes.

Started by `envs/rlbench_keeper.py` in a fresh interpreter; asked by `envs/rlbench_process.py`.  RLBench and PyRep are
imported here and nowhere else.  Torch must not be: PyRep's simulator crashes beside it, so nothing of `wamrl_ray` is
imported either.

    launch {task, arm_mode, views, resolution, variation}      ──► {version}
    reset  {placement_seed, seed, attempts}                    ──► {**observation, attempts, rss_bytes}
    step   {arm, gripper, capture}                             ──► {**observation, reward, terminate}
    measure {}              ──► sizes and places of Water Plants after a reset, as `envs/rlbench_measure.py` lists them
    observation: joints (7) rad, tip (3) m, gripper_open, poured (null for a task without water)

A request carries `n`, its reply the same `n` and either `ok` or `error` {type, module, message, stack}.  Frames
(V, h, w, 3) uint8 lie in the memory file shared with the supervisor, written before the reply is sent; with
`capture` false the cameras are not drawn.
"""

from __future__ import annotations

import mmap
import os
import random
import resource
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from envs.rlbench_wire import Decoder, Message, encode, receive

COPPELIASIM_VERSION = 40100
"4.1.0, as CoppeliaSim reports it"

NUM_JOINTS = 7

RETRIED_RESETS = ("BoundaryError", "WaypointError", "TaskEnvironmentError", "RuntimeError")
"Exceptions after which another reset may succeed: a placement that does not fit, the simulator's -1."

Json = dict[str, Any]


class Simulator:
    """RLBench's `TaskEnvironment` for one task, got once."""

    def __init__(self, frames_fd: int) -> None:
        self._frames_fd = frames_fd

    def launch(self, task: str, arm_mode: str, views: list[str], resolution: int, variation: int) -> Json:
        """Import, launch and load the task.  RuntimeError for another version of CoppeliaSim."""
        import rlbench.tasks
        from pyrep.backend import sim
        from rlbench.action_modes.action_mode import MoveArmThenGripper
        from rlbench.action_modes.arm_action_modes import JointPosition, JointVelocity
        from rlbench.action_modes.gripper_action_modes import Discrete
        from rlbench.environment import Environment
        from rlbench.observation_config import ObservationConfig

        if "torch" in sys.modules:
            raise RuntimeError("something imported torch into the simulator's process, which crashes CoppeliaSim")
        # Every camera that stays off is removed from the scene at launch.
        observe = ObservationConfig()
        observe.set_all(False)
        observe.joint_positions = observe.gripper_open = observe.gripper_pose = True
        self._cameras = [getattr(observe, f"{view}_camera") for view in views]
        for camera in self._cameras:
            camera.rgb = True
            camera.image_size = (resolution, resolution)
        # The default action mode never attaches what the gripper closes on; Discrete does.
        arm = JointVelocity() if arm_mode == "joint_velocity" else JointPosition(absolute_mode=False)
        environment = Environment(MoveArmThenGripper(arm, Discrete()), obs_config=observe, headless=True)
        environment.launch()
        version = sim.simGetInt32Parameter(sim.sim_intparam_program_version)
        if version != COPPELIASIM_VERSION:
            raise RuntimeError(f"CoppeliaSim reports version {version}, PyRep needs {COPPELIASIM_VERSION} (4.1.0)")
        self._coppeliasim = version
        self._task = environment.get_task(getattr(rlbench.tasks, task))
        self._task.set_variation(variation)
        self._views, size = views, (len(views), resolution, resolution, 3)
        memory = mmap.mmap(self._frames_fd, int(np.prod(size)))
        self._frames = np.frombuffer(memory, np.uint8).reshape(size)
        return {"version": version}

    def reset(self, placement_seed: int, seed: int, attempts: int) -> Json:
        """Place the task at random, seeded; try again where the placement failed, with the next random numbers."""
        self._seed(placement_seed)
        self._draw(True)
        for attempt in range(1, attempts + 1):
            try:
                _, observation = self._task.reset()
                break
            except Exception as error:  # whatever RLBench and PyRep raise, told apart by name
                if attempt == attempts or type(error).__name__ not in RETRIED_RESETS:
                    raise
        # What is random after the start, such as where water drops appear, is the episode's own.
        self._seed(seed)
        placements = getattr(getattr(self._task, "_scene", None), "_attempts", 0)  # RLBench's own, inside one reset
        reply = self._observed(observation, capture=True)
        return {**reply, "attempts": attempt + int(placements), "rss_bytes": _rss_bytes()}

    def step(self, arm: list[float], gripper: float, capture: bool) -> Json:
        """One control tick: `arm` (7,) in the arm mode's units, `gripper` 1 open or 0 closed."""
        self._draw(capture)
        observation, reward, terminate = self._task.step(np.array([*arm, gripper]))
        return {**self._observed(observation, capture), "reward": float(reward), "terminate": bool(terminate)}

    def measure(self) -> Json:
        """What Water Plants looks like in numbers; nothing moves."""
        from envs import rlbench_measure

        reading = rlbench_measure.measure(rlbench_measure.pyrep_api())
        return {**reading, "versions": rlbench_measure.versions(self._coppeliasim)}

    def _draw(self, on: bool) -> None:
        for camera in self._cameras:
            camera.rgb = on

    def _observed(self, observation: Any, capture: bool) -> Json:
        if capture:
            for place, view in enumerate(self._views):
                image = np.asarray(getattr(observation, f"{view}_rgb"))
                if image.dtype != np.uint8 or image.shape != self._frames[place].shape:
                    wanted = self._frames[place].shape
                    raise RuntimeError(f"{view}_rgb is {image.dtype} {image.shape}, not uint8 {wanted}")
                self._frames[place] = image
        joints, tip = ([float(x) for x in row] for row in (observation.joint_positions, observation.gripper_pose[:3]))
        if len(joints) != NUM_JOINTS:
            raise RuntimeError(f"the arm has {len(joints)} joints, not the Panda's {NUM_JOINTS}")
        if not np.isfinite([*joints, *tip]).all():
            raise RuntimeError(f"the simulation has diverged: joints {joints}, tip {tip}")
        drops = getattr(getattr(self._task, "_task", None), "drops", None)  # WaterPlants' own list
        poured = None if drops is None else bool(drops)
        return {"joints": joints, "tip": tip, "gripper_open": float(observation.gripper_open), "poured": poured}

    def _seed(self, seed: int) -> None:
        """RLBench's tasks draw from the global generators."""
        np.random.seed(seed)
        random.seed(seed)


def serve(sock: socket.socket, simulator: Simulator) -> None:
    """Answer requests until the supervisor hangs up."""
    operations: dict[str, Callable[..., Json]] = {
        "launch": simulator.launch,
        "reset": simulator.reset,
        "step": simulator.step,
        "measure": simulator.measure,
    }
    decoder = Decoder()
    while (request := receive(sock, decoder)) is not None:
        number, operation = request.pop("n"), request.pop("op")
        try:
            reply = encode({"n": number, "ok": operations[operation](**request)})
        except Exception as error:  # the border to the supervisor, which decides what it means
            reply = encode({"n": number, "error": _described(error)})
        sock.sendall(reply)


def _described(error: Exception) -> Message:
    """The error and its stack as text; the classes exist in this process only."""
    stack = "".join(traceback.format_exception(error))
    kind = type(error)
    return {"type": kind.__name__, "module": kind.__module__, "message": str(error)[:2000], "stack": stack[-16000:]}


def _rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def main(argv: list[str]) -> None:
    socket_fd, frames_fd = (int(word) for word in argv)
    for fd in (socket_fd, frames_fd):  # what the simulator starts must not hold them
        os.set_inheritable(fd, False)
    serve(socket.socket(fileno=socket_fd), Simulator(frames_fd))
    # Shutting CoppeliaSim down may hang or crash and has nothing left to save.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
