"""The command line: help answers at once, every mistake is one line and exit code 2, nothing is started before that."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from envs.reach import ReachConfig
from envs.water_plants import WaterPlantsConfig
from wamrl_ray.__main__ import FAILED, WRONG_USAGE, main
from wamrl_ray.commands_eval import other_settings
from wamrl_ray.config import from_json, load_config
from wamrl_ray.metrics import explained, read_metrics
from wamrl_ray.policy.bases import save_base, shipped_bases
from wamrl_ray.policy.wam import WAM, WAMConfig
from wamrl_ray.preflight import env_config, split_env_settings

COMMANDS = ("train", "eval", "collect", "pretrain", "dataset", "calibrate", "doctor")


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that must be refused; its one message."""
    assert main(argv) == WRONG_USAGE
    err = capsys.readouterr().err
    assert err.startswith(f"wamrl {argv[0]}: ")
    assert err.count("\n") == 1 and "Traceback" not in err
    return err


def eval_args(out: Path, checkpoint: str, env: str = "reach") -> list[str]:
    args = {"checkpoint": checkpoint, "env": env, "split": "held_out", "episodes": "4", "json": str(out)}
    return ["eval", *(part for name, value in args.items() for part in (f"--{name}", value))]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An untrained policy of `reach`'s sizes, on disk."""
    folder = tmp_path_factory.mktemp("base")
    save_base(WAM(WAMConfig.debug(), seed=0), folder)
    return str(folder)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert f"  wamrl {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["fly"],
        ["train", "--workers", "0"],
        ["train", "--workers", "two"],
        ["eval", "--checkpoint", "tiny_reach"],
        ["eval", "--checkpoint", "x", "--env", "reach", "--split", "test", "--episodes", "1", "--json", "o"],
        ["doctor", "--verbose"],
    ],
)
def test_wrong_usage_is_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == WRONG_USAGE
    assert "usage: wamrl" in capsys.readouterr().err


def test_zero_workers_are_refused_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--config", "debug", "--workers", "0"])
    assert "use at least 1" in capsys.readouterr().err


def test_an_unknown_key_is_refused_and_no_folder_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    err = refused(capsys, "train", "--config", "debug", "--run-dir", str(run_dir), "--rollout.num-worker", "3")
    assert "did you mean rollout.num_workers?" in err
    assert not run_dir.exists()


def test_a_missing_checkpoint_lists_the_shipped_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "train", "--config", "debug", "--run-dir", str(tmp_path / "run"), "--base", "tiny_reech")
    assert "tiny_reech" in err and str(shipped_bases()) in err
    err = refused(capsys, *eval_args(tmp_path / "out.json", checkpoint="nowhere"))
    assert "nowhere" in err and str(shipped_bases()) in err
    assert not (tmp_path / "out.json").exists()


def test_a_base_of_another_environment_is_refused(
    base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["--base", base, "--env.resolution", "64"]
    err = refused(capsys, "train", "--config", "debug", "--run-dir", str(tmp_path / "run"), *changes)
    assert "resolution = 32" in err and "resolution = 64" in err
    err = refused(capsys, *eval_args(tmp_path / "out.json", checkpoint=base, env="counting"))
    assert "action_dim" in err and "counting" in err


def test_an_unknown_environment_is_refused_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "reach, counting" in refused(capsys, *eval_args(tmp_path / "out.json", "tiny_reach", env="kitchen"))


def test_settings_of_an_environment_are_options_of_eval_and_collect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--env.scoring", "rlbench_compat", "--env.views=[front]", "--env.max-steps", "9"]
    asked = WaterPlantsConfig(scoring="rlbench_compat", views=("front",), max_steps=9, resolution=32)
    assert env_config("water_plants", 32, words) == asked
    assert env_config("water_plants_rlbench_compat") == WaterPlantsConfig(scoring="rlbench_compat")
    assert split_env_settings(["--noise-std", "1", *words, "--tasks", "2"]) == (
        words,
        ["--noise-std", "1", "--tasks", "2"],
    )
    assert other_settings(asked, WaterPlantsConfig(resolution=32, max_steps=9)) == (
        "--env.scoring rlbench_compat --env.views ['front']"
    )
    assert other_settings(asked, ReachConfig()) == ""

    out = tmp_path / "out.json"
    err = refused(capsys, *eval_args(out, "tiny_reach"), "--env.max-step", "5")
    assert "unknown key env.max_step; did you mean env.max_steps?" in err
    assert "--fast 1: no option of `wamrl eval`" in refused(capsys, *eval_args(out, "tiny_reach"), "--fast", "1")
    collect = ["collect", "--env", "reach", "--episodes", "1", "--out", str(tmp_path / "data"), "--capture-every", "1"]
    assert main([*collect, "--env.max-steps", "3"]) == 0
    assert [len(np.load(file)["action"]) <= 3 for file in (tmp_path / "data").glob("*.npz")] == [True, True]


def test_a_run_that_saved_nothing_is_told_from_a_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "epoch.json").write_text("{}")
    err = refused(capsys, *eval_args(tmp_path / "out.json", checkpoint=str(tmp_path)))
    assert "the run has no complete checkpoint yet" in err


