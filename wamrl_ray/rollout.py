"""The step loop: one ticket, one environment, one policy, one Episode.

Fed by the worker shells (`local.py`, `local_lockstep.py`, `cluster.py`) with a ticket of the TicketOffice and the pair
whose weights the policy holds; feeds the EpisodeStore and the learners with the Episode, and the training loop with its
summary.  The episode is a function of (ticket, weights): all randomness comes from the ticket.
"""

from __future__ import annotations

import importlib.metadata
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wamrl_ray.types import Decision, Env, EnvSpec, Episode, Observation, Pair, Policy, PolicySpec, Ticket


@dataclass(frozen=True, kw_only=True)
class EpisodeSummary:
    """What the control plane knows of an episode, beside its handle.  RolloutPool -> loop, store, evaluation.

    Example: ticket 37, pair_order (2, 5), success True, success_step 14, env_steps 14, num_decisions 2,
    nbytes 221_184, env_reward 1.0, error None.
    """

    ticket: Ticket
    pair_order: tuple[int, int]
    "(epoch, seq) of the pair it was acted with"
    success: bool
    success_step: int
    "env steps at the first success, -1 if none"
    env_steps: int
    num_decisions: int
    nbytes: int
    "bytes of its arrays"
    env_reward: float
    "sum of the environment's rewards"
    error: str | None = None
    info: Mapping[str, float] = field(default_factory=dict)
    "the task's own figures at the end, by name"


def rollout(env: Env, policy: Policy, ticket: Ticket, pair: Pair) -> Episode:
    """Run one episode.

    Training tickets act with exploration, evaluation tickets with the deterministic sampler.  A non-finite decision
    ends the episode with `error` set and the sound decisions before it; an exception of the environment propagates.
    Raises ValueError if policy and environment do not fit together.
    """
    progress = Progress(env, policy.spec, ticket)
    while not progress.done:
        progress.advance(policy.decide(**progress.question()))
    return progress.episode(pair)


class Progress:
    """An episode being run: it says what the next decision depends on, and executes the answer.

    `done` turns True when the environment terminates or truncates, or after an unusable decision.
    """

    def __init__(self, env: Env, spec: PolicySpec, ticket: Ticket) -> None:
        """Resets the environment.  Raises ValueError if policy and environment do not fit together."""
        self._env, self._spec, self._env_spec, self._ticket = env, spec, env.env_spec, ticket
        _check_fit(spec, env.env_spec)
        self._capture_at = sorted({o for o in spec.imagined_offsets if o <= spec.executed} | {spec.executed})
        self._action_seeds = _seeds(ticket, "action", env.env_spec.max_steps)
        self._world_seeds = _seeds(ticket, "world", env.env_spec.max_steps)
        env_seed = int(ticket.seed("env").generate_state(1, np.uint32)[0]) & 0x7FFFFFFF
        self._observation = env.reset_to(ticket.task_id, ticket.init_state_id, env_seed)
        self._memory = deque([self._observation.frames] * spec.memory, maxlen=spec.memory)
        self._trace = _Trace(observations=[self._observation], obs_step=[0])
        self._steps, self._terminated, self._truncated, self._success_step = 0, False, False, -1
        self._error: str | None = None
        self._info: Mapping[str, float] = {}

    @property
    def done(self) -> bool:
        return self._terminated or self._truncated or self._error is not None

    def question(self) -> dict[str, Any]:
        """The arguments of `Policy.decide`."""
        t = len(self._trace.decisions)
        if t == self._env_spec.max_steps:
            name = self._env_spec.name
            raise RuntimeError(f"ticket {self._ticket.ticket_id}: {name} did not truncate at max_steps = {t}")
        return {
            "frames": np.stack(self._memory),
            "state": self._observation.state,
            "instruction": self._env_spec.instructions[self._ticket.task_id],
            "action_seed": self._action_seeds[t],
            "world_seed": self._world_seeds[t],
            "stochastic": self._ticket.purpose == "train",
        }

    def advance(self, decision: Decision) -> None:
        """Execute a decision, or end the episode if it is not sound."""
        trace, spec, t = self._trace, self._spec, len(self._trace.decisions)
        error = _fault(decision, spec)
        if error is not None:
            self._error, trace.unusable = f"decision {t}: {error}", decision
            return
        chunk = self._env.step_chunk(decision.actions, self._capture_at)
        trace.decisions.append(decision)
        trace.decision_obs.append(trace.obs_step.index(self._steps))
        trace.executed.append(chunk.steps)
        trace.env_reward.append(chunk.reward)
        for offset in sorted(chunk.captures):
            trace.observations.append(chunk.captures[offset])
            trace.obs_step.append(self._steps + offset)
        self._steps += chunk.steps
        self._terminated, self._truncated, self._info = chunk.terminated, chunk.truncated, chunk.info
        if chunk.success and self._success_step < 0:
            self._success_step = self._steps
        if not self.done:
            self._observation = chunk.captures[spec.executed]
            self._memory.append(self._observation.frames)

    def episode(self, pair: Pair) -> Episode:
        """What was gathered, stamped with the weights it was acted with."""
        error = self._error
        if error is not None:
            error = f"ticket {self._ticket.ticket_id}, {error} (pair {pair.order}, actor {pair.actor})"
        return self._trace.episode(
            ticket=self._ticket,
            pair=pair,
            env_spec=self._env_spec,
            success_step=self._success_step,
            terminated=self._terminated,
            truncated=self._truncated,
            error=error,
            info=self._info,
        )


