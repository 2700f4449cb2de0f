"""What a video update is made of: balanced draws, shares of a batch, held-out starts, the adapted weight, configs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learners.losses import feature_kl, feature_variance
from learners.video_anchor import FeatureAnchor, adapted_weight
from learners.video_config import Mixed, OutcomeConditioned, PretrainingReplayConfig, SuccessOnly, VideoSFTConfig
from learners.video_sampling import batch_parts, draw, is_held_out
from wamrl_ray.config import Config, ConfigError, from_json, load_config, to_json


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# ------------------------------------------------------------------------------------------------ sampling


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(0, 60), st.integers(0, 99))
def test_every_task_is_drawn_equally_often_and_no_window_a_second_time_too_early(
    groups: list[int], total: int, seed: int
) -> None:
    drawn = draw(groups, total, rng(seed), balance=True)
    tasks = Counter(groups[i] for i in drawn)
    assert len(drawn) == total
    counts = [tasks[task] for task in set(groups)]
    assert max(counts) - min(counts) <= 1
    for task in set(groups):
        own = [drawn.tolist().count(i) for i, group in enumerate(groups) if group == task]
        assert max(own) - min(own) <= 1


def test_without_balance_a_task_is_drawn_in_proportion_to_its_windows() -> None:
    groups = [0] * 9 + [1]
    assert Counter(groups[i] for i in draw(groups, 100, rng(), balance=False)) == {0: 90, 1: 10}
    assert Counter(groups[i] for i in draw(groups, 100, rng(), balance=True)) == {0: 50, 1: 50}


def test_a_draw_is_a_function_of_its_generator() -> None:
    draws = [draw([0, 1, 0, 1, 2], 20, rng(seed), balance=True).tolist() for seed in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]


def test_shares_of_a_batch_by_hand() -> None:
    assert batch_parts(16, failed=0.25, pretraining=0.1) == (11, 4, 1)
    assert batch_parts(16, failed=0.0, pretraining=0.0) == (16, 0, 0)
    assert batch_parts(100, failed=0.29, pretraining=0.7) == (1, 29, 70)
    assert batch_parts(2, failed=0.45, pretraining=0.45) == (2, 0, 0)


def test_held_out_starts_are_a_seeded_share_of_all_and_of_every_task() -> None:
    held = [[is_held_out(seed, task, start, 0.1) for start in range(1000)] for seed, task in ((0, 0), (0, 1), (1, 0))]
    assert [abs(sum(row) - 100) < 35 for row in held] == [True] * 3
    assert held[0] != held[1] and held[0] != held[2]
    assert not any(is_held_out(0, 0, start, 0.0) for start in range(100))
    # Once held out, always held out: a larger share adds starts.
    assert all(is_held_out(0, 0, start, 0.3) for start in range(1000) if held[0][start])


# ------------------------------------------------------------------------------------------------ anchor


@pytest.mark.parametrize(
    ("weight", "drift", "expected"),
    [
        (0.1, 0.0201, 0.2), (0.1, 0.0199, 0.1), (0.1, 0.0101, 0.1), (0.1, 0.0099, 0.05), (0.6, 5.0, 1.0),
        (0.015, 0.0, 0.01),
    ],
)  # fmt: skip
def test_the_adapted_weight_by_hand(weight: float, drift: float, expected: float) -> None:
    assert adapted_weight(weight, drift, 0.03, (0.01, 1.0)) == pytest.approx(expected)


def layers(seed: int, batch: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 5, 3, generator=generator) * (i + 1) for i in range(2)]


def test_the_reference_variance_is_the_mean_over_batches_and_the_current_one_an_ema_of_it() -> None:
    anchor = FeatureAnchor(decay=0.75)
    anchor.calibrate([layers(0), layers(1)])
    one, two, now = (feature_variance(layers(seed)) for seed in (0, 1, 2))
    for i in range(2):
        assert torch.allclose(anchor.reference_variance[i], (one[i] + two[i]) / 2)
    fixed = [layer.clone() for layer in anchor.reference_variance]
    anchor.kl(layers(2), layers(0))
    for i in range(2):
        assert torch.allclose(anchor.variance[i], 0.75 * fixed[i] + 0.25 * now[i])
        assert torch.equal(anchor.reference_variance[i], fixed[i])


def test_the_kl_per_layer_averages_to_the_feature_kl_and_only_the_means_carry_gradient() -> None:
    anchor = FeatureAnchor(decay=0.5)
    anchor.calibrate([layers(0)])
    current, reference = ([layer.requires_grad_() for layer in layers(seed)] for seed in (1, 2))
    per_layer = anchor.kl(current, reference)
    whole = feature_kl(current, reference, anchor.variance, anchor.reference_variance)
    assert torch.stack(per_layer).mean().item() == pytest.approx(whole.item(), rel=1e-6)
    assert per_layer[0].item() != pytest.approx(per_layer[1].item(), rel=1e-3)
    per_layer[0].backward()
    # d/dmu of (mu - mu_ref)^2 / (2 s_ref^2), averaged over the layer's 60 entries; nothing through the variances.
    analytic = (current[0] - reference[0]) / anchor.reference_variance[0] / 60
    assert current[0].grad is not None and torch.allclose(current[0].grad, analytic, rtol=1e-4)
    assert current[1].grad is None and all(layer.grad is None for layer in reference)


def test_a_nan_does_not_enter_the_running_variance() -> None:
    anchor = FeatureAnchor(decay=0.5)
    anchor.calibrate([layers(0)])
    before = [layer.clone() for layer in anchor.variance]
    anchor.kl([layer * float("nan") for layer in layers(1)], layers(0))
    assert all(torch.equal(a, b) for a, b in zip(anchor.variance, before, strict=True))


# ------------------------------------------------------------------------------------------------ configs


def test_the_kinds_of_failure_data_are_chosen_by_config_and_round_trip() -> None:
    assert Config().video_learner.failures == SuccessOnly() and SuccessOnly().share == 0
    overrides = ["--video-learner.failures.kind", "mixed", "--video-learner.failures.per-start", "3"]
    config = load_config([], [*overrides, "--video-learner.kl-weight-range", "[0.1, 2]"])
    assert config.video_learner.failures == Mixed(per_start=3) and config.video_learner.kl_weight_range == (0.1, 2.0)
    assert from_json(to_json(config)) == config
    with pytest.raises(ConfigError, match="unknown key video_learner.failures.share"):
        load_config([], ["--video-learner.failures.share", "0.1"])
    with pytest.raises(ConfigError, match=r"command line: video_learner.pretraining.share = 1.5: use a share"):
        load_config([], ["--video-learner.pretraining.share", "1.5"])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mixed(share=0.0), r"failures\.share = 0\.0: "),
        (lambda: OutcomeConditioned(per_pair=0), r"failures\.per_pair = 0: "),
        (lambda: PretrainingReplayConfig(per_task=0), r"pretraining\.per_task = 0: "),
        (lambda: VideoSFTConfig(held_out_share=1.0), r"held_out_share = 1\.0: "),
        (lambda: VideoSFTConfig(kl_weight_range=(0.0, 1.0)), r"kl_weight_range = \(0\.0, 1\.0\): "),
        (lambda: VideoSFTConfig(kl_target=0.1, kl_weight=0.0), r"kl_weight = 0\.0: .*start inside"),
        (
            lambda: VideoSFTConfig(failures=Mixed(share=0.6), pretraining=PretrainingReplayConfig(path="x", share=0.4)),
            r"failures\.share = 0\.6: .*nothing is left for successes",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^video_learner\.{message}"):
        make()
