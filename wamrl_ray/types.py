"""Records that cross a border, in the order the data takes, and the protocols the parts are wired by.

    Ticket ──► rollout(env, policy) ──► Episode ──► store ──► learners ──► Snapshot ──► broker ──► Pair ──► rollout

Axis letters, used everywhere: B batch, T decisions in an episode, N observations in an episode, L env steps in an
episode, H model action horizon, E executed steps per decision (E <= H), D model action channels, A env action
dimension (A <= D), S state dimension, K denoising steps, V camera views, M memory frames, F imagined frames,
h x w an image.  Every record is frozen and keyword-only; arrays in a record are never written to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

Metrics = dict[str, float]
"""Names are `part/what_unit`; a value is one finite float."""

Frames = NDArray[np.uint8]
"""(V, h, w, 3) RGB of one moment, or the same with leading axes."""

Split = Literal["train", "held_out"]


# ------------------------------------------------------------------------------------------------ randomness

STREAMS: Mapping[str, int] = {
    "env": 0, "action": 1, "world": 2, "imagine": 3, "learner": 4, "schedule": 5, "replay": 6,
}  # fmt: skip
"""Every consumer of randomness draws from its own stream: adding a draw to one leaves the others as they are."""


def seed_sequence(run_seed: int, index: int, stream: str) -> np.random.SeedSequence:
    """The only source of randomness of a run: a function of (run seed, ticket id or update index, stream name)."""
    return np.random.SeedSequence([run_seed, index, STREAMS[stream]])


# ------------------------------------------------------------------------------------------------ environment


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """What an environment is, as far as policy, rollout and reports need to know.  Environment -> everyone.

    Example (LIBERO-Object): name "libero_object", simulator "mujoco", instructions of 10 tasks, views
    ("agent", "wrist"), resolution 64, state_dim 8, action_dim 7, max_steps 280,
    init_states {"train": range(0, 40), "held_out": range(40, 50)}.
    """

    name: str
    simulator: str
    "named in every record, chart and table"
    instructions: tuple[str, ...]
    "one per task, index = task id"
    views: tuple[str, ...]
    resolution: int
    "h = w of a frame, pixels"
    state_dim: int
    action_dim: int
    max_steps: int
    "env steps until truncation, settle steps not counted"
    init_states: Mapping[Split, range]
    "ids of initial states per split; the two ranges are disjoint"


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One captured moment.  Environment -> policy, Episode."""

    frames: Frames
    "(V, h, w, 3) uint8"
    state: NDArray[np.float32]
    "(S,) proprioception, the environment's units"


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What came of executing up to E actions.  Environment -> rollout.

    Example: 8 actions asked, capture_at (4, 8), success at the 6th step: steps 6, captures {4: ...}, success True,
    terminated True, truncated False, reward 1.0.
    """

    steps: int
    "actions actually executed, <= E: the chunk ends at the step that terminates or truncates"
    captures: Mapping[int, Observation]
    "offset (1-based, steps after the chunk's start) -> observation rendered there; offsets never reached are absent"
    states: NDArray[np.float32]
    "(steps, S) state after every step"
    reward: float
    "sum of env rewards over the executed steps"
    success: bool
    terminated: bool
    truncated: bool
    info: Mapping[str, float] = field(default_factory=dict)
    "the task's own figures after the last of them, by name"


class Env(Protocol):
    """A `gymnasium.Env` that executes chunks and renders only where asked (see `envs/base.py`)."""

    env_spec: EnvSpec

    def reset_to(self, task_id: int, init_state_id: int, seed: int) -> Observation:
        """Start an episode: same arguments, same bits, whatever ran before."""

    def step_chunk(self, actions: NDArray[np.float32], capture_at: Sequence[int]) -> Chunk:
        """Execute `actions` (E, A); render only at the 1-based offsets in `capture_at`."""

    def close(self) -> None: ...


# ------------------------------------------------------------------------------------------------ tickets and episodes


@dataclass(frozen=True, kw_only=True)
class Ticket:
    """The right, and the whole recipe, to run one episode.  TicketOffice -> RolloutWorker.

    Example: ticket_id 37, env "libero_object", task_id 3, init_state_id 12, run_seed 0, purpose "train",
    deadline_s 120.0.  The episode is a function of (ticket, pair): reissuing a ticket repeats it bit for bit.
    """

    ticket_id: int
    "unique in a run; training counts up from 0, evaluation uses its own range (see `tickets.py`)"
    env: str
    task_id: int
    init_state_id: int
    run_seed: int
    purpose: Literal["train", "eval"]
    "train: Flow-SDE exploration; eval: the deterministic ODE sampler"
    deadline_s: float
    "wall seconds from dispatch after which the worker is killed and the ticket reissued"

    def seed(self, stream: str) -> np.random.SeedSequence:
        return seed_sequence(self.run_seed, self.ticket_id, stream)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One act of the policy.  Policy -> rollout -> Episode."""

    actions: NDArray[np.float32]
    "(E, A) executed actions in env units"
    chain: NDArray[np.float32]
    "(K+1, H, D) denoising iterates in model units, chain[0] is noise, chain[K] the result"
    stochastic_step: int
    "index k of the one SDE step in [0, K), K for all steps, -1 for none (ODE)"
    logprob: float
    "log density of the stochastic transitions, summed over executed steps x A; 0 for ODE"
    world_seed: int
    "seed of the future noise that the world model read"


