"""Demonstrations as a LeRobotDataset v3.0: the way out of our own files.  `lerobot_import` is the way back.

`wamrl dataset export` feeds it demonstrations; any reader of the format takes them from there.  One row per env step: a
row's images are the last captured ones and `frame_captured` tells the rows they were captured at; `action` ran,
`expert_action` is the label.  What a row cannot hold (the state after the last step, an observation captured there,
seeds and versions) is in `meta/wamrl_episodes.parquet`, which other readers do not look at.  Images are PNG, so
nothing is lost.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wamrl_ray.lerobot_layout import (
    ARRAYS,
    CONTROL_HZ,
    DATA_PATH,
    EPISODES,
    FILE_MB,
    FILES_PER_CHUNK,
    INFO,
    RECORDS,
    STATS,
    TASKS,
    VERSION,
    camera_key,
    features_of,
    new_folder,
    require_pyarrow,
)
from wamrl_ray.lerobot_stats import Stats, image_histogram, image_stats, vector_stats
from wamrl_ray.types import Demonstration

# ------------------------------------------------------------------------------------------------ rows of one episode


def check_demonstration(demo: Demonstration, features: dict[str, Any] | None, name: str) -> None:
    """ValueError if its arrays do not belong together, or have other sizes than `features`."""
    steps = len(demo.action)
    if steps < 1 or len(demo.state) != steps + 1 or demo.label.shape != demo.action.shape:
        raise ValueError(
            f"{name}: state {demo.state.shape}, action {demo.action.shape}, label {demo.label.shape} do not belong "
            "together: L steps want state (L+1, S), action and label (L, A); collect it again"
        )
    at = demo.obs_step
    if len(at) != len(demo.frames) or len(at) == 0 or at[0] != 0 or at[-1] > steps or (np.diff(at) <= 0).any():
        raise ValueError(
            f"{name}: obs_step {at.tolist()} must ascend from 0 to at most {steps}, one per frame "
            f"({len(demo.frames)}); collect it again"
        )
    if features is not None and features != features_of(demo):
        theirs, ours = (
            {key: value["shape"] for key, value in of.items()} for of in (features, features_of(demo))
        )
        raise ValueError(f"{name} has {ours}, the ones before it {theirs}: export each set of sizes by itself")


def number_columns(demo: Demonstration, *, episode: int, first: int, task: int, fps: int) -> dict[str, NDArray[Any]]:
    """Every column but the images, (L,) or (L, d)."""
    steps = np.arange(len(demo.action))
    return {
        "observation.state": demo.state[:-1],
        "action": demo.action,
        "expert_action": demo.label,
        "frame_captured": np.isin(steps, demo.obs_step),
        "next.success": (steps == steps[-1]) & demo.success,
        "timestamp": (steps / fps).astype(np.float32),
        "frame_index": steps,
        "episode_index": np.full_like(steps, episode),
        "index": first + steps,
        "task_index": np.full_like(steps, task),
    }


def encode_png(image: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return file.getvalue()


def make_table(demo: Demonstration, numbers: dict[str, NDArray[Any]], pngs: list[list[bytes]]) -> Any:
    """The episode's rows; `pngs` (N, V).  A held image is stored again, which costs next to nothing once packed."""
    pa = require_pyarrow()
    held = np.searchsorted(demo.obs_step, np.arange(len(demo.action)), side="right") - 1
    image_type = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    columns = {}
    for view in range(demo.frames.shape[1]):
        cells = [{"bytes": pngs[n][view], "path": f"frame-{demo.obs_step[n]:06d}.png"} for n in held]
        columns[camera_key(view)] = pa.array(cells, type=image_type)
    for key, values in numbers.items():
        flat = pa.array(np.ascontiguousarray(values).reshape(-1))
        wide = values.ndim == 2 and values.shape[1] > 1  # LeRobot keeps shape [1] as a plain number
        columns[key] = pa.FixedSizeListArray.from_arrays(flat, values.shape[1]) if wide else flat
    # What the Hub's viewer and `datasets.load_dataset` go by.
    table = pa.table(columns)
    described = {"info": {"features": {key: _hub_type(value) for key, value in features_of(demo).items()}}}
    return table.replace_schema_metadata({"huggingface": json.dumps(described)})


def _hub_type(feature: dict[str, Any]) -> dict[str, Any]:
    if feature["dtype"] == "image":
        return {"_type": "Image"}
    value = {"dtype": feature["dtype"], "_type": "Value"}
    length = feature["shape"][0]
    return value if length == 1 else {"feature": value, "length": length, "_type": "Sequence"}


# ------------------------------------------------------------------------------------------------ a dataset


