"""Demonstrations on disk: files that can be trusted, and an index that follows from them."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from envs.build import make_env
from envs.reach import ReachConfig
from wamrl_ray.collect_expert import CollectConfig, demonstrate
from wamrl_ray.demonstrations import (
    INDEX,
    DemonstrationFolder,
    load_demonstration,
    load_demonstrations,
    save_demonstration,
)
from wamrl_ray.types import Demonstration

NOISY = CollectConfig(capture_every=2, noise_share=1.0)


def index_lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / INDEX).read_text(encoding="utf-8").splitlines()]


def contents(folder: Path) -> dict[str, Demonstration]:
    return {path.name: load_demonstration(path) for path in sorted(folder.glob("*.npz"))}


def assert_same(found: dict[str, Demonstration], expected: dict[str, Demonstration]) -> None:
    assert found.keys() == expected.keys()
    for name, demonstration in expected.items():
        for field, value in vars(demonstration).items():
            np.testing.assert_array_equal(getattr(found[name], field), value)



def test_a_file_round_trips_and_tells_how_it_was_made(tmp_path: Path) -> None:
    demo = demonstrate(make_env(ReachConfig(), "train"), 0, 1, 2, NOISY)
    save_demonstration(demo, tmp_path / "demo_x.npz")
    assert_same(contents(tmp_path), {"demo_x.npz": demo})
    assert json.loads(demo.disturbance)["noise_share"] == 1.0 and demo.versions["simulator"] == "numpy"
    (tmp_path / "demo_y.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match="demo_y.npz: is no demonstration"):
        list(load_demonstrations(tmp_path))
    with pytest.raises(ValueError, match="wamrl collect"):
        load_demonstrations(tmp_path / "nothing")


def test_an_index_line_says_what_its_file_holds(tmp_path: Path) -> None:
    demo = demonstrate(make_env(ReachConfig(), "train"), 1, 4, 2, CollectConfig(noise_share=0.0))
    DemonstrationFolder(tmp_path).add(demo, "demo_01_000_00002.npz")
    line = index_lines(tmp_path)[0]
    assert {name: line[name] for name in line if name not in ("versions", "disturbance", "steps")} == {
        "file": "demo_01_000_00002.npz", "env": "reach", "simulator": "numpy", "resolution": 32, "task_id": 1,
        "init_state_id": 4, "seed": 2, "success": True, "kind": "expert", "base": "",
        "instruction": "go to the blue disc",
    }  # fmt: skip
    assert line["steps"] == len(demo.label) and line["versions"] == dict(demo.versions)
    assert len(str(line["disturbance"])) == 16


@pytest.mark.parametrize("damage", ["missing", "torn", "unwritten", "file gone", "other fields", "junk"])
def test_an_index_is_repaired_from_the_files(damage: str, tmp_path: Path) -> None:
    folder, env = DemonstrationFolder(tmp_path), make_env(ReachConfig(), "train")
    for i in range(3):
        folder.add(demonstrate(env, 0, i, i, NOISY), f"demo_00_000_0000{i}.npz")
    sound = (tmp_path / INDEX).read_text(encoding="utf-8")
    lines = sound.splitlines(keepends=True)
    if damage == "missing":
        (tmp_path / INDEX).unlink()
    elif damage == "file gone":
        (tmp_path / "demo_00_000_00002.npz").unlink()
    else:
        other = '{"file": "demo_00_000_00002.npz"}\n'
        last = {"torn": lines[2][:40], "unwritten": "", "other fields": other, "junk": lines[2] + "{junk\n"}[damage]
        (tmp_path / INDEX).write_text(lines[0] + lines[1] + last, encoding="utf-8")
    entries = DemonstrationFolder(tmp_path).entries
    expected = sound if damage != "file gone" else lines[0] + lines[1]
    assert (tmp_path / INDEX).read_text(encoding="utf-8") == expected
    assert [json.loads(json.dumps(asdict(entry))) for entry in entries.values()] == index_lines(tmp_path)
