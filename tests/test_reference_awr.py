"""AWR as a whole, on micro-batches built by hand, against literal sums over draws; what its targets and noise are."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from learners.awr import AWR, AWRConfig
from learners.transitions import Predict
from tests import numpy_reference as reference
from tests.micro_batches import D, H, estimate_of, labelled, sampler_of
from wamrl_ray.policy.flow_sde import Prediction

CHECKED = settings(max_examples=25, deadline=None, derandomize=True)
NOWHERE = None
"""The experts of these tests do not look at their context."""


def nowhere(batch: object) -> None:
    return NOWHERE


def expert(seen: list[tuple[Tensor, Tensor]], slope: float = 0.3) -> Predict:
    """Velocity slope x + sigma + the state's first entry; notes what it was asked."""

    def predict(context: None, x: Tensor, sigma: Tensor, state: Tensor) -> Prediction:
        seen.append((x, sigma))
        each = state[:, 0].repeat_interleave(len(x) // len(state))
        return Prediction(velocity=slope * x + sigma[:, None, None] + each[:, None, None])

    return predict  # type: ignore[return-value]


def fixed(velocity: Tensor) -> Predict:
    """The same velocity whatever it is asked."""
    return lambda context, x, sigma, state: Prediction(velocity=velocity)


@CHECKED
@given(
    st.sampled_from(["residual", "chunk"]), st.sampled_from(["own", "independent"]), st.integers(1, 4),
    st.integers(1, 3), st.floats(0.2, 2.0), st.sampled_from([1.0, 2.0, 20.0]), st.integers(0, 2**31),
)  # fmt: skip
def test_the_awr_loss_is_the_literal_one(  # type: ignore[no-untyped-def]
    target, coupling, n: int, draws: int, temperature: float, cap: float, seed: int
) -> None:
    sampler, rng = sampler_of(), np.random.default_rng(seed)
    batch, now = labelled(rng, n, sampler)
    advantage, keep = torch.from_numpy(rng.normal(size=n)).float(), torch.from_numpy(rng.integers(0, 2, n)).bool()
    estimate, seen = estimate_of(advantage, keep), []
    config = AWRConfig(temperature=temperature, max_weight=cap, target=target, coupling=coupling, draws=draws)
    objective = AWR(config, sampler)
    objective.prepare(expert([]), nowhere, [batch], estimate, seed)  # type: ignore[arg-type]
    loss, _ = objective.loss(expert(seen, slope=-0.5), NOWHERE, batch, slice(0, n), now, estimate)  # type: ignore[arg-type]
    ((x, sigma),) = seen
    weights = [reference.awr_weight(float(a), temperature, cap) for a in advantage]
    kept = [w for w, k in zip(weights, keep.tolist(), strict=True) if k] or [1.0]
    x, sigma = x.double().numpy().reshape(n, draws, H, D), sigma.numpy().reshape(n, draws)
    assert set(sigma.flat) <= {1.0, 0.75, 0.5, 0.25}
    for i in range(n):
        level, clean = sigma[i][:, None, None], batch.clean[i].double().numpy()
        noise = (x[i] - (1.0 - level) * clean) / level
        if coupling == "own":
            np.testing.assert_allclose(noise, batch.noise[i].expand(draws, -1, -1), atol=1e-5)
        start, velocity = (slope * x[i] + level + float(batch.state[i, 0]) for slope in (0.3, -0.5))
        executed = [bool(batch.transitions.mask[i, 0, h].any()) for h in range(H)]
        weight = weights[i] / (sum(kept) / len(kept))
        expected = reference.awr_decision(weight, target, velocity, start, noise, clean, executed)
        assert float(loss[i]) == pytest.approx(expected, rel=1e-4, abs=1e-5)


# ------------------------------------------------------------------------------------------------ draws


@pytest.mark.parametrize("coupling", ["independent", "own"])
def test_awr_draws_every_level_of_the_grid_and_fresh_noise_or_takes_the_chunks_own(coupling) -> None:  # type: ignore[no-untyped-def]
    sampler, rng, seen = sampler_of(), np.random.default_rng(0), []
    batch, now = labelled(rng, 200, sampler)
    estimate, objective = estimate_of(torch.zeros(200)), AWR(AWRConfig(draws=4, coupling=coupling), sampler)
    for seed in (0, 0, 1):
        objective.prepare(expert([]), nowhere, [batch], estimate, seed)  # type: ignore[arg-type]
        objective.loss(expert(seen), NOWHERE, batch, slice(0, 200), now, estimate)  # type: ignore[arg-type]
    (x, sigma), again, other = seen
    assert torch.equal(x, again[0]) and not torch.equal(sigma, other[1])
    level, count = torch.unique(sigma, return_counts=True)
    assert level.tolist() == [0.25, 0.5, 0.75, 1.0] and int(count.min()) > 150
    noise = (x - (1.0 - sigma[:, None, None]) * batch.clean.repeat_interleave(4, dim=0)) / sigma[:, None, None]
    own = batch.noise.repeat_interleave(4, dim=0)
    if coupling == "own":
        torch.testing.assert_close(noise, own, rtol=1e-4, atol=1e-5)
        return
    assert abs(float(noise.mean())) < 0.05 and float(noise.std()) == pytest.approx(1.0, abs=0.05)
    for elsewhere in (own, noise.roll(1, dims=0)):  # neither the chunk's nor that of another draw
        assert abs(float((noise * elsewhere).mean())) < 0.05


def test_all_passes_of_an_update_see_the_same_draws() -> None:
    sampler, seen = sampler_of(), []
    batch, now = labelled(np.random.default_rng(0), 4, sampler)
    estimate, objective = estimate_of(torch.zeros(4)), AWR(AWRConfig(coupling="independent"), sampler)
    objective.prepare(expert([]), nowhere, [batch], estimate, 0)  # type: ignore[arg-type]
    for _ in range(2):
        objective.loss(expert(seen), NOWHERE, batch, slice(0, 4), now, estimate)  # type: ignore[arg-type]
    assert torch.equal(seen[0][0], seen[1][0]) and torch.equal(seen[0][1], seen[1][1])


@pytest.mark.parametrize("target", ["residual", "chunk"])
def test_the_awr_loss_is_the_same_in_parts(target) -> None:  # type: ignore[no-untyped-def]
    sampler, rng = sampler_of("flow_noise"), np.random.default_rng(3)
    (first, now), (second, _) = (labelled(rng, n, sampler) for n in (2, 3))
    advantage = torch.from_numpy(rng.normal(size=5)).float()
    estimate, objective = estimate_of(advantage), AWR(AWRConfig(target=target, coupling="independent"), sampler)
    objective.prepare(expert([]), nowhere, [first, second], estimate, 7)  # type: ignore[arg-type]
    after = expert([], slope=-0.5)
    parts = [(first, slice(0, 2)), (second, slice(2, 5))]
    losses = [objective.loss(after, NOWHERE, batch, own, now, estimate)[0] for batch, own in parts]  # type: ignore[arg-type]

    def joined(a: object, b: object, *names: str) -> dict[str, Tensor]:
        return {name: torch.cat([getattr(a, name), getattr(b, name)]) for name in names}

    moves = replace(first.transitions, **joined(first.transitions, second.transitions, *vars(first.transitions)))
    whole = replace(first, transitions=moves, **joined(first, second, "episode", "state", "clean", "noise"))
    objective.prepare(expert([]), nowhere, [whole], estimate, 7)  # type: ignore[arg-type]
    together, _ = objective.loss(after, NOWHERE, whole, slice(0, 5), now, estimate)  # type: ignore[arg-type]
    torch.testing.assert_close(torch.cat(losses), together)


# ------------------------------------------------------------------------------------------------ gradients


def gradient_at_the_start(target: str, advantage: Tensor) -> Tensor:
    """d sum of losses / d velocity, (n, H, D), of one draw, where the expert says what it said before the update."""
    sampler, n = sampler_of(), len(advantage)
    batch, now = labelled(np.random.default_rng(5), n, sampler)
    velocity = torch.randn(n, H, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    estimate = estimate_of(advantage)
    objective = AWR(AWRConfig(draws=1, temperature=1.0, target=target), sampler)  # type: ignore[arg-type]
    objective.prepare(fixed(velocity), nowhere, [batch], estimate, 0)  # type: ignore[arg-type]
    loss, _ = objective.loss(fixed(velocity), NOWHERE, batch, slice(0, n), now, estimate)  # type: ignore[arg-type]
    (gradient,) = torch.autograd.grad(loss.sum(), velocity)
    if target == "residual" and not advantage.any():
        assert not loss.any()
    return gradient


def test_a_residual_of_weight_one_has_no_loss_and_no_gradient_at_the_start() -> None:
    equal = torch.zeros(4)
    assert not gradient_at_the_start("residual", equal).any()
    assert gradient_at_the_start("chunk", equal).abs().max() > 0.1


def test_the_residuals_gradient_at_the_start_is_that_of_the_chunk_less_that_of_weight_one() -> None:
    advantage = torch.tensor([0.0, 1.0, -1.0, 2.5])
    chunk, alike = gradient_at_the_start("chunk", advantage), gradient_at_the_start("chunk", torch.zeros(4))
    residual = gradient_at_the_start("residual", advantage)
    torch.testing.assert_close(residual, chunk - alike, rtol=1e-4, atol=1e-5)
    assert residual.abs().max() > 0.1


def test_awr_has_the_analytic_gradient_and_none_on_steps_that_do_not_count() -> None:
    """Chunk: d loss / d v = weight x 2 (v - (eps - x0)) / (executed steps x D) at one draw."""
    sampler = sampler_of()
    batch, now = labelled(np.random.default_rng(5), 3, sampler)
    mask = torch.zeros(3, 1, H, D)
    mask[:, :, :2, 0] = 1.0  # two steps run, and one of two channels is the environment's
    batch = replace(batch, transitions=replace(batch.transitions, mask=mask))
    advantage = torch.tensor([0.0, 1.0, -1.0])
    estimate = estimate_of(advantage)
    objective = AWR(AWRConfig(draws=1, temperature=1.0, target="chunk"), sampler)
    objective.prepare(expert([]), nowhere, [batch], estimate, 0)  # type: ignore[arg-type]
    velocity = torch.randn(3, H, D, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss, _ = objective.loss(fixed(velocity), NOWHERE, batch, slice(0, 3), now, estimate)  # type: ignore[arg-type]
    loss.sum().backward()
    weight = advantage.exp() / advantage.exp().mean()
    expected = weight[:, None, None] * 2 * (velocity.detach() - (batch.noise - batch.clean)) / (2 * D)
    expected[:, 2:] = 0.0
    torch.testing.assert_close(velocity.grad, expected, rtol=1e-4, atol=1e-5)


def test_the_target_takes_no_gradient() -> None:
    """What the expert said before the update is a number: no gradient passes through it, in any later step."""
    sampler = sampler_of()
    batch, now = labelled(np.random.default_rng(5), 3, sampler)
    before, after = (torch.zeros(3, H, D, requires_grad=True) for _ in range(2))
    estimate, objective = estimate_of(torch.tensor([0.0, 1.0, -1.0])), AWR(AWRConfig(draws=1), sampler)
    objective.prepare(fixed(before), nowhere, [batch], estimate, 0)  # type: ignore[arg-type]
    loss, _ = objective.loss(fixed(after), NOWHERE, batch, slice(0, 3), now, estimate)  # type: ignore[arg-type]
    loss.sum().backward()
    assert before.grad is None and after.grad is not None and after.grad.any()
