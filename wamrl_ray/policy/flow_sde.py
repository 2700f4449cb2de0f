"""Flow-SDE: the one owner of the denoising grid and of each transition's mean and std, for sampling and for scoring.

Sigma = 1 is noise, sigma = 0 is data, v = eps - x0 (Genie Envisioner's convention; network time is 1000 sigma).
Sources: Flow-GRPO (arXiv 2505.05470) eq. 9 and its piRL form (arXiv 2510.25889).  Departures: everything is FP32
whatever the network's dtype, the stochastic step is drawn per episode-decision (not per batch), and noise enters only
the entries whose density is counted (executed steps x env action dims), so the Gaussian below is the exact density of
the transition's random part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    num_steps: int = 4
    "K denoising steps on the uniform grid 1 = sigma_0 > ... > sigma_K = 0"
    eta: float = 0.5
    "noise scale; 0 is the Euler ODE"
    stochastic: Literal["one", "all"] = "one"
    "one random SDE step per decision, the others ODE; or every step SDE"
    exclude_last: bool = True
    "never make the last step stochastic: its noise would reach the robot undenoised"

    def __post_init__(self) -> None:
        if self.num_steps < 2:
            raise ValueError(f"sampler.num_steps = {self.num_steps}: use at least 2, the first std needs sigma_1 < 1")
        if not self.eta >= 0:
            raise ValueError(f"sampler.eta = {self.eta}: use a non-negative noise scale")


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


def transition_mean(x: Tensor, v: Tensor, k: int, num_steps: int, eta: float) -> Tensor:
    """Mean of x_{k+1} given x_k and the velocity there, any shape, float32.

    mean = (1 - sigma') x0 + [sigma' - g^2 delta / (2 sigma)] x1 with x0 = x - sigma v, x1 = x + (1 - sigma) v; with
    eta = 0 it is the Euler step x + (sigma' - sigma) v.
    """
    grid = sigma_grid(num_steps)
    sigma, sigma_next = grid[k], grid[k + 1]
    x, v = x.float(), v.float()
    correction = transition_std(k, num_steps, eta) ** 2 / (2.0 * sigma)
    clean, noise = x - sigma * v, x + (1.0 - sigma) * v
    return (1.0 - sigma_next) * clean + (sigma_next - correction) * noise


def gaussian_log_prob(x: Tensor, mean: Tensor, std: float | Tensor, mask: Tensor) -> Tensor:
    """Log density of x under N(mean, std^2 I), summed over the last two axes where `mask` is 1.

    x, mean (..., H, D) and mask broadcastable to them; std a number or (..., 1, 1), positive.  Returns (...,) float32.
    """
    std = torch.as_tensor(std, dtype=torch.float32, device=x.device)
    z = (x.float() - mean.float()) / std
    density = -0.5 * z.square() - torch.log(std) - 0.5 * math.log(2.0 * math.pi)
    return (density * mask).sum(dim=(-2, -1))


def velocity_sensitivity(k: int, num_steps: int, eta: float) -> float:
    """d mean / d v of step k: -delta [1 + g^2 (1 - sigma) / (2 sigma)], the factor of the transition KL."""
    grid = sigma_grid(num_steps)
    sigma, delta = grid[k], grid[k] - grid[k + 1]
    g_squared = transition_std(k, num_steps, eta) ** 2 / delta
    return -delta * (1.0 + g_squared * (1.0 - sigma) / (2.0 * sigma))


def transition_kl(v_p: Tensor, v_q: Tensor, k: int, num_steps: int, eta: float, mask: Tensor) -> Tensor:
    """Exact KL between two policies' step-k transitions from one state: ||delta mean||^2 / (2 std^2), shape (...,)."""
    weight = velocity_sensitivity(k, num_steps, eta) ** 2 / (2.0 * transition_std(k, num_steps, eta) ** 2)
    return weight * ((v_p.float() - v_q.float()).square() * mask).sum(dim=(-2, -1))


def is_stochastic(stochastic_step: int, k: int, config: SamplerConfig) -> bool:
    """Whether step k of a decision is an SDE step: `stochastic_step` is an index, K for all steps, -1 for none."""
    if config.exclude_last and k == config.num_steps - 1:
        return False
    return stochastic_step in (k, config.num_steps)


def draw_stochastic_step(generator: torch.Generator, config: SamplerConfig) -> int:
    """The SDE step of one decision: uniform over the allowed steps, or K for all of them."""
    if config.stochastic == "all":
        return config.num_steps
    allowed = config.num_steps - int(config.exclude_last)
    return int(torch.randint(allowed, (), generator=generator))
