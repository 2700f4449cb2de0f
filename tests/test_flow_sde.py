"""Flow-SDE: hand values, an independent literal transcription, and the distribution it must keep."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from wamrl_ray.policy.flow_sde import (
    Prediction,
    SamplerConfig,
    draw_stochastic_step,
    gaussian_log_prob,
    is_stochastic,
    sigma_grid,
    transition_kl,
    transition_mean,
    transition_std,
    velocity_sensitivity,
)
from wamrl_ray.policy.wam import WAM, WAMConfig

SDE = SamplerConfig()


def literal_step(x: np.ndarray, v: np.ndarray, k: int, num: int, eta: float) -> tuple[np.ndarray, float]:
    """Mean and std of one step, written out from the paper with time t = sigma and step 1 / K."""
    t, delta = 1.0 - k / num, 1.0 / num
    denominator = 1.0 - (t if k > 0 else 1.0 - delta)
    g = eta * math.sqrt(t / denominator)
    x0_hat, x1_hat = x - t * v, x + (1.0 - t) * v
    mean = x0_hat * (1.0 - (t - delta)) + x1_hat * (t - delta - g * g * delta / (2.0 * t))
    return mean, math.sqrt(delta) * g


@pytest.mark.parametrize(
    ("num", "eta", "expected"),
    [(4, 0.5, [0.5, 0.4330127, 0.25, 0.1443376]), (5, 0.3, [0.3, 0.2683282, 0.1643168, 0.1095445, 0.0670820])],
)
def test_the_stds_are_the_published_ones(num: int, eta: float, expected: list[float]) -> None:
    assert [transition_std(k, num, eta) for k in range(num)] == pytest.approx(expected, abs=1e-6)


def test_the_grid_runs_from_noise_to_data() -> None:
    assert sigma_grid(4) == (1.0, 0.75, 0.5, 0.25, 0.0)


def test_without_noise_the_step_is_euler() -> None:
    x, v = torch.randn(3, 2, 2), torch.randn(3, 2, 2)
    for k in range(4):
        torch.testing.assert_close(transition_mean(x, v, k, 4, 0.0), x - 0.25 * v, atol=1e-6, rtol=1e-6)
        assert transition_std(k, 4, 0.0) == 0.0


@pytest.mark.parametrize("k", range(4))
def test_mean_and_std_equal_a_literal_transcription(k: int) -> None:
    x, v = torch.randn(3, 2, 2), torch.randn(3, 2, 2)
    mean, std = literal_step(x.double().numpy(), v.double().numpy(), k, 4, 0.5)
    np.testing.assert_allclose(transition_mean(x, v, k, 4, 0.5).numpy(), mean, atol=1e-6)
    assert transition_std(k, 4, 0.5) == pytest.approx(std, abs=1e-9)


@pytest.mark.parametrize("k", range(4))
def test_the_sensitivity_is_the_derivative_of_the_mean(k: int) -> None:
    v = torch.zeros(1, requires_grad=True)
    transition_mean(torch.ones(1), v, k, 4, 0.5).sum().backward()
    assert v.grad is not None
    assert velocity_sensitivity(k, 4, 0.5) == pytest.approx(float(v.grad), rel=1e-6)


@pytest.mark.parametrize("k", range(4))
def test_the_transition_kl_is_the_kl_of_the_two_gaussians(k: int) -> None:
    x, v, w = (torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(i)) for i in range(3))
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    std = transition_std(k, 4, 0.5)
    p = torch.distributions.Normal(transition_mean(x, v, k, 4, 0.5), std)
    q = torch.distributions.Normal(transition_mean(x, w, k, 4, 0.5), std)
    expected = (torch.distributions.kl_divergence(p, q) * mask).sum(dim=(-2, -1))
    p_hat, q_hat = Prediction(velocity=v), Prediction(velocity=w)
    torch.testing.assert_close(transition_kl(p_hat, q_hat, k, SDE, mask), expected, rtol=1e-4, atol=1e-6)
    assert not transition_kl(p_hat, p_hat, k, SDE, mask).any()


def test_the_weights_of_the_transition_kl_by_hand() -> None:
    """K = 4, eta = 0.5: delta^2 / (2 eta^2) at first, then delta (1 + eta^2 / 2)^2 (1 - t) / (2 eta^2 t)."""
    v, mask = torch.ones(1, 1), torch.ones(1, 1)
    p, q = Prediction(velocity=v), Prediction(velocity=0 * v)
    weights = [float(transition_kl(p, q, k, SDE, mask)) for k in range(4)]
    assert weights == pytest.approx([0.125, 0.2109375, 0.6328125, 1.8984375], rel=1e-5)


def test_the_log_density_equals_a_literal_sum_over_masked_entries() -> None:
    x, mean = torch.randn(2, 3, 2), torch.randn(2, 3, 2)
    mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    for b in range(2):
        literal = 0.0
        for h, d in ((0, 0), (1, 0), (1, 1)):
            z = float(x[b, h, d] - mean[b, h, d]) / 0.3
            literal += -0.5 * z * z - math.log(0.3 * math.sqrt(2 * math.pi))
        assert float(gaussian_log_prob(x, mean, 0.3, mask)[b]) == pytest.approx(literal, rel=1e-5)


def exact_velocity(x: Tensor, sigma: float, mean: float, std: float) -> Tensor:
    """E[eps - x0 | x] for x0 ~ N(mean, std^2) and x = (1 - sigma) x0 + sigma eps."""
    variance = (1.0 - sigma) ** 2 * std**2 + sigma**2
    centred = x - (1.0 - sigma) * mean
    return sigma / variance * centred - (mean + (1.0 - sigma) * std**2 / variance * centred)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_a_gaussian_keeps_its_mean_and_spread_whatever_the_noise(eta: float) -> None:
    generator, num = torch.Generator().manual_seed(0), 400
    x = torch.randn(20_000, generator=generator)
    for k, sigma in enumerate(sigma_grid(num)[:-1]):
        mean = transition_mean(x, exact_velocity(x, sigma, 2.0, 0.5), k, num, eta)
        x = mean + transition_std(k, num, eta) * torch.randn(x.shape, generator=generator)
    assert float(x.mean()) == pytest.approx(2.0, abs=0.02)
    assert float(x.std()) == pytest.approx(0.5, rel=0.03)


def test_the_random_step_is_uniform_over_the_allowed_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = [draw_stochastic_step(generator, SamplerConfig()) for _ in range(3000)]
    counts = np.bincount(drawn, minlength=4)
    assert counts[3] == 0 and counts[:3].min() > 900
    assert 3 in {draw_stochastic_step(generator, SamplerConfig(exclude_last=False)) for _ in range(100)}
    assert draw_stochastic_step(generator, SamplerConfig(stochastic="all")) == 4


def test_which_steps_are_stochastic() -> None:
    config = SamplerConfig()
    assert [is_stochastic(2, k, config) for k in range(4)] == [False, False, True, False]
    assert [is_stochastic(4, k, config) for k in range(4)] == [True, True, True, False]
    assert [is_stochastic(4, k, SamplerConfig(exclude_last=False)) for k in range(4)] == [True] * 4
    assert not any(is_stochastic(-1, k, config) for k in range(4))


@pytest.mark.parametrize("stochastic", ["one", "all"])
def test_the_log_probability_of_a_sampled_chain_equals_an_independent_computation(stochastic: str) -> None:
    policy = WAM(WAMConfig.debug(), SamplerConfig(stochastic=stochastic), seed=0)  # type: ignore[arg-type]
    spec, rng = policy.spec, np.random.default_rng(0)
    frames = rng.integers(0, 256, (spec.memory, 1, spec.resolution, spec.resolution, 3), dtype=np.uint8)
    state = rng.normal(size=spec.state_dim).astype(np.float32)
    for seed in range(4):
        decision = policy.decide(frames, state, "reach", action_seed=seed, world_seed=seed, stochastic=True)
        with torch.no_grad():
            context = policy.world_context(policy.encode(torch.from_numpy(frames)[None], ["reach"]), [seed])
            literal = 0.0
            steps = range(3) if stochastic == "all" else [decision.stochastic_step]
            for k in steps:
                x = torch.from_numpy(decision.chain[k])[None]
                v = policy.velocity(context, x, torch.tensor([1.0 - k / 4]), torch.from_numpy(state)[None])
                mean, std = literal_step(x[0].double().numpy(), v[0].double().numpy(), k, 4, 0.5)
                z = (decision.chain[k + 1] - mean)[: spec.executed, : spec.action_dim] / std
                literal += float((-0.5 * z**2 - math.log(std) - 0.5 * math.log(2 * math.pi)).sum())
        assert decision.logprob == pytest.approx(literal, rel=1e-4)


@pytest.mark.parametrize("wrong", [{"num_steps": 1}, {"eta": -0.1}])
def test_a_wrong_sampler_config_names_field_and_value(wrong: dict[str, float]) -> None:
    name, value = next(iter(wrong.items()))
    with pytest.raises(ValueError, match=rf"sampler\.{name} = {value}"):
        SamplerConfig(**wrong)  # type: ignore[arg-type]
