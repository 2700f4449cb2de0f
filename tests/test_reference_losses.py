"""Each loss against its literal transcription on drawn inputs; its gradient by hand or by differences, or none."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from torch import Tensor
from torch.autograd import gradcheck

from learners import losses
from tests import numpy_reference as reference

CHECKED = settings(max_examples=50, deadline=None, derandomize=True)
number = st.floats(-3.0, 3.0, width=32)
sizes = st.tuples(*[st.integers(1, 3)] * 5)
width = st.floats(0.05, 0.9)


def reals(*shape: int, low: float = -3.0, high: float = 3.0) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float64, shape, elements=st.floats(low, high, width=32))


def bits(*shape: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.bool_, shape, elements=st.booleans())


def leaf(*shape: int, seed: int = 0) -> Tensor:
    """Float64 away from every kink, for finite differences."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def each(function, *columns) -> np.ndarray:  # type: ignore[no-untyped-def]
    """A scalar function over the entries of arrays that broadcast."""
    return np.array(
        [function(*map(float, row)) for row in zip(*(c.flat for c in np.broadcast_arrays(*columns)), strict=True)]
    )


# ------------------------------------------------------------------------------------------------ world model


@CHECKED
@given(sizes, st.data())
def test_the_masked_mean_is_the_mean_of_the_valid_entries(size: tuple[int, ...], data: st.DataObject) -> None:
    x, mask = data.draw(reals(*size[:3])), data.draw(bits(size[0], 1, size[2]))
    out = losses.masked_mean(torch.from_numpy(x), torch.from_numpy(mask))
    np.testing.assert_allclose(float(out), reference.masked_mean(x, mask), atol=1e-12)


@CHECKED
@given(sizes, st.data())
def test_flow_matching_is_the_literal_weighted_mean_over_frames_that_exist(
    size: tuple[int, ...], data: st.DataObject
) -> None:
    velocity, noise, clean = (data.draw(reals(*size)) for _ in range(3))
    mask, weight = data.draw(bits(size[0], size[2])), data.draw(reals(size[0], low=0.0))
    v = torch.from_numpy(velocity).requires_grad_()
    rest = (torch.from_numpy(a) for a in (noise, clean, mask))
    out = losses.flow_matching_mse(v, *rest, weight=torch.from_numpy(weight))
    np.testing.assert_allclose(
        float(out.detach()), reference.flow_matching_mse(velocity, noise, clean, mask, weight), rtol=1e-9, atol=1e-12
    )
    (grad,) = torch.autograd.grad(out, v)
    frames = np.broadcast_to(mask[:, None, :, None, None], size)
    expected = 2 * weight[:, None, None, None, None] * (velocity - (noise - clean)) * frames / max(frames.sum(), 1)
    np.testing.assert_allclose(grad.numpy(), expected, atol=1e-9)


@CHECKED
@given(sizes, st.data())
def test_the_feature_variance_is_the_literal_one_without_gradient(size: tuple[int, ...], data: st.DataObject) -> None:
    layers = [data.draw(reals(*size[:3])), data.draw(reals(*size[2:]))]
    out = losses.feature_variance([torch.from_numpy(a).requires_grad_() for a in layers])
    assert not any(variance.requires_grad for variance in out)
    for layer, variance in zip(layers, out, strict=True):
        np.testing.assert_allclose(variance.numpy(), reference.feature_variance(layer), rtol=1e-3, atol=1e-6)


@CHECKED
@given(sizes, st.data())
def test_the_feature_kl_and_its_gradients_are_the_literal_ones(size: tuple[int, ...], data: st.DataObject) -> None:
    shapes = [size[:3], size[2:]]
    mu, ref = ([data.draw(reals(*shape)) for shape in shapes] for _ in range(2))
    s2, s2_ref = ([data.draw(reals(shape[2], low=0.25)) for shape in shapes] for _ in range(2))
    given_to = [[torch.from_numpy(a).requires_grad_() for a in group] for group in (mu, ref, s2, s2_ref)]
    out = losses.feature_kl(*given_to)
    np.testing.assert_allclose(float(out.detach()), reference.feature_kl(mu, ref, s2, s2_ref), rtol=1e-4, atol=1e-6)
    out.backward()
    assert all(leaf.grad is None for group in given_to[1:] for leaf in group)
    for m, r, b, x in zip(mu, ref, s2_ref, given_to[0], strict=True):
        assert x.grad is not None
        np.testing.assert_allclose(x.grad.numpy(), (m - r) / b / (m.size * len(mu)), rtol=1e-4, atol=1e-6)


# ------------------------------------------------------------------------------------------------ actor and critic


