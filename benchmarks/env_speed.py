"""How fast and small the simulated environments are: LIBERO against the stock one, and Water Plants (MuJoCo).

    python -m benchmarks.env_speed --json OUT [--task 0] [--chunks 8] [--resolution 96]
    python -m benchmarks.env_speed --env water_plants --json OUT [--resolution 128]

Stock LIBERO draws both cameras in every step and compiles the scene at every reset; ours executes chunks of 8, captured
at 4 and 8, and resets softly.  Both run in this process, in turns, so that a busy machine slows both; the frames at
captured steps are asserted to be equal byte for byte.  Memory is measured in a process of its own for each, after the
same work.

Water Plants (MuJoCo) has no stock version: `tick_ms` and `render_ms` are milliseconds of a control tick and of drawing
both policy cameras, means over whole episodes of the scripted expert, grasp and pouring included.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from envs.libero import CAMERAS, DUMMY_ACTION, LiberoConfig, LiberoEnv
from envs.libero_stock import load_suite, quiet
from envs.render import choose_renderer
from envs.water_plants import WaterPlantsConfig, WaterPlantsEnv

CHUNK, CAPTURE_AT, RESETS, INIT_STATE, SEED = 8, (4, 8), 5, 0, 0


class Stock:
    """LIBERO as public evaluations drive it."""

    def __init__(self, config: LiberoConfig, task_id: int) -> None:
        suite = load_suite(config.suite)
        with quiet():
            from libero.libero.envs import OffScreenRenderEnv

            self.env = OffScreenRenderEnv(
                bddl_file_name=suite.get_task_bddl_file_path(task_id),
                camera_heights=config.resolution,
                camera_widths=config.resolution,
            )
        self.init_states = suite.get_task_init_states(task_id)
        self.settle_steps = config.settle_steps

    def reset(self, init_state_id: int, seed: int) -> float:
        """Seconds that the hard reset took, without the settling that follows it."""
        self.make_current()
        start = time.perf_counter()
        self.env.seed(seed)
        with quiet():
            self.env.reset()
        self.env.set_init_state(self.init_states[init_state_id])
        seconds = time.perf_counter() - start
        for _ in range(self.settle_steps):
            self.step(DUMMY_ACTION)
        return seconds

    def step(self, action: NDArray[np.float32]) -> NDArray[np.uint8]:
        """(V, h, w, 3) frames after the step, turned by 180 degrees as ours are."""
        self.make_current()
        obs, *_ = self.env.step(action.astype(np.float64))
        return np.stack([obs[f"{camera}_image"][::-1, ::-1] for camera in CAMERAS])

    def make_current(self) -> None:
        """Two GL contexts live in this process, and robosuite draws into, and frees, whatever is the current one's."""
        self.env.sim._render_context_offscreen.gl_ctx.make_current()


def measure(config: LiberoConfig, task_id: int, chunks: int) -> dict[str, float]:
    ours, stock = LiberoEnv(config, split="train"), Stock(config, task_id)
    start = time.perf_counter()
    ours.reset_to(task_id, INIT_STATE, SEED)
    build_s = time.perf_counter() - start
    soft_s, reset_to_s = [], []
    for _ in range(RESETS):
        start = time.perf_counter()
        ours.soft_reset(INIT_STATE, SEED)
        soft_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        ours.reset_to(task_id, INIT_STATE, SEED)
        reset_to_s.append(time.perf_counter() - start)
    hard_s = stock.reset(INIT_STATE, SEED)
    actions = np.random.default_rng(0).uniform(-1, 1, (chunks, CHUNK, 7)).astype(np.float32)
    stock_s = ours_s = 0.0
    for chunk_actions in actions:
        start = time.perf_counter()
        expected = [stock.step(action) for action in chunk_actions]
        stock_s += time.perf_counter() - start
        start = time.perf_counter()
        chunk = ours.step_chunk(chunk_actions, CAPTURE_AT)
        ours_s += time.perf_counter() - start
        for offset in CAPTURE_AT:
            assert np.array_equal(chunk.captures[offset].frames, expected[offset - 1]), f"frames differ at {offset}"
    steps = chunks * CHUNK
    return {
        "stock_steps_per_s": steps / stock_s,
        "ours_steps_per_s": steps / ours_s,
        "ratio": stock_s / ours_s,
        "hard_reset_s": hard_s,
        "soft_reset_s": statistics.median(soft_s),
        "reset_to_s": statistics.median(reset_to_s),
        "build_s": build_s,
        "env_steps": steps,
    }


