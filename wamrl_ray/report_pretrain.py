"""What a pretraining leaves for people beside the base: curves, and pictures of what the world model imagines.

    OUT/pretrain.jsonl                one line {"step": s, name: value, ...} per logged step
    OUT/tensorboard/                  the same as curves
    OUT/imagination/step_000250.png   a row per held-out window: current, true future and imagined frame, all views
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from wamrl_ray.atomic import replacing
from wamrl_ray.types import Metrics

JSONL = "pretrain.jsonl"
SIDE, BAR = 128, 16
"""least pixels of a frame's side, and of a label's height"""


class PretrainLog:
    """Opened at the step that a training continues from: what an earlier attempt wrote beyond it is dropped."""

    def __init__(self, out: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second to import

        self._path = out / JSONL
        kept = [line for line in read_log(out) if line["step"] <= step]
        with replacing(self._path) as file:
            file.write("".join(json.dumps(line) + "\n" for line in kept).encode())
        self._board = SummaryWriter(str(out / "tensorboard"), purge_step=step + 1)

    def write(self, step: int, metrics: Metrics) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **dict(sorted(metrics.items()))}, allow_nan=False) + "\n")
        for name, value in metrics.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()

    def close(self) -> None:
        self._board.close()


def read_log(out: Path) -> list[dict[str, float]]:
    """The lines of a pretraining, oldest first; a last one without its end was torn by a kill and is left out."""
    path = out / JSONL
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def write_sheet(
    path: Path,
    columns: Sequence[tuple[str, NDArray[np.float32]]],
    labels: Sequence[str],
) -> Path:
    """A PNG with one row per window: for each column (title, frames (n, V, h, w, 3) in [0, 1]) all V views.

    `labels`: n of them, one above each row.
    """
    n, views, height = columns[0][1].shape[:3]
    scale = max(1, -(-SIDE // height))
    # (n, column, V, h, w, 3) -> (n, h, column and view side by side, 3), each pixel a square
    tiles = np.stack([np.rint(np.clip(frames, 0.0, 1.0) * 255.0).astype(np.uint8) for _, frames in columns], axis=1)
    rows = tiles.transpose(0, 3, 1, 2, 4, 5).reshape(n, height, -1, 3).repeat(scale, axis=1).repeat(scale, axis=2)
    high, wide = rows.shape[1:3]
    sheet = Image.new("RGB", (wide, BAR + n * (BAR + high)))
    draw = ImageDraw.Draw(sheet)
    for i, (title, _) in enumerate(columns):
        draw.text((i * views * height * scale + 4, 2), title, fill="white")
    for i, label in enumerate(labels):
        top = BAR + i * (BAR + high)
        draw.text((4, top + 2), label, fill="white")
        sheet.paste(Image.fromarray(rows[i]), (0, top + BAR))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, "PNG")
    return path
