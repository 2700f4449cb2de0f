"""LeRobotDataset v3.0: public datasets come in as far as they go, and what cannot be read is refused."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import imageio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envs.build import make_env
from envs.reach import ReachConfig
from tests.lerobot_samples import (
    AS_IT_IS,
    CHEESE,
    LIBERO,
    SOUP,
    assert_same,
    libero_demo,
    public_rows,
    write_public,
)
from wamrl_ray.__main__ import WRONG_USAGE, main
from wamrl_ray.lerobot_dataset import export_dataset
from wamrl_ray.lerobot_import import import_dataset
from wamrl_ray.lerobot_source import ImportConfig


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lerobot") / "exported"
    export_dataset([libero_demo(0, 8), libero_demo(1, 11, task=1)], out)
    return out


def test_a_public_dataset_gives_every_frame_and_all_but_the_last_action(tmp_path: Path) -> None:
    episodes = [public_rows(0, 5, task=2), public_rows(1, 4, task=1), public_rows(2, 6, task=0)]
    found = list(import_dataset(write_public(tmp_path / "public", episodes), AS_IT_IS, LIBERO))
    assert [(episode, demo.task_id, demo.instruction) for episode, demo in found] == [(0, 0, SOUP), (2, 1, CHEESE)]
    for (_, demo), wanted in zip(found, (episodes[0], episodes[2]), strict=True):
        rows = len(wanted["action"])
        np.testing.assert_array_equal(demo.frames, wanted["images"])
        np.testing.assert_array_equal(demo.obs_step, np.arange(rows, dtype=np.int32))
        np.testing.assert_array_equal(demo.state, wanted["state"])
        np.testing.assert_array_equal(demo.action, wanted["action"][:-1])
        np.testing.assert_array_equal(demo.label, demo.action)
        assert demo.success and demo.init_state_id == demo.seed == -1 and demo.env == "libero_object"


def test_an_imported_public_dataset_can_be_exported_and_comes_back(tmp_path: Path) -> None:
    public = write_public(tmp_path / "public", [public_rows(0, 5, task=2)])
    ((_, demo),) = import_dataset(public, AS_IT_IS, LIBERO)
    export_dataset([demo], tmp_path / "exported")
    ((_, again),) = import_dataset(tmp_path / "exported", AS_IT_IS)
    assert_same(demo, again)


def test_other_column_names_are_found_or_named(tmp_path: Path) -> None:
    episode = public_rows(0, 3, task=2)
    usual = write_public(tmp_path / "a", [episode], keys=("image", "wrist_image"), names=("state", "actions"))
    odd = write_public(tmp_path / "b", [episode], keys=("images.front", "images.hand"))
    with pytest.raises(ValueError, match=r"no column observation.images.image .*images.front.*--cameras"):
        import_dataset(odd, AS_IT_IS, LIBERO)
    for folder, config in ((usual, AS_IT_IS), (odd, ImportConfig(cameras=("images.front", "images.hand")))):
        ((_, demo),) = import_dataset(folder, config, LIBERO)
        np.testing.assert_array_equal(demo.frames, episode["images"])


def test_images_are_averaged_over_areas_turned_and_thinned_as_asked(tmp_path: Path) -> None:
    episode = public_rows(0, 6, task=2)
    episode["images"][0, 0, :2, :2] = [[[10, 20, 30]]]
    config = ImportConfig(resolution=8, rotate_180=True, capture_every=2)
    ((_, demo),) = import_dataset(write_public(tmp_path / "public", [episode]), config, LIBERO)
    assert demo.obs_step.tolist() == [0, 2, 4] and demo.frames.shape == (3, 2, 8, 8, 3) and len(demo.state) == 6
    assert demo.frames[0, 0, 7, 7].tolist() == [10, 20, 30]
    mean = episode["images"][4, 1, 14:, :2].reshape(-1, 3).mean(0)
    np.testing.assert_allclose(demo.frames[2, 1, 0, 7], mean, atol=1)


def test_a_gripper_between_0_and_1_is_refused_or_turned_round(tmp_path: Path) -> None:
    episode = public_rows(0, 4, task=2)
    episode["action"][:, 6] = [1, 1, 0, 0]
    public = write_public(tmp_path / "public", [episode])
    with pytest.raises(ValueError, match="--gripper-open-is-one"):
        list(import_dataset(public, AS_IT_IS, LIBERO))
    ((_, demo),) = import_dataset(public, ImportConfig(gripper_open_is_one=True), LIBERO)
    assert demo.action[:, 6].tolist() == demo.label[:, 6].tolist() == [-1, -1, 1]
    np.testing.assert_array_equal(demo.action[:, :6], episode["action"][:-1, :6])


def test_videos_are_cut_into_their_episodes(tmp_path: Path) -> None:
    """Two episodes of 7 and 5 frames in one file: brightness tells a frame's number through the compression."""
    episodes = [public_rows(0, 7, task=2), public_rows(1, 5, task=0)]
    public, key = write_public(tmp_path / "public", episodes), "observation.images.image"
    info = json.loads((public / "meta/info.json").read_text(encoding="utf-8"))
    info["features"][key]["dtype"] = "video"
    info["video_path"] = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    (public / "meta/info.json").write_text(json.dumps(info), encoding="utf-8")
    (public / f"videos/{key}/chunk-000").mkdir(parents=True)
    film = [np.full((32, 32, 3), 20 * n, np.uint8) for n in range(12)]
    imageio.mimwrite(public / f"videos/{key}/chunk-000/file-000.mp4", film, fps=10)  # type: ignore[arg-type]
    places = {"chunk_index": [0, 0], "file_index": [0, 0], "from_timestamp": [0.0, 0.7]}
    (public / "meta/episodes/chunk-000").mkdir(parents=True)
    table = pa.table({"episode_index": [0, 1], **{f"videos/{key}/{name}": value for name, value in places.items()}})
    pq.write_table(table, public / "meta/episodes/chunk-000/file-000.parquet")
    (_, one), (_, two) = import_dataset(public, ImportConfig(resolution=16), LIBERO)
    level = [round(float(frame.mean()) / 20) for demo in (one, two) for frame in demo.frames[:, 0]]
    assert level == list(range(12))
    np.testing.assert_array_equal(two.frames[:, 1], episodes[1]["images"][:, 1])


