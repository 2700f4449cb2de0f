"""The critic: value of a decision from the world model's pooled features and the robot's state.  Actor learner only.

It reads features detached from the world model: the critic learns, the world does not.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Critic(nn.Module):
    """MLP with two hidden layers over standardised inputs.

    The inputs' mean and std are fixed by the first update: pooled features differ little between moments, and unscaled
    their common part would drown what differs.  The last layer starts at zero, so an untrained critic says 0 and its
    advantages are plain returns.
    """

    mean: Tensor
    std: Tensor
    fitted: Tensor

    def __init__(self, pooled_dim: int, state_dim: int, hidden: int, *, seed: int) -> None:
        super().__init__()
        width = pooled_dim + state_dim
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.layers = nn.Sequential(
                nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1)
            )
        last = self.layers[-1]
        assert isinstance(last, nn.Linear)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))
        self.register_buffer("fitted", torch.zeros(()))

    def fit_scale(self, pooled: Tensor, state: Tensor) -> None:
        """Fix the input scale from (n, P) and (n, S); only the first call counts."""
        if float(self.fitted) > 0:
            return
        inputs = torch.cat([pooled, state], dim=1)
        self.mean.copy_(inputs.mean(dim=0))
        self.std.copy_(inputs.std(dim=0, unbiased=False).clamp(min=1e-3))
        self.fitted.fill_(1.0)

    def forward(self, pooled: Tensor, state: Tensor) -> Tensor:
        """(n, P) and (n, S) -> (n,).  No gradient reaches `pooled`."""
        inputs = (torch.cat([pooled.detach(), state], dim=1) - self.mean) / self.std
        out: Tensor = self.layers(inputs.clamp(-10.0, 10.0)).squeeze(1)
        return out
