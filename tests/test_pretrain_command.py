"""`wamrl pretrain`: which demonstrations it takes, what it refuses, what it leaves, and that a kill changes nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.test_pretrain import demonstration
from wamrl_ray.__main__ import main
from wamrl_ray.demonstrations import save_demonstration
from wamrl_ray.demonstrations_select import Selection
from wamrl_ray.policy.bases import save_base
from wamrl_ray.policy.wam import WAM, WAMConfig
from wamrl_ray.progress_pretrain import PretrainProgress
from wamrl_ray.report_pretrain import PretrainLog, read_log, write_sheet

STEPS = 30
RECIPE = (
    "--config", "pretrain/reach", "--video-steps", "8", "--action-steps", "22", "--batch-size", "4",
    "--held-out-every", "3", "--save-every", "6", "--log-every", "1",
)  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine demonstrations named by task, then number; their seeds 0..8 tell them apart."""
    folder = tmp_path_factory.mktemp("data") / "reach"
    folder.mkdir()
    for seed in range(9):
        demo = replace(demonstration(seed, noisy=True), task_id=seed // 5)
        save_demonstration(demo, folder / f"demo_{seed // 5:02d}_000_{seed % 5:05d}.npz")
    return folder


def seeds(selection: Selection) -> tuple[list[int], list[int]]:
    return [d.seed for d in selection.training()], [d.seed for d in selection.held_out()]


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["pretrain", *args]) == 2
    return capsys.readouterr().err


def test_every_nth_demonstration_of_each_source_is_held_out(data: Path) -> None:
    one = Selection(sources=(data,), held_out_every=4)
    assert seeds(one) == ([0, 1, 2, 4, 5, 6, 8], [3, 7])
    assert seeds(replace(one, sources=(data, data))) == ([0, 1, 2, 4, 5, 6, 8] * 2, [3, 7] * 2)
    assert seeds(replace(one, tasks=(1,))) == ([5, 6, 8], [7]), "which are held out does not hang on the tasks"


def test_few_shot_is_so_many_of_each_task_and_leaves_validation_alone(data: Path) -> None:
    assert seeds(Selection(sources=(data, data), held_out_every=4, few_shot=2)) == ([0, 1, 5, 6], [3, 7, 3, 7])


def test_a_tar_file_stands_for_its_folder(data: Path, tmp_path: Path) -> None:
    archive = tmp_path / "demos.tar"
    with tarfile.open(archive, "w") as tar:
        for path in reversed(sorted(data.iterdir())):
            tar.add(path, f"reach/{path.name}")
    packed, plain = Selection(sources=(archive,), held_out_every=4), Selection(sources=(data,), held_out_every=4)
    assert seeds(packed) == seeds(plain)
    assert np.array_equal(next(packed.held_out()).frames, next(plain.held_out()).frames)
    (tmp_path / "not.tar").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"not.tar'?: neither a folder nor an uncompressed tar"):
        list(replace(packed, sources=(tmp_path / "not.tar",)).training())


