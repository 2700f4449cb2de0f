"""Checkpoints: complete or absent, whatever happens while one is written."""

import errno
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes import snapshot
from wamrl_ray import checkpoint


def parts(value: int = 0):
    return {"run.json": checkpoint.json_part({"value": value}), "learner.pt": checkpoint.torch_part({"v": value})}


def value(folder: Path | None) -> int:
    assert folder is not None
    return checkpoint.read_json(folder / "run.json")["value"]


def test_every_kind_of_part_reads_back_equal(tmp_path: Path):
    snap = snapshot("world", 1.5)
    state = {"w": torch.arange(3.0), "step": 4, "nested": [{"lr": 1e-3}, "adam"]}
    folder = checkpoint.save(
        tmp_path, 1,
        {
            "a.npz": checkpoint.snapshot_part(snap),
            "b.pt": checkpoint.torch_part(state),
            "c.json": checkpoint.json_part([1]),
        },
        keep=1,
    )  # fmt: skip
    read = checkpoint.read_snapshot(folder / "a.npz")
    assert (read.component, read.digest, read.layout) == (snap.component, snap.digest, snap.layout)
    assert np.array_equal(read.buffer, snap.buffer)
    loaded = checkpoint.read_torch(folder / "b.pt")
    assert torch.equal(loaded["w"], state["w"]) and loaded["nested"] == state["nested"]
    assert checkpoint.read_json(folder / "c.json") == [1]


def test_the_newest_is_loaded_and_only_the_last_are_kept(tmp_path: Path):
    for i in (1, 2, 9, 10):
        checkpoint.save(tmp_path, i, parts(i), keep=2)
    assert value(checkpoint.load_latest(tmp_path)) == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_000009", "iter_000010"]
    assert checkpoint.load_latest(tmp_path / "nowhere") is None


def test_a_checkpoint_killed_while_written_is_never_seen_and_its_remains_are_removed(tmp_path: Path):
    checkpoint.save(tmp_path, 1, parts(1), keep=3)

    def killed(file) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, parts(2) | {"z": killed}, keep=3)
    assert value(checkpoint.load_latest(tmp_path)) == 1
    checkpoint.save(tmp_path, 3, parts(3), keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_000001", "iter_000003"]


@pytest.mark.parametrize("part", ["first", "last"])
def test_a_full_disk_leaves_the_last_good_checkpoint_and_one_clear_message(tmp_path: Path, part: str):
    checkpoint.save(tmp_path, 1, parts(1), keep=1)

    def full(file) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    message = r"No space left.*last good one is .*iter_000001.*--resume auto"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.save(tmp_path, 2, parts(2) | {"a" if part == "first" else "z": full}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["iter_000001"]
    assert value(checkpoint.load_latest(tmp_path)) == 1


class NearlyFull(io.BytesIO):
    """Takes 1000 bytes: torch's writer dies of it in another way than of a disk that takes nothing."""

    def write(self, data) -> int:
        if self.tell() + len(data) > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@pytest.mark.parametrize("kind", ["json", "torch", "snapshot"])
def test_a_disk_that_fills_up_half_way_is_reported_the_same_way_by_every_kind_of_part(tmp_path: Path, kind: str):
    checkpoint.save(tmp_path, 1, parts(1), keep=1)
    writer = {
        "json": checkpoint.json_part("x" * 10**6),
        "torch": checkpoint.torch_part({"w": torch.zeros(10**6)}),
        "snapshot": checkpoint.snapshot_part(snapshot("world", 1.0, size=10**6)),
    }[kind]

    with pytest.raises(checkpoint.CheckpointError, match="No space left on device"):
        checkpoint.save(tmp_path, 2, {"z": lambda file: writer(NearlyFull())}, keep=1)
    assert value(checkpoint.load_latest(tmp_path)) == 1


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "no_manifest", "bad_manifest"])
def test_a_damaged_checkpoint_is_refused_by_name_and_passed_over_by_resume(tmp_path: Path, damage: str, caplog):
    checkpoint.save(tmp_path, 1, parts(1), keep=3)
    newest = checkpoint.save(tmp_path, 2, parts(2), keep=3)
    target = newest / "learner.pt"
    match damage:
        case "flip":
            content = bytearray(target.read_bytes())
            content[len(content) // 2] ^= 1
            target.write_bytes(content)
        case "truncate":
            target.write_bytes(target.read_bytes()[:-1])
        case "delete":
            target.unlink()
        case "no_manifest":
            (newest / "manifest.json").unlink()
        case "bad_manifest":
            (newest / "manifest.json").write_text("{")
    with pytest.raises(checkpoint.CheckpointError, match="iter_000002"):
        checkpoint.verify(newest)
    assert value(checkpoint.load_latest(tmp_path)) == 1
    assert damage == "no_manifest" or "iter_000002" in caplog.text


def test_the_manifest_lists_every_file_with_size_and_hash(tmp_path: Path):
    folder = checkpoint.save(tmp_path, 1, parts(), keep=1)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert manifest["files"]["run.json"]["bytes"] == (folder / "run.json").stat().st_size


def test_a_repeated_iteration_replaces_its_checkpoint(tmp_path: Path):
    checkpoint.save(tmp_path, 1, parts(1), keep=3)
    checkpoint.save(tmp_path, 1, parts(5), keep=3)
    assert value(checkpoint.load_latest(tmp_path)) == 5
