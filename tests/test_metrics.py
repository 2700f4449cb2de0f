"""Metrics are on disk once written, resume where they should, are explained, and the pictures made of them open."""

from __future__ import annotations

import io
import json
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest

from wamrl_ray.metrics import EXPLAINED, MetricsWriter, as_markdown, explained, read_metrics
from wamrl_ray.progress import COLUMNS, Progress, success_text
from wamrl_ray.report import CURVES, side_by_side, write_clip, write_curves, write_episode_clip

ROOT = Path(__file__).parent.parent


def test_a_written_line_is_on_disk_and_in_tensorboard_before_close(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(0, {"rollout/successes": 3.0, "actor/loss": 0.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert lines == [{"iteration": 0, "actor/loss": 0.5, "rollout/successes": 3.0}]
    assert next((tmp_path / "tensorboard").glob("events.*")).stat().st_size > 100
    writer.close()


def test_a_resumed_run_drops_what_was_written_beyond_its_checkpoint(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for iteration in range(4):
            writer.write(iteration, {"rollout/successes": float(iteration)})
    with MetricsWriter(tmp_path, first_iteration=2) as writer:
        writer.write(2, {"rollout/successes": 20.0})
    assert [(m["iteration"], m["rollout/successes"]) for m in read_metrics(tmp_path)] == [(0, 0), (1, 1), (2, 20)]


def test_a_torn_last_line_does_not_stop_a_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0, "a/b": 1.0}\n{"iteration": 1, "a/', encoding="utf-8")
    with MetricsWriter(tmp_path, first_iteration=2) as writer:
        writer.write(2, {"a/b": 3.0})
    assert [m["iteration"] for m in read_metrics(tmp_path)] == [0, 2]


def test_a_nan_is_refused(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer, pytest.raises(ValueError, match="Out of range"):
        writer.write(0, {"actor/loss": float("nan")})


def test_docs_hold_the_table() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == as_markdown()


def test_what_is_shown_and_drawn_is_in_the_table() -> None:
    for name in [name for _, name, _ in COLUMNS if "/" in name] + [name for name, _ in CURVES]:
        assert explained(name), name


def test_a_number_in_a_name_stands_for_every_number() -> None:
    numbered = next(name for name in EXPLAINED if "{k}" in name)
    assert explained(numbered.replace("{k}", "3")) == explained(numbered.replace("{k}", "0")) == EXPLAINED[numbered]
    assert explained("actor/no_such_metric") is None


def test_a_clip_shows_the_imagined_left_and_the_executed_right(tmp_path: Path) -> None:
    imagined = np.zeros((3, 2, 32, 32, 3), np.float32)
    imagined[..., 0] = 1.0
    executed = np.zeros((3, 2, 32, 32, 3), np.uint8)
    executed[..., 2] = 255
    frames = side_by_side(imagined, executed)
    assert frames.shape[0] == 3 and frames.dtype == np.uint8
    assert frames[0, -1, 0].tolist() == [255, 0, 0] and frames[0, -1, -1].tolist() == [0, 0, 255]
    assert frames.shape[1] >= 2 * 256, "large enough for a person"
    assert frames[0, :16, : frames.shape[2] // 2].max() > 200, "the label is drawn"
    # Three equal frames would be one long one in a GIF.
    executed[1, ..., :4, :4, 1] = 255
    for suffix in ("mp4", "gif"):
        back = iio.imread(write_clip(tmp_path / f"clip.{suffix}", imagined, executed))
        assert len(back) == 3
        left, right = back[0][-1, 4].astype(int), back[0][-1, -4].astype(int)
        assert left[0] > 200 and left[2] < 60 and right[2] > 200 and right[0] < 60


def test_an_episode_clip_shows_the_reached_moments_only(tmp_path: Path) -> None:
    frames = np.zeros((3, 2, 1, 16, 16, 3), np.uint8)
    reached = np.array([[True, True], [True, False], [False, False]])
    clip = {"imagined": frames, "executed": frames, "reached": reached, "reward": np.zeros(3, np.float32)}
    path = write_episode_clip(tmp_path / "clips" / "a.mp4", clip)
    assert path is not None and len(iio.imread(path)) == 3
    assert write_episode_clip(tmp_path / "b.mp4", {**clip, "reached": np.zeros((3, 2), bool)}) is None


def test_a_clip_of_unequal_halves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="both must be"):
        write_clip(tmp_path / "clip.mp4", np.zeros((3, 1, 8, 8, 3)), np.zeros((2, 1, 8, 8, 3)))


def test_curves_need_at_least_one_iteration(tmp_path: Path) -> None:
    assert write_curves(tmp_path) is None
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"rollout/success_rate": 0.5})
    assert write_curves(tmp_path) == tmp_path / "curves.png"
    assert iio.imread(tmp_path / "curves.png").ndim == 3


def test_progress_without_a_terminal_is_one_plain_line_per_iteration() -> None:
    out = io.StringIO()
    with Progress(4, file=out) as progress:
        times = {"time/rollout_s": 2.0, "time/iteration_s": 31.5}
        progress.on_metrics(1, {"rollout/success_rate": 0.25, "rollout/env_steps": 50.0, **times})
        progress.on_evaluation("final", {"successes": 7, "trials": 10, "low": 0.397, "high": 0.892, "env": "reach",
                                         "simulator": "numpy", "split": "train"})  # fmt: skip
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("iteration 2/4  success 25%") and lines[0].endswith("steps/s 25  left 0:01:03")
    assert "reward -" in lines[0]
    assert lines[1] == "final success 7/10 = 70 % [40, 89] (reach on numpy, train)"
    assert len(lines) == 2 and "\x1b" not in out.getvalue()


def test_no_trials_are_no_division() -> None:
    assert success_text({"successes": 0, "trials": 0, "low": 0.0, "high": 1.0}) == "0/0 = 0 % [0, 100]"
