"""Every formula of the learners and the sampler once more: literal, slow, one number at a time, in float64.

For the tests alone: they compare the tensor code with these.  Each function is its source's formula written out, in the
source's own form where it differs from the code's, so that an error would have to be made twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# ------------------------------------------------------------------------------------------------ world model


def masked_mean(x: Array, mask: Array) -> float:
    """Sum of the valid entries over their number; 0 if there is none."""
    mask = np.broadcast_to(mask, x.shape)
    valid = [float(x[i]) for i in np.ndindex(x.shape) if mask[i]]
    return sum(valid) / len(valid) if valid else 0.0


def flow_matching_mse(velocity: Array, noise: Array, clean: Array, mask: Array, weight: Array) -> float:
    """Flow matching, arXiv 2210.02747 eq. 23 with sigma_min = 0: the target of v is noise - data.  mask (B, F)."""
    total, count = 0.0, 0
    for b, view, f, *rest in np.ndindex(velocity.shape):
        if mask[b, f]:
            i = (b, view, f, *rest)
            total += float(weight[b]) * (float(velocity[i]) - (float(noise[i]) - float(clean[i]))) ** 2
            count += 1
    return total / count if count else 0.0


def feature_variance(layer: Array) -> list[float]:
    """E[x^2] - E[x]^2 per channel over batch and tokens of (B, N, C), floored at 1e-4 of the channels' mean."""
    channels = [[float(layer[b, n, c]) for b, n in np.ndindex(layer.shape[:2])] for c in range(layer.shape[2])]
    plain = [sum(x * x for x in channel) / len(channel) - (sum(channel) / len(channel)) ** 2 for channel in channels]
    return [max(s2, 1e-4 * sum(plain) / len(plain)) for s2 in plain]


def gaussian_kl(mean: float, variance: float, other_mean: float, other_variance: float) -> float:
    """KL(N(mean, variance) || N(other)), univariate."""
    return 0.5 * (math.log(other_variance / variance) + (variance + (mean - other_mean) ** 2) / other_variance - 1.0)


def feature_kl(mu: Sequence[Array], ref: Sequence[Array], s2: Sequence[Array], s2_ref: Sequence[Array]) -> float:
    """Mean over layers of the mean over tokens and channels of the Gaussian KL, diagonal covariances."""
    layers = []
    for m, r, a, b in zip(mu, ref, s2, s2_ref, strict=True):
        terms = [gaussian_kl(float(m[i]), float(a[i[2]]), float(r[i]), float(b[i[2]])) for i in np.ndindex(m.shape)]
        layers.append(sum(terms) / len(terms))
    return sum(layers) / len(layers)


# ------------------------------------------------------------------------------------------------ actor and critic


def ppo_clip(log_rho: float, advantage: float, low: float, high: float) -> tuple[float, bool]:
    """-L^CLIP, arXiv 1707.06347 eq. 7, by cases: (loss, whether it is a constant of log_rho there)."""
    rho = math.exp(log_rho)
    if advantage > 0 and rho > 1.0 + high:
        return -(1.0 + high) * advantage, True
    if advantage < 0 and rho < 1.0 - low:
        return -(1.0 - low) * advantage, True
    return -rho * advantage, False


def approx_kl(log_rho: float) -> float:
    """k3 = (r - 1) - log r of Schulman's note, r = new / old, samples of the old."""
    r = math.exp(log_rho)
    return (r - 1.0) - log_rho


def truncated_weight(log_ratio: float, cap: float) -> float:
    """min(c, pi / mu), arXiv 1802.01561 eq. 2."""
    return min(cap, math.exp(log_ratio))


def awr_weight(advantage: float, temperature: float, max_weight: float) -> float:
    """min(exp(A / beta), w_max), arXiv 1910.00177."""
    return min(math.exp(advantage / temperature), max_weight)


