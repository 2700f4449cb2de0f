"""Losses by hand, and what they do at the edges.  `test_reference_losses.py` has the drawn inputs and gradients."""

from __future__ import annotations

import math

import pytest
import torch

from learners.losses import (
    feature_kl,
    feature_variance,
    flow_matching_mse,
    ppo_clip,
    value_loss,
)


def layers(seed: int, count: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 5, 4, generator=generator) for _ in range(count)]


# ------------------------------------------------------------------------------------------------ feature KL


def test_feature_kl_is_zero_at_identity() -> None:
    features = layers(0)
    variance = feature_variance(features)
    assert float(feature_kl(features, features, variance, variance)) == pytest.approx(0.0, abs=1e-7)


def test_feature_kl_of_one_feature_by_hand() -> None:
    """mu 3, mu_ref 1, s^2 2, s_ref^2 4: 1/2 [ln 2 + (2 + 4) / 4 - 1]."""
    kl = feature_kl(
        [torch.full((1, 1, 1), 3.0)], [torch.full((1, 1, 1), 1.0)], [torch.tensor([2.0])], [torch.tensor([4.0])]
    )
    assert float(kl) == pytest.approx(0.5 * (math.log(2.0) + 0.5), abs=1e-6)


def test_each_term_of_the_feature_kl_counts() -> None:
    zero, one = [torch.zeros(1, 1, 1)], [torch.ones(1, 1, 1)]
    v1, v2 = [torch.tensor([1.0])], [torch.tensor([2.0])]
    assert float(feature_kl(one, zero, v1, v1)) == pytest.approx(0.5)
    assert float(feature_kl(zero, zero, v2, v1)) == pytest.approx(0.5 * (2.0 - 1.0 - math.log(2.0)), abs=1e-6)
    assert float(feature_kl(one, zero, v2, v2)) == pytest.approx(0.25)


def test_feature_kl_has_exactly_no_gradient_at_the_reference() -> None:
    ref = layers(3)
    mu = [layer.clone().requires_grad_() for layer in ref]
    feature_kl(mu, ref, [v * 1.3 for v in feature_variance(ref)], feature_variance(ref)).backward()
    assert all(not m.grad.any() for m in mu if m.grad is not None) and all(m.grad is not None for m in mu)


@pytest.mark.parametrize("weight", [0.0, 1.0, 1e3])
def test_a_growing_kl_weight_freezes_drift(weight: float) -> None:
    """min over theta of (theta - 1)^2 + weight KL(theta || 0): theta = 1 / (1 + weight / 4) with s_ref^2 = 2."""
    theta = torch.zeros(1, 1, 1, requires_grad=True)
    optimizer = torch.optim.SGD([theta], lr=0.4 / (1.0 + weight / 4))
    for _ in range(60):
        optimizer.zero_grad()
        s2 = [torch.tensor([2.0])]
        loss = (theta - 1.0).square().sum() + weight * feature_kl([theta], [torch.zeros(1, 1, 1)], s2, s2)
        loss.backward()
        optimizer.step()
    assert float(theta.detach()) == pytest.approx(1.0 / (1.0 + weight / 4), rel=1e-4)


def test_a_constant_channel_does_not_make_the_kl_explode() -> None:
    features = layers(4, count=1)
    features[0][..., 0] = 1.0
    variance = feature_variance(features)[0]
    assert float(variance[0]) == pytest.approx(1e-4 * float(features[0].flatten(0, 1).var(0, unbiased=False).mean()))


# ------------------------------------------------------------------------------------------------ flow matching


def test_flow_matching_compares_the_velocity_with_noise_minus_data() -> None:
    shape = (1, 1, 2, 1, 1, 1)
    velocity = torch.tensor([1.0, 5.0]).reshape(shape)
    noise, clean = torch.tensor([2.0, 2.0]).reshape(shape), torch.tensor([0.5, 0.0]).reshape(shape)
    both = flow_matching_mse(velocity, noise, clean, torch.ones(1, 2), weight=torch.ones(1))
    assert float(both) == pytest.approx(((1 - 1.5) ** 2 + (5 - 2) ** 2) / 2)
    first = flow_matching_mse(velocity, noise, clean, torch.tensor([[1.0, 0.0]]), weight=torch.tensor([0.5]))
    assert float(first) == pytest.approx(0.125)


# ------------------------------------------------------------------------------------------------ actor and critic


def test_a_ratio_beyond_float32_is_finite_whatever_the_advantage() -> None:
    loss, clipped = ppo_clip(torch.full((3,), 200.0), torch.tensor([0.0, 1.0, -1.0]), clip_low=0.2, clip_high=0.2)
    assert loss[0].item() == 0.0 and loss[1].item() == pytest.approx(-1.2) and bool(torch.isfinite(loss).all())
    assert clipped.tolist() == [False, True, False]


def test_the_two_clip_widths_are_independent() -> None:
    up, down = torch.tensor([math.log(1.25)]), torch.tensor([math.log(0.75)])
    one = torch.ones(1)
    assert not ppo_clip(up, one, clip_low=0.2, clip_high=0.28)[1].item()
    assert ppo_clip(up, one, clip_low=0.2, clip_high=0.2)[1].item()
    assert ppo_clip(down, -one, clip_low=0.2, clip_high=0.28)[1].item()
    assert not ppo_clip(down, -one, clip_low=0.3, clip_high=0.28)[1].item()


def test_value_loss_is_quadratic_then_linear_and_pessimistic_about_moves() -> None:
    value, old, target = torch.tensor([1.0, 4.0]), torch.tensor([1.0, 0.0]), torch.tensor([2.0, 4.0])
    assert value_loss(value, old, target, value_clip=0.0, huber=10.0).tolist() == pytest.approx([0.5, 0.0])
    clipped = value_loss(value, old, target, value_clip=0.5, huber=10.0)
    assert clipped.tolist() == pytest.approx([0.5, 0.5 * 3.5**2])
    far = value_loss(torch.zeros(1), torch.zeros(1), torch.tensor([5.0]), value_clip=0.0, huber=1.0)
    assert float(far) == pytest.approx(5.0 - 0.5)
