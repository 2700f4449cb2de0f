"""Mean, std, density, KL and entropy of a transition: literal transcriptions, torch's own and analytic gradients."""

from __future__ import annotations

import math
from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from learners.losses import approx_kl
from tests import numpy_reference as reference
from wamrl_ray.policy.flow_sde import (
    Prediction,
    SamplerConfig,
    bounded_std,
    gaussian_log_prob,
    is_stochastic,
    transition,
    transition_entropy,
    transition_kl,
    velocity_sensitivity,
)

CHECKED = settings(max_examples=50, deadline=None, derandomize=True)
H, D = 2, 3
SDE, LEARNED = SamplerConfig(), SamplerConfig(noise="flow_noise")
BOTH = pytest.mark.parametrize("config", [SDE, LEARNED], ids=["flow_sde", "flow_noise"])

samplers = st.builds(
    lambda noise, num_steps, eta, low, factor: SamplerConfig(
        noise=noise, num_steps=num_steps, eta=eta, std_min=low, std_max=low * factor
    ),
    st.sampled_from(["flow_sde", "flow_noise"]), st.integers(2, 10), st.floats(0.1, 1.5), st.floats(0.05, 0.5),
    st.floats(1.0, 4.0),
)  # fmt: skip
seeds = st.integers(0, 2**31)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def predictions(seed: int, *shape: int) -> Prediction:
    return Prediction(velocity=draw(seed, *shape), raw_std=draw(seed + 1, *shape))


def literal(x: Tensor, p: Prediction, step: Tensor, config: SamplerConfig) -> tuple[np.ndarray, np.ndarray]:
    """Mean and std (n, m, H, D), one entry at a time."""
    assert p.raw_std is not None
    mean, std = np.zeros(x.shape), np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        here, k = (float(x[i]), float(p.velocity[i])), int(step[i[:2]])
        if config.noise == "flow_sde":
            mean[i], std[i] = reference.flow_sde_step(*here, k, config.num_steps, config.eta)
        else:
            raw = float(p.raw_std[i])
            mean[i], std[i] = reference.flow_noise_step(*here, raw, config.num_steps, config.std_min, config.std_max)
    return mean, std


def case(seed: int, config: SamplerConfig) -> tuple[Tensor, Tensor, Tensor]:
    """x (n, m, H, D), step (n, m), mask (n, 1, H, D)."""
    rng = np.random.default_rng(seed)
    step = torch.from_numpy(rng.integers(0, config.num_steps, (2, 2)))
    return draw(seed + 2, 2, 2, H, D), step, torch.from_numpy(rng.integers(0, 2, (2, 1, H, D))).float()


# ------------------------------------------------------------------------------------------------ values


