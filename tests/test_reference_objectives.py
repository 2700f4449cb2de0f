"""PPO as a whole, on micro-batches built by hand, against literal sums over transitions; its clip widths."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from learners.ppo import PPO, PPOConfig, clip_scale
from tests import numpy_reference as reference
from tests.micro_batches import estimate_of, labelled, literal_log_probs, sampler_of
from wamrl_ray.policy.flow_sde import SamplerConfig, transition, velocity_sensitivity

CHECKED = settings(max_examples=50, deadline=None, derandomize=True)
NOWHERE = None
"""PPO looks at neither the expert nor its context."""


# ------------------------------------------------------------------------------------------------ clip widths


def test_the_clip_scales_by_hand() -> None:
    """K = 4, eta = 0.5: slope / std = 0.25 / 0.5, then 0.28125 / 0.433, 0.250, 0.144; the first three average 0.758."""
    constant, exponential, sensitivity = (
        clip_scale(PPOConfig(clip_schedule=schedule, clip_first=0.001), SamplerConfig())  # type: ignore[arg-type]
        for schedule in ("constant", "exponential", "sensitivity")
    )
    assert constant.tolist() == [1.0] * 4
    assert exponential.tolist() == pytest.approx([0.001, 0.001**0.5, 1.0, 1.0])  # the last random step is k = 2
    whole = clip_scale(PPOConfig(clip_schedule="exponential", clip_first=0.001), SamplerConfig(exclude_last=False))
    assert whole.tolist() == pytest.approx([0.001, 0.01, 0.1, 1.0])
    assert sensitivity.tolist() == pytest.approx([0.659480, 0.856690, 1.483830, 2.570069], rel=1e-5)
    learned = clip_scale(PPOConfig(clip_schedule="sensitivity"), sampler_of("flow_noise"))
    assert learned.tolist() == [1.0] * 4


@CHECKED
@given(
    st.sampled_from(["constant", "exponential", "sensitivity"]), st.integers(2, 10), st.floats(0.1, 1.5),
    st.floats(0.001, 1.0), st.booleans(),
)  # fmt: skip
def test_the_clip_scales_are_the_literal_ones(schedule, num: int, eta: float, first: float, exclude: bool) -> None:  # type: ignore[no-untyped-def]
    sampler = SamplerConfig(num_steps=num, eta=eta, exclude_last=exclude)
    out = clip_scale(PPOConfig(clip_schedule=schedule, clip_first=first), sampler)
    assert out.shape == (num,) and out.dtype == torch.float32
    np.testing.assert_allclose(out, reference.clip_scale(schedule, num, eta, first, exclude), rtol=1e-5)


# ------------------------------------------------------------------------------------------------ PPO

configs = st.builds(
    lambda joint, schedule, discount, stale, cap, low, high: PPOConfig(
        ratio="joint" if joint else "step", clip_schedule="constant" if joint else schedule,
        denoise_discount=1.0 if joint else discount, proximal="update_start" if stale else "behaviour",
        importance_cap=cap, clip_low=low, clip_high=high, clip_first=0.3,
    ),
    st.booleans(), st.sampled_from(["constant", "exponential", "sensitivity"]), st.sampled_from([1.0, 0.9]),
    st.booleans(), st.sampled_from([0.0, 1.2, 5.0]), st.sampled_from([0.05, 0.2]), st.sampled_from([0.05, 0.28]),
)  # fmt: skip
samplers = st.builds(
    sampler_of, st.sampled_from(["flow_sde", "flow_noise"]), st.sampled_from(["one", "all"]), st.booleans()
)


@CHECKED
@given(configs, samplers, st.integers(1, 3), st.integers(0, 2**31))
def test_the_ppo_loss_is_the_literal_sum(config: PPOConfig, sampler: SamplerConfig, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, now = labelled(rng, n, sampler)
    everyone = torch.from_numpy(rng.normal(size=n + 2)).float()  # the micro-batch is a part of the update
    loss, terms = PPO(config, sampler).loss(NOWHERE, NOWHERE, batch, slice(1, n + 1), now, estimate_of(everyone))  # type: ignore[arg-type]
    scale = [1.0] * sampler.num_steps
    if not sampler.learned_std or config.clip_schedule == "exponential":
        scale = reference.clip_scale(
            config.clip_schedule, sampler.num_steps, sampler.eta, config.clip_first, sampler.exclude_last
        )
    log_pi = literal_log_probs(batch.transitions, now, sampler)
    assert loss.shape == (n,)
    for i in range(n):
        expected, clipped, weight = reference.ppo_decision(
            log_pi[i], batch.start_logprob[i].tolist(), batch.behaviour_logprob[i].tolist(), float(everyone[i + 1]),
            batch.transitions.step[i].tolist(), ratio=config.ratio, stale=config.proximal == "update_start",
            cap=config.importance_cap, discount=config.denoise_discount, num_steps=sampler.num_steps,
            low=config.clip_low, high=config.clip_high, scale=scale,
        )  # fmt: skip
        assert float(loss[i]) == pytest.approx(expected, rel=1e-3, abs=1e-3)
        assert terms["clipped"][i].tolist() == clipped
        assert terms["importance_weight"][i].tolist() == pytest.approx(weight, rel=1e-4)


@pytest.mark.parametrize("proximal", ["update_start", "behaviour"])
def test_the_gradient_of_ppo_is_the_analytic_one_where_nothing_clips_and_none_elsewhere(proximal: str) -> None:
    """d loss_i / d v = -w discount A rho / m x d log pi / d v; none where clipped, masked, or in what was recorded."""
    sampler = sampler_of()
    config = PPOConfig(proximal=proximal, denoise_discount=0.9, clip_low=0.1, clip_high=0.1)  # type: ignore[arg-type]
    batch, now = labelled(np.random.default_rng(1), 6, sampler)
    recorded = [batch.start_logprob.requires_grad_(), batch.behaviour_logprob.detach().requires_grad_()]
    batch = replace(batch, start_logprob=recorded[0], behaviour_logprob=recorded[1])
    now = replace(now, velocity=now.velocity.requires_grad_())
    advantage = torch.tensor([1.0, -2.0, 0.5, -1.0, 2.0, 0.0])
    loss, terms = PPO(config, sampler).loss(NOWHERE, NOWHERE, batch, slice(0, 6), now, estimate_of(advantage))  # type: ignore[arg-type]
    loss.sum().backward()
    assert all(leaf.grad is None for leaf in recorded)
    moves, clipped = batch.transitions, terms["clipped"]
    assert clipped.any() and not clipped.all()
    log_pi = torch.tensor(literal_log_probs(moves, now.detach(), sampler))
    rho = (log_pi - (batch.start_logprob if proximal == "update_start" else batch.behaviour_logprob)).exp()
    factor = -terms["importance_weight"] * 0.9 ** (3 - moves.step) * advantage[:, None] * rho / 3 * ~clipped
    mean, std = transition(moves.x, now, moves.step, sampler)
    slope = torch.tensor([velocity_sensitivity(k, 4, 0.5) for k in range(3)])[moves.step][..., None, None]
    expected = factor[..., None, None] * slope * (moves.x_next - mean) / std**2 * moves.mask
    torch.testing.assert_close(now.velocity.grad, expected.detach(), rtol=1e-3, atol=1e-4)
