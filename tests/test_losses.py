"""Losses against hand values, literal NumPy and analytic gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learners.losses import (
    approx_kl,
    feature_kl,
    feature_variance,
    flow_matching_mse,
    masked_mean,
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


def test_feature_kl_equals_a_literal_mean_over_layers_tokens_and_channels() -> None:
    mu, ref = layers(1), layers(2)
    s2, s2_ref = feature_variance(mu), feature_variance(ref)
    literal = []
    for m, r, a, b in zip(mu, ref, s2, s2_ref, strict=True):
        rows = []
        for i in range(3):
            for n in range(5):
                for c in range(4):
                    square = float(m[i, n, c] - r[i, n, c]) ** 2
                    rows.append(0.5 * (math.log(b[c] / a[c]) + (float(a[c]) + square) / float(b[c]) - 1.0))
        literal.append(np.mean(rows))
    assert float(feature_kl(mu, ref, s2, s2_ref)) == pytest.approx(float(np.mean(literal)), rel=1e-5)


def test_feature_kl_gives_the_reference_no_gradient_and_the_current_the_analytic_one() -> None:
    mu = [layer.requires_grad_() for layer in layers(1)]
    ref = [layer.requires_grad_() for layer in layers(2)]
    s2_ref = [v.requires_grad_() for v in feature_variance(ref)]
    feature_kl(mu, ref, feature_variance(mu), s2_ref).backward()
    assert all(layer.grad is None for layer in (*ref, *s2_ref))
    for m, r, b in zip(mu, ref, s2_ref, strict=True):
        torch.testing.assert_close(m.grad, (m - r).detach() / b.detach() / (m.numel() * len(mu)))


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


def test_frames_that_do_not_exist_give_no_gradient() -> None:
    velocity = torch.randn(2, 2, 2, 3, 3, 4, requires_grad=True)
    mask = torch.tensor([[True, False], [False, False]])
    zeros = torch.zeros_like(velocity)
    flow_matching_mse(velocity, zeros, zeros, mask, weight=torch.ones(2)).backward()
    assert velocity.grad is not None
    assert velocity.grad[0, :, 0].all() and not velocity.grad[0, :, 1].any() and not velocity.grad[1].any()


def test_nothing_valid_is_a_loss_of_zero() -> None:
    assert float(masked_mean(torch.ones(3), torch.zeros(3))) == 0.0


# ------------------------------------------------------------------------------------------------ actor and critic


def test_ppo_clip_equals_a_literal_computation() -> None:
    log_rho = np.array([0.0, 0.5, -0.5, 0.5, -0.5, 0.25])
    advantage = np.array([1.0, 2.0, 3.0, -1.0, -2.0, 1.0])
    terms, clipped = [], []
    for x, a in zip(log_rho, advantage, strict=True):
        rho = math.exp(x)
        limited = min(max(rho, 0.9), 1.3)
        clipped.append(limited * a < rho * a)
        terms.append(-min(rho * a, limited * a))
    loss, flags = ppo_clip(torch.tensor(log_rho), torch.tensor(advantage), clip_low=0.1, clip_high=0.3)
    assert loss.tolist() == pytest.approx(terms)
    assert flags.tolist() == clipped == [False, True, False, False, True, False]


def test_a_clipped_sample_has_no_gradient_and_an_unclipped_one_has_minus_rho_a() -> None:
    log_rho = torch.tensor([0.5, -0.5, 0.1], requires_grad=True)
    advantage = torch.tensor([1.0, 1.0, 2.0])
    loss, _ = ppo_clip(log_rho, advantage, clip_low=0.2, clip_high=0.2)
    loss.sum().backward()
    assert log_rho.grad is not None
    expected = [0.0, -math.exp(-0.5), -2.0 * math.exp(0.1)]
    assert log_rho.grad.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_two_clip_widths_are_independent() -> None:
    up, down = torch.tensor([math.log(1.25)]), torch.tensor([math.log(0.75)])
    one = torch.ones(1)
    assert not ppo_clip(up, one, clip_low=0.2, clip_high=0.28)[1].item()
    assert ppo_clip(up, one, clip_low=0.2, clip_high=0.2)[1].item()
    assert ppo_clip(down, -one, clip_low=0.2, clip_high=0.28)[1].item()
    assert not ppo_clip(down, -one, clip_low=0.3, clip_high=0.28)[1].item()


def test_approx_kl_is_zero_at_ratio_one_and_close_to_the_kl_of_gaussians() -> None:
    assert approx_kl(torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    log_rho = 0.5 * x.square() - 0.5 * (x - 0.2).square()
    assert bool((approx_kl(log_rho) >= 0).all())
    assert float(approx_kl(log_rho).mean()) == pytest.approx(0.5 * 0.2**2, rel=0.05)


def test_value_loss_is_quadratic_then_linear_and_pessimistic_about_moves() -> None:
    value, old, target = torch.tensor([1.0, 4.0]), torch.tensor([1.0, 0.0]), torch.tensor([2.0, 4.0])
    assert value_loss(value, old, target, value_clip=0.0, huber=10.0).tolist() == pytest.approx([0.5, 0.0])
    clipped = value_loss(value, old, target, value_clip=0.5, huber=10.0)
    assert clipped.tolist() == pytest.approx([0.5, 0.5 * 3.5**2])
    far = value_loss(torch.zeros(1), torch.zeros(1), torch.tensor([5.0]), value_clip=0.0, huber=1.0)
    assert float(far) == pytest.approx(5.0 - 0.5)