@dataclass(frozen=True, kw_only=True)
class Episode:
    """One finished episode in contiguous arrays.  RolloutWorker -> EpisodeStore -> learners.

    Observations are captured at every decision and at every imagined offset, each once: observation n was taken after
    `obs_step[n]` env steps, and decision t acts on observation `decision_obs[t]`.
    Example: E 8, imagined offsets (4, 8), success after 14 steps: obs_step [0, 4, 8, 12], decision_obs [0, 2], T = 2,
    executed [8, 6], success_step 14; the second decision's offset 8 was never reached, so it has no observation.
    """

    ticket: Ticket
    instruction: str
    pair: Pair
    "the weights it was acted with"
    frames: Frames
    "(N, V, h, w, 3) uint8"
    state: NDArray[np.float32]
    "(N, S)"
    obs_step: NDArray[np.int32]
    "(N,) env steps before the observation, ascending"
    decision_obs: NDArray[np.int32]
    "(T,) index into the N observations"
    chain: NDArray[np.float32]
    "(T, K+1, H, D)"
    stochastic_step: NDArray[np.int32]
    "(T,)"
    behaviour_logprob: NDArray[np.float32]
    "(T,)"
    world_seed: NDArray[np.int64]
    "(T,)"
    actions: NDArray[np.float32]
    "(T, E, A) env units; rows after `executed` are what the policy asked for but never ran"
    executed: NDArray[np.int32]
    "(T,) env steps that ran, 1..E"
    env_reward: NDArray[np.float32]
    "(T,) sum over the executed steps"
    success: bool
    success_step: int
    "env steps at the first success, -1 if none"
    terminated: bool
    truncated: bool
    error: str | None = None
    "why the episode is unusable (non-finite action, simulator failure), else None"
    info: Mapping[str, float] = field(default_factory=dict)
    "the task's own figures at its end, by name; empty if it has none"
    versions: Mapping[str, str] = field(default_factory=dict)
    "environment, simulator and package versions"

    @property
    def num_decisions(self) -> int:
        return len(self.decision_obs)

    @property
    def env_steps(self) -> int:
        return int(self.executed.sum())

    @property
    def nbytes(self) -> int:
        return sum(v.nbytes for v in vars(self).values() if isinstance(v, np.ndarray))

    def obs_at(self, step: int) -> int | None:
        """Index of the observation taken after `step` env steps, None if there is none."""
        n = int(np.searchsorted(self.obs_step, step))
        return n if n < len(self.obs_step) and self.obs_step[n] == step else None


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """One disturbed demonstration of an expert.  Collection -> pretraining.

    Executed and labelled action are two things: the label is always what the expert would do at that state.
    Example: 103 env steps captured every 4: frames (26, 2, 64, 64, 3), obs_step [0, 4, ..., 100], state (104, 8).
    """

    env: str
    simulator: str
    task_id: int
    init_state_id: int
    seed: int
    instruction: str
    success: bool
    frames: Frames
    "(N, V, h, w, 3) uint8"
    obs_step: NDArray[np.int32]
    "(N,) env steps before each observation"
    state: NDArray[np.float32]
    "(L+1, S) before the first and after every env step"
    action: NDArray[np.float32]
    "(L, A) executed, env units"
    label: NDArray[np.float32]
    "(L, A) the expert's clean action at the state before the step"
    kind: Literal["expert", "policy"] = "expert"
    "who acted; the expert labels either way"
    base: str = ""
    "digest of the policy that acted, empty if none did"
    disturbance: str = ""
    "canonical JSON of the CollectConfig it was made with, empty if that was not recorded"
    versions: Mapping[str, str] = field(default_factory=dict)
    "environment, simulator and package versions"