@CHECKED
@given(samplers, seeds)
def test_mean_std_and_density_are_the_literal_ones(config: SamplerConfig, seed: int) -> None:
    x, step, mask = case(seed, config)
    p, noise = predictions(seed, 2, 2, H, D), draw(seed + 3, 2, 2, H, D)
    mean, std = transition(x, p, step, config)
    expected = literal(x, p, step, config)
    np.testing.assert_allclose(mean, expected[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(std.expand_as(x), expected[1], rtol=1e-5)
    x_next = mean + std * noise
    density = gaussian_log_prob(x_next, mean, std, mask)
    for i in np.ndindex(2, 2):
        one = reference.log_density(x_next[i].double().numpy(), expected[0][i], expected[1][i], mask[i[0], 0].numpy())
        assert float(density[i]) == pytest.approx(one, rel=1e-3, abs=1e-3)
        for whole, part in zip(
            transition(x[i], replace(p, velocity=p.velocity[i], raw_std=p.raw_std[i]), int(step[i]), config),
            (mean[i], std[i]),
            strict=True,
        ):
            assert torch.equal(whole.expand(H, D), part.expand(H, D))


@CHECKED
@given(st.floats(0.1, 2.0), seeds)
def test_the_log_density_takes_one_std_for_all_and_counts_masked_entries_only(std: float, seed: int) -> None:
    x, mean, mask = draw(seed, 2, H, D), draw(seed + 1, 2, H, D), torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    out = gaussian_log_prob(x, mean, std, mask)
    for b in range(2):
        one = reference.log_density(x[b].double().numpy(), mean[b].numpy(), np.full((H, D), std), mask.numpy())
        assert float(out[b]) == pytest.approx(one, rel=1e-4, abs=1e-4)


@CHECKED
@given(samplers, seeds)
def test_the_transition_kl_is_the_literal_one_and_that_of_torch(config: SamplerConfig, seed: int) -> None:
    x, step, mask = case(seed, config)
    p, q = predictions(seed, 2, 2, H, D), predictions(seed + 10, 2, 2, H, D)
    out = transition_kl(p, q, step, config, mask)
    (mean_p, std_p), (mean_q, std_q) = (literal(x, side, step, config) for side in (p, q))
    for i in np.ndindex(2, 2):
        entries = [
            reference.gaussian_kl(mean_p[i + e], std_p[i + e] ** 2, mean_q[i + e], std_q[i + e] ** 2)
            for e in np.ndindex(H, D)
            if mask[i[0], 0][e]
        ]
        assert float(out[i]) == pytest.approx(sum(entries), rel=1e-4, abs=1e-6)
    gaussians = [Normal(*(a.double() for a in transition(x, side, step, config))) for side in (p, q)]
    expected = (kl_divergence(*gaussians) * mask).sum(dim=(-2, -1))
    torch.testing.assert_close(out, expected.float(), rtol=1e-3, atol=1e-4)
    assert bool((out >= 0).all()) and not transition_kl(p, p, step, config, mask).any()


@CHECKED
@given(samplers, seeds, st.booleans())
def test_the_entropy_is_that_of_torch(config: SamplerConfig, seed: int, rows_only: bool) -> None:
    x, step, mask = case(seed, config)
    mask = mask[..., :1] if rows_only else mask
    p = predictions(seed, 2, 2, H, D)
    mean, std = transition(x, p, step, config)
    expected = (Normal(mean, std).entropy() * mask).sum(dim=(-2, -1))
    torch.testing.assert_close(transition_entropy(p, step, config, mask), expected, rtol=1e-4, atol=1e-4)


@CHECKED
@given(samplers, st.lists(st.floats(-20.0, 20.0, width=32), min_size=1, max_size=8))
def test_the_learned_std_grows_with_the_head_within_its_bounds(config: SamplerConfig, raw: list[float]) -> None:
    std = bounded_std(torch.tensor(sorted(raw)), config)
    assert std.dtype == torch.float32 and bool((std.diff() >= 0).all())
    assert float(std.min()) >= config.std_min * (1 - 1e-6) and float(std.max()) <= config.std_max * (1 + 1e-6)
    half = torch.tensor([-0.7, 0.3], dtype=torch.bfloat16)
    assert torch.equal(bounded_std(half, config), bounded_std(half.float(), config))
    far = bounded_std(torch.tensor([-30.0, 0.0, 30.0]), config)
    middle = math.sqrt(config.std_min * config.std_max)
    np.testing.assert_allclose(far, [config.std_min, middle, config.std_max], rtol=1e-6)


def test_which_steps_are_stochastic() -> None:
    config, whole = SamplerConfig(), SamplerConfig(exclude_last=False)
    assert [is_stochastic(2, k, config) for k in range(4)] == [False, False, True, False]
    assert [is_stochastic(4, k, config) for k in range(4)] == [True, True, True, False]
    assert [is_stochastic(4, k, whole) for k in range(4)] == [True] * 4
    assert [is_stochastic(3, k, whole) for k in range(4)] == [False, False, False, True]
    assert not any(is_stochastic(-1, k, config) for k in range(4))
    for chosen in (config, whole, replace(config, stochastic="all"), replace(whole, stochastic="all")):
        step = 1 if chosen.stochastic == "one" else chosen.num_steps
        assert sum(is_stochastic(step, k, chosen) for k in range(4)) == chosen.stochastic_steps


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_steps": 1}, "num_steps = 1: use at least 2"),
        ({"eta": -0.1}, r"eta = -0\.1: use a noise scale of at least 0\.001"),
        ({"eta": 1e-30}, r"eta = 1e-30: use a noise scale of at least 0\.001"),
        ({"eta": math.nan}, r"eta = nan: use a noise scale of at least 0\.001"),
        ({"noise": "white"}, "noise = 'white': use 'flow_sde'"),
        ({"stochastic": "some"}, "stochastic = 'some': use 'one'"),
        ({"std_min": 0.0}, r"std_min = 0\.0: use a std of at least 0\.001"),
        ({"std_min": 1e-30}, r"std_min = 1e-30: use a std of at least 0\.001"),
        ({"std_min": 0.2}, r"std_min = 0\.2: use a std of at least 0\.001, at most std_max = 0\.16"),
    ],
)
def test_a_wrong_sampler_config_names_field_value_and_remedy(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=rf"sampler\.{message}"):
        SamplerConfig(**wrong)


# ------------------------------------------------------------------------------------------------ sampled KL


