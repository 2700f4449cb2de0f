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
        done, total = progress.kept + progress.new, progress.kept + progress.new + progress.missing
        text = status_text(progress, time.monotonic() - self._started) if progress.new else "starting"
        self.show(done, total, text)
        if progress.new and not self.live:
            self.say(f"episode {done}/{total}  {text}")


def status_text(progress: Collected, elapsed_s: float) -> str:
    """Successes and rate of the new demonstrations, time left, and faults if there were any."""
    per_s = progress.new / max(elapsed_s, 1e-9)
    left = clock(progress.missing / per_s)
    text = f"successes {progress.successes}/{progress.new}  {60 * per_s:.1f} episodes/min  left {left}"
    faults = fault_text(progress)
    return f"{text}  {faults}" if faults else text


def fault_text(progress: Collected) -> str:
    """{"rollout/worker_errors": 2, ...} -> "worker errors 2, ..."; empty if nothing failed."""
    counts = ((name, int(progress.faults.get(f"rollout/{name}", 0))) for name in FAULTS)
    return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in counts if count)