def value_loss(value: float, old: float, target: float, clip: float, huber: float) -> float:
    """Huber's function of the error, the larger of two: the plain prediction's and that of the one kept near `old`."""

    def cost(error: float) -> float:
        return 0.5 * error**2 if abs(error) <= huber else huber * (abs(error) - 0.5 * huber)

    if clip == 0:
        return cost(target - value)
    near = min(max(value, old - clip), old + clip)
    return max(cost(target - value), cost(target - near))


# ------------------------------------------------------------------------------------------------ returns


def gae(
    reward: Sequence[float], value: Sequence[float], after: float, terminated: bool, gamma: float, lam: float
) -> list[float]:
    """One episode, arXiv 1506.02438 eq. 16: A_t = sum over l of (gamma lambda)^l delta_{t+l}."""
    values = [*value, 0.0 if terminated else after]
    delta = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(reward)]
    return [sum((gamma * lam) ** i * d for i, d in enumerate(delta[t:])) for t in range(len(delta))]


def group_advantage(returns: Sequence[float], group: Sequence[int]) -> list[float]:
    """(r_i - mean(group)) / std(group), arXiv 2402.03300 section 4.1.2, with 1e-6 added to the std."""
    out = []
    for r, g in zip(returns, group, strict=True):
        peers = [x for x, other in zip(returns, group, strict=True) if other == g]
        mean = sum(peers) / len(peers)
        std = math.sqrt(sum((x - mean) ** 2 for x in peers) / len(peers))
        out.append((r - mean) / (std + 1e-6))
    return out


def normalise(x: Sequence[float]) -> list[float]:
    mean = sum(x) / len(x)
    std = math.sqrt(sum((y - mean) ** 2 for y in x) / len(x))
    return [(y - mean) / (std + 1e-5) for y in x]


def explained_variance(value: Sequence[float], target: Sequence[float]) -> float:
    """1 - Var[y - V] / Var[y]."""

    def variance(x: Sequence[float]) -> float:
        return sum((y - sum(x) / len(x)) ** 2 for y in x) / len(x)

    return 1.0 - variance([y - v for y, v in zip(target, value, strict=True)]) / variance(target)


def denoise_discount(k: int, num_steps: int, discount: float) -> float:
    """DPPO, arXiv 2409.00588 section 4.3: one factor for each step that is left after step k."""
    out = 1.0
    for _ in range(k + 1, num_steps):
        out *= discount
    return out


# ------------------------------------------------------------------------------------------------ denoising


def flow_sde_step(x: float, v: float, k: int, num_steps: int, eta: float) -> tuple[float, float]:
    """(mean, std) of step k as Flow-GRPO (arXiv 2505.05470 eq. 9) writes it, an Euler-Maruyama step of the SDE

        dx = [v + g^2 / (2 t) (x + (1 - t) v)] dt + g dw,  dt = -1 / K,  g = eta sqrt(t / (1 - t)),

    where 1 - t under the root is that of the second grid point at t = 1.
    """
    t, dt = 1.0 - k / num_steps, 1.0 / num_steps
    g = eta * math.sqrt(t / (1.0 - t if k > 0 else dt))
    drift = v + g**2 / (2.0 * t) * (x + (1.0 - t) * v)
    return x - drift * dt, g * math.sqrt(dt)


def flow_noise_step(x: float, v: float, raw: float, num_steps: int, low: float, high: float) -> tuple[float, float]:
    """(mean, std) of a step of Flow-Noise, arXiv 2510.25889: Euler, log-variance interpolated by tanh."""
    share = (math.tanh(raw) + 1.0) / 2.0
    log_variance = math.log(low**2) + share * (math.log(high**2) - math.log(low**2))
    return x - v / num_steps, math.sqrt(math.exp(log_variance))


def log_density(x: Array, mean: Array, std: Array, mask: Array) -> float:
    """Sum of log N(x; mean, std^2) over the entries (H, D) where mask is 1."""
    total = 0.0
    for i in np.ndindex(x.shape):
        if mask[i]:
            total += -((x[i] - mean[i]) ** 2) / (2.0 * std[i] ** 2) - math.log(math.sqrt(2.0 * math.pi) * std[i])
    return total


