"""PPO and AWR as a whole, on micro-batches built by hand, against literal sums over transitions and draws."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from learners.advantages import Estimate
from learners.awr import AWR, AWRConfig
from learners.labels import LabelledBatch
from learners.ppo import PPO, PPOConfig, clip_scale
from learners.transitions import Transitions
from tests import numpy_reference as reference
from wamrl_ray.policy.flow_sde import Prediction, SamplerConfig, transition, velocity_sensitivity

CHECKED = settings(max_examples=50, deadline=None, derandomize=True)
H, D, S = 3, 2, 2
NOWHERE = None
"""Neither objective looks at the expert's context here, and PPO not at the expert."""


def sampler_of(noise: str = "flow_sde", stochastic: str = "all", exclude_last: bool = True) -> SamplerConfig:
    return SamplerConfig(noise=noise, stochastic=stochastic, exclude_last=exclude_last)  # type: ignore[arg-type]


def labelled(rng: np.random.Generator, n: int, sampler: SamplerConfig) -> tuple[LabelledBatch, Prediction]:
    """n decisions with their random transitions, and a prediction under which they are likely."""

    def draw(*shape: int) -> Tensor:
        return torch.from_numpy(rng.normal(size=shape)).float()

    m = sampler.stochastic_steps
    last = sampler.num_steps - int(sampler.exclude_last)
    step = torch.from_numpy(rng.integers(0, last, (n, 1)) if m == 1 else np.tile(np.arange(m), (n, 1)))
    mask = torch.from_numpy(rng.integers(0, 2, (n, 1, H, D))).float()
    mask[:, :, 0, 0] = 1.0
    x, now = draw(n, m, H, D), Prediction(velocity=draw(n, m, H, D), raw_std=draw(n, m, H, D))
    mean, std = transition(x, now, step, sampler)
    moves = Transitions(step=step, x=x, x_next=mean + std * draw(n, m, H, D), mask=mask)
    log_pi = torch.tensor(literal_log_probs(moves, now, sampler), dtype=torch.float32)
    start = log_pi + 0.2 * draw(n, m)
    zeros = torch.zeros(n)
    batch = LabelledBatch(
        batch=0, episode=torch.arange(n), decision=torch.zeros(n, dtype=torch.int64), state=draw(n, S),
        clean=draw(n, H, D), transitions=moves, obs=None, world_seed=zeros, context=None, pooled=zeros[:, None],  # type: ignore[arg-type]
        behaviour=now, behaviour_logprob=start + 0.5 * draw(n, m), start=now, start_logprob=start, base=now,
        logprob_gap=zeros, reconstruction=zeros, scored=zeros.bool(), reward=zeros,
    )  # fmt: skip
    return batch, now


def literal_log_probs(moves: Transitions, p: Prediction, sampler: SamplerConfig) -> list[list[float]]:
    assert p.raw_std is not None
    out = np.zeros(moves.step.shape)
    for i, j in np.ndindex(moves.step.shape):
        mean, std = np.zeros((H, D)), np.zeros((H, D))
        for e in np.ndindex(H, D):
            x, v, raw = (float(a[i, j][e]) for a in (moves.x, p.velocity, p.raw_std))
            if sampler.learned_std:
                mean[e], std[e] = reference.flow_noise_step(
                    x, v, raw, sampler.num_steps, sampler.std_min, sampler.std_max
                )
            else:
                mean[e], std[e] = reference.flow_sde_step(x, v, int(moves.step[i, j]), sampler.num_steps, sampler.eta)
        out[i, j] = reference.log_density(moves.x_next[i, j].double().numpy(), mean, std, moves.mask[i, 0].numpy())
    return out.tolist()


def estimate_of(advantage: Tensor, keep: Tensor | None = None) -> Estimate:
    zeros = torch.zeros_like(advantage)
    return Estimate(
        advantage=advantage, keep=torch.ones_like(zeros).bool() if keep is None else keep, target=zeros, value=zeros
    )


# ------------------------------------------------------------------------------------------------ clip widths


def test_the_clip_scales_by_hand() -> None:
    """K = 4, eta = 0.5: slope / std = 0.25 / 0.5, then 0.28125 / 0.433, 0.250, 0.144; the first three average 0.758."""
    constant, exponential, sensitivity = (
        clip_scale(PPOConfig(clip_schedule=schedule, clip_first=0.001), SamplerConfig())  # type: ignore[arg-type]
        for schedule in ("constant", "exponential", "sensitivity")
    )
    assert constant.tolist() == [1.0] * 4
    assert exponential.tolist() == pytest.approx([0.001, 0.01, 0.1, 1.0])
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


# ------------------------------------------------------------------------------------------------ AWR


