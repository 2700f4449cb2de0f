"""Demonstrations: what ran, what the expert would have done, and a folder that fills up whatever is killed when."""

import io
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from envs.build import make_env
from envs.counting import CountingConfig
from envs.experts import LiberoObjectExpert
from envs.libero import LiberoConfig
from envs.reach import ReachConfig, ReachEnv
from tests.test_demonstrations import assert_same, contents, index_lines
from wamrl_ray import collect_expert
from wamrl_ray.__main__ import WRONG_USAGE, main
from wamrl_ray.collect import Collected, Collection, collect
from wamrl_ray.collect_expert import CollectConfig, Disturbance, MissedGrasp, check_policy, demonstrate, make_expert
from wamrl_ray.collect_progress import CollectionProgress, status_text
from wamrl_ray.demonstrations import load_demonstration, save_demonstration
from wamrl_ray.policy.bases import save_base
from wamrl_ray.policy.wam import WAM, WAMConfig

NOISY = CollectConfig(capture_every=2, noise_share=1.0)
REACH = Collection(env=ReachConfig(), tasks=(0, 1), episodes=2)


# ------------------------------------------------------------------------------------------------ one demonstration


def test_a_label_is_the_clean_expert_at_the_state_that_the_noise_led_to() -> None:
    env = make_env(ReachConfig(), "train")
    demo = demonstrate(env, 0, 5, 7, NOISY)
    assert demo.obs_step.tolist() == list(range(0, len(demo.obs_step) * 2, 2))
    assert len(demo.state) == len(demo.label) + 1 == len(demo.action) + 1
    assert (demo.action != demo.label).any() and np.abs(demo.action).max() <= 1
    env.reset_to(0, 5, 7)
    expert = make_expert(env)
    for state, action, label in zip(demo.state, demo.action, demo.label, strict=False):
        np.testing.assert_array_equal(expert.act(), label)
        np.testing.assert_array_equal(env._state(), state)
        env.step_chunk(action[None], ())


def test_without_noise_the_expert_acts_itself_and_a_seed_repeats_a_demonstration() -> None:
    env = make_env(ReachConfig(), "train")
    clean = demonstrate(env, 1, 3, 0, CollectConfig(noise_share=0.0))
    np.testing.assert_array_equal(clean.action, clean.label)
    assert clean.success and clean.instruction == "go to the blue disc" and clean.kind == "expert"
    one, two, other = (demonstrate(env, 1, 3, seed, NOISY) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.action, two.action)
    assert one.action.shape != other.action.shape or (one.action != other.action).any()


def test_a_policy_acts_in_chunks_and_the_expert_labels() -> None:
    env, policy = make_env(ReachConfig(), "train"), WAM(WAMConfig.debug(), seed=0)
    demo = demonstrate(env, 0, 5, 7, CollectConfig(capture_every=4, max_steps=8), policy)
    assert len(demo.action) <= 8 and (demo.action != demo.label).any() and demo.kind == "policy"
    with pytest.raises(ValueError, match="no scripted expert"):
        demonstrate(make_env(CountingConfig(), "train"), 0, 0, 0, NOISY)
    with pytest.raises(ValueError, match="capture_every = 3: the policy decides every 4 env steps"):
        check_policy(policy.spec, CollectConfig(capture_every=3))
    with pytest.raises(ValueError, match="memory 1"):
        check_policy(replace(policy.spec, memory=2), CollectConfig())


def test_of_a_policys_decisions_the_expert_takes_its_share() -> None:
    env, policy = make_env(ReachConfig(), "train"), WAM(WAMConfig.debug(), seed=0)

    def by_expert(share: float) -> list[bool]:
        config = CollectConfig(capture_every=4, expert_share=share, max_steps=24)
        chunks = []
        for state in range(6):
            demo = demonstrate(env, 0, state, 7, config, policy)
            same = (demo.action == demo.label).all(axis=1)
            chunks += [same[at : at + 4].tolist() for at in range(0, len(same), 4)]
        assert all(len(set(chunk)) == 1 for chunk in chunks), "chunk by chunk"
        return [chunk[0] for chunk in chunks]

    assert all(by_expert(1.0)) and not any(by_expert(0.0))
    assert 0 < sum(by_expert(0.5)) < len(by_expert(0.5))


