"""What a person sees while a run works: a live table on a terminal, one plain line per iteration elsewhere.

Fed by `run_training` through `on_metrics` and `on_evaluation`; feeds nobody.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wamrl_ray.types import Metrics

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("success", "rollout/success_rate", ".0%"),
    ("reward", "reward/reconstruction_mean", ".3f"),
    ("KL", "actor/approx_kl_nats", ".4f"),
    ("world loss", "video/flow_loss", ".4f"),
    ("staleness", "rollout/staleness_updates", ".0f"),
    ("steps/s", "env_steps_per_s", ".0f"),
)
"""(heading, metric, format); a metric that an iteration does not have (no success to train on) shows as a dash."""

ROWS = 12
"""iterations kept on screen"""


class Progress:
    """Context manager around one run of `iterations` in all."""

    def __init__(self, iterations: int, file: TextIO | None = None) -> None:
        self._iterations = iterations
        self._done = 0
        self._seconds: list[float] = []
        "of the iterations seen; those before a resume are not"
        self._started = time.monotonic()
        self._rows: deque[list[str]] = deque(maxlen=ROWS)
        self._console = Console(file=file or sys.stdout)
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, get_renderable=self._screen, refresh_per_second=2)
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def on_metrics(self, iteration: int, metrics: Metrics) -> None:
        """`iteration` counts from 0 and is finished."""
        self._done = iteration + 1
        shown = dict(metrics)
        if metrics.get("time/rollout_s", 0) > 0:
            shown["env_steps_per_s"] = metrics.get("rollout/env_steps", 0) / metrics["time/rollout_s"]
        self._seconds.append(metrics.get("time/iteration_s", 0.0))
        cells = [format(shown[name], spec) if name in shown else "-" for _, name, spec in COLUMNS]
        self._rows.append([f"{self._done}/{self._iterations}", *cells])
        if self._live is None:
            parts = [f"{heading} {cell}" for (heading, _, _), cell in zip(COLUMNS, cells, strict=True)]
            self.say(f"iteration {self._done}/{self._iterations}  {'  '.join(parts)}  left {self._time_left()}")

    def on_evaluation(self, name: str, result: Mapping[str, Any]) -> None:
        """`name` is base, final or iter_…; `result` is `evaluate`'s."""
        world = f"{result['env']} on {result['simulator']}, {result['split']}"
        self.say(f"{name} success {success_text(result)} ({world})")

    def _time_left(self) -> str:
        if not self._seconds:
            return "-"
        seconds = int(sum(self._seconds) / len(self._seconds) * (self._iterations - self._done))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def _screen(self) -> Group:
        table = Table(box=None, header_style="bold")
        for heading in ("iteration", *(heading for heading, _, _ in COLUMNS)):
            table.add_column(heading, justify="right")
        for row in self._rows:
            table.add_row(*row)
        elapsed = int(time.monotonic() - self._started)
        status = f"{self._done}/{self._iterations} iterations, {elapsed} s, time left {self._time_left()}"
        return Group(table, Text(status, style="dim"))


def success_text(result: Mapping[str, Any]) -> str:
    """{"successes": 7, "trials": 10, "low": 0.397, "high": 0.892} -> "7/10 = 70 % [40, 89]"."""
    rate = result["successes"] / max(result["trials"], 1)
    interval = f"[{100 * result['low']:.0f}, {100 * result['high']:.0f}]"
    return f"{result['successes']}/{result['trials']} = {100 * rate:.0f} % {interval}"
