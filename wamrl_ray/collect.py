"""Demonstrations: an expert, disturbed on purpose, and its clean opinion at every step.  `wamrl collect` writes them.

Executed and labelled action are two things.  What runs is the expert's action with held Gaussian noise, a forced
opening of the gripper now and then, or the action of a policy under training; the label is always what the expert
would do right there.  So the data leads where a learner's own errors lead and shows the way back (DART, arXiv
1703.09327; DAgger, arXiv 1011.0686), and because the experts are memoryless the label is a function of what can be
seen.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from wamrl_ray.types import Chunk, Demonstration, Observation, seed_sequence

if TYPE_CHECKING:
    from envs.base import ChunkEnv
    from envs.build import EnvConfig
    from wamrl_ray.policy.wam import WAM

Action = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class CollectConfig:
    """How demonstrations are disturbed.  Lengths in env steps."""

    capture_every: int = 4
    "env steps between captured observations; each can start a training window"
    noise_std: float = 0.5
    "of the action noise, in action units, on every dimension but the gripper's"
    noise_share: float = 0.35
    "share of the time that noise is on; drawn in spells of 1 to `noise_hold` steps of one constant value"
    noise_hold: int = 8
    open_rate: float = 0.004
    "chance per step of a forced gripper opening for `noise_hold` steps: drops the object now and then"
    max_steps: int | None = None
    "stop here; None: the environment's own limit"


class Expert(Protocol):
    def act(self) -> Action: ...


def make_expert(env: ChunkEnv) -> Expert:
    """The scripted expert of an environment.  Raises ValueError where there is none."""
    from envs.experts import LiberoObjectExpert, ReachExpert
    from envs.libero import LiberoEnv
    from envs.reach import ReachEnv

    match env:
        case LiberoEnv() if env.env_spec.name == "libero_object":
            return LiberoObjectExpert(env)
        case ReachEnv():
            return ReachExpert(env)
        case _:
            raise ValueError(f"env = {env.env_spec.name!r}: no scripted expert, use libero_object or reach")


class Disturbance:
    """Turns the expert's action into the executed one; all randomness from one generator."""

    def __init__(self, config: CollectConfig, rng: np.random.Generator, action_dim: int) -> None:
        self._config, self._rng, self._dim = config, rng, action_dim
        self._noise, self._noise_left, self._open_left = np.zeros(action_dim, np.float32), 0, 0
        self._gripper = action_dim == 7

    def __call__(self, action: Action) -> Action:
        c, rng = self._config, self._rng
        if self._noise_left == 0:
            self._noise_left = int(rng.integers(1, c.noise_hold + 1))
            on = rng.random() < c.noise_share
            self._noise = (rng.normal(0.0, c.noise_std, self._dim) * on).astype(np.float32)
        self._noise_left -= 1
        executed = action + self._noise
        if self._gripper:
            executed[3:6] = action[3:6] + 0.3 * self._noise[3:6]
            if rng.random() < c.open_rate:
                self._open_left = c.noise_hold
            executed[6] = -1.0 if self._open_left > 0 else action[6]
            self._open_left = max(0, self._open_left - 1)
        clipped: Action = np.clip(executed, -1.0, 1.0)
        return clipped


def demonstrate(
    env: ChunkEnv, task_id: int, init_state_id: int, seed: int, config: CollectConfig, policy: WAM | None = None
) -> Demonstration:
    """One demonstration, a function of its arguments.  With a policy, the policy acts and the expert labels."""
    rng = np.random.default_rng(seed_sequence(seed, init_state_id, "action"))
    first = env.reset_to(task_id, init_state_id, seed)
    expert, spec = make_expert(env), env.env_spec
    limit = min(config.max_steps or spec.max_steps, spec.max_steps)
    disturb = Disturbance(config, rng, spec.action_dim)
    driver = _policy_driver(policy, spec.instructions[task_id], rng) if policy is not None else None

    frames, obs_step, states = [first.frames], [0], [first.state]
    actions: list[Action] = []
    labels: list[Action] = []
    latest, chunk = first, None
    while len(actions) < limit and not (chunk and (chunk.terminated or chunk.truncated)):
        label = expert.act()
        executed = disturb(label) if driver is None else driver(len(actions), latest)
        capture = (len(actions) + 1) % config.capture_every == 0
        chunk = env.step_chunk(executed[None], (1,) if capture else ())
        labels.append(label)
        actions.append(executed)
        states.append(chunk.states[-1])
        if capture and 1 in chunk.captures:
            latest = chunk.captures[1]
            frames.append(latest.frames)
            obs_step.append(len(actions))
    return Demonstration(
        env=spec.name,
        simulator=spec.simulator,
        task_id=task_id,
        init_state_id=init_state_id,
        seed=seed,
        instruction=spec.instructions[task_id],
        success=_succeeded(chunk),
        frames=np.stack(frames),
        obs_step=np.array(obs_step, np.int32),
        state=np.stack(states),
        action=np.stack(actions),
        label=np.stack(labels),
    )


