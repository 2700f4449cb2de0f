"""Exploration while denoising: the one owner of the grid and of each transition's mean and std, to sample and to score.

    prediction of the expert at (x_k, sigma_k) ──► transition ──► N(mean, std^2) of x_{k+1} ──► log_prob, kl, entropy

Sigma = 1 is noise, sigma = 0 is data, v = eps - x0 (Genie Envisioner's convention; network time is 1000 sigma).
Flow-SDE: Flow-GRPO (arXiv 2505.05470) eq. 9 and its piRL form (arXiv 2510.25889); its std is a constant of the step.
Flow-Noise: piRL's alternative, an Euler step with a std that the expert learns within bounds.
Departures: everything is FP32 whatever the network's dtype, the stochastic step is drawn per episode-decision (not per
batch), and noise enters only the entries whose density is counted (executed steps x env action dims), so the Gaussian
below is the exact density of the transition's random part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

NOISE_HEAD = "action_noise_head."
"""Prefix, within the expert, of the parameters that only Flow-Noise has: bases are stored without them."""

SMALLEST = 1e-3
"""noise scale whose density float32 resolves: iterates of order 1 are rounded at 1e-7"""


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    num_steps: int = 4
    "K denoising steps on the uniform grid 1 = sigma_0 > ... > sigma_K = 0"
    noise: Literal["flow_sde", "flow_noise"] = "flow_sde"
    "flow_sde: noise of fixed size, drift corrected so that the marginals stay; flow_noise: learned size, no correction"
    eta: float = 0.5
    "flow_sde: noise scale; 0 is the Euler ODE"
    std_min: float = 0.08
    "flow_noise: smallest std, model units (an action's 1st to 99th percentile is -1 to 1); piRL's bound"
    std_max: float = 0.16
    "flow_noise: largest std; an untrained head gives the geometric mean of the two"
    stochastic: Literal["one", "all"] = "one"
    "one random step per decision, the others ODE; or every step random"
    exclude_last: bool = True
    "never make the last step stochastic: its noise would reach the robot undenoised"

    def __post_init__(self) -> None:
        if self.num_steps < 2:
            raise ValueError(f"sampler.num_steps = {self.num_steps}: use at least 2, the first std needs sigma_1 < 1")
        if not (self.eta == 0 or self.eta >= SMALLEST):
            raise ValueError(
                f"sampler.eta = {self.eta}: use a noise scale of at least {SMALLEST}, below which densities measure "
                "rounding, or 0 for the ODE"
            )
        if self.noise not in ("flow_sde", "flow_noise"):
            raise ValueError(f"sampler.noise = {self.noise!r}: use 'flow_sde' or 'flow_noise'")
        if self.stochastic not in ("one", "all"):
            raise ValueError(f"sampler.stochastic = {self.stochastic!r}: use 'one' or 'all'")
        if not SMALLEST <= self.std_min <= self.std_max:
            raise ValueError(
                f"sampler.std_min = {self.std_min}: use a std of at least {SMALLEST}, at most std_max = {self.std_max}"
            )

    @property
    def learned_std(self) -> bool:
        return self.noise == "flow_noise"

    @property
    def explores(self) -> bool:
        """Whether a stochastic step has any noise, and so a density."""
        return self.learned_std or self.eta > 0

    @property
    def stochastic_steps(self) -> int:
        """Random transitions of a decision that explores."""
        return 1 if self.stochastic == "one" else self.num_steps - int(self.exclude_last)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the expert says of an iterate.  WAM -> sampler, learners."""

    velocity: Tensor
    "(..., H, D) float32"
    raw_std: Tensor | None = None
    "(..., H, D) float32, unbounded; None without a noise head"

    def detach(self) -> Prediction:
        return Prediction(
            velocity=self.velocity.detach(), raw_std=None if self.raw_std is None else self.raw_std.detach()
        )


# ------------------------------------------------------------------------------------------------ Flow-SDE


def sigma_grid(num_steps: int) -> tuple[float, ...]:
    """The K+1 noise levels 1, 1 - 1/K, ..., 0."""
    return tuple(1.0 - k / num_steps for k in range(num_steps + 1))


def transition_std(k: int, num_steps: int, eta: float) -> float:
    """Std of step k: g sqrt(delta), g = eta sqrt(sigma_k / (1 - s)).

    s = min(sigma_k, sigma_1): only the denominator, singular at sigma_0 = 1, is moved to the second grid point.
    K = 4, eta = 0.5: 0.500, 0.433, 0.250, 0.144.
    """
    grid = sigma_grid(num_steps)
    s = min(grid[k], grid[1])
    return eta * math.sqrt(grid[k] / (1.0 - s)) * math.sqrt(grid[k] - grid[k + 1])


def velocity_sensitivity(k: int, num_steps: int, eta: float) -> float:
    """d mean / d v of step k: -delta [1 + g^2 (1 - sigma) / (2 sigma)], the factor of the transition KL."""
    grid = sigma_grid(num_steps)
    sigma, delta = grid[k], grid[k] - grid[k + 1]
    g_squared = transition_std(k, num_steps, eta) ** 2 / delta
    return -delta * (1.0 + g_squared * (1.0 - sigma) / (2.0 * sigma))


def transition_mean(x: Tensor, v: Tensor, k: int | Tensor, num_steps: int, eta: float) -> Tensor:
    """Mean of x_{k+1} given x_k and the velocity there, (..., H, D) float32; k a number, or (...,) int64.

    mean = (1 - sigma') x0 + [sigma' - g^2 delta / (2 sigma)] x1 with x0 = x - sigma v, x1 = x + (1 - sigma) v; with
    eta = 0 it is the Euler step x + (sigma' - sigma) v.
    """
    sigma, rest, to_clean, to_noise, _, _ = _at(k, num_steps, eta, x)
    x, v = x.float(), v.float()
    return to_clean * (x - sigma * v) + to_noise * (x + rest * v)


