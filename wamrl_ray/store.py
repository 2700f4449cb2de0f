"""EpisodeStore: the index of successful episodes the video learner replays, bounded in bytes, balanced over tasks.

Fed by the training loop with (summary, handle) of every finished episode; feeds the VideoPort with handles.  It never
looks inside a handle.  What leaves or does not enter is counted by reason and success.
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
    from wamrl_ray.config import StoreConfig

Handle = Any

DROPS = ("failure", "error_success", "error_failure", "too_large_success", "evicted_success")
"""Why, and with what outcome, an episode is not (or no longer) in the store; each is a counter in the metrics."""


class EpisodeStore:
    """Entries in order of arrival, which is ticket order in a synchronous run."""

    def __init__(self, config: StoreConfig) -> None:
        self._config = config
        self._entries: list[tuple[EpisodeSummary, Handle]] = []
        self._dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        return sum(summary.nbytes for summary, _ in self._entries)

    def add(self, summary: EpisodeSummary, handle: Handle) -> None:
        """Index a success; anything else is counted by reason.  Evicts the oldest of the best-filled task."""
        if summary.error is not None:
            self._dropped["error_success" if summary.success else "error_failure"] += 1
        elif not summary.success:
            self._dropped["failure"] += 1
        elif summary.nbytes > self._config.max_bytes:
            self._dropped["too_large_success"] += 1
        else:
            self._entries.append((summary, handle))
            while self.nbytes > self._config.max_bytes:
                self._evict()

    def sample(self, n: int, seed: np.random.SeedSequence) -> list[Handle]:
        """Up to n handles, tasks taken in turn, a function of (contents, seed).

        Within a task no episode comes twice before all have come once; a rare task's episodes repeat, but only until
        it is as frequent as the best-filled one, so the answer is shorter than n when the store is small.
        """
        rng = np.random.default_rng(seed)
        by_task = self._by_task()
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
        return [self._entries[i][1] for i in chosen]

    def state(self, folder: Path, persist: Callable[[Handle, Path], None]) -> dict[str, Any]:
        """JSON-able; every indexed episode not yet on disk is written with persist(handle, path)."""
        folder.mkdir(parents=True, exist_ok=True)
        for summary, handle in self._entries:
            path = episode_path(folder, summary)
            if not path.exists():
                persist(handle, path)
        return {"entries": [asdict(summary) for summary, _ in self._entries], "dropped": dict(self._dropped)}

    def load_state(self, state: Mapping[str, Any], folder: Path, restore: Callable[[Path], Handle]) -> None:
        """Raises ValueError if an indexed episode's file is gone."""
        entries = []
        for row in state["entries"]:
            summary = _summary(row)
            path = episode_path(folder, summary)
            if not path.exists():
                raise ValueError(f"{path}: the checkpoint's store lists this episode, but the file is gone: restore it")
            entries.append((summary, restore(path)))
        self._entries, self._dropped = entries, Counter(state["dropped"])

    @staticmethod
    def files(state: Mapping[str, Any]) -> list[str]:
        """Names of the episode files that a saved state needs."""
        return [episode_path(Path(), _summary(row)).name for row in state["entries"]]

    def metrics(self) -> Metrics:
        """`store/…`: episodes, tasks and bytes held, and drops since the start by reason and success."""
        held = {
            "store/episodes": float(len(self)),
            "store/tasks": float(len(self._by_task())),
            "store/bytes": float(self.nbytes),
        }
        return held | {f"store/dropped_{reason}": float(self._dropped[reason]) for reason in DROPS}

    def _by_task(self) -> dict[int, list[int]]:
        """Task id -> indices of its entries, oldest first."""
        by_task: dict[int, list[int]] = {}
        for i, (summary, _) in enumerate(self._entries):
            by_task.setdefault(summary.ticket.task_id, []).append(i)
        return by_task

    def _evict(self) -> None:
        best_filled = max(self._by_task().values(), key=lambda entries: (len(entries), -entries[0]))
        del self._entries[best_filled[0]]
        self._dropped["evicted_success"] += 1


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
