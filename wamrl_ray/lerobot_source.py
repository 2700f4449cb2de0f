"""A LeRobotDataset v3.0 folder, opened and checked before any image is read.

`wamrl dataset import` names the folder and how to change what is in it; `lerobot_import` reads the episodes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wamrl_ray.lerobot_layout import INFO, RECORDS, TASKS, camera_key, require_pyarrow
from wamrl_ray.types import EnvSpec

CAMERAS = (
    ("observation.images.image", "image", "images.agentview_rgb"),
    ("observation.images.image2", "observation.images.wrist_image", "wrist_image", "images.wrist_rgb"),
)
"names in public LIBERO datasets, of the first view and of the second"
STATES, ACTIONS = ("observation.state", "state"), ("action", "actions")
CONVERTER = "python -m lerobot.datasets.v30.convert_dataset_v21_to_v30 --repo-id=USER/NAME"


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """How images and actions are changed on their way in; the defaults change nothing."""

    resolution: int | None = None
    "pixels, h = w; None: as stored.  Averages over areas"
    rotate_180: bool = False
    "for images stored as the simulator draws them; public LIBERO datasets and ours are turned already"
    capture_every: int = 1
    "env steps between observations that are kept"
    gripper_open_is_one: bool = False
    "for actions whose last number is 1 for open and 0 for closed; LIBERO's own is -1 for open and +1 for closed"
    cameras: tuple[str, ...] = ()
    "column names of the views in the environment's order; empty: the usual ones"

    def __post_init__(self) -> None:
        if self.resolution is not None and self.resolution < 8:
            raise ValueError(f"resolution = {self.resolution} is too small: use at least 8 pixels")
        if self.capture_every < 1:
            raise ValueError(f"capture_every = {self.capture_every} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class Source:
    """An opened dataset folder.  `open_source` makes it, `import_dataset` reads it."""

    folder: Path
    info: dict[str, Any]
    "meta/info.json"
    tasks: dict[int, str]
    "instruction of each task_index"
    records: dict[int, dict[str, Any]]
    "of each episode_index, empty unless we exported it"
    cameras: tuple[str, ...]
    state: str
    action: str
    videos: dict[tuple[str, int], tuple[Path, float]] = field(default_factory=dict)
    "file and start in seconds of each (camera, episode index) that is stored as video"

    @property
    def features(self) -> dict[str, Any]:
        return dict(self.info["features"])


def open_source(folder: Path, config: ImportConfig, env: EnvSpec | None) -> Source:
    """Everything that can be checked before images are read.  Raises ValueError."""
    pyarrow = require_pyarrow()
    if not (folder / INFO).is_file():
        raise ValueError(f"data = {str(folder)!r} is no LeRobotDataset: there is no {INFO}")
    info = json.loads((folder / INFO).read_text(encoding="utf-8"))
    version = str(info.get("codebase_version"))
    if not version.startswith("v3."):
        raise ValueError(f"codebase_version = {version!r} of {folder}: v3.0 is read, convert it with {CONVERTER}")
    if not (folder / TASKS).is_file() or not any(folder.glob("data/*/*.parquet")):
        raise ValueError(f"data = {str(folder)!r}: {TASKS} or data/*/*.parquet is missing; download it whole")
    records: dict[int, dict[str, Any]] = {}
    if (folder / RECORDS).is_file():
        table = pyarrow.parquet.read_table(folder / RECORDS)
        records = {row["episode_index"]: row for row in table.to_pylist()}
    columns = info["features"].keys()
    if records:
        views = sum(1 for key in columns if key.startswith("observation.images."))
        usual: Sequence[Sequence[str]] = [(camera_key(view),) for view in range(views)]
        if config.gripper_open_is_one:
            raise ValueError(f"gripper_open_is_one: {folder} was exported here, its gripper is -1 for open: drop it")
    elif env is None:
        raise ValueError(f"{folder} was not exported here: name the environment whose tasks it holds with --env")
    else:
        usual = CAMERAS[: len(env.views)]
        if config.cameras and len(config.cameras) != len(env.views):
            raise ValueError(f"cameras = {list(config.cameras)}: {env.name} has the views {list(env.views)}")
    tasks = pyarrow.parquet.read_table(folder / TASKS).to_pydict()
    index = tasks.pop("task_index")
    source = Source(
        folder=folder,
        info=info,
        tasks=dict(zip(index, next(iter(tasks.values())), strict=True)),
        records=records,
        cameras=tuple(_column(columns, names) for names in ([(key,) for key in config.cameras] or usual)),
        state=_column(columns, STATES),
        action=_column(columns, ACTIONS),
    )
    if env is not None:
        _check_fits(source, env)
    return replace(source, videos=_video_places(source))


def _video_places(source: Source) -> dict[tuple[str, int], tuple[Path, float]]:
    cameras = [key for key in source.cameras if source.features[key]["dtype"] == "video"]
    place = ("chunk_index", "file_index", "from_timestamp")
    names = {key: [f"videos/{key}/{name}" for name in place] for key in cameras}
    places = {}
    for path in sorted(source.folder.glob("meta/episodes/*/*.parquet")) if cameras else ():
        columns = ["episode_index", *(name for of in names.values() for name in of)]
        for row in require_pyarrow().parquet.read_table(path, columns=columns).to_pylist():
            for key in cameras:
                chunk, number, start_s = (row[name] for name in names[key])
                file = source.info["video_path"].format(video_key=key, chunk_index=chunk, file_index=number)
                places[key, row["episode_index"]] = source.folder / file, float(start_s)
    return places


def _column(columns: Iterable[str], names: Sequence[str]) -> str:
    for name in names:
        if name in columns:
            return name
    raise ValueError(
        f"there is no column {' or '.join(names)}, only {', '.join(columns)}; cameras of another name: --cameras"
    )


def _check_fits(source: Source, env: EnvSpec) -> None:
    for key, wanted in ((source.state, env.state_dim), (source.action, env.action_dim)):
        found = source.features[key]["shape"]
        if list(found) != [wanted]:
            raise ValueError(f"{key} has shape {list(found)}, {env.name} wants [{wanted}]: is --env the right one?")
    if source.records:
        others = {json.loads(row["record"])["env"] for row in source.records.values()} - {env.name}
        if others:
            raise ValueError(f"--env {env.name}: the dataset was exported from {', '.join(sorted(others))}; drop --env")
    elif not task_ids(source, env):
        raise ValueError(
            f"none of its {len(source.tasks)} tasks is one of {env.name}'s: {next(iter(source.tasks.values()))!r} is "
            f"one of the former, {env.instructions[0]!r} of the latter; is --env the right one?"
        )


def task_ids(source: Source, env: EnvSpec) -> dict[int, int]:
    """task_index -> the environment's task id, for the tasks it has."""
    ids = {_plain(instruction): task for task, instruction in enumerate(env.instructions)}
    return {index: ids[_plain(text)] for index, text in source.tasks.items() if _plain(text) in ids}


def _plain(instruction: str) -> str:
    return instruction.lower().replace("_", " ").strip(" .")
