"""Each return, advantage and reward against its literal transcription on drawn inputs."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch.autograd import gradcheck

from learners import returns
from learners.losses import masked_mean
from tests import numpy_reference as reference
from wamrl_ray.rewards.reconstruction import RewardConfig, shape
from wamrl_ray.rewards.success import gain

CHECKED = settings(max_examples=50, deadline=None, derandomize=True)
number = st.floats(-5.0, 5.0, width=32)
share = st.floats(0.0, 1.0)
distances = st.floats(0.0, 2.0, width=32)
episode = st.tuples(st.lists(st.tuples(number, number), min_size=1, max_size=5), number, st.booleans())
"""([(reward, value) per decision], value of what follows, terminated)"""


@CHECKED
@given(st.lists(episode, min_size=1, max_size=4), share, share, st.integers(0, 2), number)
def test_gae_is_the_literal_sum_of_every_episode_whatever_lies_on_the_padding(
    episodes: list, gamma: float, lam: float, padding: int, rubbish: float
) -> None:
    length = max(len(steps) for steps, _, _ in episodes) + padding
    reward, value, discount = (torch.full((length, len(episodes)), rubbish) for _ in range(3))
    mask = torch.zeros(length, len(episodes), dtype=torch.bool)
    for b, (steps, _, terminated) in enumerate(episodes):
        n = len(steps)
        reward[:n, b], value[:n, b], mask[:n, b] = (
            torch.tensor([r for r, _ in steps]),
            torch.tensor([v for _, v in steps]),
            True,
        )
        discount[:n, b] = gamma
        discount[n - 1, b] = gamma * (not terminated)
    after = torch.tensor([end for _, end, _ in episodes])
    advantage, target = returns.gae(reward, value, discount, mask, after, gae_lambda=lam)
    for b, (steps, end, terminated) in enumerate(episodes):
        rewards, values = zip(*steps, strict=True)
        expected = reference.gae(rewards, values, end, terminated, gamma, lam)
        np.testing.assert_allclose(advantage[: len(steps), b], expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(target[: len(steps), b], np.add(expected, values), rtol=1e-4, atol=1e-4)
        assert not advantage[len(steps) :, b].any() and not target[len(steps) :, b].any()


def test_gae_passes_gradients_to_valid_entries_only_and_past_no_termination() -> None:
    generator = torch.Generator().manual_seed(0)
    reward, value = (torch.randn(3, 2, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    after = torch.ones(2, dtype=torch.float64, requires_grad=True)
    discount = torch.tensor([[0.9, 0.9], [0.9, 0.0], [0.9, 0.9]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 1], [1, 0]])

    def advantage(r: torch.Tensor, v: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
        return returns.gae(r, v, discount, mask, end, gae_lambda=0.8)[0]

    assert gradcheck(advantage, (reward, value, after))
    to_reward, to_value, to_after = torch.autograd.grad(advantage(reward, value, after).sum(), (reward, value, after))
    assert float(to_reward[2, 1]) == float(to_value[2, 1]) == float(to_after[1]) == 0.0
    assert bool((to_reward[mask.bool()] != 0).all()) and float(to_after[0]) != 0.0


@CHECKED
@given(st.lists(st.tuples(st.integers(-20, 20), st.integers(0, 3)), min_size=1, max_size=12), st.randoms())
def test_the_group_advantage_is_the_literal_one_in_any_order(pairs: list[tuple[int, int]], random) -> None:  # type: ignore[no-untyped-def]
    quarters, group = zip(*pairs, strict=True)
    total = [q / 4 for q in quarters]
    out = returns.group_advantage(torch.tensor(total), torch.tensor(group))
    np.testing.assert_allclose(out, reference.group_advantage(total, group), rtol=1e-4, atol=1e-5)
    order = random.sample(range(len(total)), len(total))
    moved = returns.group_advantage(torch.tensor(total)[order], torch.tensor(group)[order] * 10 + 3)
    torch.testing.assert_close(moved, out[order])


@CHECKED
@given(st.floats(-1000.0, 1000.0, width=32), st.integers(1, 300))
def test_equal_returns_and_equal_advantages_become_zero_however_many(value: float, count: int) -> None:
    equal = torch.full((count,), value)
    assert not returns.group_advantage(equal, torch.zeros(count, dtype=torch.int64)).any()
    assert not returns.normalise(equal, torch.ones(count)).any()


@CHECKED
@given(st.lists(st.tuples(number, st.booleans()), min_size=1, max_size=12))
def test_normalisation_is_the_literal_one_over_valid_entries(entries: list[tuple[float, bool]]) -> None:
    x, mask = (torch.tensor(column) for column in zip(*entries, strict=True))
    out = returns.normalise(x, mask)
    assert out.dtype == x.dtype and not out[~mask].any()
    if mask.any():
        np.testing.assert_allclose(out[mask], reference.normalise(x[mask].tolist()), rtol=1e-4, atol=1e-4)
        assert abs(float(masked_mean(out, mask))) < 1e-5


@CHECKED
@given(st.lists(st.tuples(number, number, st.booleans()), min_size=1, max_size=12))
def test_the_explained_variance_is_the_literal_one_over_valid_entries(entries: list) -> None:
    value, target, mask = (torch.tensor(column) for column in zip(*entries, strict=True))
    out = float(returns.explained_variance(value, target, mask))
    valid = target[mask]
    if len(valid) and float(valid.var(unbiased=False)) > 1e-3:
        expected = reference.explained_variance(value[mask].tolist(), valid.tolist())
        np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-3)
    elif len(valid) == 0 or bool((valid == valid[0]).all()):
        assert out == 0.0


@CHECKED
@given(st.integers(2, 12), st.floats(0.5, 1.0))
def test_the_denoising_discount_is_one_factor_per_remaining_step(num_steps: int, discount: float) -> None:
    step = torch.arange(num_steps)[:, None].expand(-1, 2)
    out = returns.denoise_discount(step, num_steps=num_steps, discount=discount)
    assert out.shape == step.shape and out.dtype == torch.float32
    expected = [reference.denoise_discount(k, num_steps, discount) for k in range(num_steps)]
    np.testing.assert_allclose(out[:, 1], expected, rtol=1e-5)


# ------------------------------------------------------------------------------------------------ rewards


def test_a_success_that_is_lost_and_found_is_paid_once_or_telescopes() -> None:
    score = np.array([0, 1, 0, 1], np.float32)
    assert gain(score, "best_so_far").tolist() == [0, 1, 0, 0]
    assert gain(score, "difference").tolist() == [0, 1, -1, 1]
    lost = np.array([0, 1, 0, 0], np.float32)
    assert gain(lost, "best_so_far").sum() == 1.0 and gain(lost, "difference").sum() == 0.0


@CHECKED
@given(st.lists(st.floats(0.0, 1.0, width=32), min_size=1, max_size=8), st.sampled_from(["best_so_far", "difference"]))
def test_the_gain_is_the_literal_one_and_sums_to_the_best_or_the_last_score(drawn: list[float], form) -> None:  # type: ignore[no-untyped-def]
    score = np.array(drawn, np.float32)
    out = gain(score, form)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, reference.gain(drawn, form), atol=1e-6)
    np.testing.assert_allclose(out.sum(), max(drawn) if form == "best_so_far" else drawn[-1], atol=1e-5)


@CHECKED
@given(st.lists(st.tuples(distances, distances, distances), min_size=1, max_size=8), st.floats(1e-4, 0.5))
def test_the_shaped_reward_is_the_literal_one(rows: list[tuple[float, float, float]], epsilon: float) -> None:
    executed, still, moved = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    out = shape(executed, still, moved, RewardConfig(epsilon=epsilon))
    np.testing.assert_allclose(out, [reference.progress(*row, epsilon) for row in rows], atol=1e-12)
    np.testing.assert_allclose(
        shape(executed, still, moved, RewardConfig(shaping="negative")), [-d for d, _, _ in rows]
    )
    exp = shape(executed, still, moved, RewardConfig(shaping="exp", tau=0.3))
    np.testing.assert_allclose(exp, np.exp([-d / 0.3 for d, _, _ in rows]), rtol=1e-12)


@pytest.mark.parametrize("shaping", ["progress", "negative", "exp"])
def test_a_larger_distance_never_pays_more(shaping) -> None:  # type: ignore[no-untyped-def]
    d = torch.linspace(0.0, 2.0, 50)
    paid = shape(d, torch.full_like(d, 0.5), torch.full_like(d, 0.7), RewardConfig(shaping=shaping))
    assert bool((paid.diff() <= 0).all()) and float(paid[0]) > float(paid[-1])