# ------------------------------------------------------------------------------------------------ rewards


def gain(score: Sequence[float], form: str) -> list[float]:
    """What each decision added to the score, or to the best score so far, beginning at 0."""
    out, before = [], 0.0
    for t, now in enumerate(score):
        seen = max(score[: t + 1]) if form == "best_so_far" else now
        out.append(seen - before)
        before = seen
    return out


def progress(d_executed: float, d_still: float, d_moved: float, epsilon: float) -> float:
    """1 - d(imagined, executed) over the larger movement, within [-1, 1]; 0 if less than epsilon was imagined."""
    if d_still < epsilon:
        return 0.0
    return max(-1.0, min(1.0, 1.0 - d_executed / max(d_still, d_moved)))


# ------------------------------------------------------------------------------------------------ objectives


def clip_scale(schedule: str, num_steps: int, eta: float, first: float, exclude_last: bool) -> list[float]:
    """Factor on PPO's widths per step.  sensitivity: the KL of a unit change of v is slope^2 / 2, its mean slope 1."""
    if schedule == "constant":
        return [1.0] * num_steps
    if schedule == "exponential":
        equal = (1.0 / first) ** (1.0 / max(num_steps - 1 - int(exclude_last), 1))
        return [min(first * equal**k, 1.0) for k in range(num_steps)]
    slope = []
    for k in range(num_steps):
        (one, std), (zero, _) = (flow_sde_step(0.0, v, k, num_steps, eta) for v in (1.0, 0.0))
        slope.append(math.sqrt(2.0 * gaussian_kl(one, std**2, zero, std**2)))
    random = slope[:-1] if exclude_last else slope
    return [s / (sum(random) / len(random)) for s in slope]


def ppo_decision(
    log_pi: Sequence[float], start: Sequence[float], behaviour: Sequence[float], advantage: float,
    steps: Sequence[int], *, ratio: str, stale: bool, cap: float, discount: float, num_steps: int,
    low: float, high: float, scale: Sequence[float],
) -> tuple[float, list[bool], list[float]]:  # fmt: skip
    """One decision's loss, and what was clipped and the weight per ratio: PPO with the ratio split into pi / start and
    start / behaviour (arXiv 2110.00641 eq. 6), the second one truncated."""
    if ratio == "joint":
        log_pi, start, behaviour, steps = [sum(log_pi)], [sum(start)], [sum(behaviour)], [num_steps - 1]
        scale = [1.0] * num_steps
    losses, clipped, weights = [], [], []
    for new, proximal, acted, k in zip(log_pi, start, behaviour, steps, strict=True):
        loss, flag = ppo_clip(new - (proximal if stale else acted), advantage, low * scale[k], high * scale[k])
        weight = truncated_weight(proximal - acted, cap) if stale and cap > 0 else 1.0
        losses.append(weight * denoise_discount(k, num_steps, discount) * loss)
        clipped.append(flag)
        weights.append(weight)
    return sum(losses) / len(losses), clipped, weights


def awr_decision(
    weight: float, target: str, velocity: Array, start: Array, noise: Array, clean: Array, executed: Sequence[bool]
) -> float:
    """Mean over draws, executed steps and channels; velocity, `start` (before the update), noise are (draws, H, D).

    chunk: w |v - (eps - x0)|^2.  residual: |v - v_start - (w - 1) (eps - x0 - v_start)|^2.
    """
    terms = []
    for s, h, d in np.ndindex(velocity.shape):
        if executed[h]:
            v, before, straight = float(velocity[s, h, d]), float(start[s, h, d]), float(noise[s, h, d] - clean[h, d])
            if target == "chunk":
                terms.append(weight * (v - straight) ** 2)
            else:
                terms.append((v - before - (weight - 1.0) * (straight - before)) ** 2)
    return sum(terms) / len(terms)
