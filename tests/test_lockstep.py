"""Acting side by side: the same episodes as one after the other, up to the last bits of a matrix product."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from envs.reach import ReachConfig
from tests.toy_learning import tiny
from wamrl_ray.config import Config, RolloutConfig
from wamrl_ray.local import build_local
from wamrl_ray.run import System
from wamrl_ray.types import Episode

CONFIG = Config(
    env=ReachConfig(max_steps=24, speed=0.5, radius=0.25), rollout=RolloutConfig(episodes_per_iteration=8, group_size=2)
)


def system(folder: Path, lockstep: bool) -> System:
    made = build_local(CONFIG, folder, lambda: tiny(sampler=CONFIG.sampler), lockstep=lockstep)
    made.start()
    return made


def episodes(made: System, tickets: slice) -> list[Episode]:
    issued = made.office.train_tickets(0)
    made.office.settle(issued)
    return [episode for _, episode in made.pool.run(issued[tickets], made.broker.current())]


def test_side_by_side_gives_what_one_after_the_other_does(tmp_path: Path) -> None:
    alone, together = (episodes(system(tmp_path / str(mode), mode), slice(None)) for mode in (False, True))
    for one, other in zip(alone, together, strict=True):
        assert one.ticket == other.ticket and one.pair.world == other.pair.world
        assert (one.success, one.terminated, one.truncated) == (other.success, other.terminated, other.truncated)
        assert np.array_equal(one.executed, other.executed)
        assert np.array_equal(one.stochastic_step, other.stochastic_step)
        assert np.array_equal(one.world_seed, other.world_seed)
        np.testing.assert_allclose(one.chain, other.chain, atol=1e-3)
        np.testing.assert_allclose(one.behaviour_logprob, other.behaviour_logprob, atol=1e-2)
    assert len({episode.num_decisions for episode in together}) > 1, "some end before others"


def test_a_ticket_alone_has_the_bits_of_a_rollout(tmp_path: Path) -> None:
    (one,), (other,) = (episodes(system(tmp_path / str(mode), mode), slice(3, 4)) for mode in (False, True))
    assert all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("chain", "frames", "actions"))


def test_two_runs_side_by_side_are_equal_and_train(tmp_path: Path) -> None:
    runs = [system(tmp_path / name, True) for name in "ab"]
    metrics = [[{k: v for k, v in run.step().items() if "time/" not in k} for _ in range(2)] for run in runs]
    assert metrics[0] == metrics[1] and metrics[0][0]["rollout/episodes"] == 8
    assert runs[0].broker.current().actor == runs[1].broker.current().actor


def test_both_splits_can_be_run_and_a_misfit_is_refused(tmp_path: Path) -> None:
    made = system(tmp_path / "a", True)
    result = made.evaluate("held_out", 6)
    assert result["trials"] == 6 and result["repeats"] == 0
    made.close()
    wrong = build_local(replace(CONFIG, env=ReachConfig(resolution=16)), tmp_path / "b", tiny, lockstep=True)
    wrong.start()
    with pytest.raises(ValueError, match="resolution"):
        wrong.evaluate("held_out", 1)
