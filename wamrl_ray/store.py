"""EpisodeStore: the index of the episodes the video learner is trained on, bounded in bytes, balanced over tasks.

Fed by the training loop with (summary, handle) of every finished episode; feeds the VideoPort with handles.  It never
looks inside a handle.  Successes and failures are two parts that never push one another out; failures are kept only
where the config asks for them, and then by quota.  What leaves or does not enter is counted by reason and success.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wamrl_ray.atomic import replacing
from wamrl_ray.rollout import EpisodeSummary
from wamrl_ray.types import Episode, Metrics, Pair, Ticket

if TYPE_CHECKING:
    from learners.video_config import Failures
    from wamrl_ray.config import StoreConfig

Handle = Any

DROPS = (
    "failure", "pair_quota_failure", "start_quota_failure", "error_success", "error_failure", "too_large_success",
    "too_large_failure", "evicted_success", "evicted_failure",
)  # fmt: skip
"""Why, and with what outcome, an episode is not (or no longer) in the store; each is a counter in the metrics."""


class EpisodeStore:
    """Entries in order of arrival, which is ticket order in a synchronous run."""

    def __init__(self, config: StoreConfig, failures: Failures) -> None:
        """`failures`: the video learner's rule; with a share of 0 no failure is kept."""
        self._failures_rule = failures
        self._dropped: Counter[str] = Counter()
        self._parts = {
            True: _Part(config.max_bytes, "success", self._dropped),
            False: _Part(config.max_failure_bytes, "failure", self._dropped),
        }

    def __len__(self) -> int:
        """Successes held."""
        return len(self._parts[True].entries)

    @property
    def nbytes(self) -> int:
        """Of the successes."""
        return self._parts[True].nbytes

    def add(self, summary: EpisodeSummary, handle: Handle) -> None:
        """Index the episode, or count why not.  A full part evicts the oldest of its best-filled task."""
        if summary.error is not None:
            self._dropped["error_success" if summary.success else "error_failure"] += 1
        elif summary.success or self._within_quota(summary):
            self._parts[summary.success].add(summary, handle)

    def sample(self, n: int, seed: np.random.SeedSequence, *, success: bool = True) -> list[Handle]:
        """Up to n handles of one outcome, tasks taken in turn, a function of (contents, seed).

        Within a task no episode comes twice before all have come once; a rare task's episodes repeat, but only until
        it is as frequent as the best-filled one, so the answer is shorter than n when the store is small.
        """
        return self._parts[success].sample(n, seed)

    def state(self, folder: Path, persist: Callable[[Handle, Path], None]) -> dict[str, Any]:
        """JSON-able; every indexed episode not yet on disk is written with persist(handle, path)."""
        folder.mkdir(parents=True, exist_ok=True)
        rows: dict[bool, list[dict[str, Any]]] = {}
        for success, part in self._parts.items():
            rows[success] = [asdict(summary) for summary, _ in part.entries]
            for summary, handle in part.entries:
                path = episode_path(folder, summary)
                if not path.exists():
                    persist(handle, path)
        return {"entries": rows[True], "failures": rows[False], "dropped": dict(self._dropped)}

    def load_state(self, state: Mapping[str, Any], folder: Path, restore: Callable[[Path], Handle]) -> None:
        """Raises ValueError if an indexed episode's file is gone."""
        loaded: dict[bool, list[tuple[EpisodeSummary, Handle]]] = {True: [], False: []}
        for row in [*state["entries"], *state["failures"]]:
            summary = _summary(row)
            path = episode_path(folder, summary)
            if not path.exists():
                raise ValueError(f"{path}: the checkpoint's store lists this episode, but the file is gone: restore it")
            loaded[summary.success].append((summary, restore(path)))
        for success, entries in loaded.items():
            self._parts[success].entries = entries
        self._dropped.clear()
        self._dropped.update(state["dropped"])

    @staticmethod
    def files(state: Mapping[str, Any]) -> list[str]:
        """Names of the episode files that a saved state needs."""
        return [episode_path(Path(), _summary(row)).name for row in [*state["entries"], *state["failures"]]]

    def metrics(self) -> Metrics:
        """`store/…`: episodes, tasks and bytes held, and drops since the start by reason and success."""
        held = {
            "store/episodes": float(len(self)),
            "store/tasks": float(len(self._parts[True].by_task())),
            "store/bytes": float(self.nbytes),
            "store/failures": float(len(self._parts[False].entries)),
            "store/failure_bytes": float(self._parts[False].nbytes),
        }
        return held | {f"store/dropped_{reason}": float(self._dropped[reason]) for reason in DROPS}

    def _within_quota(self, failure: EpisodeSummary) -> bool:
        """Whether a failure may enter.  A pair's quota refuses it; in a start's, the oldest makes room: the newer
        policy's failure tells more about where the policy goes now."""
        rule, entries = self._failures_rule, self._parts[False].entries
        if rule.share == 0:
            self._dropped["failure"] += 1
            return False
        if sum(held.pair_order == failure.pair_order for held, _ in entries) >= rule.per_pair:
            self._dropped["pair_quota_failure"] += 1
            return False
        of_start = [i for i, (held, _) in enumerate(entries) if _start(held) == _start(failure)]
        if len(of_start) >= rule.per_start:
            del entries[of_start[0]]
            self._dropped["start_quota_failure"] += 1
        return True


