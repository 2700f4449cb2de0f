"""The layout of a LeRobotDataset v3.0 folder: paths, column names, and the features of our own demonstrations.

`lerobot_dataset` writes by it, `lerobot_import` reads by it; `docs/datasets.md` says what each column means.

    DIR/meta/info.json, stats.json, tasks.parquet, episodes/chunk-000/file-000.parquet
    DIR/meta/wamrl_episodes.parquet      ours: what rows cannot hold
    DIR/data/chunk-CCC/file-FFF.parquet  one row per env step
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wamrl_ray.types import Demonstration

VERSION = "v3.0"
INFO, TASKS, STATS = "meta/info.json", "meta/tasks.parquet", "meta/stats.json"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
RECORDS = "meta/wamrl_episodes.parquet"
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
FILES_PER_CHUNK, FILE_MB = 1000, 100
CONTROL_HZ = 20
"LIBERO's control rate: env steps, and so rows, per second"

ARRAYS = ("frames", "obs_step", "state", "action", "label")
"the fields of a Demonstration that rows hold; all others go into its record"
COUNTERS = {
    "timestamp": "float32", "frame_index": "int64", "episode_index": "int64", "index": "int64", "task_index": "int64",
}  # fmt: skip
STATE_NAMES = ["x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "gripper_qpos_0", "gripper_qpos_1"]
ACTION_NAMES = ["x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "gripper"]


def camera_key(view: int) -> str:
    """observation.images.image, image2, ...: the names LIBERO policies of that library ask for."""
    return "observation.images.image" + (str(view + 1) if view else "")


def require_pyarrow() -> Any:
    """The package, with what is used of it; ValueError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError("LeRobot datasets need pyarrow: run pip install 'wamrl-ray[lerobot]'") from None
    return pyarrow


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill that takes `out`'s place when the block ends; if the block raises, nothing is left.

    Raises ValueError if `out` exists and is not an empty folder, or cannot be made.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out = {str(out)!r} is not empty: name a new folder, or remove it first")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"out = {str(out)!r}: {error.strerror}; name a folder you can write to") from None
    try:
        yield temporary
        temporary.replace(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def features_of(demo: Demonstration) -> dict[str, Any]:
    """The `features` of info.json: dtype, shape and names per column."""
    views, height, width = demo.frames.shape[1:4]
    image = {"dtype": "image", "shape": [height, width, 3], "names": ["height", "width", "channel"]}
    states, actions = demo.state.shape[1], demo.action.shape[1]
    action_names = ACTION_NAMES if actions == 7 else [f"action_{i}" for i in range(actions)]
    state_names = STATE_NAMES if states == 8 else [f"state_{i}" for i in range(states)]
    return {
        **{camera_key(view): image for view in range(views)},
        "observation.state": {"dtype": "float32", "shape": [states], "names": state_names},
        "action": {"dtype": "float32", "shape": [actions], "names": action_names},
        "expert_action": {"dtype": "float32", "shape": [actions], "names": action_names},
        "frame_captured": {"dtype": "bool", "shape": [1], "names": None},
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
        **{key: {"dtype": dtype, "shape": [1], "names": None} for key, dtype in COUNTERS.items()},
    }
