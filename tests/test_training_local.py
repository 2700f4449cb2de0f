"""The loop in one process: order of consumption, refusals, failures, and resume that continues bit for bit."""

import dataclasses
import json
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from envs.build import make_env
from envs.counting import CountingConfig
from envs.reach import ReachConfig
from learners.actor_config import ActorFlowSDEConfig
from learners.video_config import Mixed, OutcomeConditioned, PretrainingReplayConfig, VideoSFTConfig
from tests.fakes import CountingPolicy, FakeActor, FakeVideo
from wamrl_ray import checkpoint
from wamrl_ray.broker import WeightBroker
from wamrl_ray.config import CheckpointConfig, Config, ConfigError, EvaluationConfig, RolloutConfig
from wamrl_ray.demonstrations import save_demonstration
from wamrl_ray.evaluate import evaluate, wilson
from wamrl_ray.local import LocalPool, build_local
from wamrl_ray.policy.wam import WAM, WAMConfig
from wamrl_ray.preflight import check_run
from wamrl_ray.run import System, run_training
from wamrl_ray.store import load_episode, save_episode
from wamrl_ray.training import TrainingLoop
from wamrl_ray.types import Demonstration

COUNTING = Config(
    env=CountingConfig(),
    rollout=RolloutConfig(episodes_per_iteration=4, group_size=2),
    evaluation=EvaluationConfig(episodes=4, split="held_out"),
    checkpoint=CheckpointConfig(keep=2),
)


def counting(
    run_dir: Path, config: Config = COUNTING, *, drift: float = 0.1, policy: CountingPolicy | None = None
) -> System:
    broker = WeightBroker(config.broker, run_dir / "epoch.json")
    pool = LocalPool(lambda split: make_env(config.env, split), policy or CountingPolicy(), broker, 3)
    return System(
        config, run_dir, env_spec=pool.env("train").env_spec, tasks=pool.env("train").tasks, pool=pool,
        video=FakeVideo(drift), actor=FakeActor(), broker=broker, persist=save_episode, restore=load_episode,
        close=pool.close,
    )  # fmt: skip


def digests(summary: dict[str, Any]) -> tuple[str, str]:
    return summary["world_digest"], summary["actor_digest"]


# ------------------------------------------------------------------------------------------------ one iteration