def test_a_miss_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    never_closes = SimpleNamespace(act=lambda: -np.ones(7, np.float32), opening=(6, -1.0))
    monkeypatch.setattr(collect_expert, "make_expert", lambda env, offset=None: never_closes)
    arm: Any = None
    miss = MissedGrasp(arm, CollectConfig(miss_share=1.0, miss_steps=3), np.random.default_rng(0))
    label = np.zeros(7, np.float32)
    assert [bool((miss(label) == label).all()) for _ in range(5)] == [False, False, False, True, True]


def test_another_collection_seed_goes_on_with_the_states() -> None:
    spec = make_env(ReachConfig(), "train").env_spec
    states = [
        [t.init_state_id for t in Collection(env=ReachConfig(), tasks=(0,), episodes=3, seed=s).tickets(spec).values()]
        for s in (0, 1)
    ]
    assert states == [list(spec.init_states["train"][:3]), list(spec.init_states["train"][3:6])]


def test_the_gripper_is_forced_open_now_and_then_and_never_gets_noise() -> None:
    config = CollectConfig(open_rate=0.05, noise_share=1.0)
    an_arm: Any = SimpleNamespace(action_noise=LiberoObjectExpert.action_noise, opening=LiberoObjectExpert.opening)
    disturb = Disturbance(config, np.random.default_rng(0), an_arm)
    closing = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
    gripper = [float(disturb(closing)[6]) for _ in range(400)]
    assert set(gripper) == {-1.0, 1.0} and 0.1 < gripper.count(-1.0) / 400 < 0.6


@pytest.mark.sim
def test_a_missed_grasp_closes_on_nothing_and_the_second_try_succeeds_under_clean_labels() -> None:
    config = CollectConfig(
        miss_share=1.0, miss_m=(0.06, 0.09), noise_share=0.0, open_rate=0.0, capture_every=1000
    )
    env = make_env(LiberoConfig(resolution=16), "train")
    demo = demonstrate(env, 0, 18, 18, config)
    opening = demo.state[1:, 6] - demo.state[1:, 7]
    missing = np.flatnonzero((demo.action[:, 6] > 0) & (demo.label[:, 6] < 0))
    assert len(missing) == 10 and opening[missing[-1]] < 0.01, "fingers 8 mm apart: nothing between them"
    held = np.flatnonzero((demo.action[:, 6] > 0) & (demo.label[:, 6] > 0) & (demo.state[1:, 2] > 0.2))
    assert held[0] > missing[-1] and opening[held].min() > 0.03, "the object is between them"
    assert demo.success
    after = slice(int(missing[-1]) + 1, None)
    np.testing.assert_array_equal(demo.action[after], demo.label[after])
    env.reset_to(0, 18, 18)
    expert = make_expert(env)
    for action, label in zip(demo.action[: missing[-1] + 1], demo.label, strict=False):
        np.testing.assert_array_equal(expert.act(), label)
        env.step_chunk(action[None], ())
    env.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"capture_every": 0}, "capture_every = 0: use at least 1 env step"),
        ({"miss_share": 1.5}, "miss_share = 1.5: use a share"),
        ({"miss_m": (0.04, 0.01)}, "miss_m = (0.04, 0.01): use [lowest, highest]"),
        ({"max_steps": 0}, "max_steps = 0: use at least 1, or null"),
    ],
)
def test_a_disturbance_that_cannot_be_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        CollectConfig(**change)
    assert message in str(caught.value)


# ------------------------------------------------------------------------------------------------ a collection


