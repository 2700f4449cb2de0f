"""Batching, optimiser and configs, on a network of toy size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learners.actor_config import ActorFlowSDEConfig
from learners.batching import all_decisions, final_memory, gather, success_decision, to_time_major
from learners.optim import GuardedAdamW
from learners.video_config import VideoSFTConfig
from tests.toy_learning import tiny, toy_episodes
from wamrl_ray.types import Episode


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    return toy_episodes()


# ------------------------------------------------------------------------------------------------ batching


def test_a_batch_has_memory_future_and_what_was_reached(episodes: list[Episode]) -> None:
    spec, episode = tiny().spec, episodes[0]
    batch = gather(episodes, [(0, 0), (0, 1)], spec)
    now = episode.decision_obs
    assert torch.equal(batch.memory[1, 0], torch.from_numpy(episode.frames[now[1]]))
    assert torch.equal(batch.future[0, 1], torch.from_numpy(episode.frames[now[1]]))
    assert torch.equal(batch.future[1, 1], batch.memory[1, 0])  # step 8 was never reached: the decision's own frame
    assert batch.reached.tolist() == [[True, True], [True, False]]
    assert batch.executed.tolist() == [4, 3]
    assert torch.equal(batch.chain, torch.from_numpy(episode.chain))


def test_memory_repeats_the_first_frame_and_keeps_the_order_oldest_first(episodes: list[Episode]) -> None:
    spec, episode = replace(tiny().spec, memory=3), episodes[1]
    batch = gather(episodes, [(1, 0), (1, 2)], spec)
    first, second, third = (torch.from_numpy(episode.frames[n]) for n in episode.decision_obs)
    assert torch.equal(batch.memory[0], torch.stack([first, first, first]))
    assert torch.equal(batch.memory[1], torch.stack([first, second, third]))
    final = final_memory(episode, spec)
    assert final is not None and np.array_equal(final[0], episode.frames[[*episode.decision_obs[1:], -1]])
    assert final_memory(episodes[0], spec) is None  # ended at step 7, between offsets


def test_frames_beyond_the_executed_steps_are_seen_but_not_reached(episodes: list[Episode]) -> None:
    spec = replace(tiny().spec, imagined_offsets=(4, 6))
    batch = gather(episodes, [(1, 0)], spec)
    assert batch.seen.tolist() == [[True, True]] and batch.reached.tolist() == [[True, False]]


def test_success_belongs_to_the_chunk_in_which_it_came(episodes: list[Episode]) -> None:
    assert [success_decision(replace(episodes[0], success_step=s)) for s in (-1, 0, 1, 4, 5, 7)] == [-1, 0, 0, 0, 1, 1]


def test_time_major_places_every_decision_once(episodes: list[Episode]) -> None:
    picks = torch.tensor(all_decisions(episodes))
    shuffled = picks[torch.randperm(len(picks), generator=torch.Generator().manual_seed(0))]
    values, mask = to_time_major(shuffled[:, 0] * 10.0 + shuffled[:, 1], shuffled[:, 0], shuffled[:, 1], 6)
    assert mask.sum(dim=0).tolist() == [e.num_decisions for e in episodes]
    assert values[1, 3].item() == 31.0 and values[2, 0].item() == 0.0


# ------------------------------------------------------------------------------------------------ optimiser


def test_a_nan_is_skipped_counted_and_after_too_many_in_a_row_fatal() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = GuardedAdamW([weight], name="toy", lr=0.1, weight_decay=0.0, grad_clip=1.0, max_bad=3)
    for bad in (weight.sum() * float("nan"), (weight * 0.0).sqrt().sum() * float("inf")):
        assert optimizer.step(bad) == -1.0
    assert weight.tolist() == [1.0, 1.0]
    assert optimizer.step(weight.sum()) > 0 and optimizer.bad_in_a_row == 0
    before = weight.detach().clone()
    assert optimizer.step((weight - before).abs().sqrt().sum()) == -1.0  # finite loss, infinite gradient
    optimizer.step(weight.sum() / 0.0)
    with pytest.raises(RuntimeError, match="toy: loss or gradient was not finite 3 times in a row"):
        optimizer.step(weight.sum() / 0.0)
    assert torch.equal(weight, before) and optimizer.skipped == 5


# ------------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize(
    ("make", "name", "wrong", "value"),
    [
        (VideoSFTConfig, "video_learner", "lr", -1.0),
        (VideoSFTConfig, "video_learner", "ema_decay", 1.0),
        (VideoSFTConfig, "video_learner", "replay", 1.5),
        (ActorFlowSDEConfig, "actor_learner", "batch_size", 0),
    ],
)
def test_a_wrong_learner_config_names_field_and_value(make: Any, name: str, wrong: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name}\.{wrong} = {value}: "):
        make(**{wrong: value})