def test_an_iteration_hands_everything_on_in_ticket_order(tmp_path: Path):
    system = counting(tmp_path)
    system.start()
    for _ in range(3):
        system.step()
    updates = [call for call in system.actor.calls if call[0] == "update"]
    assert updates == [("update", i, list(range(4 * i, 4 * i + 4))) for i in range(3)]
    for _, _, ids in (call for call in system.video.calls if call[0] == "update"):
        assert all(system.office._train_state(t // 2 % 2, t // 4) % 2 == 0 for t in ids), "only even starts succeed"


def test_episodes_are_acted_with_the_newest_pair_and_so_never_stale(tmp_path: Path):
    system = counting(tmp_path)
    system.start()
    for i in range(3):
        acted_with = system.broker.current().order
        assert acted_with == (1, i)
        assert system.step()["rollout/staleness_max_updates"] == 0
        assert system.actor.calls[-2] == ("remember", (1, i + 1)), "the learner knows the pair before it is acted with"
        assert system.actor.calls[-1] == ("rebase", system.broker.current().world)


def test_the_pair_names_the_world_its_actor_was_trained_against(tmp_path: Path):
    system = counting(tmp_path)
    system.start()
    base = system.broker.current()
    system.step()
    first = system.broker.current()
    assert first.trained_against_world == base.world != first.world
    system.step()
    assert system.broker.current().trained_against_world == first.world


def test_a_world_that_drifts_too_far_is_refused_and_waits_for_an_actor_trained_in_its_features(tmp_path: Path):
    system = counting(tmp_path, drift=5.0)
    system.start()
    base = system.broker.current()
    rows, worlds = [], []
    for _ in range(4):
        rows.append(system.step())
        worlds.append(system.broker.current().world)
    # Even iterations: the new actor was trained against the published world and goes out with it.  Odd ones: the world
    # was left alone, the actor was trained against it, and they go out together.
    assert [row["broker/committed"] for row in rows] == [1, 1, 1, 1]
    assert [row["video/skipped"] for row in rows] == [0, 1, 0, 1]
    assert worlds[0] == base.world != worlds[1] == worlds[2] != worlds[3] == system.video.export().result().digest
    assert [row["broker/refused_drift"] for row in rows] == [1, 1, 2, 2]


def test_a_refused_world_still_waits_after_a_resume(tmp_path: Path):
    system = counting(tmp_path, drift=5.0)
    system.start()
    system.step()
    state = system.loop.state()
    assert state["waiting"] is True
    other = counting(tmp_path, drift=5.0)
    other.loop.load_state(state)
    assert other.loop.waiting is True


def test_without_any_success_the_video_learner_is_skipped_and_says_so(tmp_path: Path):
    config = dataclasses.replace(COUNTING, env=CountingConfig(success_step=99))
    system = counting(tmp_path, config)
    system.start()
    metrics = system.step()
    assert (metrics["video/skipped"], metrics["rollout/success_rate"]) == (1, 0)
    assert system.video.calls == [] and metrics["broker/committed"] == 1


def test_earlier_successes_are_replayed_in_the_configured_share(tmp_path: Path):
    system = counting(tmp_path, dataclasses.replace(COUNTING, video_learner=VideoSFTConfig(replay=0.5)))
    system.start()
    seen: set[int] = set()
    kinds = set()
    for i in range(8):
        before = len(system.video.calls)
        metrics = system.step()
        new, old = metrics["video/new_episodes"], metrics["video/replayed_episodes"]
        if len(system.video.calls) > before:
            ids = system.video.calls[-1][2]
            assert set(ids[: int(new)]) & seen == set() and set(ids[int(new) :]) <= seen
            assert all(t // 4 == i for t in ids[: int(new)])
            seen |= set(ids)
        if seen - set(range(4 * i, 4 * i + 4)):
            assert old == (new or 2), "half are replayed; without new ones, half an iteration's worth"
            kinds.add(bool(new))
    assert kinds == {True, False}, "the run had iterations with and without new successes"


def test_failures_join_the_successes_only_where_the_config_asks(tmp_path: Path):
    mixed = VideoSFTConfig(failures=Mixed(share=0.2, per_pair=2))
    for name, video in (("plain", VideoSFTConfig()), ("mixed", mixed)):
        system = counting(tmp_path / name, dataclasses.replace(COUNTING, video_learner=video))
        system.start()
        seen = []
        for _ in range(6):
            before = len(system.video.calls)
            metrics = system.step()
            starts = {t: system.office._train_state(t // 2 % 2, t // 4) for t in range(4 * system.iteration)}
            failed = metrics["video/failed_episodes"]
            if len(system.video.calls) == before:
                assert failed == 0, "failures alone are no update"
                continue
            given = system.video.calls[-1][2]
            odd = [t for t in given if starts[t] % 2]
            assert len(odd) == failed and given[len(given) - len(odd) :] == odd, "only even starts succeed"
            if failed:  # the share of windows that the learner is to draw, rounded up to whole episodes
                assert failed == -(-(len(given) - failed) // 4)
            seen.append(failed)
        assert (max(seen) > 0) == (name == "mixed")
        assert (system.store.metrics()["store/failures"] > 0) == (name == "mixed")


def test_every_metric_is_finite_and_named_by_its_part(tmp_path: Path):
    system = counting(tmp_path)
    system.start()
    metrics = system.step()
    assert {name.split("/")[0] for name in metrics} == {"rollout", "store", "broker", "world", "actor", "video", "time"}
    assert all(np.isfinite(value) for value in metrics.values())


# ------------------------------------------------------------------------------------------------ failures


class NanPolicy(CountingPolicy):
    def decide(self, *args, **kwargs):
        decision = super().decide(*args, **kwargs)
        return dataclasses.replace(decision, actions=np.full_like(decision.actions, np.nan))


def test_nan_actions_end_the_run_with_one_message(tmp_path: Path):
    system = counting(tmp_path, policy=NanPolicy())
    system.start()
    with pytest.raises(RuntimeError, match=r"iteration 0: ticket 0, decision 0: the policy's actions is not finite"):
        system.step()
    with pytest.raises(RuntimeError, match=r"evaluation of counting: ticket \d+, decision 0"):
        system.evaluate("train", 1)


def test_a_simulator_that_fails_once_leaves_no_trace_but_a_counter(tmp_path: Path):
    start = counting(tmp_path / "spec").office._train_state(0, 0)
    fault = CountingConfig(fault="raise", fault_init_state=start, fault_marker=str(tmp_path / "marker"))
    results = []
    for name, env in (("plain", CountingConfig()), ("faulty", fault)):
        system = counting(tmp_path / name, dataclasses.replace(COUNTING, env=env))
        system.start()
        results.append((system.step(), system.broker.current()))
    assert results[0][1] == results[1][1]
    assert [metrics["rollout/reissued_tickets"] for metrics, _ in results] == [0, 1]


def test_a_simulator_that_always_fails_ends_the_run_with_ticket_and_first_error(tmp_path: Path):
    start = counting(tmp_path / "spec").office._train_state(0, 0)
    env = CountingConfig(fault="raise", fault_init_state=start)
    system = counting(tmp_path, dataclasses.replace(COUNTING, env=env))
    system.start()
    with pytest.raises(RuntimeError, match="ticket 0 failed 3 times, at first: counting: the fault"):
        system.step()


def test_a_learners_error_and_silence_are_named(tmp_path: Path):
    system = counting(tmp_path)
    system.start()
    failed: Future[dict[str, float]] = Future()
    failed.set_exception(RuntimeError("loss was NaN 5 times in a row"))
    system.actor.update = lambda handles, index: failed
    with pytest.raises(RuntimeError, match="actor update failed: loss was NaN 5 times"):
        system.step()
    loop = TrainingLoop(
        run_seed=0, office=counting(tmp_path).office, pool=system.pool, store=system.store, video=system.video,
        actor=system.actor, broker=system.broker, replay=0.5, update_deadline_s=0.05,
    )  # fmt: skip
    system.actor.update = lambda handles, index: Future()
    with pytest.raises(TimeoutError, match="actor update gave no answer within 0.05 s"):
        loop.step()


# ------------------------------------------------------------------------------------------------ whole runs


def test_a_run_leaves_config_evaluations_checkpoints_and_summary(tmp_path: Path):
    seen, evaluated = [], []
    summary = run_training(
        counting(tmp_path), iterations=3,
        on_metrics=lambda i, metrics: seen.append((i, metrics["rollout/episodes"])),
        on_evaluation=lambda name, result: evaluated.append(name),
    )  # fmt: skip
    assert seen == [(0, 4), (1, 4), (2, 4)] and evaluated == ["base", "final"]
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    # Held-out starts 40 (even, succeeds) and 41 (odd) of both tasks.
    assert {k: summary["final_success"][k] for k in ("successes", "trials")} == {"successes": 2, "trials": 4}
    assert (summary["episodes"], summary["pairs_committed"], summary["iterations"]) == (12, 3, 3)
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"iter_000002", "iter_000003"}
    assert {p.name for p in (tmp_path / "evaluation").iterdir()} == {"base.json", "final.json"}
    assert json.loads((tmp_path / "config.json").read_text())["env"]["kind"] == "counting"


@pytest.mark.parametrize("stop_after", [0, 1, 3])
def test_stop_and_resume_equals_an_uninterrupted_run(tmp_path: Path, stop_after: int):
    whole = run_training(counting(tmp_path / "whole"), iterations=4)
    stopping = counting(tmp_path / "parts")
    first = run_training(stopping, iterations=4, stop_requested=lambda: stopping.iteration == stop_after)
    assert first["stopped"] and first["iterations"] == stop_after and not (tmp_path / "parts/summary.json").exists()
    resumed = run_training(counting(tmp_path / "parts"), iterations=4, resume="auto")
    for key in whole.keys() - {"wall_s"}:
        assert resumed[key] == whole[key], key


def test_a_killed_run_continues_from_its_last_checkpoint_under_a_newer_epoch(tmp_path: Path):
    whole = run_training(counting(tmp_path / "whole"), iterations=4)
    killed = counting(tmp_path / "parts")

    def die(iteration: int, metrics: dict[str, float]) -> None:
        if iteration == 2:
            raise KeyboardInterrupt  # the third iteration is done but not saved

    with pytest.raises(KeyboardInterrupt):
        run_training(killed, iterations=4, on_metrics=die)
    again = counting(tmp_path / "parts")
    repeated: list[int] = []
    resumed = run_training(again, iterations=4, resume="auto", on_metrics=lambda i, m: repeated.append(i))
    assert repeated == [2, 3] and digests(resumed) == digests(whole)
    assert again.broker.current().order == (2, 4)


def test_more_iterations_can_follow_a_finished_run_but_its_config_stays(tmp_path: Path):
    run_training(counting(tmp_path), iterations=2)
    other = dataclasses.replace(COUNTING, seed=1)
    with pytest.raises(ValueError, match="seed = 1.*made with 0"):
        run_training(counting(tmp_path, other), iterations=3, resume="auto")
    more = dataclasses.replace(COUNTING, iterations=99, rollout=dataclasses.replace(COUNTING.rollout, num_workers=7))
    assert run_training(counting(tmp_path, more), iterations=3, resume="auto")["iterations"] == 3


def test_a_new_run_never_mixes_with_an_old_one_and_a_wrong_resume_is_named(tmp_path: Path):
    run_training(counting(tmp_path), iterations=1)
    with pytest.raises(ValueError, match="--resume auto or name another folder"):
        run_training(counting(tmp_path), iterations=1)
    with pytest.raises(ValueError, match="resume = .*nowhere"):
        run_training(counting(tmp_path), iterations=1, resume=str(tmp_path / "nowhere"))


def test_a_run_can_be_resumed_into_another_folder(tmp_path: Path):
    whole = run_training(counting(tmp_path / "whole"), iterations=3)
    run_training(counting(tmp_path / "a"), iterations=2)
    resumed = run_training(counting(tmp_path / "b"), iterations=3, resume=str(tmp_path / "a"))
    assert digests(resumed) == digests(whole)


def test_episode_files_stay_exactly_while_a_checkpoint_lists_them(tmp_path: Path):
    config = dataclasses.replace(COUNTING, store=dataclasses.replace(COUNTING.store, max_bytes=30_000))
    run_training(counting(tmp_path, config), iterations=6)
    listed: set[str] = set()
    for folder in checkpoint.complete(tmp_path / "checkpoints"):
        entries = checkpoint.read_json(folder / "run.json")["store"]["entries"]
        listed |= {f"ticket_{row['ticket']['ticket_id']:09d}" for row in entries}
    assert {path.name[:16] for path in (tmp_path / "episodes").iterdir()} == listed and listed


# ------------------------------------------------------------------------------------------------ evaluation


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (0, 0, 0.0, 1.0)],
)
def test_wilson_interval_by_hand(successes: int, trials: int, low: float, high: float):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_wilson_refuses_more_successes_than_trials():
    with pytest.raises(ValueError, match="successes = 3"):
        wilson(3, 2)


def test_evaluation_counts_per_task_and_names_what_was_measured(tmp_path: Path):
    system = counting(tmp_path)
    system.start()
    result = json.loads(json.dumps(system.evaluate("held_out", 5)))
    assert (result["env"], result["simulator"], result["split"]) == ("counting", "none", "held_out")
    assert result["pair"]["world"] == system.broker.current().world
    # Starts (0, 40), (1, 40), (0, 41), (1, 41), (0, 42): even ones succeed.
    assert [(t["successes"], t["trials"]) for t in result["tasks"]] == [(2, 3), (1, 2)]
    assert (result["successes"], result["trials"], result["repeats"]) == (3, 5, 0)
    assert (result["low"], result["high"]) == wilson(3, 5)
    assert [row["init_state_id"] for row in result["episodes"]] == [40, 40, 41, 41, 42]
    assert system.evaluate("held_out", 23)["repeats"] == 3


def test_evaluation_refuses_repeated_or_foreign_tickets(tmp_path: Path):
    system = counting(tmp_path)
    system.start()
    tickets = system.office.eval_tickets("held_out", 2)
    pair, spec = system.broker.current(), system.env_spec
    with pytest.raises(ValueError, match="counted twice"):
        evaluate(system.pool, [*tickets, tickets[0]], pair, env_spec=spec, split="held_out")
    with pytest.raises(ValueError, match="no evaluation ticket of split 'train'"):
        evaluate(system.pool, tickets, pair, env_spec=spec, split="train")


# ------------------------------------------------------------------------------------------------ the real policy


REACH = Config(
    env=ReachConfig(max_steps=8, speed=0.5, radius=0.25),
    rollout=RolloutConfig(episodes_per_iteration=8, group_size=2),
    video_learner=VideoSFTConfig(lr=1e-3, steps_per_update=2, batch_size=4),
    actor_learner=ActorFlowSDEConfig(lr=1e-3, epochs=1, batch_size=8),
    evaluation=EvaluationConfig(episodes=2),
)


def reach(run_dir: Path, config: Config = REACH) -> System:
    return build_local(config, run_dir, lambda: WAM(WAMConfig.debug(), config.sampler, seed=0))


def test_the_real_policy_trains_to_equal_digests_twice_and_across_stop_and_resume(tmp_path: Path):
    base = reach(tmp_path / "base")
    base.start()
    runs = [run_training(reach(tmp_path / name), iterations=2) for name in ("a", "b")]
    assert digests(runs[0]) == digests(runs[1])
    pair = base.broker.current()
    assert all(new != old for new, old in zip(digests(runs[0]), (pair.world, pair.actor), strict=True)), "both trained"
    assert runs[0]["pairs_committed"] == 2

    stopping = reach(tmp_path / "c")
    run_training(stopping, iterations=2, stop_requested=lambda: stopping.iteration == 1)
    resumed = run_training(reach(tmp_path / "c"), iterations=2, resume="auto")
    assert digests(resumed) == digests(runs[0])
    assert resumed["final_success"] == runs[0]["final_success"]


def test_failures_and_replayed_demonstrations_leave_a_run_resumable(tmp_path: Path):
    demo = Demonstration(
        env="reach", simulator="none", task_id=0, init_state_id=0, seed=0, instruction="reach the red circle",
        success=True, frames=np.full((3, 1, 32, 32, 3), 90, np.uint8), obs_step=np.int32([0, 2, 4]),
        state=np.zeros((5, 2), np.float32), action=np.zeros((4, 2), np.float32), label=np.zeros((4, 2), np.float32),
    )  # fmt: skip
    (tmp_path / "demos").mkdir()
    save_demonstration(demo, tmp_path / "demos" / "demo_00_000_00000.npz")
    video = dataclasses.replace(
        REACH.video_learner, failures=OutcomeConditioned(), kl_target=0.01,
        pretraining=PretrainingReplayConfig(path=str(tmp_path / "demos")),
    )  # fmt: skip
    config = dataclasses.replace(REACH, video_learner=video, evaluation=EvaluationConfig(episodes=0))
    seen: list[dict[str, float]] = []
    whole = run_training(reach(tmp_path / "a", config), iterations=3, on_metrics=lambda i, m: seen.append(m))
    assert any(m.get("video/failed_window_share", 0) > 0 for m in seen)
    assert seen[-1]["video/pretraining_window_share"] == 0.25
    stopping = reach(tmp_path / "b", config)
    run_training(stopping, iterations=3, stop_requested=lambda: stopping.iteration == 2)
    resumed = run_training(reach(tmp_path / "b", config), iterations=3, resume="auto")
    assert digests(resumed) == digests(whole)


@pytest.mark.parametrize(("path", "why"), [("nowhere", "no such folder"), ("empty", "run `wamrl collect` first")])
def test_missing_demonstrations_are_refused_before_anything_starts(tmp_path: Path, path: str, why: str):
    (tmp_path / "empty").mkdir()
    replay = PretrainingReplayConfig(path=str(tmp_path / path))
    config = dataclasses.replace(REACH, base="tiny_reach", video_learner=VideoSFTConfig(pretraining=replay))
    with pytest.raises(ConfigError, match=rf"video_learner.pretraining.path = '{tmp_path / path}': .*{why}"):
        check_run(config)


def test_another_seed_gives_other_digests(tmp_path: Path):
    runs = []
    for seed in (0, 1):
        system = reach(tmp_path / str(seed), dataclasses.replace(REACH, seed=seed))
        system.start()
        system.step()
        runs.append(system.broker.current().actor)
    assert runs[0] != runs[1]
