"""The environment everyone steps: a `gymnasium.Env` that executes chunks and renders only where asked.

Fed by rollout (`reset_to`, `step_chunk`), the scripted experts and anyone who knows gymnasium (`reset`, `step`); feeds
`Observation` and `Chunk` records back.  A simulator is a subclass with five hooks (`_reset`, `_step`, `_frames`,
`_state`, and `close` if it holds anything); what an episode is, which initial states it may start from, when it is over
and what a bad action is are decided here, once, for all of them.

    reset_to(task, init state, seed) ──► Observation
    step_chunk(actions, capture_at)  ──► per step: _step(action, capture) → capture? → over?  ──► Chunk
    reset, step                      ──► the same two, one step at a time, in gymnasium's words

Three booleans stay apart.  `success` is latched: once reached it stays for the episode.  `terminated` is the task's own
end (in most tasks success, but a task may end without it or go on after it).  `truncated` is our clock, `max_steps`;
no simulator's own horizon is used.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.error import ResetNeeded
from numpy.typing import NDArray

from wamrl_ray.types import Chunk, EnvSpec, Frames, Observation, Split

GymObs = dict[str, NDArray[Any]]


class ChunkEnv(gymnasium.Env[GymObs, NDArray[np.float32]]):
    """One episode at a time, from the initial states of one split only.

    `split` is given once, at construction, and cannot be changed or overridden by a call: an environment built for
    training refuses the held-out initial states, whoever asks.
    `tasks` are the task ids this environment may run (ids of `env_spec.instructions`); empty means all.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's own class attribute

    def __init__(self, env_spec: EnvSpec, split: Split, tasks: tuple[int, ...] = ()) -> None:
        if split not in env_spec.init_states:
            raise ValueError(f"split = {split!r} is unknown to {env_spec.name}: use train or held_out")
        last = len(env_spec.instructions) - 1
        bad = [task for task in tasks if not 0 <= task <= last]
        if bad:
            raise ValueError(f"tasks = {list(tasks)} names task {bad[0]}, but {env_spec.name} has tasks 0..{last}")
        self.env_spec = env_spec
        self.split: Split = split
        self.tasks = tasks or tuple(range(len(env_spec.instructions)))
        size = (len(env_spec.views), env_spec.resolution, env_spec.resolution, 3)
        self.observation_space = gymnasium.spaces.Dict(
            {
                "frames": gymnasium.spaces.Box(0, 255, size, np.uint8),
                "state": gymnasium.spaces.Box(-np.inf, np.inf, (env_spec.state_dim,), np.float32),
            }
        )
        self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (env_spec.action_dim,), np.float32)
        self._task_id: int | None = None
        self._init_state_id = -1
        self._steps = 0
        self._success = False
        self._over = True

    # ------------------------------------------------------------------------------------ hooks of a simulator

    @abstractmethod
    def _reset(self, task_id: int, init_state_id: int, seed: int) -> None:
        """Put the world into this start, ready to be observed: same arguments, same bits, whatever ran before."""

    @abstractmethod
    def _step(self, action: NDArray[np.float32], capture: bool) -> tuple[float, bool, bool]:
        """Run one env step; `capture` says whether `_frames` will be asked for it.  -> (reward, success, terminated)"""

    @abstractmethod
    def _frames(self) -> Frames:
        """(V, h, w, 3) uint8 of the last reset or captured step; a fresh array."""

    @abstractmethod
    def _state(self) -> NDArray[np.float32]:
        """(S,) float32 after the last reset or step; a fresh array."""

    def _info(self) -> dict[str, float]:
        """The task's own figures after the last reset or step, by name; part of gymnasium's info and of the records."""
        return {}

    # ------------------------------------------------------------------------------------ chunks

    def reset_to(self, task_id: int, init_state_id: int, seed: int) -> Observation:
        """Start an episode: same arguments, same bits, whatever ran before.

        Raises ValueError for a task this environment may not run and for an initial state outside its split.
        """
        self._check_start(task_id, init_state_id)
        # Over until the reset has come through: a simulator that failed half-way must not be stepped.
        self._over = True
        self._reset(task_id, init_state_id, seed)
        self._task_id, self._init_state_id = task_id, init_state_id
        self._steps, self._success, self._over = 0, False, False
        return Observation(frames=self._frames(), state=self._state())

    def step_chunk(self, actions: NDArray[np.float32], capture_at: Sequence[int]) -> Chunk:
        """Execute `actions` (E, A) in env units; render only at the 1-based offsets in `capture_at`.

        Ends early at the step that terminates or truncates.  Raises ValueError for actions of another shape or with a
        non-finite value, and for offsets outside 1..E; `gymnasium.error.ResetNeeded` if the episode is over.
        """
        actions = self._check_actions(actions)
        offsets = frozenset(capture_at)
        if any(not 1 <= offset <= len(actions) for offset in offsets):
            raise ValueError(f"capture_at = {sorted(offsets)} must lie within 1..{len(actions)}, the actions given")
        if self._over:
            raise ResetNeeded(f"{self.env_spec.name}: the episode is over (or none was started): call reset_to() first")
        captures: dict[int, Observation] = {}
        states: list[NDArray[np.float32]] = []
        reward, terminated, truncated = 0.0, False, False
        for offset, action in enumerate(actions, start=1):
            step_reward, success, terminated = self._step(action, offset in offsets)
            self._steps += 1
            reward += step_reward
            self._success = self._success or success
            truncated = self._steps >= self.env_spec.max_steps and not terminated
            states.append(self._state())
            if offset in offsets:
                captures[offset] = Observation(frames=self._frames(), state=states[-1].copy())
            if terminated or truncated:
                self._over = True
                break
        return Chunk(
            steps=len(states),
            captures=captures,
            states=np.stack(states),
            reward=reward,
            success=self._success,
            terminated=terminated,
            truncated=truncated,
            info=self._info(),
        )

    # ------------------------------------------------------------------------------------ gymnasium

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[GymObs, dict[str, Any]]:
        """gymnasium's reset.  `options` may hold "task_id" and "init_state_id"; what is left out is drawn from the
        tasks and the split of this environment with `seed`."""
        super().reset(seed=seed)
        options = options or {}
        unknown = sorted(set(options) - {"task_id", "init_state_id"})
        if unknown:
            raise ValueError(f"options has the unknown key {unknown[0]!r}: use task_id and init_state_id")
        # All three are drawn whatever is given, so that naming one leaves the others as they were.
        task_id = int(self.np_random.choice(self.tasks))
        init_state_id = int(self.np_random.choice(self.env_spec.init_states[self.split]))
        env_seed = int(self.np_random.integers(2**31))
        start = (options.get("task_id", task_id), options.get("init_state_id", init_state_id))
        observation = self.reset_to(*start, env_seed)
        return {"frames": observation.frames, "state": observation.state}, self._episode()

    def step(self, action: NDArray[np.float32]) -> tuple[GymObs, float, bool, bool, dict[str, Any]]:
        """gymnasium's step: the one-step case of `step_chunk`."""
        chunk = self.step_chunk(np.asarray(action)[None], capture_at=(1,))
        observation = chunk.captures[1]
        obs: GymObs = {"frames": observation.frames, "state": observation.state}
        return obs, chunk.reward, chunk.terminated, chunk.truncated, self._episode()

    def _episode(self) -> dict[str, Any]:
        start = {"task_id": self._task_id, "init_state_id": self._init_state_id}
        return {**start, "success": self._success, **self._info()}

    # ------------------------------------------------------------------------------------ checks

    def _check_start(self, task_id: int, init_state_id: int) -> None:
        name = self.env_spec.name
        if task_id not in self.tasks:
            raise ValueError(f"task_id = {task_id} is not one of this {name} environment's tasks {list(self.tasks)}")
        allowed = self.env_spec.init_states[self.split]
        if init_state_id not in allowed:
            raise ValueError(
                f"init_state_id = {init_state_id} is outside of split {self.split!r} of {name} "
                f"({allowed.start}..{allowed.stop - 1}): build the environment with the split that holds it"
            )

    def _check_actions(self, actions: NDArray[np.float32]) -> NDArray[np.float32]:
        actions = np.array(actions, dtype=np.float32)
        dim = self.env_spec.action_dim
        if actions.ndim != 2 or actions.shape[1] != dim or len(actions) == 0:
            raise ValueError(f"actions have shape {actions.shape}, {self.env_spec.name} takes (E, {dim}) with E >= 1")
        if not np.isfinite(actions).all():
            row, column = (int(i) for i in np.argwhere(~np.isfinite(actions))[0])
            raise ValueError(
                f"actions[{row}, {column}] = {actions[row, column]} is not finite: the policy's output is broken, "
                f"{self.env_spec.name} was not stepped"
            )
        return actions