class Writer:
    """Fills a new folder, one episode after the other; `close` writes what is known only at the end."""

    def __init__(self, folder: Path, fps: int) -> None:
        if fps < 1:
            raise ValueError(f"fps = {fps} must be at least 1; LIBERO runs at {CONTROL_HZ}")
        self._pa, self._folder, self._fps = require_pyarrow(), folder, fps
        self._features: dict[str, Any] | None = None
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._records: list[dict[str, Any]] = []
        self._numbers: list[dict[str, NDArray[Any]]] = []
        self._histograms: dict[str, NDArray[np.int64]] = {}
        self._images = 0
        self.rows = 0
        self._file: Any = None
        self._file_number, self._file_bytes = -1, FILE_MB << 20

    def add(self, demo: Demonstration) -> None:
        """Raises ValueError for arrays that do not fit together or have other sizes than the first one's."""
        episode = len(self._episodes)
        check_demonstration(demo, self._features, f"demonstration {episode}")
        self._features = self._features or features_of(demo)
        task = self._tasks.setdefault(demo.instruction, len(self._tasks))
        numbers = number_columns(demo, episode=episode, first=self.rows, task=task, fps=self._fps)
        pngs = [[encode_png(image) for image in views] for views in demo.frames]
        size = sum(len(png) for views in pngs for png in views)
        self._write_rows(make_table(demo, numbers, pngs), size)
        self._episodes.append(self._episode(demo, episode, numbers))
        last = pngs[-1] if demo.obs_step[-1] == len(demo.action) else []
        self._records.append(
            {
                "episode_index": episode,
                "length": len(demo.action),
                "record": record_of(demo),
                "state": demo.state[-1],
                "images": last,
            }
        )
        self._numbers.append(numbers)
        self.rows += len(demo.action)

    def _write_rows(self, table: Any, size: int) -> None:
        """One row group; a new file once the present one has its megabytes."""
        if self._file_bytes + size > FILE_MB << 20:
            self._close_file()
            self._file_number, self._file_bytes = self._file_number + 1, 0
            path = self._folder / DATA_PATH.format(**self._place())
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._pa.parquet.ParquetWriter(path, table.schema, compression="zstd")
        self._file.write_table(table)
        self._file_bytes += size

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()

    def _place(self) -> dict[str, int]:
        chunk, number = divmod(self._file_number, FILES_PER_CHUNK)
        return {"chunk_index": chunk, "file_index": number}

    def _episode(self, demo: Demonstration, episode: int, numbers: dict[str, NDArray[Any]]) -> dict[str, Any]:
        stats: dict[str, Stats] = {key: vector_stats(values) for key, values in numbers.items()}
        for view in range(demo.frames.shape[1]):
            key, histogram = camera_key(view), image_histogram(demo.frames[:, view])
            stats[key] = image_stats(histogram, len(demo.frames))
            self._histograms[key] = self._histograms.get(key, 0) + histogram
        self._images += len(demo.frames)
        return {
            "episode_index": episode,
            "tasks": [demo.instruction],
            "length": len(demo.action),
            **{f"data/{key}": value for key, value in self._place().items()},
            "dataset_from_index": self.rows,
            "dataset_to_index": self.rows + len(demo.action),
            "meta/episodes/chunk_index": 0,
            "meta/episodes/file_index": 0,
            **{f"stats/{key}/{name}": v.tolist() for key, of in stats.items() for name, v in of.items()},
        }

    def close(self) -> None:
        """Raises ValueError if there was no episode."""
        self._close_file()
        if self._features is None:
            raise ValueError("there are no demonstrations to export")
        stats = {
            key: vector_stats(np.concatenate([numbers[key] for numbers in self._numbers])) for key in self._numbers[0]
        } | {key: image_stats(histogram, self._images) for key, histogram in self._histograms.items()}
        self._write_json(STATS, {key: {name: v.tolist() for name, v in of.items()} for key, of in stats.items()})
        self._write_json(INFO, self._info())
        self._write_table(EPISODES, self._pa.Table.from_pylist(self._episodes))
        self._write_table(RECORDS, self._pa.Table.from_pylist(self._records))
        self._write_table(TASKS, tasks_table(self._tasks))

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": VERSION,
            "robot_type": None,
            "total_episodes": len(self._episodes),
            "total_frames": self.rows,
            "total_tasks": len(self._tasks),
            "chunks_size": FILES_PER_CHUNK,
            "data_files_size_in_mb": FILE_MB,
            "video_files_size_in_mb": 2 * FILE_MB,
            "fps": self._fps,
            "splits": {"train": f"0:{len(self._episodes)}"},
            "data_path": DATA_PATH,
            "video_path": None,
            "features": self._features,
        }

    def _write_json(self, name: str, value: object) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=4) + "\n", encoding="utf-8")

    def _write_table(self, name: str, table: Any) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._pa.parquet.write_table(table, path)


def tasks_table(tasks: dict[str, int]) -> Any:
    """Instructions as pandas would store the index of a table, which is what LeRobot reads them as."""
    name = "__index_level_0__"
    index = {"name": None, "field_name": name, "pandas_type": "unicode", "numpy_type": "object", "metadata": None}
    pandas = {"index_columns": [name], "column_indexes": [], "columns": [index]}
    table = require_pyarrow().table({"task_index": list(tasks.values()), name: list(tasks)})
    return table.replace_schema_metadata({"pandas": json.dumps(pandas)})


def record_of(demo: Demonstration) -> str:
    """JSON of everything that is no array."""
    names = [field.name for field in fields(demo) if field.name not in ARRAYS]
    return json.dumps({name: getattr(demo, name) for name in names}, sort_keys=True)


def export_dataset(demonstrations: Iterable[Demonstration], out: Path, *, fps: int = CONTROL_HZ) -> tuple[int, int]:
    """Write a LeRobotDataset v3.0 folder, whole or not at all.  (episodes, rows).

    Raises ValueError for a folder that is not empty, no demonstrations, or such as do not fit together.
    """
    with new_folder(out) as folder:
        writer = Writer(folder, fps)
        count = 0
        for count, demo in enumerate(demonstrations, start=1):  # noqa: B007 - the last value is the answer
            writer.add(demo)
        writer.close()
    return count, writer.rows