def measure_water_plants(config: WaterPlantsConfig, episodes: int) -> dict[str, float]:
    from envs.water_plants_expert import WaterPlantsExpert

    env = WaterPlantsEnv(config, split="train")
    start = time.perf_counter()
    env.reset_to(0, 0, SEED)
    build_s = time.perf_counter() - start
    expert = WaterPlantsExpert(env)
    tick_s = render_s = reset_s = 0.0
    ticks = renders = successes = 0
    for episode in range(episodes):
        start = time.perf_counter()
        env.reset_to(0, episode, SEED)
        reset_s += time.perf_counter() - start
        chunk = None
        while chunk is None or not (chunk.terminated or chunk.truncated):
            action = expert.act()[None]
            start = time.perf_counter()
            chunk = env.step_chunk(action, ())
            tick_s += time.perf_counter() - start
            start = time.perf_counter()
            env._frames()
            render_s += time.perf_counter() - start
            renders += 1
        ticks += int(chunk.info["ticks"])
        successes += chunk.success
    return {
        "render_ms": 1e3 * render_s / renders,
        "tick_ms": 1e3 * tick_s / ticks,
        "reset_to_ms": 1e3 * reset_s / episodes,
        "build_s": build_s,
        "ticks": ticks,
        "episodes": episodes,
        "successes": successes,
    }


def rss_mib(which: Literal["stock", "ours"], config: LiberoConfig | WaterPlantsConfig, task_id: int) -> float:
    """MiB of resident memory after one reset and one chunk, of this process."""
    env: Any
    if isinstance(config, WaterPlantsConfig):
        env = WaterPlantsEnv(config, split="train")
        env.reset_to(task_id, INIT_STATE, SEED)
        env.step_chunk(np.zeros((CHUNK, 8), np.float32), CAPTURE_AT)
        return resident_mib()
    actions = np.zeros((CHUNK, 7), np.float32)
    if which == "stock":
        env = Stock(config, task_id)
        env.reset(INIT_STATE, SEED)
        for action in actions:
            env.step(action)
    else:
        env = LiberoEnv(config, split="train")
        env.reset_to(task_id, INIT_STATE, SEED)
        env.step_chunk(actions, CAPTURE_AT)
    return resident_mib()


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here, as one flat JSON object")
    parser.add_argument("--env", choices=["libero", "water_plants"], default="libero")
    parser.add_argument("--suite", default="libero_object")
    parser.add_argument("--task", type=int, default=0)
    parser.add_argument("--chunks", type=int, default=8, help="chunks of 8 env steps that are timed")
    parser.add_argument("--episodes", type=int, default=10, help="episodes of the expert (water_plants)")
    parser.add_argument("--resolution", type=int, help="default: 96, water_plants 128")
    parser.add_argument("--rss", choices=["stock", "ours"], help="print the resident memory of one side, MiB, and end")
    args = parser.parse_args()
    config: LiberoConfig | WaterPlantsConfig = LiberoConfig(suite=args.suite, resolution=args.resolution or 96)
    if args.env == "water_plants":
        config = WaterPlantsConfig(resolution=args.resolution or 128)
    choose_renderer()
    if args.rss:
        print(json.dumps(rss_mib(args.rss, config, args.task)))
        return
    if isinstance(config, WaterPlantsConfig):
        figures = measure_water_plants(config, args.episodes)
    else:
        figures = measure(config, args.task, args.chunks)
    for which in ("ours",) if args.env == "water_plants" else ("stock", "ours"):
        command = [sys.executable, "-m", "benchmarks.env_speed", *sys.argv[1:], "--rss", which]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=True, timeout=300
        )
        figures[f"rss_mib_{which}"] = json.loads(done.stdout.splitlines()[-1])
    text = json.dumps({name: round(value, 4) for name, value in figures.items()}, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