@CHECKED
@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_the_clipped_surrogate_is_the_literal_one_and_has_a_gradient_where_it_is_not_clipped(
    n: int, m: int, per_entry: bool, data: st.DataObject
) -> None:
    log_rho, advantage = data.draw(reals(n, m, low=-1.0, high=1.0)), data.draw(reals(n, 1))
    shape = (n, m) if per_entry else (1,)
    low, high = (data.draw(arrays(np.float64, shape, elements=width)) for _ in range(2))
    x = torch.from_numpy(log_rho).requires_grad_()
    widths = [torch.from_numpy(w) if per_entry else float(w[0]) for w in (low, high)]
    loss, clipped = losses.ppo_clip(x, torch.from_numpy(advantage), clip_low=widths[0], clip_high=widths[1])
    assert loss.shape == clipped.shape == (n, m) and not clipped.requires_grad
    np.testing.assert_allclose(
        loss.detach().flatten(), each(lambda *a: reference.ppo_clip(*a)[0], log_rho, advantage, low, high), atol=1e-9
    )
    flags = each(lambda *a: reference.ppo_clip(*a)[1], log_rho, advantage, low, high).reshape(n, m)
    np.testing.assert_array_equal(clipped.numpy(), flags)
    (grad,) = torch.autograd.grad(loss.sum(), x)
    np.testing.assert_allclose(grad.numpy(), np.where(flags, 0.0, -np.exp(log_rho) * advantage), atol=1e-9)


@CHECKED
@given(st.integers(1, 6), st.floats(1.0, 10.0), st.floats(0.1, 2.0), st.data())
def test_kl_estimate_and_weights_are_the_literal_ones(
    n: int, cap: float, temperature: float, data: st.DataObject
) -> None:
    drawn = data.draw(reals(n))
    x = torch.from_numpy(drawn)
    np.testing.assert_allclose(losses.approx_kl(x), each(reference.approx_kl, drawn), rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(
        losses.truncated_weight(x, cap=cap), each(lambda a: reference.truncated_weight(a, cap), drawn), rtol=1e-9
    )
    np.testing.assert_allclose(
        losses.awr_weight(x, temperature=temperature, max_weight=cap),
        each(lambda a: reference.awr_weight(a, temperature, cap), drawn),
        rtol=1e-9,
    )


@CHECKED
@given(st.lists(st.floats(-10.0, 10.0, width=32), min_size=1, max_size=20))
def test_the_kl_estimate_is_never_negative_in_single_precision(drawn: list[float]) -> None:
    x = torch.tensor(drawn)
    assert float(losses.approx_kl(torch.zeros(()))) == 0.0
    assert bool((losses.approx_kl(torch.cat([x, x * 1e-3, x * 1e-6])) >= 0).all())


@CHECKED
@given(st.integers(1, 6), st.sampled_from([0.0, 0.2, 1.0]), st.floats(0.25, 4.0), st.data())
def test_the_value_loss_is_the_literal_one(n: int, clip: float, huber: float, data: st.DataObject) -> None:
    value, old, target = (data.draw(reals(n)) for _ in range(3))
    out = losses.value_loss(*map(torch.from_numpy, (value, old, target)), value_clip=clip, huber=huber)
    expected = each(lambda v, o, y: reference.value_loss(v, o, y, clip, huber), value, old, target)
    np.testing.assert_allclose(out, expected, rtol=1e-9, atol=1e-12)


def test_the_value_loss_has_no_gradient_where_the_clipped_prediction_is_the_worse_one() -> None:
    """Old 0, clip 0.5.  Moved by 1 towards a target at 2: clipped, none.  Moved by 1 away from it, or by 0.2: plain."""
    value = torch.tensor([1.0, -1.0, 0.2], requires_grad=True)
    zero, target = torch.zeros(3), torch.full((3,), 2.0)
    losses.value_loss(value, zero, target, value_clip=0.5, huber=10.0).sum().backward()
    assert value.grad is not None
    np.testing.assert_allclose(value.grad, [0.0, -3.0, -1.8], rtol=1e-6)


# ------------------------------------------------------------------------------------------------ gradients


def test_the_gradients_of_the_losses_are_those_of_finite_differences() -> None:
    mask = torch.tensor([[True, False, True], [True, True, False]])
    assert gradcheck(lambda x: losses.masked_mean(x, mask), (leaf(2, 3),))
    assert gradcheck(
        lambda v, eps, x0: losses.flow_matching_mse(v, eps, x0, mask, weight=torch.tensor([0.5, 2.0])),
        tuple(leaf(2, 2, 3, 2, seed=i) for i in range(3)),
    )
    assert gradcheck(
        lambda x, a: losses.ppo_clip(x, a, clip_low=0.3, clip_high=0.2)[0], (leaf(4, 3), leaf(4, 1, seed=1))
    )
    assert gradcheck(losses.approx_kl, (leaf(5),))
    for clip in (0.0, 0.3):
        assert gradcheck(
            lambda v, old, y, clip=clip: losses.value_loss(v, old, y, value_clip=clip, huber=0.8),
            tuple(leaf(8, seed=i) for i in range(3)),
        )


def test_invalid_entries_and_importance_weights_have_no_gradient() -> None:
    x, mask = leaf(2, 3), torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    losses.masked_mean(x, mask).backward()
    assert x.grad is not None and bool(((x.grad != 0) == mask.bool()).all())
    assert not losses.truncated_weight(leaf(3), cap=2.0).requires_grad
    (nothing,) = torch.autograd.grad(losses.masked_mean(y := leaf(3), torch.zeros(3)), y)
    assert not nothing.any()
