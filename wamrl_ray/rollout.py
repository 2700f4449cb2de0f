"""The step loop: one ticket, one environment, one policy, one Episode.

Fed by the worker shells (`local.py`, `cluster.py`) with a ticket of the TicketOffice and the pair whose weights the
policy holds; feeds the EpisodeStore and the learners with the Episode, and the training loop with its summary.
The episode is a function of (ticket, weights): all randomness comes from the ticket.
"""

from __future__ import annotations

import importlib.metadata
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

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


def rollout(env: Env, policy: Policy, ticket: Ticket, pair: Pair) -> Episode:
    """Run one episode.

    Training tickets act with Flow-SDE exploration, evaluation tickets with the deterministic sampler.  A non-finite
    decision ends the episode with `error` set and the sound decisions before it; an exception of the environment
    propagates.  Raises ValueError if policy and environment do not fit together.
    """
    spec, env_spec = policy.spec, env.env_spec
    _check_fit(spec, env_spec)
    capture_at = sorted({offset for offset in spec.imagined_offsets if offset <= spec.executed} | {spec.executed})
    action_seeds = _seeds(ticket, "action", env_spec.max_steps)
    world_seeds = _seeds(ticket, "world", env_spec.max_steps)
    instruction = env_spec.instructions[ticket.task_id]

    env_seed = int(ticket.seed("env").generate_state(1, np.uint32)[0]) & 0x7FFFFFFF
    observation = env.reset_to(ticket.task_id, ticket.init_state_id, env_seed)
    trace = _Trace(observations=[observation], obs_step=[0])
    memory = deque([observation.frames] * spec.memory, maxlen=spec.memory)
    steps, terminated, truncated, success_step, error = 0, False, False, -1, None
    while not (terminated or truncated):
        t = len(trace.decisions)
        if t == env_spec.max_steps:
            raise RuntimeError(f"ticket {ticket.ticket_id}: {env_spec.name} did not truncate at max_steps = {t}")
        decision = policy.decide(
            np.stack(memory),
            observation.state,
            instruction,
            action_seed=action_seeds[t],
            world_seed=world_seeds[t],
            stochastic=ticket.purpose == "train",
        )
        error = _fault(decision, spec)
        if error is not None:
            error = f"ticket {ticket.ticket_id}, decision {t}: {error} (pair {pair.order}, actor {pair.actor})"
            trace.unusable = decision
            break
        chunk = env.step_chunk(decision.actions, capture_at)
        trace.decisions.append(decision)
        trace.decision_obs.append(trace.obs_step.index(steps))
        trace.executed.append(chunk.steps)
        trace.env_reward.append(chunk.reward)
        for offset in sorted(chunk.captures):
            trace.observations.append(chunk.captures[offset])
            trace.obs_step.append(steps + offset)
        steps += chunk.steps
        terminated, truncated = chunk.terminated, chunk.truncated
        if chunk.success and success_step < 0:
            success_step = steps
        if not (terminated or truncated):
            observation = chunk.captures[spec.executed]
            memory.append(observation.frames)
    return trace.episode(
        ticket=ticket,
        pair=pair,
        env_spec=env_spec,
        success_step=success_step,
        terminated=terminated,
        truncated=truncated,
        error=error,
    )


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
    )


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
