"""Returns and advantages by hand.  `test_reference_returns.py` has the drawn inputs."""

from __future__ import annotations

import pytest
import torch

from learners.returns import explained_variance, gae, group_advantage


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


def test_explained_variance_is_one_for_the_truth_and_zero_for_a_constant() -> None:
    target, mask = torch.tensor([1.0, 2.0, 4.0, 99.0]), torch.tensor([1, 1, 1, 0])
    assert float(explained_variance(target, target, mask)) == 1.0
    assert float(explained_variance(torch.zeros(4), target, mask)) == pytest.approx(0.0)
    assert float(explained_variance(target, torch.ones(4), mask)) == 0.0
