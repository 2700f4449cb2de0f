"""What a person sees while a policy is pretrained: a bar on a terminal, a line per save elsewhere.

Fed by `commands_pretrain.Recorder`; feeds nobody.
"""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from wamrl_ray.types import Metrics

SHOWN: tuple[tuple[str, str, str], ...] = (
    ("video", "pretrain/video_loss", ".3f"),
    ("action", "pretrain/action_loss", ".3f"),
    ("valid video", "pretrain/valid_video_loss", ".3f"),
    ("valid action", "pretrain/valid_action_loss", ".3f"),
    ("imagined/copied", "pretrain/valid_imagined_to_copied_mse", ".2f"),
    ("s/step", "time/step_s", ".3f"),
)
"""(heading, metric, format); what a step does not have is left out"""


class PretrainProgress:
    """Context manager around one training to step `end`."""

    def __init__(self, end: int, file: TextIO | None = None) -> None:
        self._end, self._said = end, False
        self._console = Console(file=file or sys.stdout)
        self._bar: Bar | None = None
        self._shown: Metrics = {}
        "the last value of each, so that validation stays on the bar between saves"
        if self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=self._console)
            self._bar.add_task("starting", total=end)

    def __enter__(self) -> PretrainProgress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_metrics(self, step: int, metrics: Metrics) -> None:
        """`step` steps are done."""
        if self._bar is not None:
            self._shown |= metrics
            self._bar.update(self._bar.task_ids[0], completed=step, description=self._text(self._shown, step))
        elif not self._said or "pretrain/valid_video_loss" in metrics:
            self.say(f"step {step}/{self._end}  {self._text(metrics, step)}")
            self._said = True

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _text(self, metrics: Metrics, step: int) -> str:
        parts = [f"{heading} {metrics[name]:{spec}}" for heading, name, spec in SHOWN if name in metrics]
        seconds = round(metrics["time/step_s"] * (self._end - step))
        return "  ".join([*parts, f"left {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"])
