"""The learners' benchmark on a network of toy size: its ways of updating agree; no times are asserted."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from benchmarks import learner_speed
from tests.toy_learning import tiny
from wamrl_ray.policy.flow_sde import SamplerConfig
from wamrl_ray.policy.wam import WAM, Context

CPU = torch.device("cpu")


def base(sampler: SamplerConfig) -> WAM:
    return tiny(sampler=sampler)


def test_all_ways_take_the_same_gradient_and_all_figures_are_there() -> None:
    figures = learner_speed.measure(base, CPU, shape=(2, 3), rounds=1)
    for name in ("actor_decisions_per_s", "actor_naive_decisions_per_s", "actor_reuse_ratio", "video_samples_per_s"):
        assert figures[name] > 0
    for setting in ("one", "all"):
        assert figures[f"{setting}_gradient_difference"] <= 1e-5
        assert figures[f"{setting}_weight_difference_of_move"] < 1e-2


def test_the_naive_way_runs_the_world_once_per_row_of_every_use() -> None:
    sampler = SamplerConfig(stochastic="all", exclude_last=False)
    episodes = learner_speed.made_up_episodes(base(sampler), 2, 3)
    rows = {}
    for way in learner_speed.WAYS:
        update, seen = learner_speed.ActorUpdate(way, base(sampler), episodes, CPU), []
        update.learner.policy.world.register_forward_hook(lambda _m, _i, out, seen=seen: seen.append(len(out.velocity)))
        update()
        rows[way] = sum(seen)
    common = 6  # the label of what acted; a critic that explains nothing yet asks for no final observation
    assert rows == {"reuse": common, "visit": common + 6 * 5, "naive": common + 24 * 5}  # the base's label, 4 epochs


def test_a_way_with_other_gradients_is_refused() -> None:
    def other(batch: learner_speed.LabelledBatch, policy: WAM) -> Context:
        rows = torch.arange(len(batch)).repeat_interleave(batch.transitions.step.shape[1])
        return policy.world_context(batch.obs.index(rows), batch.world_seed[rows] + 1)

    with (
        patch.object(learner_speed, "_context_per_row", other),
        pytest.raises(AssertionError, match="gradients differ"),
    ):
        learner_speed.measure_actor(base, SamplerConfig(), CPU, shape=(2, 3), rounds=1, peak=1.0)
