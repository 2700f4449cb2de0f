"""What a person sees while demonstrations are collected: a bar on a terminal, a line for each one elsewhere.

Fed by `collect` through `on_progress`; feeds nobody.
"""

from __future__ import annotations

import time
from typing import TextIO

from wamrl_ray.collect import Collected
from wamrl_ray.progress_bar import StatusBar, clock

FAULTS = ("reissued_tickets", "deadlines_missed", "worker_errors", "worker_restarts")


class CollectionProgress(StatusBar):
    """Context manager around one collection; call it with each `collect.Collected`."""

    def __init__(self, file: TextIO | None = None) -> None:
        super().__init__(file=file)
        self._started = time.monotonic()

    def __call__(self, progress: Collected) -> None:
        if progress.new <= 1:  # workers take a while to start, which says nothing about the rate
            self._started = time.monotonic()
        done, total = progress.kept + progress.new, progress.kept + progress.new + progress.missing
        text = status_text(progress, time.monotonic() - self._started) if progress.new else "starting"
        self.show(done, total, text)
        if progress.new and not self.live:
            self.say(f"episode {done}/{total}  {text}")


def status_text(progress: Collected, elapsed_s: float) -> str:
    """Successes and rate of the new demonstrations, time left, and faults if there were any.

    `elapsed_s` counts from the first of them, which has no rate yet.
    """
    text = f"successes {progress.successes}/{progress.new}"
    if progress.new > 1:
        per_s = (progress.new - 1) / max(elapsed_s, 1e-9)
        text += f"  {60 * per_s:.1f} episodes/min  left {clock(progress.missing / per_s)}"
    faults = fault_text(progress)
    return f"{text}  {faults}" if faults else text


def fault_text(progress: Collected) -> str:
    """{"rollout/worker_errors": 2, ...} -> "worker errors 2, ..."; empty if nothing failed."""
    counts = ((name, int(progress.faults.get(f"rollout/{name}", 0))) for name in FAULTS)
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts if count)