class _Part:
    """The episodes of one outcome."""

    def __init__(self, max_bytes: int, outcome: str, dropped: Counter[str]) -> None:
        self.entries: list[tuple[EpisodeSummary, Handle]] = []
        self._max_bytes, self._outcome, self._dropped = max_bytes, outcome, dropped

    @property
    def nbytes(self) -> int:
        return sum(summary.nbytes for summary, _ in self.entries)

    def add(self, summary: EpisodeSummary, handle: Handle) -> None:
        if summary.nbytes > self._max_bytes:
            self._dropped[f"too_large_{self._outcome}"] += 1
            return
        self.entries.append((summary, handle))
        while self.nbytes > self._max_bytes:
            best_filled = max(self.by_task().values(), key=lambda entries: (len(entries), -entries[0]))
            del self.entries[best_filled[0]]
            self._dropped[f"evicted_{self._outcome}"] += 1

    def sample(self, n: int, seed: np.random.SeedSequence) -> list[Handle]:
        rng = np.random.default_rng(seed)
        by_task = self.by_task()
        if not by_task:
            return []
        n = min(n, len(by_task) * max(len(entries) for entries in by_task.values()))
        tasks = [sorted(by_task)[i] for i in rng.permutation(len(by_task))]
        orders = {task: rng.permutation(len(by_task[task])) for task in tasks}
        chosen = []
        for i in range(n):
            turn, place = divmod(i, len(tasks))
            order = orders[tasks[place]]
            chosen.append(by_task[tasks[place]][order[turn % len(order)]])
        return [self.entries[i][1] for i in chosen]

    def by_task(self) -> dict[int, list[int]]:
        """Task id -> indices of its entries, oldest first."""
        by_task: dict[int, list[int]] = {}
        for i, (summary, _) in enumerate(self.entries):
            by_task.setdefault(summary.ticket.task_id, []).append(i)
        return by_task


def _start(summary: EpisodeSummary) -> tuple[int, int]:
    return summary.ticket.task_id, summary.ticket.init_state_id


def _summary(row: Mapping[str, Any]) -> EpisodeSummary:
    """From JSON, which has lists where the record has tuples and dicts where it has records."""
    epoch, seq = row["pair_order"]
    return EpisodeSummary(**{**row, "ticket": Ticket(**row["ticket"]), "pair_order": (epoch, seq)})


def episode_path(folder: Path, summary: EpisodeSummary) -> Path:
    """Where an episode lies on disk: named by ticket and pair, so that no two different episodes share a file."""
    epoch, seq = summary.pair_order
    return folder / f"ticket_{summary.ticket.ticket_id:09d}_pair_{epoch}_{seq}.npz"


def save_episode(episode: Episode, path: Path) -> None:
    """One plain `.npz` (no pickle), written atomically; `load_episode` returns an equal episode."""
    arrays = {name: value for name, value in vars(episode).items() if isinstance(value, np.ndarray)}
    meta = {name: value for name, value in vars(episode).items() if name not in arrays}
    meta |= {"ticket": asdict(episode.ticket), "pair": asdict(episode.pair), "versions": dict(episode.versions)}
    with replacing(path) as file:
        np.savez(file, allow_pickle=False, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)


def load_episode(path: Path) -> Episode:
    """Raises ValueError (numpy's) if the file is not such an archive, FileNotFoundError if there is none."""
    with np.load(path, allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files if name != "meta"}
        meta = json.loads(file["meta"].tobytes())
    meta |= {"ticket": Ticket(**meta["ticket"]), "pair": Pair(**meta["pair"])}
    return Episode(**arrays, **meta)