def fault_metric(error: BaseException) -> str | None:
    """Metric that counts attempts lost to a fault of this kind; None for an error that is not a simulator's fault."""
    kind = getattr(error, "kind", None)  # of `envs.rlbench_process.SimulatorFault`, also through Ray
    return f"rollout/faults/{kind}" if isinstance(kind, str) else None


def summarise(episode: Episode) -> EpisodeSummary:
    """The summary that travels beside the episode's handle."""
    return EpisodeSummary(
        ticket=episode.ticket,
        pair_order=episode.pair.order,
        success=episode.success,
        success_step=episode.success_step,
        env_steps=episode.env_steps,
        num_decisions=episode.num_decisions,
        nbytes=episode.nbytes,
        env_reward=float(episode.env_reward.sum()),
        error=episode.error,
        info=episode.info,
    )


def mean_info(rows: Sequence[EpisodeSummary]) -> dict[str, float]:
    """The task's own figures, each the mean over the episodes that have it."""
    names = sorted({name for row in rows for name in row.info})
    return {name: float(np.mean([row.info[name] for row in rows if name in row.info])) for name in names}


@dataclass
class _Trace:
    """What an episode has gathered so far."""

    observations: list[Observation]
    obs_step: list[int]
    decision_obs: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    executed: list[int] = field(default_factory=list)
    env_reward: list[float] = field(default_factory=list)
    unusable: Decision | None = None
    "a decision that ended the episode: it gives an episode without decisions its array shapes"

    def episode(
        self,
        *,
        ticket: Ticket,
        pair: Pair,
        env_spec: EnvSpec,
        success_step: int,
        terminated: bool,
        truncated: bool,
        error: str | None,
        info: Mapping[str, float],
    ) -> Episode:
        sample = self.decisions[0] if self.decisions else self.unusable
        assert sample is not None, "an episode has at least one decision, sound or not"
        t = len(self.decisions)
        chain = np.zeros((t, *sample.chain.shape), np.float32)
        actions = np.zeros((t, *sample.actions.shape), np.float32)
        for i, decision in enumerate(self.decisions):
            chain[i], actions[i] = decision.chain, decision.actions
        return Episode(
            ticket=ticket,
            instruction=env_spec.instructions[ticket.task_id],
            pair=pair,
            frames=np.stack([o.frames for o in self.observations]),
            state=np.stack([o.state for o in self.observations]).astype(np.float32),
            obs_step=np.array(self.obs_step, np.int32),
            decision_obs=np.array(self.decision_obs, np.int32),
            chain=chain,
            stochastic_step=np.array([d.stochastic_step for d in self.decisions], np.int32),
            behaviour_logprob=np.array([d.logprob for d in self.decisions], np.float32),
            world_seed=np.array([d.world_seed for d in self.decisions], np.int64),
            actions=actions,
            executed=np.array(self.executed, np.int32),
            env_reward=np.array(self.env_reward, np.float32),
            success=success_step >= 0,
            success_step=success_step,
            terminated=terminated,
            truncated=truncated,
            error=error,
            info=dict(info),
            versions={"environment": env_spec.name, "simulator": env_spec.simulator, **package_versions()},
        )


@cache
def package_versions() -> Mapping[str, str]:
    """Versions of the packages whose change may change an episode."""
    found = {}
    for package in ("wamrl-ray", "numpy", "torch", "mujoco", "robosuite"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _seeds(ticket: Ticket, stream: str, count: int) -> list[int]:
    """Non-negative int64 seeds, one per decision: decision t has the same one however long the episode gets."""
    words = ticket.seed(stream).generate_state(count, np.uint64) >> np.uint64(1)
    return [int(word) for word in words]


def _fault(decision: Decision, spec: PolicySpec) -> str | None:
    """What makes a decision unusable, None if nothing does."""
    named: Sequence[tuple[str, NDArray[np.float32]]] = (
        ("actions", decision.actions),
        ("chain", decision.chain),
        ("logprob", np.array(decision.logprob, np.float32)),
    )
    for name, values in named:
        if not np.isfinite(values).all():
            return f"the policy's {name} is not finite"
    if decision.actions.shape != (spec.executed, spec.action_dim):
        return f"the policy's actions have shape {decision.actions.shape}, not {(spec.executed, spec.action_dim)}"
    return None


def _check_fit(spec: PolicySpec, env_spec: EnvSpec) -> None:
    pairs = {
        "action_dim": (spec.action_dim, env_spec.action_dim),
        "state_dim": (spec.state_dim, env_spec.state_dim),
        "views": (tuple(spec.views), tuple(env_spec.views)),
        "resolution": (spec.resolution, env_spec.resolution),
    }
    for name, (policy_has, env_has) in pairs.items():
        if policy_has != env_has:
            raise ValueError(
                f"policy.spec.{name} = {policy_has!r}, but environment {env_spec.name} has {env_has!r}: "
                "use a base checkpoint made for this environment"
            )