@pytest.mark.parametrize(("config", "k"), [(SDE, 0), (SDE, 1), (SDE, 2), (SDE, 3), (LEARNED, 0), (LEARNED, 2)])
def test_the_kl_estimated_from_ratios_is_the_closed_form_on_a_small_step(config: SamplerConfig, k: int) -> None:
    """From transitions the old policy draws, as the learner has them; the learned std moves as well."""
    old, x, mask = predictions(0, H, D), draw(5, H, D), torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    assert old.raw_std is not None
    new = Prediction(velocity=old.velocity + 0.03 * draw(6, H, D), raw_std=old.raw_std + 0.1 * draw(7, H, D))
    mean, std = transition(x, old, k, config)
    x_next = mean + std * draw(8, 20_000, H, D)
    before, after = (gaussian_log_prob(x_next, *transition(x, side, k, config), mask) for side in (old, new))
    exact = float(transition_kl(old, new, k, config, mask))
    assert 1e-5 < exact < 0.05
    assert float(approx_kl(after - before).mean()) == pytest.approx(exact, rel=0.05)


# ------------------------------------------------------------------------------------------------ gradients


def leaves(p: Prediction) -> Prediction:
    assert p.raw_std is not None
    return Prediction(velocity=p.velocity.clone().requires_grad_(), raw_std=p.raw_std.clone().requires_grad_())


def std_slope(raw: Tensor, config: SamplerConfig) -> Tensor:
    """d log std / d raw = 1/2 (1 - tanh^2 raw) log(std_max / std_min)."""
    return 0.5 * (1.0 - torch.tanh(raw) ** 2) * math.log(config.std_max / config.std_min)


def slopes(step: Tensor, config: SamplerConfig) -> Tensor:
    """d mean / d v per step, by hand: -delta on the first step and of Euler, -delta (1 + eta^2 / 2) elsewhere."""
    later = 1.0 if config.learned_std else 1.0 + config.eta**2 / 2.0
    return (-torch.where(step == 0, 1.0, later) / config.num_steps)[..., None, None]


@BOTH
def test_the_gradient_of_the_log_density_is_the_analytic_one_and_none_on_masked_entries(config: SamplerConfig) -> None:
    x, step, mask = case(3, config)
    step[0, 0] = 0
    p, x_next = leaves(predictions(3, 2, 2, H, D)), draw(9, 2, 2, H, D)
    mean, std = transition(x, p, step, config)
    gaussian_log_prob(x_next, mean, std, mask).sum().backward()
    z = ((x_next - mean) / std).detach()
    assert p.velocity.grad is not None and p.raw_std is not None
    torch.testing.assert_close(p.velocity.grad, slopes(step, config) * z / std.detach() * mask, rtol=1e-4, atol=1e-5)
    if config.learned_std:
        expected = (z**2 - 1.0) * std_slope(p.raw_std.detach(), config) * mask
        torch.testing.assert_close(p.raw_std.grad, expected, rtol=1e-4, atol=1e-5)
    else:
        assert p.raw_std.grad is None
    for k in range(config.num_steps):
        eta = 0.0 if config.learned_std else config.eta
        assert velocity_sensitivity(k, config.num_steps, eta) == pytest.approx(float(slopes(torch.tensor(k), config)))


@BOTH
def test_the_gradients_of_the_transition_kl_are_the_analytic_ones_on_both_sides(config: SamplerConfig) -> None:
    x, step, mask = case(4, config)
    p, q = leaves(predictions(4, 2, 2, H, D)), leaves(predictions(14, 2, 2, H, D))
    transition_kl(p, q, step, config, mask).sum().backward()
    s_p, s_q = (transition(x, side, step, config)[1].detach() for side in (p, q))
    slope, dv = slopes(step, config), (p.velocity - q.velocity).detach()
    by_velocity = slope**2 * dv / s_q**2 * mask
    for side, sign in ((p, 1.0), (q, -1.0)):
        torch.testing.assert_close(side.velocity.grad, sign * by_velocity, rtol=1e-4, atol=1e-6)
    assert p.raw_std is not None and q.raw_std is not None
    if not config.learned_std:
        assert p.raw_std.grad is None and q.raw_std.grad is None
        return
    ratio = (s_p / s_q) ** 2
    to_p = (ratio - 1.0) * std_slope(p.raw_std.detach(), config) * mask
    to_q = (1.0 - ratio - (slope * dv / s_q) ** 2) * std_slope(q.raw_std.detach(), config) * mask
    torch.testing.assert_close(p.raw_std.grad, to_p, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(q.raw_std.grad, to_q, rtol=1e-4, atol=1e-6)


@BOTH
def test_only_a_learned_std_gives_the_entropy_a_gradient(config: SamplerConfig) -> None:
    _, step, mask = case(5, config)
    p = leaves(predictions(5, 2, 2, H, D))
    out = transition_entropy(p, step, config, mask)
    if not config.learned_std:
        assert not out.requires_grad
        return
    out.sum().backward()
    assert p.velocity.grad is None and p.raw_std is not None
    torch.testing.assert_close(p.raw_std.grad, std_slope(p.raw_std.detach(), config) * mask, rtol=1e-4, atol=1e-6)
