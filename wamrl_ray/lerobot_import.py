"""LeRobotDataset v3.0 -> demonstrations: our own exports back to the bit, and public ones as far as they go.

`wamrl dataset import` feeds it a folder on this machine; `demonstrations` stores what it yields.

Our own export holds everything (`lerobot_dataset`).  A public one holds a row per frame: images, state, action and a
task, no label and no state after the last action.  Its label is its action, and its last action is dropped: T rows are
T observations with T - 1 steps between them, and nothing is made up.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wamrl_ray.lerobot_layout import RECORDS, require_pyarrow
from wamrl_ray.lerobot_source import ImportConfig, Source, open_source, task_ids
from wamrl_ray.lerobot_video import read_frames
from wamrl_ray.types import Demonstration, EnvSpec, Frames

UNKNOWN = -1
"initial state and seed of a demonstration that was not made here"


def import_dataset(
    folder: Path, config: ImportConfig, env: EnvSpec | None = None
) -> Iterator[tuple[int, Demonstration]]:
    """(episode index, demonstration) of a dataset folder, in its order.

    `env` is needed for a dataset that was not exported here: it names the tasks, and episodes of other tasks are left
    out.  Raises ValueError before the first one for a folder that is none, of another version, without the columns or
    tasks asked for, or with other sizes than the environment's; later for an episode that does not hold together.
    """
    source = open_source(folder, config, env)
    if source.records:
        return _own_episodes(source, config)
    assert env is not None
    return _public_episodes(source, config, env)


# ------------------------------------------------------------------------------------------------ episodes


def _own_episodes(source: Source, config: ImportConfig) -> Iterator[tuple[int, Demonstration]]:
    for episode, rows in _episode_rows(source):
        kept = source.records.get(episode)
        if kept is None or kept["length"] != len(rows):
            raise ValueError(f"{RECORDS} does not fit episode {episode}: export again, or delete it and give --env")
        captured = np.asarray(rows["frame_captured"].to_numpy()).nonzero()[0]
        steps = captured[captured % config.capture_every == 0]
        frames, obs_step = _frames(source, config, episode, rows, steps), steps.astype(np.int32)
        if kept["images"] and len(rows) % config.capture_every == 0:
            last = np.stack([_decode(image, config) for image in kept["images"]])
            frames, obs_step = np.concatenate([frames, last[None]]), np.append(obs_step, np.int32(len(rows)))
        state = _matrix(rows, source.state, episode)
        demonstration = Demonstration(
            **json.loads(kept["record"]),
            frames=frames,
            obs_step=obs_step,
            state=np.concatenate([state, np.array(kept["state"], np.float32)[None]]),
            action=_matrix(rows, source.action, episode),
            label=_matrix(rows, "expert_action", episode),
        )
        yield episode, demonstration


def _public_episodes(source: Source, config: ImportConfig, env: EnvSpec) -> Iterator[tuple[int, Demonstration]]:
    ids = task_ids(source, env)
    for episode, rows in _episode_rows(source):
        task_index = rows["task_index"][0].as_py()
        if task_index not in ids:
            continue
        if len(rows) < 2:
            raise ValueError(f"episode {episode} has {len(rows)} row: a demonstration wants at least 2")
        action = _matrix(rows, source.action, episode)[:-1]
        if config.gripper_open_is_one:
            action[:, -1] = 1.0 - 2.0 * action[:, -1]
        elif env.name.startswith("libero") and action[:, -1].min() >= 0.0:
            raise ValueError(
                f"episode {episode}: the gripper's action is never negative, LIBERO's is -1 for open and +1 for "
                "closed; where the dataset says 1 for open and 0 for closed, use --gripper-open-is-one"
            )
        steps = np.arange(0, len(rows), config.capture_every)
        if "frame_captured" in rows.column_names:  # our own export, its records lost: a held image is no observation
            steps = steps[rows["frame_captured"].to_numpy()[steps]]
        labelled = "expert_action" in rows.column_names
        success = rows["next.success"].to_pylist() if "next.success" in rows.column_names else [True]
        demonstration = Demonstration(
            env=env.name,
            simulator="unknown",
            task_id=ids[task_index],
            init_state_id=UNKNOWN,
            seed=UNKNOWN,
            instruction=env.instructions[ids[task_index]],
            success=bool(np.any(success)),
            frames=_frames(source, config, episode, rows, steps),
            obs_step=steps.astype(np.int32),
            state=_matrix(rows, source.state, episode),
            action=action,
            label=_matrix(rows, "expert_action", episode)[:-1] if labelled else action.copy(),
            versions={"lerobot_dataset": str(source.info["codebase_version"])},
        )
        yield episode, demonstration


def _episode_rows(source: Source) -> Iterator[tuple[int, Any]]:
    """(episode index, its rows as a pyarrow table), in the order of the files."""
    pyarrow = require_pyarrow()
    for path in sorted(source.folder.glob("data/*/*.parquet")):
        table = pyarrow.parquet.read_table(path)
        episodes = table["episode_index"].to_numpy()
        starts = [0, *(np.flatnonzero(np.diff(episodes)) + 1), len(episodes)]
        for start, stop in zip(starts[:-1], starts[1:], strict=True):
            rows = table.slice(start, stop - start)
            episode = int(episodes[start])
            if (rows["frame_index"].to_numpy() != np.arange(len(rows))).any():
                raise ValueError(f"{path}: episode {episode} is not whole, frame_index does not count up from 0")
            yield episode, rows


def _matrix(rows: Any, key: str, episode: int) -> NDArray[np.float32]:
    """A column as (rows, d)."""
    try:
        values = np.array(rows[key].to_pylist(), np.float32)
    except ValueError:
        raise ValueError(f"episode {episode}: the rows of {key} differ in length") from None
    if not np.isfinite(values).all():
        raise ValueError(f"episode {episode}: {key} has a missing or non-finite value")
    return values.reshape(len(rows), -1)


# ------------------------------------------------------------------------------------------------ images


def _frames(source: Source, config: ImportConfig, episode: int, rows: Any, steps: NDArray[np.intp]) -> Frames:
    """(N, V, h, w, 3) of the rows `steps`."""
    views = []
    for key in source.cameras:
        if source.features[key]["dtype"] == "video":
            file, start_s = source.videos[key, episode]
            images = read_frames(file, start_s=start_s, count=len(rows), fps=float(source.info["fps"]))
            views.append([_adapt(image, config) for image in images[steps]])
        else:
            cells = rows[key].take(steps).to_pylist()
            files = [cell["bytes"] or (source.folder / cell["path"]).read_bytes() for cell in cells]
            views.append([_decode(file, config) for file in files])
    return np.stack([np.stack(view) for view in views], axis=1)


def _decode(data: bytes, config: ImportConfig) -> NDArray[np.uint8]:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return _adapt(np.asarray(image.convert("RGB")), config)


def _adapt(image: NDArray[np.uint8], config: ImportConfig) -> NDArray[np.uint8]:
    """(h, w, 3), turned and resized as the config says."""
    from PIL import Image

    if image.shape[0] != image.shape[1]:
        raise ValueError(f"images are {image.shape[1]} x {image.shape[0]} pixels: policies here see squares, crop them")
    if config.rotate_180:
        image = image[::-1, ::-1]
    if config.resolution not in (None, len(image)):
        size = (config.resolution, config.resolution)
        image = np.asarray(Image.fromarray(np.ascontiguousarray(image)).resize(size, Image.Resampling.BOX))
    return image
