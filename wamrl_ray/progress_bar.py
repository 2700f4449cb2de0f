"""One line of progress: a bar on a terminal, plain lines elsewhere.  The progress displays of commands feed it."""

from __future__ import annotations

import sys
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar


class StatusBar:
    """Context manager; `total` None: not known yet."""

    def __init__(self, total: int | None = None, file: TextIO | None = None) -> None:
        self._console = Console(file=file or sys.stdout)
        self._bar: Bar | None = None
        if self._console.is_terminal:
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = Bar(*columns, console=self._console)
            self._bar.add_task("starting", total=total)

    @property
    def live(self) -> bool:
        """Whether there is a bar; if not, lines are all that can be shown."""
        return self._bar is not None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, done: int, total: int, text: str) -> None:
        """Move the bar; nothing without one."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, total=total, description=text)

    def say(self, text: str) -> None:
        """One line that stays."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Seconds -> h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