# ------------------------------------------------------------------------------------------------ weights


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The trainable tensors of one component at one moment.  Learner -> broker -> workers, learners, checkpoints.

    One flat little-endian buffer: names sorted, each tensor contiguous.  `digest` is the sha256 of layout + buffer
    (first 16 hex digits), so equal digests mean equal weights.  Immutable once made.
    """

    component: Literal["world", "actor"]
    digest: str
    layout: tuple[tuple[str, str, tuple[int, ...]], ...]
    "(name, numpy dtype string, shape) in buffer order"
    buffer: NDArray[np.uint8]
    "(nbytes,)"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A published, interface-aligned (world, actor).  Broker -> workers; stamped on every Episode.

    Example: epoch 2, seq 5, world "9f3a...", actor "77c0...", trained_against_world "9f3a...", interface "c41d...".
    Ordered by (epoch, seq): any newer epoch wins, even with a smaller seq.
    """

    epoch: int
    seq: int
    world: str
    "digest"
    actor: str
    "digest"
    trained_against_world: str
    "digest of the world whose features the actor was last trained on"
    interface: str
    "digest of codec, text encoder, normaliser, layers read, horizon, resolution (`WAM.interface_digest`)"

    @property
    def order(self) -> tuple[int, int]:
        return (self.epoch, self.seq)


# ------------------------------------------------------------------------------------------------ policy, learner


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Sizes of the contract between a policy and everything around it.  Policy -> rollout, learners.

    Example (tiny LIBERO): horizon 8, executed 8, action_dim 7, state_dim 8, channels 15, views ("agent", "wrist"),
    resolution 64, memory 1, imagined_offsets (8,).
    """

    horizon: int
    "H"
    executed: int
    "E"
    action_dim: int
    "A"
    state_dim: int
    "S"
    channels: int
    "D = A + S: future states are denoised beside the actions, as GE-Act does; only the first A are executed"
    views: tuple[str, ...]
    resolution: int
    memory: int
    "M: frames of the last M decisions, oldest first, the first one repeated at the episode's start"
    imagined_offsets: tuple[int, ...]
    "F env-step offsets after the decision, ascending, each <= H; those <= E have an executed counterpart"


class Policy(Protocol):
    """What rollout needs of a policy; `policy.wam.WAM` and the tests' counting policy have it."""

    spec: PolicySpec

    def decide(
        self,
        frames: NDArray[np.uint8],
        state: NDArray[np.float32],
        instruction: str,
        *,
        action_seed: int,
        world_seed: int,
        stochastic: bool,
    ) -> Decision:
        """Act on memory frames (M, V, h, w, 3), oldest first, and the current state (S,)."""

    def load_pair(self, world: Snapshot, actor: Snapshot) -> None:
        """Swap in both components; raises ValueError and changes nothing if either does not fit."""


class Learner(Protocol):
    """What the training loop needs of a learner, in one process or behind a Ray actor."""

    def update(self, episodes: Sequence[Episode], *, index: int) -> Metrics:
        """One update on these episodes; `index` (the iteration) seeds all its randomness."""

    def export(self) -> Snapshot:
        """The current weights, immutable."""

    def state(self) -> dict[str, Any]:
        """Everything `load_state` needs to continue bit for bit: weights, optimiser, statistics, counters."""

    def load_state(self, state: Mapping[str, Any]) -> None: ...


class Reward(Protocol):
    """Distance between images; shaping is separate (`rewards/reconstruction.py`)."""

    def distance(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """(B, V, h, w, 3) float in [0, 1] twice -> (B,) non-negative, 0 iff alike in the metric's eyes."""


def finite(metrics: Iterable[tuple[str, float]]) -> Metrics:
    """Metrics with non-finite values refused: a NaN in a curve is a fault that must surface where it is made."""
    out = {name: float(value) for name, value in metrics}
    bad = sorted(name for name, value in out.items() if not np.isfinite(value))
    if bad:
        raise ValueError(f"non-finite metric {bad[0]} = {out[bad[0]]}")
    return out
