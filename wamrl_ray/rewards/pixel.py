"""Pixel metric: the mean squared error of two images.  The reconstruction reward calls it; the paper's best metric."""

from __future__ import annotations

from torch import Tensor


class PixelReward:
    """d(a, b) = mean over views, pixels and channels of (a - b)^2; implements `types.Reward`."""

    def distance(self, a: Tensor, b: Tensor) -> Tensor:
        """(B, V, h, w, 3) float in [0, 1] twice -> (B,) in [0, 1], 0 iff equal.  ValueError on unequal shapes."""
        if a.shape != b.shape:
            raise ValueError(f"images of shapes {tuple(a.shape)} and {tuple(b.shape)}: compare equal shapes")
        return (a.float() - b.float()).square().flatten(1).mean(dim=1)
