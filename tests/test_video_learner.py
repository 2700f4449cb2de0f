"""The video learner on a network of toy size: what it trains, how far it drifts, and what it keeps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from learners.video_config import OutcomeConditioned, PretrainingReplayConfig, VideoSFTConfig
from learners.video_sft import VideoSFTLearner
from tests.toy_learning import (
    batch_of,
    demonstration_windows,
    equal,
    rng,
    share_that_holds_out_some,
    tiny,
    toy_episodes,
    video,
)  # fmt: skip
from wamrl_ray.types import Episode


@pytest.fixture(scope="module")
def episodes() -> list[Episode]:
    return toy_episodes()


# ------------------------------------------------------------------------------------------------ training

def test_video_sft_lowers_its_loss_and_trains_the_world_alone(episodes: list[Episode]) -> None:
    learner = video(steps_per_update=40, kl_weight=0.0, lr=1e-2)
    text, expert = copy.deepcopy(learner.policy.text.state_dict()), learner.policy.export("actor").digest
    first = learner.update(episodes[::2], index=0)
    last = [learner.update(episodes[::2], index=index) for index in (1, 2)][-1]
    assert last["video/flow_loss"] < 0.85 * first["video/flow_loss"]
    assert learner.policy.export("actor").digest == expert and equal(text, dict(learner.policy.text.state_dict()))
    assert learner.reference.export("world").digest == tiny().export("world").digest
    assert first["video/steps_count"] == 40 and first["video/windows_count"] == 6


def test_a_world_that_broke_is_named_with_the_setting_that_broke_it(episodes: list[Episode]) -> None:
    learner = video(steps_per_update=1, lr=0.5)
    # Broken by hand: which learning rate overflows first depends on the CPU.
    learner.optimizer.optimizer.register_step_post_hook(
        lambda *_: [weight.data.fill_(float("nan")) for weight in learner.policy.world.parameters()]
    )
    with pytest.raises(RuntimeError, match=r"features are not finite any more.*lower video_learner\.lr = 0\.5"):
        learner.update(episodes[::2], index=0)


def test_the_kl_weight_changes_the_gradient_and_the_reference_has_none(episodes: list[Episode]) -> None:
    def gradient(weight: float) -> torch.Tensor:
        learner = video()
        learner.probe(episodes)
        with torch.no_grad():  # away from the reference, where the KL has a slope
            for parameter in learner.policy.world.parameters():
                parameter.add_(0.05)
        terms = learner.loss_terms(batch_of(episodes, [(0, 0), (2, 1)]), rng())
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
        terms = learner.loss_terms(batch_of(episodes, [(0, 0)]), rng())
        assert abs(terms["feature_kl_nats"].item()) < 1e-3  # the means agree; the variances' EMA has moved a hundredth
        learner.update(episodes[::2], index=0)
        drift[weight] = learner.drift_from(base)
    assert drift[1e4] < 0.1 * drift[0.0]


def test_video_with_lr_zero_changes_nothing(episodes: list[Episode]) -> None:
    learner = video(lr=0)
    learner.probe(episodes)
    before = learner.export().digest
    metrics = learner.update(episodes[::2], index=0)
    assert learner.export().digest == before and learner.drift_from(before) == 0.0
    assert metrics["video/steps_count"] == 0 and "video/flow_loss" not in metrics, "no gradient is made for nothing"


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

# ------------------------------------------------------------------------------------------------ anchor


def test_drift_from_the_pretrained_world_is_reported_at_every_update_from_before_the_first(
    episodes: list[Episode],
) -> None:
    learner = video()
    first, second = (learner.update(episodes[::2], index=index) for index in (0, 1))
    assert first["video/drift_before_nats"] == 0.0 < first["video/drift_nats"]
    assert second["video/drift_before_nats"] == first["video/drift_nats"] != second["video/drift_nats"]
    assert second["video/drift_nats"] == pytest.approx(learner.drift_from(tiny().export("world").digest), rel=1e-6)


def test_the_kl_weight_follows_the_drift_and_is_part_of_the_state(episodes: list[Episode]) -> None:
    learner = video(kl_weight=0.5, kl_target=1e-6)
    used = [learner.update(episodes[::2], index=index)["video/kl_weight"] for index in range(3)]
    assert used == [0.5, 1.0, 2.0] and learner.kl_weight == 4.0
    resumed = video(kl_weight=0.5, kl_target=1e-6)
    resumed.load_state(pickle.loads(pickle.dumps(learner.state())))
    assert resumed.update(episodes[::2], index=3)["video/kl_weight"] == 4.0
    constant = video(kl_weight=0.5)
    constant.update(episodes[::2], index=0)
    assert constant.kl_weight == 0.5


def test_the_kl_is_reported_per_layer(episodes: list[Episode]) -> None:
    metrics = video().update(episodes[::2], index=0)
    per_layer = [metrics[f"video/feature_kl_layer{i}_nats"] for i in range(2)]
    assert np.mean(per_layer) == pytest.approx(metrics["video/feature_kl_nats"], rel=1e-5)


# ------------------------------------------------------------------------------------------------ everything at once


def test_bf16_losses_are_close_and_weights_stay_fp32(episodes: list[Episode]) -> None:
    terms = []
    for precision in ("fp32", "bf16"):
        learner = video(precision=precision)
        learner.probe(episodes)
        with torch.no_grad():
            for parameter in learner.policy.world.parameters():
                parameter.add_(0.02)
        terms.append(learner.loss_terms(batch_of(episodes, [(0, 0), (2, 1), (4, 0)]), rng()))
    for name, exact in terms[0].items():
        rough = terms[1][name]
        assert rough.dtype == torch.float32 and rough.item() != exact.item()
        assert rough.item() == pytest.approx(exact.item(), rel=0.05), name
    learner.update(episodes[::2], index=0)
    assert {p.dtype for p in learner.policy.world.parameters()} == {torch.float32}


def test_with_every_option_an_update_is_a_function_of_state_episodes_and_index(episodes: list[Episode]) -> None:
    share, _ = share_that_holds_out_some(range(3))
    windows = demonstration_windows()
    options: dict[str, Any] = {
        "failures": OutcomeConditioned(), "held_out_share": share, "kl_target": 1e-3, "windows": windows,
        "pretraining": PretrainingReplayConfig(path="demos", share=0.25),
    }  # fmt: skip
    learner, resumed = video(**options), video(**options)
    learner.update(episodes, index=0)
    resumed.load_state(pickle.loads(pickle.dumps(learner.state())))
    assert equal(resumed.state(), learner.state())
    assert learner.update(episodes, index=1) == resumed.update(episodes, index=1)
    assert equal(resumed.state(), learner.state())
    assert learner.failure_embed.norm() > 0 and len(learner.held_out) > 0 and learner.kl_weight != 0.1
