"""LeRobotDataset v3.0: our demonstrations go out as others can read them, and come back to the bit."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from PIL import Image

from envs.build import make_env
from envs.reach import ReachConfig
from tests.lerobot_samples import AS_IT_IS, CHEESE, LIBERO, SOUP, assert_same, libero_demo
from wamrl_ray.__main__ import main
from wamrl_ray.collect_expert import CollectConfig, demonstrate
from wamrl_ray.demonstrations import load_demonstrations, save_demonstration
from wamrl_ray.lerobot_dataset import export_dataset
from wamrl_ray.lerobot_import import import_dataset
from wamrl_ray.types import Demonstration


@pytest.fixture(scope="module")
def demos() -> list[Demonstration]:
    return [libero_demo(0, 8), libero_demo(1, 11, task=1), libero_demo(2, 3)]


@pytest.fixture(scope="module")
def exported(demos: list[Demonstration], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lerobot") / "exported"
    assert export_dataset(demos, out) == (3, 22)
    return out


def test_a_collection_comes_back_to_the_bit(tmp_path: Path) -> None:
    env = make_env(ReachConfig(), "train")
    demos = [demonstrate(env, task, 5, task, CollectConfig(capture_every=2, noise_share=1.0)) for task in (0, 1, 0)]
    export_dataset(demos, tmp_path / "exported")
    again = list(import_dataset(tmp_path / "exported", AS_IT_IS))
    assert [episode for episode, _ in again] == [0, 1, 2]
    for demo, (_, other) in zip(demos, again, strict=True):
        assert_same(demo, other)


def test_every_field_comes_back_an_observation_at_the_last_state_too(
    demos: list[Demonstration], exported: Path
) -> None:
    assert demos[0].obs_step[-1] == 8 == len(demos[0].action) and demos[1].obs_step[-1] < len(demos[1].action)
    for demo, (_, other) in zip(demos, import_dataset(exported, AS_IT_IS, LIBERO), strict=True):
        assert_same(demo, other)


def test_a_dataset_of_many_files_comes_back(
    demos: list[Demonstration], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wamrl_ray.lerobot_dataset.FILE_MB", 0)
    monkeypatch.setattr("wamrl_ray.lerobot_dataset.FILES_PER_CHUNK", 2)
    export_dataset(demos, tmp_path / "out")
    files = sorted(str(path.relative_to(tmp_path / "out" / "data")) for path in tmp_path.rglob("data/*/*.parquet"))
    assert files == ["chunk-000/file-000.parquet", "chunk-000/file-001.parquet", "chunk-001/file-000.parquet"]
    meta = pq.read_table(tmp_path / "out" / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    assert meta["data/chunk_index"] == [0, 0, 1] and meta["data/file_index"] == [0, 1, 0]
    for demo, (_, other) in zip(demos, import_dataset(tmp_path / "out", AS_IT_IS), strict=True):
        assert_same(demo, other)


def test_the_commands_write_and_read_folders_of_demonstrations(
    demos: list[Demonstration], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    for n, demo in enumerate(demos):
        save_demonstration(demo, tmp_path / "data" / f"demo_{demo.task_id:02d}_000_{n:05d}.npz")
    folders = [str(tmp_path / name) for name in ("data", "exported", "again")]
    assert main(["dataset", "export", "--data", folders[0], "--out", folders[1]]) == 0
    assert main(["dataset", "import", "--data", folders[1], "--out", folders[2]]) == 0
    assert "3 demonstrations" in capsys.readouterr().out
    assert len((tmp_path / "again" / "index.jsonl").read_text(encoding="utf-8").splitlines()) == 3
    both = (load_demonstrations(tmp_path / name) for name in ("data", "again"))
    for one, other in zip(*both, strict=True):
        assert_same(one, other)


def test_a_row_is_an_env_step_with_the_last_captured_images(demos: list[Demonstration], exported: Path) -> None:
    rows = pq.read_table(exported / "data/chunk-000/file-000.parquet").to_pylist()
    assert [row["index"] for row in rows] == list(range(22))
    assert [row["episode_index"] for row in rows] == [0] * 8 + [1] * 11 + [2] * 3
    assert [row["task_index"] for row in rows] == [0] * 8 + [1] * 11 + [0] * 3
    assert [row["next.success"] for row in rows[:8]] == [False] * 7 + [True]
    demo, second = demos[1], rows[8:19]
    for step, row in enumerate(second):
        assert row["frame_index"] == step and row["timestamp"] == np.float32(step / 20)
        assert row["frame_captured"] == (step in (0, 4, 8)) and not row["next.success"]
        np.testing.assert_array_equal(np.float32(row["observation.state"]), demo.state[step])
        np.testing.assert_array_equal(np.float32(row["action"]), demo.action[step])
        np.testing.assert_array_equal(np.float32(row["expert_action"]), demo.label[step])
        for view, key in enumerate(("observation.images.image", "observation.images.image2")):
            image = np.asarray(Image.open(io.BytesIO(row[key]["bytes"])))
            np.testing.assert_array_equal(image, demo.frames[step // 4, view])


def test_the_metadata_says_what_the_rows_are(demos: list[Demonstration], exported: Path) -> None:
    info = json.loads((exported / "meta/info.json").read_text(encoding="utf-8"))
    assert (info["codebase_version"], info["fps"], info["splits"]) == ("v3.0", 20, {"train": "0:3"})
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 22, 2)
    table = pq.read_table(exported / "data/chunk-000/file-000.parquet")
    assert set(info["features"]) == set(table.column_names)
    assert info["features"]["action"]["shape"] == [7] and table.schema.field("action").type == pa.list_(pa.float32(), 7)
    assert info["features"]["observation.images.image2"]["shape"] == [16, 16, 3]
    episodes = pq.read_table(exported / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    assert episodes["dataset_from_index"] == [0, 8, 19] and episodes["dataset_to_index"] == [8, 19, 22]
    assert episodes["length"] == [8, 11, 3] and episodes["tasks"] == [[SOUP], [CHEESE], [SOUP]]
    tasks = pd.read_parquet(exported / "meta/tasks.parquet")
    assert tasks.loc[CHEESE].task_index == 1 and list(tasks.index) == [SOUP, CHEESE]


def test_the_statistics_are_those_of_all_rows_and_all_captured_pixels(
    demos: list[Demonstration], exported: Path
) -> None:
    stats = json.loads((exported / "meta/stats.json").read_text(encoding="utf-8"))
    action = np.concatenate([demo.action for demo in demos])
    np.testing.assert_allclose(stats["action"]["mean"], action.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats["action"]["q90"], np.quantile(action, 0.9, axis=0), rtol=1e-5)
    assert stats["action"]["count"] == [22]
    pixels = np.concatenate([demo.frames[:, 1] for demo in demos]).reshape(-1, 3) / 255.0
    wrist = {name: np.array(value) for name, value in stats["observation.images.image2"].items()}
    assert wrist["mean"].shape == (3, 1, 1) and wrist["count"] == [len(demos[0].frames) + 3 + 1]
    np.testing.assert_allclose(wrist["mean"].ravel(), pixels.mean(0), rtol=1e-9)
    np.testing.assert_allclose(wrist["std"].ravel(), pixels.std(0), rtol=1e-9)
    np.testing.assert_array_equal(wrist["min"].ravel(), pixels.min(0))
    np.testing.assert_array_equal(wrist["max"].ravel(), pixels.max(0))
    np.testing.assert_allclose(wrist["q10"].ravel(), np.quantile(pixels, 0.1, axis=0), atol=1 / 255)
    episodes = pq.read_table(exported / "meta/episodes/chunk-000/file-000.parquet").to_pydict()
    np.testing.assert_allclose(episodes["stats/action/max"][1], demos[1].action.max(0))


def test_an_export_that_lost_our_records_keeps_its_labels_and_holds_no_image_twice(
    demos: list[Demonstration], exported: Path, tmp_path: Path
) -> None:
    shutil.copytree(exported, tmp_path / "edited")
    (tmp_path / "edited/meta/wamrl_episodes.parquet").unlink()
    (_, soup), (_, cheese), _ = import_dataset(tmp_path / "edited", AS_IT_IS, LIBERO)
    assert soup.obs_step.tolist() == [0, 4] and cheese.obs_step.tolist() == [0, 4, 8]
    np.testing.assert_array_equal(cheese.frames, demos[1].frames)
    np.testing.assert_array_equal(cheese.label, demos[1].label[:-1])
    np.testing.assert_array_equal(cheese.action, demos[1].action[:-1])
    assert soup.success and not cheese.success


def test_a_failed_export_leaves_nothing_and_a_used_folder_is_left_alone(tmp_path: Path) -> None:
    other_size = dataclasses.replace(libero_demo(3, 8), frames=np.zeros((3, 2, 32, 32, 3), np.uint8))
    with pytest.raises(ValueError, match=r"demonstration 1 has .*32.*16.*export each set of sizes by itself"):
        export_dataset([libero_demo(0, 8), other_size], tmp_path / "out")
    with pytest.raises(ValueError, match="no demonstrations"):
        export_dataset([], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ValueError, match="not empty"):
        export_dataset([libero_demo(0, 8)], tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"state": np.zeros((8, 8), np.float32)}, r"L steps want state \(L\+1, S\)"),
        ({"label": np.zeros((7, 7), np.float32)}, "label"),
        ({"obs_step": np.array([0, 4, 9], np.int32)}, "ascend from 0 to at most 8"),
        ({"obs_step": np.array([1, 4, 8], np.int32)}, "ascend from 0"),
        ({"frames": np.zeros((2, 2, 16, 16, 3), np.uint8)}, "one per frame"),
    ],
)
def test_arrays_that_do_not_belong_together_are_not_exported(
    change: dict[str, NDArray[Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        export_dataset([dataclasses.replace(libero_demo(0, 8), **change)], tmp_path / "out")


@pytest.mark.slow
def test_the_lerobot_library_reads_an_export(demos: list[Demonstration], exported: Path) -> None:
    reason = "the lerobot package is not installed; it asks for older torch and diffusers than this project"
    reader = pytest.importorskip("lerobot.datasets.lerobot_dataset", reason=reason)
    dataset = reader.LeRobotDataset("local/exported", root=exported, delta_timestamps={"action": [0.0, 0.05, 0.1]})
    assert len(dataset) == 22 and dataset.meta.total_episodes == 3 and dataset.fps == 20
    item = dataset[8 + 9]
    assert item["task"] == CHEESE
    np.testing.assert_array_equal(item["observation.state"].numpy(), demos[1].state[9])
    np.testing.assert_array_equal(item["action"].numpy(), demos[1].action[[9, 10, 10]])
    assert item["action_is_pad"].tolist() == [False, False, True]
    image = np.round(item["observation.images.image2"].numpy().transpose(1, 2, 0) * 255).astype(np.uint8)
    np.testing.assert_array_equal(image, demos[1].frames[2, 1])
