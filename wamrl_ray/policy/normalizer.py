"""q01/q99 normalisation of actions and states to about [-1, 1].  Fitted by pretraining, frozen afterwards."""

from __future__ import annotations

import torch
from torch import Tensor, nn

MIN_HALF_RANGE = 1e-2
"""A channel that hardly moves in the data (a wrist that never turns) is centred but not blown up."""


class Normalizer(nn.Module):
    """Affine map that takes each channel's q01 to -1 and its q99 to +1; nothing is clipped (as GE-Act does)."""

    action_center: Tensor
    action_half: Tensor
    state_center: Tensor
    state_half: Tensor

    def __init__(self, action_dim: int, state_dim: int) -> None:
        super().__init__()
        for name, dim in (("action", action_dim), ("state", state_dim)):
            self.register_buffer(f"{name}_center", torch.zeros(dim))
            self.register_buffer(f"{name}_half", torch.ones(dim))

    def fit(self, actions: Tensor, states: Tensor) -> None:
        """Set the ranges from data, (n, A) and (n, S)."""
        for name, data in (("action", actions), ("state", states)):
            low, high = (torch.quantile(data.float(), q, dim=0) for q in (0.01, 0.99))
            getattr(self, f"{name}_center").copy_((high + low) / 2)
            getattr(self, f"{name}_half").copy_(((high - low) / 2).clamp(min=MIN_HALF_RANGE))

    def normalize_action(self, action: Tensor) -> Tensor:
        """(..., A) env units -> model units."""
        return (action - self.action_center) / self.action_half

    def denormalize_action(self, action: Tensor) -> Tensor:
        """(..., A) model units -> env units."""
        return action * self.action_half + self.action_center

    def normalize_state(self, state: Tensor) -> Tensor:
        """(..., S) env units -> model units."""
        return (state - self.state_center) / self.state_half
