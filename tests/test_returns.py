"""Returns and advantages against literal loops over one episode at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from learners.returns import explained_variance, gae, group_advantage, normalise


def literal_gae(
    reward: list[float], value: list[float], after: float, terminated: bool, gamma: float, lam: float
) -> list[float]:
    """Sum over l of (gamma lambda)^l delta_{t+l}, term by term."""
    values = [*value, 0.0 if terminated else after]
    delta = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(reward)]
    return [sum((gamma * lam) ** i * d for i, d in enumerate(delta[t:])) for t in range(len(delta))]


EPISODES = [
    ([1.0, 0.0, 2.0], [0.5, 1.0, -0.5], 3.0, True),
    ([0.0, 1.0], [0.2, 0.4], 0.7, False),
    ([5.0], [1.0], 9.0, True),
]


def padded(gamma: float, length: int) -> tuple[torch.Tensor, ...]:
    reward, value, discount, mask = (torch.zeros(length, len(EPISODES)) for _ in range(4))
    # Rubbish on padding must not matter.
    value += 7.0
    discount += gamma
    for b, (r, v, _, terminated) in enumerate(EPISODES):
        reward[: len(r), b], value[: len(r), b], mask[: len(r), b] = torch.tensor(r), torch.tensor(v), 1.0
        discount[len(r) - 1, b] = gamma * (not terminated)
    return reward, value, discount, mask, torch.tensor([after for _, _, after, _ in EPISODES])


@pytest.mark.parametrize("length", [3, 5])
@pytest.mark.parametrize("lam", [0.0, 0.9, 1.0])
def test_gae_equals_a_literal_sum_whatever_the_padding(lam: float, length: int) -> None:
    reward, value, discount, mask, after = padded(0.95, length)
    advantage, target = gae(reward, value, discount, mask, after, gae_lambda=lam)
    for b, (r, v, end, terminated) in enumerate(EPISODES):
        expected = literal_gae(r, v, end, terminated, 0.95, lam)
        assert advantage[: len(r), b].tolist() == pytest.approx(expected, abs=1e-6)
        assert target[: len(r), b].tolist() == pytest.approx(np.add(expected, v).tolist(), abs=1e-6)
        assert not advantage[len(r) :, b].any() and not target[len(r) :, b].any()


def test_a_truncated_episode_bootstraps_and_a_terminated_one_does_not() -> None:
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    truncated, _ = gae(zero, zero, 0.9 * one, one, torch.tensor([2.0]), gae_lambda=1.0)
    terminated, _ = gae(zero, zero, zero, one, torch.tensor([2.0]), gae_lambda=1.0)
    assert float(truncated) == pytest.approx(1.8) and float(terminated) == 0.0


def test_gae_with_lambda_one_and_no_discount_is_return_minus_value() -> None:
    reward, value = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[0.5], [0.5], [0.5]])
    discount = torch.tensor([[1.0], [1.0], [0.0]])
    advantage, target = gae(reward, value, discount, torch.ones(3, 1), torch.zeros(1), gae_lambda=1.0)
    assert target.flatten().tolist() == [6.0, 5.0, 3.0]
    assert advantage.flatten().tolist() == [5.5, 4.5, 2.5]


def test_gae_refuses_batch_major_input() -> None:
    with pytest.raises(ValueError, match="expected"):
        gae(*(torch.zeros(2, 3) for _ in range(4)), torch.zeros(2), gae_lambda=1.0)


def test_group_advantage_compares_within_a_group_only() -> None:
    returns, group = torch.tensor([1.0, 10.0, 3.0, 30.0]), torch.tensor([7, 2, 7, 2])
    assert group_advantage(returns, group).tolist() == pytest.approx([-1.0, -1.0, 1.0, 1.0], abs=1e-5)
    shifted = group_advantage(returns + torch.tensor([0.0, 100.0, 0.0, 100.0]), group)
    torch.testing.assert_close(shifted, group_advantage(returns, group))


def test_a_group_of_one_or_of_equal_returns_teaches_nothing() -> None:
    returns = torch.tensor([123.4567] * 11 + [5.0])  # eleven of them do not add up to eleven times one in float32
    assert group_advantage(returns, torch.tensor([0] * 11 + [1])).tolist() == [0.0] * 12


def test_normalisation_sees_valid_entries_only() -> None:
    x, mask = torch.tensor([[1.0, 2.0], [3.0, 1e6]]), torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    out = normalise(x, mask)
    expected = (np.array([1.0, 2.0, 3.0]) - 2.0) / (np.std([1.0, 2.0, 3.0]) + 1e-5)
    assert [float(out[0, 0]), float(out[0, 1]), float(out[1, 0])] == pytest.approx(expected.tolist())
    assert float(out[1, 1]) == 0.0


def test_explained_variance_is_one_for_the_truth_and_zero_for_a_constant() -> None:
    target, mask = torch.tensor([1.0, 2.0, 4.0, 99.0]), torch.tensor([1, 1, 1, 0])
    assert float(explained_variance(target, target, mask)) == 1.0
    assert float(explained_variance(torch.zeros(4), target, mask)) == pytest.approx(0.0)
    assert float(explained_variance(target, torch.ones(4), mask)) == 0.0
