"""What a person sees while demonstrations are collected: a bar on a terminal, a line for each one elsewhere.

Fed by `collect` through `on_progress`; feeds nobody.
"""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from wamrl_ray.collect import Collected

FAULTS = ("reissued_tickets", "deadlines_missed", "worker_errors", "worker_restarts")


class CollectionProgress:
    """Context manager around one collection; call it with each `collect.Collected`."""

    def __init__(self, file: TextIO | None = None) -> None:
        self._console = Console(file=file or sys.stdout)
        self._started = time.monotonic()
        self._bar: Bar | None = None
        if self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=self._console)
            self._bar.add_task("starting", total=None)

    def __enter__(self) -> CollectionProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, progress: Collected) -> None:
        done, total = progress.kept + progress.new, progress.kept + progress.new + progress.missing
        text = status_text(progress, time.monotonic() - self._started) if progress.new else "starting"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=text)
        elif progress.new:
            self.say(f"episode {done}/{total}  {text}")

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def status_text(progress: Collected, elapsed_s: float) -> str:
    """Successes and rate of the new demonstrations, time left, and faults if there were any."""
    per_s = progress.new / max(elapsed_s, 1e-9)
    seconds = round(progress.missing / per_s)
    left = f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    text = f"successes {progress.successes}/{progress.new}  {60 * per_s:.1f} episodes/min  left {left}"
    faults = fault_text(progress)
    return f"{text}  {faults}" if faults else text


def fault_text(progress: Collected) -> str:
    """{"rollout/worker_errors": 2, ...} -> "worker errors 2, ..."; empty if nothing failed."""
    counts = ((name, int(progress.faults.get(f"rollout/{name}", 0))) for name in FAULTS)
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts if count)