def test_what_cannot_work_is_refused_before_it_starts(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = ("--data", str(data), "--out", str(tmp_path / "out"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "--device cuda: torch" in refused(capsys, *RECIPE, *rest, "--device", "cuda")
    assert "--until 31: the schedule has 30 steps" in refused(capsys, *RECIPE, *rest, "--until", "31")
    assert "policy.resolution: the policy asks" in refused(capsys, "--config", "pretrain/libero_object", *rest)
    assert "none to train on" in refused(capsys, *RECIPE, *rest, "--tasks", "7")
    assert "batch_size = 0: use at least 1" in refused(capsys, *RECIPE, *rest, "--batch-size", "0")
    assert not (tmp_path / "out").exists()


def test_a_base_brings_its_architecture_and_what_comes_out_can_be_gone_on_with(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    save_base(WAM(replace(WAMConfig.debug(), imagined_offsets=(4,)), seed=3), base)
    args = ["pretrain", *RECIPE, "--data", str(data), "--out", str(out), "--init", str(base)]
    assert main([*args, "--until", "1"]) == 0
    assert "stopped at step 1 of 30" in capsys.readouterr().out
    recipe = json.loads(torch.load(out / "state.pt", weights_only=True)["config"])
    assert recipe["policy"] == json.loads((out / "config.json").read_text())
    assert recipe["policy"]["imagined_offsets"] == [4], "the preset has [2, 4]"
    assert main([*args, "--data", str(data), "--until", "2", "--few-shot", "2"]) == 0, "data may be added"
    assert "10 demonstrations" in capsys.readouterr().out
    assert [line["step"] for line in read_log(out)] == [1, 2]
    assert "lr = 0.5, but" in refused(capsys, *args[1:], "--lr", "0.5")


def killed_at(step: int, args: list[str], out: Path) -> None:
    """Run the command in a process of its own and SIGKILL it once that step is in the log."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "wamrl_ray", *args], env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline and process.poll() is None:
        if any(line["step"] >= step for line in read_log(out)):
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL


@pytest.mark.timeout(900)
def test_a_pretraining_killed_at_any_moment_ends_in_the_weights_of_an_uninterrupted_one(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["pretrain", *RECIPE, "--data", str(data), "--out"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert main([*args, str(whole)]) == 0
    moment = random.randrange(7, 16)  # after a save and well before the end
    killed_at(moment, [*args, str(parts)], parts)
    assert main([*args, str(parts)]) == 0

    assert (parts / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes(), moment
    a, b = (torch.load(folder / "state.pt", weights_only=True) for folder in (parts, whole))
    for part in ("policy", "optimizer"):
        torch.testing.assert_close(a[part], b[part], rtol=0, atol=0, msg=f"{part}, killed at {moment}")
    logs = [
        [(row["step"], row["pretrain/video_loss"], row.get("pretrain/valid_video_loss")) for row in read_log(folder)]
        for folder in (parts, whole)
    ]
    assert logs[0] == logs[1] and [row[0] for row in logs[0]] == list(range(1, STEPS + 1))

    pictures = sorted(path.name for path in (parts / "imagination").iterdir())
    assert pictures == [f"step_{step:06d}.png" for step in range(6, STEPS + 1, 6)]
    assert list(parts.glob("tensorboard/events.*")) and not list(parts.glob(".*"))
    out = capsys.readouterr().out
    assert f"step {STEPS}/{STEPS}  video" in out and "valid action" in out and f"use it with --base {parts}" in out


def test_a_sheet_shows_every_column_and_view_in_its_place(tmp_path: Path) -> None:
    shape = (2, 2, 64, 64, 3)  # two windows, two views, of which the second is half as bright
    bright = np.broadcast_to(np.array([1.0, 0.5], np.float32)[None, :, None, None, None], shape)
    dark = np.zeros(shape, np.float32)
    path = write_sheet(tmp_path / "a" / "sheet.png", [("one", dark), ("two", bright)], ["first", "second"])
    sheet = np.asarray(Image.open(path))
    assert sheet.shape == (16 + 2 * (16 + 128), 4 * 128, 3)
    middle = sheet[16 + 16 + 64, [64, 192, 320, 448], 0].tolist()
    assert middle == [0, 0, 255, 128]


def test_a_log_continues_without_what_was_written_beyond_the_state(tmp_path: Path) -> None:
    log = PretrainLog(tmp_path, 0)
    for step in (1, 2, 3):
        log.write(step, {"pretrain/lr": step / 10})
    log.close()
    with (tmp_path / "pretrain.jsonl").open("a") as file:
        file.write('{"step": 4, "pre')
    PretrainLog(tmp_path, 2).close()
    assert read_log(tmp_path) == [{"step": 1, "pretrain/lr": 0.1}, {"step": 2, "pretrain/lr": 0.2}]


def test_progress_is_a_line_at_the_start_and_at_each_save_where_there_is_no_terminal() -> None:
    import io

    file = io.StringIO()
    with PretrainProgress(10, file=file) as progress:
        for step in (1, 2, 3):
            saved = {"pretrain/valid_video_loss": 0.5} if step == 3 else {}
            progress.on_metrics(step, {"pretrain/video_loss": 0.25, "time/step_s": 600.0, **saved})
    assert file.getvalue().splitlines() == [
        "step 1/10  video 0.250  s/step 600.000  left 1:30:00",
        "step 3/10  video 0.250  valid video 0.500  s/step 600.000  left 1:10:00",
    ]
