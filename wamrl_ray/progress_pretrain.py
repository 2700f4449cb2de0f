"""What a person sees while a policy is pretrained: a bar on a terminal, a line per save elsewhere.

Fed by `commands_pretrain.Recorder`; feeds nobody.
"""

from __future__ import annotations

from typing import TextIO

from wamrl_ray.progress_bar import StatusBar, clock
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


class PretrainProgress(StatusBar):
    """Context manager around one training to step `end`."""

    def __init__(self, end: int, file: TextIO | None = None) -> None:
        super().__init__(end, file)
        self._end, self._said = end, False
        self._shown: Metrics = {}
        "the last value of each, so that validation stays on the bar between saves"

    def on_metrics(self, step: int, metrics: Metrics) -> None:
        """`step` steps are done."""
        self._shown |= metrics
        self.show(step, self._end, self._text(self._shown, step))
        if not self.live and (not self._said or "pretrain/valid_video_loss" in metrics):
            self.say(f"step {step}/{self._end}  {self._text(metrics, step)}")
            self._said = True

    def _text(self, metrics: Metrics, step: int) -> str:
        parts = [f"{heading} {metrics[name]:{spec}}" for heading, name, spec in SHOWN if name in metrics]
        return "  ".join([*parts, f"left {clock(metrics['time/step_s'] * (self._end - step))}"])
