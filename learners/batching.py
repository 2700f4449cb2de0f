"""Episodes -> tensors, in one place.  Both learners and pretraining read their batches here.

A pick is (episode index, decision index).  `gather` makes a flat batch of picks; `to_time_major` lays flat values of
whole episodes out as (T, B) for the returns, and `to_flat` is its inverse.  Axis letters are those of `types.py`;
n is the number of picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wamrl_ray.types import Episode, PolicySpec

Pick = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """Flat decisions on the CPU.  batching -> learners.

    Example (tiny LIBERO, 3 picks): memory (3, 1, 2, 96, 96, 3), future (3, 2, 2, 96, 96, 3), state (3, 8),
    chain (3, 5, 8, 15), reached [[True, True], [True, True], [True, False]]: the last chunk ended before offset 8.
    """

    episode: Tensor
    "(n,) int64 index into the episodes"
    decision: Tensor
    "(n,) int64"
    instruction: tuple[str, ...]
    memory: Tensor
    "(n, M, V, h, w, 3) uint8, frames of the last M decisions, oldest first, the first repeated at the start"
    state: Tensor
    "(n, S) float32"
    chain: Tensor
    "(n, K+1, H, D) float32"
    stochastic_step: Tensor
    "(n,) int64"
    behaviour_logprob: Tensor
    "(n,) float32, as stored by the worker"
    world_seed: Tensor
    "(n,) int64"
    future: Tensor
    "(n, F, V, h, w, 3) uint8 at the imagined offsets; the decision's own frame where there is none"
    seen: Tensor
    "(n, F) bool: a frame exists at the offset (it may lie beyond this decision's executed steps)"
    reached: Tensor
    "(n, F) bool: seen, and within this decision's executed steps"
    executed: Tensor
    "(n,) int64 env steps that ran, 1..E"

    def __len__(self) -> int:
        return len(self.episode)


def all_decisions(episodes: Sequence[Episode]) -> list[Pick]:
    """Every decision of every episode, in order."""
    return [(e, t) for e, episode in enumerate(episodes) for t in range(episode.num_decisions)]


def decisions_with_future(episodes: Sequence[Episode], spec: PolicySpec) -> list[Pick]:
    """The decisions that have at least one frame to imagine."""
    return [(e, t) for e, t in all_decisions(episodes) if any(n is not None for n in future_obs(episodes[e], t, spec))]


def future_obs(episode: Episode, t: int, spec: PolicySpec) -> list[int | None]:
    """Observation index at each imagined offset of decision t, None where none was taken."""
    start = int(episode.obs_step[episode.decision_obs[t]])
    return [episode.obs_at(start + offset) for offset in spec.imagined_offsets]


def memory_obs(episode: Episode, t: int, memory: int) -> list[int]:
    """Observation indices of the M memory frames of decision t, oldest first."""
    return [int(episode.decision_obs[max(t - back, 0)]) for back in reversed(range(memory))]


def success_decision(episode: Episode) -> int:
    """The decision during which the first success came, -1 if none: the last that starts before the success step."""
    if episode.success_step < 0:
        return -1
    starts = episode.obs_step[episode.decision_obs]
    return max(int(np.searchsorted(starts, episode.success_step)) - 1, 0)


def gather(episodes: Sequence[Episode], picks: Sequence[Pick], spec: PolicySpec) -> Decisions:
    """The picked decisions as one batch.  Raises ValueError on an empty pick or frames that do not fit `spec`."""
    if not picks:
        raise ValueError("picks = []: give at least one decision")
    memory, future, seen, reached, state = [], [], [], [], []
    for e, t in picks:
        episode = episodes[e]
        if episode.frames.shape[1:3] != (len(spec.views), spec.resolution):
            raise ValueError(
                f"episode frames {episode.frames.shape}: the policy takes views {spec.views} at {spec.resolution} px"
            )
        now = int(episode.decision_obs[t])
        ahead = future_obs(episode, t, spec)
        memory.append(episode.frames[memory_obs(episode, t, spec.memory)])
        future.append(episode.frames[[now if n is None else n for n in ahead]])
        seen.append([n is not None for n in ahead])
        limit = int(episode.executed[t])
        reached.append([n is not None and o <= limit for n, o in zip(ahead, spec.imagined_offsets, strict=True)])
        state.append(episode.state[now])

    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(np.stack([getattr(episodes[e], name)[t] for e, t in picks])).to(dtype)

    return Decisions(
        episode=torch.tensor([e for e, _ in picks]),
        decision=torch.tensor([t for _, t in picks]),
        instruction=tuple(episodes[e].instruction for e, _ in picks),
        memory=torch.from_numpy(np.stack(memory)),
        state=torch.from_numpy(np.stack(state).astype(np.float32)),
        chain=column("chain", torch.float32),
        stochastic_step=column("stochastic_step", torch.int64),
        behaviour_logprob=column("behaviour_logprob", torch.float32),
        world_seed=column("world_seed", torch.int64),
        future=torch.from_numpy(np.stack(future)),
        seen=torch.tensor(seen),
        reached=torch.tensor(reached),
        executed=column("executed", torch.int64),
    )


def final_memory(episode: Episode, spec: PolicySpec) -> tuple[NDArray[np.uint8], NDArray[np.float32]] | None:
    """Memory frames (M, V, h, w, 3) and state (S,) of the moment after the last decision, None if it was not observed.

    It is what a decision there would have read: the frames of the last M - 1 decisions, then the final one.
    """
    final = episode.obs_at(episode.env_steps)
    if final is None:
        return None
    past = memory_obs(episode, episode.num_decisions - 1, spec.memory)[1:]
    return episode.frames[[*past, final]], episode.state[final].astype(np.float32)


def to_time_major(flat: Tensor, episode: Tensor, decision: Tensor, num_episodes: int) -> tuple[Tensor, Tensor]:
    """Values (n,) of picks (episode, decision) -> (T, B) padded with 0, and the mask (T, B) of where there was one."""
    length = int(decision.max()) + 1
    padded = torch.zeros(length, num_episodes, dtype=flat.dtype, device=flat.device)
    mask = torch.zeros(length, num_episodes, dtype=torch.bool, device=flat.device)
    padded[decision, episode] = flat
    mask[decision, episode] = True
    return padded, mask


def to_flat(padded: Tensor, episode: Tensor, decision: Tensor) -> Tensor:
    """Inverse of `to_time_major`: (T, B) -> (n,)."""
    return padded[decision, episode]
