"""One demonstration: an expert, disturbed on purpose, and its clean opinion at every step.

Fed by `collect_worker.Demonstrator` with an environment and a start; feeds the files that `wamrl pretrain` reads.

Executed and labelled action are two things.  What runs is the expert's action with held Gaussian noise, a forced
opening of the gripper now and then, a first grasp beside the object, or the action of a policy under training; the
label is always what the expert would do right there.  So the data leads where a learner's own errors lead and shows
the way back (DART, arXiv 1703.09327; DAgger, arXiv 1011.0686), and because the experts are memoryless the label is a
function of what can be seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from wamrl_ray.rollout import package_versions
from wamrl_ray.types import Chunk, Demonstration, Observation, PolicySpec, seed_sequence

if TYPE_CHECKING:
    from envs.base import ChunkEnv
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
    miss_share: float = 0.3
    "share of demonstrations whose first grasp is aimed beside the object, closes on nothing and is tried again"
    miss_m: tuple[float, float] = (0.06, 0.09)
    "how far beside, lowest and highest; nearer than 0.05 the fingers mostly stop on the object's top"
    miss_steps: int = 60
    "after so many steps a miss is given up, whether the fingers have closed or not"
    expert_share: float = 0.3
    "where a policy acts: share of its decisions that the expert takes instead, so that episodes get on (DAgger's beta)"
    max_steps: int | None = None
    "stop here; None: the environment's own limit"

    def __post_init__(self) -> None:
        for name in ("capture_every", "noise_hold", "miss_steps"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "use at least 1 env step")
        for name in ("noise_share", "open_rate", "miss_share", "expert_share"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "use a share between 0 and 1")
        _require(self.noise_std >= 0, "noise_std", self.noise_std, "use 0 or more action units")
        _require(0 <= self.miss_m[0] <= self.miss_m[1], "miss_m", self.miss_m, "use [lowest, highest] in metres")
        _require(self.max_steps is None or self.max_steps >= 1, "max_steps", self.max_steps, "use at least 1, or null")

    @property
    def canonical(self) -> str:
        """JSON with sorted keys: equal texts mean equal disturbances."""
        return json.dumps(asdict(self), sort_keys=True)


def _require(condition: bool, name: str, value: object, remedy: str) -> None:
    if not condition:
        raise ValueError(f"{name} = {value!r}: {remedy}")


class Expert(Protocol):
    action_noise: Action
    "(A,) which part of the noise a dimension takes: 1 all of it, 0 none (grippers)"
    opening: tuple[int, float] | None
    "the action dimension that opens the gripper, and the value that does; None: nothing is grasped"

    def act(self) -> Action: ...


def make_expert(env: ChunkEnv, grasp_offset_m: tuple[float, float] = (0.0, 0.0)) -> Expert:
    """The scripted expert of an environment.  Raises ValueError where there is none.

    `grasp_offset_m`: an expert that aims that far beside the object; ignored where nothing is grasped.
    """
    from envs.experts import LiberoObjectExpert
    from envs.libero import LiberoEnv
    from envs.reach import ReachEnv
    from envs.reach_expert import ReachExpert
    from envs.water_plants import WaterPlantsEnv
    from envs.water_plants_expert import WaterPlantsExpert

    match env:
        case LiberoEnv() if env.env_spec.name == "libero_object":
            return LiberoObjectExpert(env, grasp_offset_m=grasp_offset_m)
        case WaterPlantsEnv():
            return WaterPlantsExpert(env, grasp_offset_m=grasp_offset_m)
        case ReachEnv():
            return ReachExpert(env)
        case _:
            name = env.env_spec.name
            raise ValueError(f"env = {name!r}: no scripted expert, use libero_object, water_plants or reach")


class Disturbance:
    """Turns the expert's action into the executed one; all randomness from one generator."""

    def __init__(self, config: CollectConfig, rng: np.random.Generator, expert: Expert) -> None:
        self._config, self._rng, self._expert = config, rng, expert
        self._noise, self._noise_left, self._open_left = np.zeros_like(expert.action_noise), 0, 0

    def __call__(self, action: Action) -> Action:
        c, rng = self._config, self._rng
        if self._noise_left == 0:
            self._noise_left = int(rng.integers(1, c.noise_hold + 1))
            on = rng.random() < c.noise_share
            self._noise = (rng.normal(0.0, c.noise_std, len(self._noise)) * on).astype(np.float32)
        self._noise_left -= 1
        executed = action + self._expert.action_noise * self._noise
        if self._expert.opening is not None:
            gripper, wide = self._expert.opening
            if rng.random() < c.open_rate:
                self._open_left = c.noise_hold
            if self._open_left > 0:
                executed[gripper] = wide
            self._open_left = max(0, self._open_left - 1)
        clipped: Action = np.clip(executed, -1.0, 1.0)
        return clipped