# ------------------------------------------------------------------------------------------------ refused


def test_what_cannot_be_read_is_refused_with_the_remedy(exported: Path, tmp_path: Path) -> None:
    episodes = [public_rows(0, 3, task=2)]
    with pytest.raises(ValueError, match="no meta/info.json"):
        import_dataset(tmp_path, AS_IT_IS, LIBERO)
    with pytest.raises(ValueError, match=r"'v2.1'.*convert_dataset_v21_to_v30"):
        import_dataset(write_public(tmp_path / "old", episodes, version="v2.1"), AS_IT_IS, LIBERO)
    with pytest.raises(ValueError, match="no column action or actions"):
        import_dataset(write_public(tmp_path / "a", episodes, names=("observation.state", "act")), AS_IT_IS, LIBERO)
    public = write_public(tmp_path / "public", episodes)
    with pytest.raises(ValueError, match="--env"):
        import_dataset(public, AS_IT_IS)
    with pytest.raises(ValueError, match=r"observation.state has shape \[8\], reach wants \[2\]"):
        import_dataset(public, AS_IT_IS, make_env(ReachConfig(), "train").env_spec)
    with pytest.raises(ValueError, match="none of its 1 tasks is one of libero_object's: 'open the drawer'"):
        import_dataset(write_public(tmp_path / "b", episodes, tasks=("open the drawer",)), AS_IT_IS, LIBERO)
    with pytest.raises(ValueError, match="has the views"):
        import_dataset(public, ImportConfig(cameras=("observation.images.image",)), LIBERO)
    with pytest.raises(ValueError, match="exported from libero_object"):
        import_dataset(exported, AS_IT_IS, dataclasses.replace(LIBERO, name="libero_goal"))
    with pytest.raises(ValueError, match="gripper_open_is_one"):
        import_dataset(exported, ImportConfig(gripper_open_is_one=True))
    shutil.rmtree(public / "data")
    with pytest.raises(ValueError, match="download it whole"):
        import_dataset(public, AS_IT_IS, LIBERO)


def test_an_episode_that_does_not_hold_together_is_refused(exported: Path, tmp_path: Path) -> None:
    episode = public_rows(0, 3, task=2)
    episode["action"][1, 2] = np.nan
    with pytest.raises(ValueError, match="episode 0: action has a missing or non-finite value"):
        list(import_dataset(write_public(tmp_path / "nan", [episode]), AS_IT_IS, LIBERO))
    wide = public_rows(0, 3, task=2)
    wide["images"] = np.zeros((3, 2, 16, 32, 3), np.uint8)
    with pytest.raises(ValueError, match="32 x 16 pixels"):
        list(import_dataset(write_public(tmp_path / "wide", [wide]), AS_IT_IS, LIBERO))
    shutil.copytree(exported, tmp_path / "cut")
    file = tmp_path / "cut/data/chunk-000/file-000.parquet"
    whole = pq.read_table(file)
    pq.write_table(whole.slice(1), file)
    with pytest.raises(ValueError, match="episode 0 is not whole"):
        list(import_dataset(tmp_path / "cut", AS_IT_IS))
    pq.write_table(whole.slice(0, 7), file)
    with pytest.raises(ValueError, match="does not fit episode 0"):
        list(import_dataset(tmp_path / "cut", AS_IT_IS))


def test_the_command_refuses_in_one_line_and_leaves_nothing(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    public = write_public(tmp_path / "public", [public_rows(0, 3, task=1)], tasks=("a", "b"))
    out = tmp_path / "new"

    def refused(*argv: str) -> str:
        assert main(["dataset", *argv]) == WRONG_USAGE
        err = capsys.readouterr().err
        assert err.startswith("wamrl dataset: ") and err.count("\n") == 1
        assert not out.exists() and not list(tmp_path.glob(".*"))
        return err

    assert "--env" in refused("import", "--data", str(public), "--out", str(out))
    assert "no demo_" in refused("export", "--data", str(public), "--out", str(out))
    assert "not empty" in refused("import", "--data", str(exported), "--out", str(public))
    assert "you can write to" in refused("import", "--data", str(exported), "--out", "/proc/new/folder")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "wamrl-ray[lerobot]" in refused("import", "--data", str(exported), "--out", str(out))
