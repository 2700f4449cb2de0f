"""Frames to latents and back: the frozen ends of the world model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PatchCodec:
    """Space-to-depth: a p x p RGB patch is one latent of 3 p^2 channels in [-1, 1].  Nothing to train, exact inverse.

    16 x 16 patches have 768 channels, more than a tiny network is wide, so the network predicts the clean sample, which
    is low-dimensional, and never the noise itself (`WorldConfig.prediction`).
    """

    patch: int

    @property
    def channels(self) -> int:
        return 3 * self.patch**2

    def encode(self, frames: Tensor) -> Tensor:
        """uint8 (..., h, w, 3) -> float32 (..., h/p, w/p, 3 p^2) in [-1, 1]."""
        *lead, h, w, c = frames.shape
        p = self.patch
        x = frames.float().div(127.5).sub(1.0).reshape(*lead, h // p, p, w // p, p, c)
        return x.transpose(-4, -3).reshape(*lead, h // p, w // p, p * p * c)

    def decode(self, latents: Tensor) -> Tensor:
        """float (..., h/p, w/p, 3 p^2) -> float32 (..., h, w, 3), clipped to [0, 1]."""
        *lead, gh, gw, _ = latents.shape
        p = self.patch
        x = latents.reshape(*lead, gh, gw, p, p, 3).transpose(-4, -3).reshape(*lead, gh * p, gw * p, 3)
        return x.add(1.0).div(2.0).clamp(0.0, 1.0)

    def round_trip(self, frames: Tensor) -> Tensor:
        """uint8 (..., h, w, 3) -> float32 in [0, 1]: what an executed frame looks like through the codec."""
        return frames.float() / 255.0


def to_uint8(frames: Tensor) -> Tensor:
    """float (...) in [0, 1] -> uint8."""
    return (frames * 255.0).round().clamp(0, 255).to(torch.uint8)