def test_every_task_starts_from_the_training_states_in_turn_and_tasks_take_turns() -> None:
    spec = replace(make_env(ReachConfig(), "train").env_spec, init_states={"train": range(5, 7), "held_out": range(9)})
    tickets = replace(REACH, episodes=3, seed=2).tickets(spec)
    assert [(name, t.ticket_id, t.init_state_id, t.run_seed) for name, t in tickets.items()] == [
        ("demo_00_002_00000.npz", 0, 5, 200_000), ("demo_01_002_00000.npz", 1, 5, 200_000),
        ("demo_00_002_00001.npz", 2, 6, 200_001), ("demo_01_002_00001.npz", 3, 6, 200_001),
        ("demo_00_002_00002.npz", 4, 5, 200_002), ("demo_01_002_00002.npz", 5, 5, 200_002),
    ]  # fmt: skip
    for change, message in (({"episodes": 0}, "episodes = 0"), ({"seed": -1}, "seed = -1")):
        with pytest.raises(ValueError, match=message):
            replace(REACH, **change)


def test_a_killed_collection_goes_on_where_it_was_and_keeps_what_is_there(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    collect(REACH, whole, workers=1)

    class Killed(Exception):
        pass

    def kill(progress: Collected) -> None:
        if progress.new == 2:
            raise Killed

    with pytest.raises(Killed):
        collect(REACH, out, workers=1, on_progress=kill)
    stamps = {path.name: path.stat().st_mtime_ns for path in out.glob("*.npz")}
    assert len(stamps) == len(index_lines(out)) == 2
    done = collect(REACH, out, workers=1)
    assert (done.kept, done.new, done.missing) == (2, 2, 0)
    assert_same(contents(out), contents(whole))
    assert all((out / name).stat().st_mtime_ns == stamp for name, stamp in stamps.items())
    assert collect(REACH, out, workers=1).new == 0
    assert {line["file"] for line in index_lines(out)} == contents(out).keys()


def test_demonstrations_of_another_make_are_not_mixed_in(tmp_path: Path) -> None:
    save_base(WAM(WAMConfig.debug(), seed=0), tmp_path / "base")
    out = tmp_path / "out"
    collect(replace(REACH, episodes=1), out, workers=1)
    collect(replace(REACH, episodes=1, seed=4), out, workers=1)
    assert len(index_lines(out)) == 4, "another seed is more of the same"
    for change, message in (
        ({"config": CollectConfig(noise_std=0.25)}, r"noise_std = 0\.25, but .*00000.npz was made with 0\.5: use"),
        ({"env": ReachConfig(resolution=16)}, r"resolution = 16, but .* was made with 32"),
        ({"base": str(tmp_path / "base")}, r"base = .*base \([0-9a-f]{16}\), but .* was made with none: use another"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            collect(replace(REACH, **change), out, workers=1)
    assert len(index_lines(out)) == 4
    old = tmp_path / "old"
    old.mkdir()
    save_demonstration(replace(load_demonstration(out / "demo_00_000_00000.npz"), disturbance=""), old / "demo_1.npz")
    with pytest.raises(ValueError, match=r"disturbance = [0-9a-f]{16}, but .* was made with none"):
        collect(REACH, old, workers=1)


def test_a_simulator_that_fails_gets_the_same_ticket_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = ReachEnv._reset, iter([1, 2, 3])

    def fail(env: ReachEnv, task_id: int, init_state_id: int, seed: int) -> None:
        if init_state_id == 1 and next(failures, None) is not None:
            raise RuntimeError("the simulator fell over")
        real(env, task_id, init_state_id, seed)

    monkeypatch.setattr(ReachEnv, "_reset", fail)
    with pytest.raises(RuntimeError, match="ticket 2 failed 3 times: the simulator fell over"):
        collect(REACH, tmp_path, workers=1)
    failures = iter([1])
    assert collect(REACH, tmp_path, workers=1).faults == {"rollout/worker_errors": 1, "rollout/reissued_tickets": 1}
    assert len(contents(tmp_path)) == 4


def test_killed_workers_cost_no_more_than_their_episodes(tmp_path: Path, ray_cluster: None) -> None:
    collection = replace(REACH, episodes=8)
    collect(collection, tmp_path / "here", workers=1)

    def workers() -> set[int]:
        found = [p for p in psutil.process_iter(["cmdline"]) if "ray::Demonstrator" in str(p.info["cmdline"])]
        return {p.pid for p in found if psutil.Process().pid in (parent.pid for parent in p.parents())}

    ending = workers()  # of an earlier collection

    def kill(progress: Collected) -> None:
        if progress.new == 1:
            for pid in workers() - ending:  # both: one of them may still be starting, without an episode to lose
                os.kill(pid, signal.SIGKILL)

    done = collect(collection, tmp_path / "there", workers=2, on_progress=kill)
    assert (done.new, done.missing) == (16, 0)
    assert done.faults["rollout/worker_errors"] >= 1 and done.faults["rollout/reissued_tickets"] >= 1
    assert_same(contents(tmp_path / "there"), contents(tmp_path / "here"))


# ------------------------------------------------------------------------------------------------ the command


def test_the_command_collects_all_tasks_and_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["collect", "--env", "reach", "--out", str(tmp_path), "--resolution", "16", "--noise-share", "0"]
    assert main([*command, "--tasks", "1", "--episodes", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "episode 1/1  successes 1/1"
    assert lines[1:] == [f"1 of 1 new episodes succeeded; demonstrations are in {tmp_path}"]
    assert main([*command, "--episodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == ["2/4", "3/4", "4/4"]
    assert lines[-1] == f"3 of 3 new episodes succeeded, 1 were there already; demonstrations are in {tmp_path}"
    assert {demo.frames.shape[-2] for demo in contents(tmp_path).values()} == {16}
    assert main([*command, "--episodes", "2", "--noise-std", "1"]) == WRONG_USAGE
    error = capsys.readouterr().err
    assert error.startswith("wamrl collect: noise_std = 1.0, but ") and error.count("\n") == 1


def test_the_command_lets_a_policy_act_at_its_own_resolution(tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    save_base(WAM(WAMConfig.debug(), seed=0), base)
    args = ["collect", "--env", "reach", "--tasks", "0", "--episodes", "1", "--out", str(out), "--base", str(base)]
    assert main(args) == 0
    (line,) = index_lines(out)
    assert (line["kind"], line["resolution"]) == ("policy", 32) and len(str(line["base"])) == 16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--env", "reach", "--tasks", "0", "2"], "--tasks 2: reach has tasks 0..1"),
        (["--env", "counting"], "there is no scripted expert for it; use libero_object or water_plants or reach"),
        (["--env", "reach", "--mis-share", "0.5"], "unknown key mis_share; did you mean miss_share?"),
        (["--env", "reach", "--miss-share", "2"], "miss_share = 2.0: use a share between 0 and 1"),
        (["--env", "reach", "--base", "tiny_libero_object"], "was made for action_dim = 7"),
        (["--env", "reach", "--base", "tiny_reach", "--capture-every", "3"], "capture_every = 3"),
        (["--env", "reach", "--seed", "999999"], "seed = 999999: use 0 to"),
        (["--env", "reach", "--out", "/dev/null/x"], "--out /dev/null/x: Not a directory; name a folder"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_starts(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collect", "--episodes", "1", "--out", str(tmp_path / "out"), *options]) == WRONG_USAGE
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_progress_tells_successes_rate_time_left_and_faults() -> None:
    state = Collected(kept=5, new=10, successes=9, missing=30, faults={"rollout/worker_errors": 2.0})
    assert status_text(state, elapsed_s=120.0) == "successes 9/10  4.5 episodes/min  left 0:06:40  worker errors 2"
    assert status_text(replace(state, faults={}), 120.0) == "successes 9/10  4.5 episodes/min  left 0:06:40"
    plain = io.StringIO()
    with CollectionProgress(plain) as progress:
        progress(replace(state, new=0))
        progress(state)
    assert plain.getvalue().startswith("episode 15/45  successes 9/10  ") and plain.getvalue().count("\n") == 1


def test_progress_is_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    with CollectionProgress(terminal) as progress:
        progress(Collected(kept=5, new=10, successes=9, missing=30, faults={}))
    assert "successes 9/10" in terminal.getvalue() and "━" in terminal.getvalue()