def test_a_missing_renderer_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_renderer(timeout_s: float = 60.0) -> str:
        raise RuntimeError("no off-screen OpenGL found: run `apt-get install libosmesa6`")

    monkeypatch.setattr("envs.render.probe_renderer", no_renderer)
    args = ["collect", "--env", "libero_object", "--tasks", "0", "--episodes", "1", "--out", str(tmp_path / "data")]
    assert "apt-get install libosmesa6" in refused(capsys, *args)
    assert not (tmp_path / "data").exists()


def test_a_task_without_number_or_expert_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rest = ["--episodes", "1", "--out", str(tmp_path / "data")]
    assert "tasks 0..1" in refused(capsys, "collect", "--env", "reach", "--tasks", "2", *rest)
    assert "no scripted expert" in refused(capsys, "collect", "--env", "counting", "--tasks", "0", *rest)


def test_pretraining_without_demonstrations_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["pretrain", "--config", "pretrain/reach", "--data", str(tmp_path), "--out", str(tmp_path / "out")]
    assert "run `wamrl collect" in refused(capsys, *args)


def test_a_used_run_folder_is_refused_without_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert "--resume auto" in refused(capsys, "train", "--config", "debug", "--run-dir", str(tmp_path))


def test_a_failure_keeps_its_traceback_in_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: object) -> int:
        raise RuntimeError("worker 1, ticket 7: the simulator died")

    monkeypatch.setattr("wamrl_ray.commands.run", explode)
    assert main(["train", "--config", "debug", "--run-dir", str(tmp_path)]) == FAILED
    err = capsys.readouterr().err
    assert "ticket 7: the simulator died" in err and "Traceback" not in err
    assert "in explode" in (tmp_path / "error.log").read_text(encoding="utf-8")


def test_doctor_passes_or_names_a_remedy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from wamrl_ray import doctor

    def missing() -> str:
        raise doctor.Problem("nothing draws: run `apt-get install libosmesa6`")

    monkeypatch.setattr(doctor, "_checks", lambda: iter([("python", lambda: "3.11"), ("renderer", missing)]))
    assert main(["doctor"]) == FAILED
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["ok    python: 3.11", "FAIL  renderer: nothing draws: run `apt-get install libosmesa6`"]
    monkeypatch.setattr(doctor, "_checks", lambda: iter([("python", lambda: sys.version)]))
    assert main(["doctor"]) == 0


def test_training_fills_a_run_folder_resumes_and_is_evaluated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    sizes = ["--rollout.episodes-per-iteration", "4", "--rollout.group-size", "2", "--evaluation.episodes", "2"]
    train = ["train", "--config", "debug", "--run-dir", str(run_dir), "--local", *sizes]
    assert main([*train, "--iterations", "1"]) == 0
    capsys.readouterr()
    assert main([*train, "--iterations", "2", "--resume", "auto"]) == 0

    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"world_digest {summary['world_digest']}", f"actor_digest {summary['actor_digest']}"]
    assert [line.split()[0] for line in lines[-4:-2]] == ["base", "final"]
    assert summary["episodes"] == 8 and summary["iterations"] == 2
    for name in ("base_success", "final_success"):
        assert set(summary[name]) == {"successes", "trials", "low", "high"} and summary[name]["trials"] == 2

    written = [line["iteration"] for line in read_metrics(run_dir)]
    assert written == [0, 1]
    unexplained = sorted(name for line in read_metrics(run_dir) for name in line if not explained(name))
    assert set(unexplained) == {"iteration"}
    config = from_json((run_dir / "config.json").read_text(encoding="utf-8"))
    assert config == load_config(["debug"], [*sizes, "--iterations", "2"])
    assert list(run_dir.glob("clips/*.mp4")) and (run_dir / "evaluation" / "final.json").exists()
    assert list(run_dir.glob("tensorboard/events.*")) and (run_dir / "curves.png").exists()

    out = tmp_path / "eval.json"
    assert main(eval_args(out, checkpoint=str(run_dir))) == 0
    result = json.loads(out.read_text(encoding="utf-8"))
    assert result["trials"] == 4 and result["split"] == "held_out"
    assert result["pair"]["actor"] == summary["actor_digest"]
    assert "note" not in capsys.readouterr().err
    assert main([*eval_args(out, checkpoint=str(run_dir)), "--env.max-steps", "4"]) == 0
    assert f"note: the run has --env.max_steps {config.env.max_steps}; " in capsys.readouterr().err

    assert "seed = 5" in refused(capsys, *train, "--iterations", "3", "--resume", "auto", "--seed", "5")
