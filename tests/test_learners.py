"""Batching, optimiser and the video learner, on a network of toy size."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from learners.actor_config import ActorFlowSDEConfig
from learners.batching import all_decisions, final_memory, gather, success_decision, to_time_major
from learners.optim import GuardedAdamW
from learners.video_sft import VideoSFTConfig, VideoSFTLearner
from tests.toy_learning import equal, tiny, toy_episodes, video
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


# ------------------------------------------------------------------------------------------------ video learner


def test_video_sft_lowers_its_loss_and_trains_the_world_alone(episodes: list[Episode]) -> None:
    learner = video(steps_per_update=40, kl_weight=0.0, lr=1e-2)
    text, expert = copy.deepcopy(learner.policy.text.state_dict()), learner.policy.export("actor").digest
    first = learner.update(episodes[::2], index=0)
    last = [learner.update(episodes[::2], index=index) for index in (1, 2)][-1]
    assert last["video/flow_loss"] < 0.8 * first["video/flow_loss"]
    assert learner.policy.export("actor").digest == expert and equal(text, dict(learner.policy.text.state_dict()))
    assert learner.reference.export("world").digest == tiny().export("world").digest
    assert first["video/steps_count"] == 40 and first["video/windows_count"] == 6


def test_the_kl_weight_changes_the_gradient_and_the_reference_has_none(episodes: list[Episode]) -> None:
    def gradient(weight: float) -> torch.Tensor:
        learner = video()
        learner.probe(episodes)
        with torch.no_grad():  # away from the reference, where the KL has a slope
            for parameter in learner.policy.world.parameters():
                parameter.add_(0.05)
        terms = learner.loss_terms(episodes, [(0, 0), (1, 1)], np.random.default_rng(0))
        (terms["flow_loss"] + weight * terms["feature_kl_nats"]).backward()
        assert all(p.grad is None for p in learner.reference.parameters())
        return torch.cat([p.grad.flatten() for p in learner.policy.world.parameters() if p.grad is not None])

    assert gradient(0.0).norm() > 0
    assert not torch.equal(gradient(0.0), gradient(1.0))


def test_the_feature_kl_is_zero_at_the_base_and_a_large_weight_freezes_drift(episodes: list[Episode]) -> None:
    drift = {}
    for weight in (0.0, 1e4):
        learner = video(kl_weight=weight, steps_per_update=20)
        learner.probe(episodes)
        base = learner.export().digest
        terms = learner.loss_terms(episodes, [(0, 0)], np.random.default_rng(0))
        assert abs(terms["feature_kl_nats"].item()) < 1e-3  # the means agree; the variances' EMA has moved a hundredth
        learner.update(episodes[::2], index=0)
        drift[weight] = learner.drift_from(base)
    assert drift[1e4] < 0.1 * drift[0.0]


def test_video_with_lr_zero_changes_nothing(episodes: list[Episode]) -> None:
    learner = video(lr=0)
    learner.probe(episodes)
    before = learner.export().digest
    learner.update(episodes[::2], index=0)
    assert learner.export().digest == before and learner.drift_from(before) == 0.0


def test_without_successes_there_is_no_video_update_and_failures_are_refused(episodes: list[Episode]) -> None:
    learner = video()
    before = learner.export().digest
    assert learner.update([], index=0)["video/steps_count"] == 0
    assert learner.export().digest == before
    with pytest.raises(ValueError, match="did not succeed"):
        learner.update(episodes, index=0)


def test_a_video_update_is_a_function_of_state_episodes_and_index(episodes: list[Episode]) -> None:
    one, other, shifted = video(), video(), video()
    assert one.update(episodes[::2], index=3) == other.update(episodes[::2], index=3)
    shifted.update(episodes[::2], index=4)
    assert one.export().digest == other.export().digest != shifted.export().digest


def test_the_video_state_round_trips_bit_for_bit(episodes: list[Episode]) -> None:
    learner, resumed = video(), video()
    learner.update(episodes[::2], index=0)
    old = learner.export().digest
    resumed.load_state(pickle.loads(pickle.dumps(learner.state())))
    assert equal(resumed.state(), learner.state())
    metrics = learner.update(episodes[::2], index=1)
    assert resumed.update(episodes[::2], index=1) == metrics
    assert resumed.export().digest == learner.export().digest
    assert resumed.drift_from(old) == learner.drift_from(old) > 0
    other = VideoSFTLearner(VideoSFTConfig(), tiny(seed=1), tiny(seed=1), run_seed=0)
    with pytest.raises(ValueError, match="has interface = "):
        other.load_state(learner.state())


def test_drift_is_zero_to_itself_and_forgets_the_longest_unused(episodes: list[Episode]) -> None:
    learner = video(probe_versions=2)
    learner.probe(episodes)
    base = learner.export().digest
    for index in range(2):
        learner.update(episodes[::2], index=index)
        last = learner.export().digest
        assert learner.drift_from(last) == 0.0 and learner.drift_from(base) > 0  # asked for, so kept
    learner.update(episodes[::2], index=2)
    learner.export()
    with pytest.raises(ValueError, match="no remembered world"):
        learner.drift_from(last)


def test_the_video_learner_gives_up_after_repeated_nans(episodes: list[Episode]) -> None:
    learner = video(max_bad_updates=2)
    with torch.no_grad():
        next(learner.policy.world.parameters()).fill_(float("nan"))
    with pytest.raises(RuntimeError, match="video_learner"):
        learner.update(episodes[::2], index=0)


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