@cache
def _table(num_steps: int, eta: float) -> Tensor:
    """(K, 6): sigma, 1 - sigma, weight of x0, weight of x1, std, d mean / d v; computed in float64, stored in FP32."""
    rows = []
    grid = sigma_grid(num_steps)
    for k, (sigma, sigma_next) in enumerate(zip(grid[:-1], grid[1:], strict=True)):
        std = transition_std(k, num_steps, eta)
        to_noise = sigma_next - std**2 / (2.0 * sigma)
        rows.append([sigma, 1.0 - sigma, 1.0 - sigma_next, to_noise, std, velocity_sensitivity(k, num_steps, eta)])
    with torch.inference_mode(False):  # training may use what acting made
        return torch.tensor(rows, dtype=torch.float32)


def _at(k: int | Tensor, num_steps: int, eta: float, like: Tensor) -> tuple[Tensor, ...]:
    """The table's columns at k, broadcastable to iterates (..., H, D)."""
    table = _table(num_steps, eta).to(like.device)
    return table[k].unbind() if isinstance(k, int) else table[k][..., None, None, :].unbind(dim=-1)


# ------------------------------------------------------------------------------------------------ both


def transition(x: Tensor, prediction: Prediction, k: int | Tensor, config: SamplerConfig) -> tuple[Tensor, Tensor]:
    """Mean (..., H, D) and std, broadcastable to it, of x_{k+1} given x_k; k a number, or (...,) int64."""
    if config.learned_std:
        return transition_mean(x, prediction.velocity, k, config.num_steps, 0.0), _std(prediction, k, config)
    return transition_mean(x, prediction.velocity, k, config.num_steps, config.eta), _std(prediction, k, config)


def _std(prediction: Prediction, k: int | Tensor, config: SamplerConfig) -> Tensor:
    if not config.learned_std:
        return _at(k, config.num_steps, config.eta, prediction.velocity)[4]
    assert prediction.raw_std is not None, "a policy built with this sampler has a noise head"
    return bounded_std(prediction.raw_std, config)


def bounded_std(raw: Tensor, config: SamplerConfig) -> Tensor:
    """Flow-Noise's std, same shape: log variance = (1 - u) log std_min^2 + u log std_max^2 with u = (1 + tanh raw) / 2.

    arXiv 2510.25889, as RLinf bounds it; raw = 0 gives the geometric mean of the bounds.
    """
    u = 0.5 * (1.0 + torch.tanh(raw.float()))
    return torch.exp((1.0 - u) * math.log(config.std_min) + u * math.log(config.std_max))


def gaussian_log_prob(x: Tensor, mean: Tensor, std: float | Tensor, mask: Tensor) -> Tensor:
    """Log density of x under N(mean, std^2 I), summed over the last two axes where `mask` is 1.

    x, mean (..., H, D) and mask broadcastable to them; std positive, a number or broadcastable.  Returns (...,) FP32.
    """
    std = torch.as_tensor(std, dtype=torch.float32, device=x.device)
    z = (x.float() - mean.float()) / std
    density = -0.5 * z.square() - torch.log(std) - 0.5 * math.log(2.0 * math.pi)
    return (density * mask).sum(dim=(-2, -1))


def transition_kl(p: Prediction, q: Prediction, k: int | Tensor, config: SamplerConfig, mask: Tensor) -> Tensor:
    """Exact KL(p || q) between two policies' transitions from one state, nats summed over mask, shape (...,).

    log(s_q / s_p) + (s_p^2 + dmean^2) / (2 s_q^2) - 1/2 per entry, dmean = (d mean / d v) (v_p - v_q): the velocities'
    difference, not the means', which would lose its last digits.  Flow-SDE's stds are equal, which leaves
    dmean^2 / (2 std^2), a weighted velocity error.
    """
    eta = 0.0 if config.learned_std else config.eta
    slope = _at(k, config.num_steps, eta, p.velocity)[5]
    square = (slope * (p.velocity.float() - q.velocity.float())).square()
    s_p, s_q = _std(p, k, config), _std(q, k, config)
    if config.learned_std:
        per_entry = torch.log(s_q / s_p) + 0.5 * ((s_p / s_q).square() - 1.0) + square / (2.0 * s_q.square())
    else:
        per_entry = square / (2.0 * s_q.square())
    return (per_entry * mask).sum(dim=(-2, -1))


def transition_entropy(prediction: Prediction, k: int | Tensor, config: SamplerConfig, mask: Tensor) -> Tensor:
    """Differential entropy of a transition, nats summed over mask, (...,): log std + 1/2 log(2 pi e) per entry."""
    per_entry = torch.log(_std(prediction, k, config)) + 0.5 * math.log(2.0 * math.pi * math.e)
    return (per_entry * mask).expand_as(prediction.velocity).sum(dim=(-2, -1))


# ------------------------------------------------------------------------------------------------ which steps


def is_stochastic(stochastic_step: int, k: int, config: SamplerConfig) -> bool:
    """Whether step k of a decision is random: `stochastic_step` is an index, K for all steps, -1 for none."""
    if config.exclude_last and k == config.num_steps - 1:
        return False
    return stochastic_step in (k, config.num_steps)


def draw_stochastic_step(generator: torch.Generator, config: SamplerConfig) -> int:
    """The random step of one decision: uniform over the allowed steps, or K for all of them."""
    if config.stochastic == "all":
        return config.num_steps
    allowed = config.num_steps - int(config.exclude_last)
    return int(torch.randint(allowed, (), generator=generator))