def _succeeded(chunk: Chunk | None) -> bool:
    return chunk is not None and chunk.success


def _policy_driver(
    policy: WAM, instruction: str, rng: np.random.Generator
) -> Callable[[int, Observation], Action]:
    """Chunked acting for memory-1 policies: a new decision every E steps, on the observation captured there."""
    if policy.spec.memory != 1:
        raise ValueError(f"policy.memory = {policy.spec.memory}: collection with a policy supports memory 1")
    chunk: Action = np.zeros((0, policy.spec.action_dim), np.float32)

    def drive(step: int, observation: Observation) -> Action:
        nonlocal chunk
        offset = step % policy.spec.executed
        if offset == 0:
            seeds = [int(s) for s in rng.integers(0, 2**31, 2)]
            chunk = policy.decide(
                observation.frames[None], observation.state, instruction,
                action_seed=seeds[0], world_seed=seeds[1], stochastic=False,
            ).actions  # fmt: skip
        action: Action = chunk[offset]
        return action

    return drive


# ------------------------------------------------------------------------------------------------ files


def save_demonstration(demonstration: Demonstration, path: Path) -> None:
    """One .npz, written beside and renamed: a file that is there is whole."""
    fields = asdict(demonstration)
    arrays = {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}
    meta = {name: value for name, value in fields.items() if name not in arrays}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    with temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, meta=np.array(json.dumps(meta)), **arrays)
    temporary.rename(path)


def load_demonstration(path: Path) -> Demonstration:
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files if name != "meta"}
        return Demonstration(**json.loads(str(file["meta"])), **arrays)


def load_demonstrations(folder: Path) -> Iterator[Demonstration]:
    """All demonstrations below a folder, in the order of their names.  Raises ValueError if there are none."""
    paths = sorted(folder.rglob("demo_*.npz"))
    if not paths:
        raise ValueError(f"data = {str(folder)!r}: no demo_*.npz there, run `wamrl collect` first")
    return (load_demonstration(path) for path in paths)


# ------------------------------------------------------------------------------------------------ many of them

Job = tuple[int, int, int, Path]
"""task, init state, seed, file."""


def collect(
    env: EnvConfig,
    tasks: tuple[int, ...],
    episodes: int,
    out: Path,
    *,
    workers: int,
    seed: int = 0,
    config: CollectConfig | None = None,
    base: str | None = None,
    on_done: Callable[[int, int, bool], None] = lambda done, total, success: None,
) -> tuple[int, int]:
    """Collect `episodes` per task in `workers` processes; files that are there already are kept.  (successes, total).

    Initial states are the environment's training ones, in turn.  `base`: a policy acts, the expert labels.
    """
    from envs.build import make_env

    out.mkdir(parents=True, exist_ok=True)
    spec = make_env(env, "train").env_spec
    states = spec.init_states["train"]
    jobs: list[Job] = []
    for task in tasks:
        for i in range(episodes):
            name = f"demo_{task:02d}_{seed:03d}_{i:05d}.npz"
            jobs.append((task, states[i % len(states)], seed * 100_000 + i, out / name))
    todo = [job for job in jobs if not job[3].exists()]
    total, successes = len(todo), 0
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        shares = [todo[w::workers * 4] for w in range(workers * 4)]
        disturbed = config or CollectConfig()
        futures = [pool.submit(_collect_share, env, share, disturbed, base) for share in shares if share]
        done = 0
        for future in as_completed(futures):
            for success in future.result():
                done, successes = done + 1, successes + success
                on_done(done, total, success)
    return successes, total


def _collect_share(env_config: EnvConfig, jobs: list[Job], config: CollectConfig, base: str | None) -> list[bool]:
    from envs.build import make_env

    policy = None
    if base is not None:
        import torch

        from wamrl_ray.policy.bases import load_base

        torch.set_num_threads(1)
        policy = load_base(base)
    env = make_env(env_config, "train")
    try:
        results = []
        for task, init_state, seed, path in jobs:
            demonstration = demonstrate(env, task, init_state, seed, config, policy)
            save_demonstration(demonstration, path)
            results.append(demonstration.success)
        return results
    finally:
        env.close()  # type: ignore[no-untyped-call]  # gymnasium's
