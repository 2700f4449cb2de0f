"""Losses as pure functions: tensors and coefficients in, a loss or a per-sample term out.  Both learners call them.

No config, model, device or randomness here.  Axes: B batch, V views, F imagined frames, N tokens, C channels; a mask is
1 on valid entries, and every mean is over valid entries only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are cut here, far beyond any clip: an infinite ratio times an advantage of 0 would be NaN."""


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where mask (broadcastable to x) is 1; 0 if nothing is valid, so that an empty batch has no gradient."""
    weight = mask.to(x.dtype).expand_as(x)
    return (x * weight).sum() / weight.sum().clamp(min=1.0)


# ------------------------------------------------------------------------------------------------ world model


def flow_matching_mse(velocity: Tensor, noise: Tensor, clean: Tensor, mask: Tensor, *, weight: Tensor) -> Tensor:
    """Mean of w |v - (eps - x0)|^2 over valid entries (flow matching, arXiv 2210.02747 eq. 21, sigma = 1 is noise).

    velocity, noise, clean (B, V, F, ...) latents; mask (B, F), 1 where the future frame exists; weight (B,), such as
    `WAM.flow_weight`.  Returns a scalar.
    """
    frames = mask[:, None, :].reshape(mask.shape[0], 1, mask.shape[1], *[1] * (velocity.dim() - 3))
    error = (velocity - (noise - clean)).square() * weight.reshape(-1, *[1] * (velocity.dim() - 1))
    return masked_mean(error, frames)


def feature_variance(features: Sequence[Tensor]) -> list[Tensor]:
    """Diagonal covariance of each layer, (C,) each: variance over batch and tokens of (B, N, C), without gradient.

    Floored at 1e-4 of the layer's mean variance: a channel that is constant on the sample would else make every later
    difference cost infinitely much.
    """
    variances = []
    for layer in features:
        flat = layer.detach().float().flatten(0, 1)
        variance = flat.var(dim=0, unbiased=False)
        variances.append(variance.clamp(min=float(variance.mean()) * 1e-4 + 1e-12))
    return variances


def feature_kl(
    features: Sequence[Tensor],
    reference: Sequence[Tensor],
    variance: Sequence[Tensor],
    reference_variance: Sequence[Tensor],
) -> Tensor:
    """Gaussian KL(current || reference), mean over layer, token and channel, nats per feature (WAM-RL's regulariser).

    KL = 1/2 [log(s_ref^2 / s^2) + (s^2 + (mu - mu_ref)^2) / s_ref^2 - 1], diagonal covariances.
    features, reference: L tensors (B, N, C); variances: L tensors (C,).  Gradient flows to `features` alone: the
    variances are running statistics, so at mu = mu_ref the gradient is exactly zero.
    """
    terms = []
    for mu, mu_ref, s2, s2_ref in zip(features, reference, variance, reference_variance, strict=True):
        s2, s2_ref = s2.detach().float(), s2_ref.detach().float()
        square = (mu.float() - mu_ref.detach().float()).square()
        terms.append(0.5 * (torch.log(s2_ref / s2) + (s2 + square) / s2_ref - 1.0).mean())
    return torch.stack(terms).mean()


# ------------------------------------------------------------------------------------------------ actor and critic


def ppo_clip(
    log_rho: Tensor, advantage: Tensor, *, clip_low: float | Tensor, clip_high: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Clipped surrogate -min(rho A, clip(rho, 1 - low, 1 + high) A), arXiv 1707.06347 eq. 7 with two clip widths.

    log_rho = log pi - log pi_old and advantage broadcastable to one another, the widths too.  Returns the loss per
    entry and, as bool, where the clip took the gradient away: where the clipped term is the smaller one.
    """
    rho = log_rho.clamp(max=MAX_LOG_RATIO).exp()
    plain = rho * advantage
    low, high = torch.as_tensor(1.0 - clip_low), torch.as_tensor(1.0 + clip_high)
    clipped = torch.minimum(torch.maximum(rho, low.to(rho)), high.to(rho)) * advantage
    return -torch.minimum(plain, clipped), (clipped < plain).detach()


def approx_kl(log_rho: Tensor) -> Tensor:
    """Estimate of KL(old || pi) per sample of the old policy: rho - 1 - log rho >= 0 (Schulman's k3), same shape."""
    return torch.expm1(log_rho) - log_rho


def truncated_weight(log_ratio: Tensor, *, cap: float) -> Tensor:
    """Importance weight min(pi_start / mu, cap) of stale data, same shape, no gradient (truncation as in V-trace,
    arXiv 1802.01561 eq. 2; the split of PPO's ratio into a proximal and a behaviour part is arXiv 2110.00641 eq. 6)."""
    return log_ratio.detach().exp().clamp(max=cap)


def awr_weight(advantage: Tensor, *, temperature: float, max_weight: float) -> Tensor:
    """min(exp(A / temperature), max_weight), same shape: advantage-weighted regression, arXiv 1910.00177 eq. 10 and
    its clipping (section 4)."""
    return (advantage / temperature).clamp(max=math.log(max_weight)).exp()


def value_loss(value: Tensor, old_value: Tensor, target: Tensor, *, value_clip: float, huber: float) -> Tensor:
    """Huber loss of the critic per entry, the worse of the plain and the clipped prediction (PPO's value clipping).

    All of one shape.  The clipped prediction stays within `value_clip` of `old_value` (0: no clipping); errors beyond
    `huber` cost linearly.
    """

    def cost(prediction: Tensor) -> Tensor:
        return torch.nn.functional.huber_loss(prediction, target, reduction="none", delta=huber)

    loss = cost(value)
    if value_clip > 0:
        loss = torch.maximum(loss, cost(old_value + (value - old_value).clamp(-value_clip, value_clip)))
    return loss
