"""Demonstrations and datasets to try LeRobotDataset v3.0 with: noise of LIBERO's shapes, and what others publish."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from wamrl_ray.lerobot_source import ImportConfig
from wamrl_ray.types import Demonstration, EnvSpec

AS_IT_IS = ImportConfig()
SOUP, CHEESE = "pick up the alphabet soup and place it in the basket", "pick up the cream cheese"
LIBERO = EnvSpec(
    name="libero_object",
    simulator="mujoco",
    instructions=(SOUP, CHEESE),
    views=("agent", "wrist"),
    resolution=64,
    state_dim=8,
    action_dim=7,
    max_steps=280,
    init_states={"train": range(0, 40), "held_out": range(40, 50)},
)


def assert_same(one: Demonstration, other: Demonstration) -> None:
    for field in dataclasses.fields(Demonstration):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            np.testing.assert_array_equal(a, b, err_msg=field.name)
        else:
            assert a == b, field.name


def libero_demo(seed: int, steps: int, every: int = 4, task: int = 0) -> Demonstration:
    """Noise of LIBERO's shapes; with `steps` a multiple of `every` the last state is an observation too."""
    rng = np.random.default_rng(seed)
    obs_step = np.arange(0, steps + 1, every, dtype=np.int32)
    sizes = ((steps + 1, 8), (steps, 7), (steps, 7))
    numbers = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    return Demonstration(
        env="libero_object",
        simulator="mujoco 3.17.0",
        task_id=task,
        init_state_id=seed,
        seed=100 + seed,
        instruction=LIBERO.instructions[task],
        success=seed % 2 == 0,
        frames=rng.integers(0, 256, (len(obs_step), 2, 16, 16, 3), np.uint8),
        obs_step=obs_step,
        state=numbers[0],
        action=numbers[1],
        label=numbers[2],
        kind="policy",
        base="9f3a5c",
        disturbance='{"noise_std": 0.5}',
        versions={"simulator": "mujoco 3.17.0"},
    )


def png(image: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="PNG")
    return file.getvalue()


def public_rows(seed: int, rows: int, task: int, size: int = 16) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    action = rng.uniform(-1, 1, (rows, 7)).astype(np.float32)
    action[:, 6] = np.where(np.arange(rows) < rows // 2, -1.0, 1.0)
    return {
        "images": rng.integers(0, 256, (rows, 2, size, size, 3), np.uint8),
        "state": rng.standard_normal((rows, 8)).astype(np.float32),
        "action": action,
        "task": task,
    }


def write_public(
    folder: Path,
    episodes: list[dict[str, Any]],
    tasks: tuple[str, ...] = (CHEESE, "open the drawer", SOUP),
    keys: tuple[str, ...] = ("observation.images.image", "observation.images.wrist_image"),
    names: tuple[str, str] = ("observation.state", "action"),
    version: str = "v3.0",
) -> Path:
    """What others publish: a row per frame, PNG images, tasks under a named index; written without our exporter."""
    columns: dict[str, list[Any]] = {name: [] for name in (*keys, *names, "frame_index", "episode_index", "task_index")}
    for index, episode in enumerate(episodes):
        for row in range(len(episode["action"])):
            for view, key in enumerate(keys):
                columns[key].append({"bytes": png(episode["images"][row, view]), "path": None})
            columns[names[0]].append(episode["state"][row].tolist())
            columns[names[1]].append(episode["action"][row].tolist())
            columns["frame_index"].append(row)
            columns["episode_index"].append(index)
            columns["task_index"].append(episode["task"])
    shape = list(episodes[0]["images"].shape[2:])
    features = {
        **{key: {"dtype": "image", "shape": shape} for key in keys},
        **{name: {"dtype": "float32", "shape": [len(columns[name][0])]} for name in names},
    }
    (folder / "data/chunk-000").mkdir(parents=True)
    (folder / "meta").mkdir()
    pq.write_table(pa.table(columns), folder / "data/chunk-000/file-000.parquet")
    pd.DataFrame({"task_index": range(len(tasks))}, index=pd.Index(tasks, name="task")).to_parquet(
        folder / "meta/tasks.parquet"
    )
    info = {"codebase_version": version, "fps": 10, "features": features, "video_path": None}
    (folder / "meta/info.json").write_text(json.dumps(info), encoding="utf-8")
    return folder
