"""Which windows a video update is made of, as pure functions of their groups and a generator.

    task of every window, generator ──► draw ──► indices ──► `video_batch`
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray


def draw(groups: Sequence[Hashable], total: int, rng: np.random.Generator, *, balance: bool) -> NDArray[np.int64]:
    """(total,) indices into `groups`, whose i-th entry is the task of window i.

    Balanced: the tasks come in turn, in a drawn order, so that their counts differ by one at most.  Within a task (or,
    unbalanced, among all) no window comes a second time before each has come once, and so on for the third.
    """
    if total == 0:
        return np.zeros(0, np.int64)
    members: dict[Hashable, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group if balance else None, []).append(i)
    names = list(members)
    turn = [names[i] for i in rng.permutation(len(names))]
    each = -(-total // len(turn))
    columns = []
    for name in turn:
        own = np.array(members[name], np.int64)
        laps = [own[rng.permutation(len(own))] for _ in range(-(-each // len(own)))]
        columns.append(np.concatenate(laps)[:each])
    return np.stack(columns, axis=1).flatten()[:total]


def batch_parts(batch_size: int, *, failed: float, pretraining: float) -> tuple[int, int, int]:
    """Windows of a batch from (successes, failures, pretraining data); shares whose sum is below 1, rounded down.

    Example: 16, failed 0.25, pretraining 0.1: (11, 4, 1).
    """
    # Without the small number 0.29 x 100 would be 28.
    of_failed, of_pretraining = (int(share * batch_size + 1e-9) for share in (failed, pretraining))
    return batch_size - of_failed - of_pretraining, of_failed, of_pretraining


def is_held_out(run_seed: int, task_id: int, init_state_id: int, share: float) -> bool:
    """Whether a start is kept from training: a hash of (seed, task, start), so that nobody has to agree on a list."""
    digest = hashlib.sha256(f"held out {run_seed} {task_id} {init_state_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < share
