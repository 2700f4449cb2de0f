"""Flow-SDE by hand, the distribution it must keep, and a chain that a policy sampled.

`test_reference_flow.py` has the drawn inputs and gradients.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests import numpy_reference as reference
from wamrl_ray.policy.flow_sde import (
    Prediction,
    SamplerConfig,
    draw_stochastic_step,
    sigma_grid,
    transition_kl,
    transition_mean,
    transition_std,
)
from wamrl_ray.policy.wam import WAM, WAMConfig

SDE = SamplerConfig()


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


def test_the_weights_of_the_transition_kl_by_hand() -> None:
    """K = 4, eta = 0.5: delta^2 / (2 eta^2) at first, then delta (1 + eta^2 / 2)^2 (1 - t) / (2 eta^2 t)."""
    v, mask = torch.ones(1, 1), torch.ones(1, 1)
    p, q = Prediction(velocity=v), Prediction(velocity=0 * v)
    weights = [float(transition_kl(p, q, k, SDE, mask)) for k in range(4)]
    assert weights == pytest.approx([0.125, 0.2109375, 0.6328125, 1.8984375], rel=1e-5)


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
                step = np.vectorize(reference.flow_sde_step)
                mean, std = step(x[0].double().numpy(), v[0].double().numpy(), k, 4, 0.5)
                ran = np.zeros(mean.shape)
                ran[: spec.executed, : spec.action_dim] = 1.0
                literal += reference.log_density(decision.chain[k + 1], mean, std, ran)
        assert decision.logprob == pytest.approx(literal, rel=1e-4)
