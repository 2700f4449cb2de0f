"""The learning benchmark: its test of two proportions, how it pools seeds, and what it refuses to compare."""

import multiprocessing
import os
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest

from benchmarks.learning import Job, Outcome, figures, main, outcomes, table, two_proportion_p_value
from wamrl_ray.config import ConfigError


def outcome(preset: str | None, seed: int, successes: int) -> Outcome:
    return Outcome(
        job=Job(preset=preset, seed=seed),
        successes=successes,
        trials=50,
        train_episodes=0 if preset is None else 96,
        evaluated_as=("9f3a", 4),
        cpu_s=10.0,
    )


def test_the_p_value_is_that_of_a_hand_computed_example() -> None:
    # pooled p = 100/200 = 0.5, standard error = sqrt(0.25 x (1/100 + 1/100)) = 0.070711, z = 0.2/0.070711 = 2.828427;
    # two tails of the standard normal beyond 2.828427 hold 0.0046777.
    assert two_proportion_p_value(60, 100, 40, 100) == pytest.approx(0.0046777, abs=1e-7)
    assert two_proportion_p_value(40, 100, 60, 100) == two_proportion_p_value(60, 100, 40, 100)
    # Unequal trials: pooled p = 45/150 = 0.3, se = sqrt(0.21 x 0.03) = 0.0793725, z = (0.4 - 0.25)/se = 1.889822.
    assert two_proportion_p_value(20, 50, 25, 100) == pytest.approx(0.0587817, abs=1e-7)


def test_equal_and_extreme_proportions_show_no_difference() -> None:
    assert two_proportion_p_value(30, 100, 30, 100) == 1.0
    assert two_proportion_p_value(0, 20, 0, 20) == two_proportion_p_value(20, 20, 20, 20) == 1.0
    with pytest.raises(ValueError, match="successes = 5 of trials = 4"):
        two_proportion_p_value(5, 4, 1, 4)


def test_seeds_are_pooled_against_the_base_of_the_same_seeds() -> None:
    found = figures(
        [outcome(None, 0, 13), outcome(None, 1, 17), outcome("grpo", 0, 20), outcome("grpo", 1, 30)]
        + [outcome("awr", 1, 40)]
    )
    assert (found["grpo_base_successes"], found["grpo_final_successes"], found["grpo_trials"]) == (30, 50, 100)
    assert (found["awr_base_successes"], found["awr_final_successes"], found["awr_trials"]) == (17, 40, 50)
    assert found["grpo_p_value"] == two_proportion_p_value(50, 100, 30, 100)
    assert found["train_episodes"] == 96
    grpo, awr = table(found, ["grpo", "awr"]).splitlines()[1:]
    assert grpo.split()[:2] == ["grpo", "30/100"] and "50/100" in grpo and "1.67" in grpo
    assert "[0.219, 0.396]" in grpo, "Wilson's interval of 30 of 100"
    assert awr.split()[:2] == ["awr", "17/50"]


def test_unequal_budgets_and_other_evaluations_are_refused() -> None:
    base, grpo = outcome(None, 0, 13), outcome("grpo", 0, 20)
    with pytest.raises(ValueError, match=r"train_episodes = \[96, 128\]"):
        figures([base, grpo, replace(outcome("awr", 0, 20), train_episodes=128)])
    with pytest.raises(ValueError, match="sampler.num_steps"):
        figures([base, replace(grpo, evaluated_as=("9f3a", 2))])
    with pytest.raises(ValueError, match="40 tickets"):
        figures([base, replace(grpo, trials=40)])


def test_a_job_that_takes_too_long_ends_the_benchmark_with_a_count() -> None:
    with pytest.raises(TimeoutError, match="0 of 1 jobs"):
        list(outcomes([Job(preset=None, seed=0)], deadline_s=0.01))
    assert not multiprocessing.active_children()


def test_a_killed_process_ends_the_benchmark_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.learning.run", killed_or_asleep)
    started = time.monotonic()
    with pytest.raises(BrokenProcessPool):
        list(outcomes([Job(preset=None, seed=seed) for seed in (0, 1)], deadline_s=60.0))
    assert time.monotonic() - started < 30.0
    assert not multiprocessing.active_children()


def killed_or_asleep(job: Job) -> None:
    """As if the machine ran out of memory during the first job."""
    if job.seed == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60.0)


def test_a_misspelt_preset_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["learning", "--presets", "pi_lr"])
    with pytest.raises(ConfigError, match="pi_lr"):
        main()