def expert(seen: list[tuple[Tensor, Tensor]]):  # type: ignore[no-untyped-def]
    """Velocity 0.3 x + sigma + the state's first entry; notes what it was asked."""

    def predict(context: None, x: Tensor, sigma: Tensor, state: Tensor) -> Prediction:
        seen.append((x, sigma))
        each = state[:, 0].repeat_interleave(len(x) // len(state))
        return Prediction(velocity=0.3 * x + sigma[:, None, None] + each[:, None, None])

    return predict


@settings(CHECKED, max_examples=25)
@given(
    st.integers(1, 4), st.integers(1, 3), st.floats(0.2, 2.0), st.sampled_from([1.0, 2.0, 20.0]), st.integers(0, 2**31)
)
def test_the_awr_loss_is_the_literal_one(n: int, draws: int, temperature: float, cap: float, seed: int) -> None:
    sampler, rng = sampler_of(), np.random.default_rng(seed)
    batch, now = labelled(rng, n, sampler)
    advantage, keep = torch.from_numpy(rng.normal(size=n)).float(), torch.from_numpy(rng.integers(0, 2, n)).bool()
    estimate, seen = estimate_of(advantage, keep), []
    objective = AWR(AWRConfig(temperature=temperature, max_weight=cap, draws=draws), sampler)
    objective.prepare([batch], estimate, np.random.default_rng(seed))
    loss, _ = objective.loss(expert(seen), NOWHERE, batch, slice(0, n), now, estimate)  # type: ignore[arg-type]
    ((x, sigma),) = seen
    weights = [reference.awr_weight(float(a), temperature, cap) for a in advantage]
    kept = [w for w, k in zip(weights, keep.tolist(), strict=True) if k] or [1.0]
    x, sigma = x.double().numpy().reshape(n, draws, H, D), sigma.numpy().reshape(n, draws)
    assert set(sigma.flat) <= {1.0, 0.75, 0.5, 0.25}
    for i in range(n):
        level, clean = sigma[i][:, None, None], batch.clean[i].double().numpy()
        noise = (x[i] - (1.0 - level) * clean) / level
        velocity = 0.3 * x[i] + level + float(batch.state[i, 0])
        executed = [bool(batch.transitions.mask[i, 0, h].any()) for h in range(H)]
        expected = reference.awr_decision(weights[i] / (sum(kept) / len(kept)), velocity, noise, clean, executed)
        assert float(loss[i]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_awr_draws_standard_noise_at_every_level_of_the_grid_anew_for_each_pass() -> None:
    sampler, rng, seen = sampler_of(), np.random.default_rng(0), []
    batch, now = labelled(rng, 200, sampler)
    estimate, objective = estimate_of(torch.zeros(200)), AWR(AWRConfig(draws=4), sampler)
    for _ in range(2):
        objective.prepare([batch], estimate, rng)
        objective.loss(expert(seen), NOWHERE, batch, slice(0, 200), now, estimate)  # type: ignore[arg-type]
    x, sigma = seen[0]
    assert not torch.equal(x, seen[1][0])
    level, count = torch.unique(sigma, return_counts=True)
    assert level.tolist() == [0.25, 0.5, 0.75, 1.0] and int(count.min()) > 150
    noise = (x - (1.0 - sigma[:, None, None]) * batch.clean.repeat_interleave(4, dim=0)) / sigma[:, None, None]
    assert abs(float(noise.mean())) < 0.05 and float(noise.std()) == pytest.approx(1.0, abs=0.05)


def test_the_awr_loss_is_the_same_in_parts() -> None:
    sampler, rng = sampler_of("flow_noise"), np.random.default_rng(3)
    parts = [labelled(rng, n, sampler) for n in (2, 3)]
    advantage = torch.from_numpy(rng.normal(size=5)).float()
    estimate, objective, losses = estimate_of(advantage), AWR(AWRConfig(), sampler), []
    objective.prepare([batch for batch, _ in parts], estimate, np.random.default_rng(7))
    for (batch, now), own in zip(parts, (slice(0, 2), slice(2, 5)), strict=True):
        losses.append(objective.loss(expert([]), NOWHERE, batch, own, now, estimate)[0])  # type: ignore[arg-type]
    first, second = (batch for batch, _ in parts)
    moves = replace(
        first.transitions,
        **{
            name: torch.cat([getattr(b.transitions, name) for b in (first, second)]) for name in vars(first.transitions)
        },
    )
    whole = replace(
        first,
        clean=torch.cat([first.clean, second.clean]),
        state=torch.cat([first.state, second.state]),
        transitions=moves,
    )
    objective.prepare([replace(whole, episode=torch.arange(5))], estimate, np.random.default_rng(7))
    together, _ = objective.loss(expert([]), NOWHERE, whole, slice(0, 5), parts[0][1], estimate)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat(losses), together)


def test_awr_has_the_analytic_gradient_and_none_on_steps_that_do_not_count() -> None:
    """d loss / d v = weight x 2 (v - (eps - x0)) / (executed steps x D) at one draw; nothing to the advantage."""
    sampler = sampler_of()
    batch, now = labelled(np.random.default_rng(5), 3, sampler)
    mask = torch.zeros(3, 1, H, D)
    mask[:, :, :2, 0] = 1.0  # two steps run, and one of two channels is the environment's
    batch = replace(batch, transitions=replace(batch.transitions, mask=mask))
    advantage = torch.tensor([0.0, 1.0, -1.0], requires_grad=False)
    estimate, objective = estimate_of(advantage), AWR(AWRConfig(draws=1, temperature=1.0), sampler)
    objective.prepare([batch], estimate, np.random.default_rng(0))
    velocity = torch.randn(3, H, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    asked = []

    def fixed(context: None, x: Tensor, sigma: Tensor, state: Tensor) -> Prediction:
        asked.append((x, sigma[:, None, None]))
        return Prediction(velocity=velocity)

    objective.loss(fixed, NOWHERE, batch, slice(0, 3), now, estimate)[0].sum().backward()  # type: ignore[arg-type]
    x, sigma = asked[0]
    noise = (x - (1.0 - sigma) * batch.clean) / sigma
    weight = advantage.exp() / advantage.exp().mean()
    expected = weight[:, None, None] * 2 * (velocity.detach() - (noise - batch.clean)) / (2 * D)
    expected[:, 2:] = 0.0
    torch.testing.assert_close(velocity.grad, expected, rtol=1e-4, atol=1e-5)