class MissedGrasp:
    """Acts as an expert that aims beside the object, until its fingers have been told to close for `hold` steps."""

    def __init__(self, env: ChunkEnv, config: CollectConfig, rng: np.random.Generator, hold: int = 10) -> None:
        self._opening = make_expert(env).opening
        share, angle, radius = rng.random(), rng.uniform(0.0, 2.0 * np.pi), rng.uniform(*config.miss_m)
        offset = (float(radius * np.cos(angle)), float(radius * np.sin(angle)))
        self._expert = make_expert(env, offset) if self._opening and share < config.miss_share else None
        self._left, self._steps_left = hold, config.miss_steps

    def __call__(self, action: Action) -> Action:
        """The misjudged action; the expert's own once the miss is done with."""
        if self._expert is None or self._opening is None or self._left == 0 or self._steps_left == 0:
            return action
        gripper, wide = self._opening
        misjudged = self._expert.act()
        self._left -= int(misjudged[gripper] * wide < 0)
        self._steps_left -= 1
        return misjudged


def demonstrate(
    env: ChunkEnv, task_id: int, init_state_id: int, seed: int, config: CollectConfig, policy: WAM | None = None
) -> Demonstration:
    """One demonstration, a function of its arguments.  With a policy, the policy acts and the expert labels.

    Raises ValueError for an environment without expert and a policy that `check_policy` refuses.
    """
    rng = np.random.default_rng(seed_sequence(seed, init_state_id, "action"))
    first = env.reset_to(task_id, init_state_id, seed)
    expert, spec = make_expert(env), env.env_spec
    limit = min(config.max_steps or spec.max_steps, spec.max_steps)
    disturb, misjudge = Disturbance(config, rng, expert), MissedGrasp(env, config, rng)
    driver = _policy_driver(policy, spec.instructions[task_id], rng, config) if policy is not None else None

    frames, obs_step, states = [first.frames], [0], [first.state]
    actions: list[Action] = []
    labels: list[Action] = []
    latest, chunk = first, None
    while len(actions) < limit and not (chunk and (chunk.terminated or chunk.truncated)):
        label = expert.act()
        executed = disturb(misjudge(label)) if driver is None else driver(len(actions), latest, label)
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
        kind="expert" if policy is None else "policy",
        disturbance=config.canonical,
        versions={"environment": spec.name, "simulator": spec.simulator, **package_versions()},
    )


def _succeeded(chunk: Chunk | None) -> bool:
    return chunk is not None and chunk.success


def check_policy(spec: PolicySpec, config: CollectConfig) -> None:
    """Raises ValueError for a policy that cannot act here: it needs one frame, captured at each of its decisions."""
    if spec.memory != 1:
        raise ValueError(f"policy.memory = {spec.memory}: collection with a policy supports memory 1")
    if spec.executed % config.capture_every:
        raise ValueError(
            f"capture_every = {config.capture_every}: the policy decides every {spec.executed} env steps and must "
            f"see a frame then; use a divisor of {spec.executed}"
        )


def _policy_driver(
    policy: WAM, instruction: str, rng: np.random.Generator, config: CollectConfig
) -> Callable[[int, Observation, Action], Action]:
    """Chunked acting: a new decision every E steps, on the observation captured there, or the label for E steps."""
    check_policy(policy.spec, config)
    chunk: Action = np.zeros((0, policy.spec.action_dim), np.float32)
    by_expert = False

    def drive(step: int, observation: Observation, label: Action) -> Action:
        nonlocal chunk, by_expert
        offset = step % policy.spec.executed
        if offset == 0:
            seeds = [int(s) for s in rng.integers(0, 2**31, 2)]
            by_expert = bool(rng.random() < config.expert_share)
        if by_expert:
            return label
        if offset == 0:
            chunk = policy.decide(
                observation.frames[None], observation.state, instruction,
                action_seed=seeds[0], world_seed=seeds[1], stochastic=False,
            ).actions  # fmt: skip
        action: Action = chunk[offset]
        return action

    return drive
