"""The video world model: a multi-view LTX video DiT that denoises future frames and lends its features to the actor.

Built from diffusers' LTX transformer with the parameter names of Genie Envisioner: beside the stock names only
`view_embed` and `view_ada.1` (and, in the tiny presets, `position_embed`).  Tokens are ordered frame-major, memory
frames first; memory tokens are clean at network time 0, future tokens noisy at 1000 sigma.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from diffusers.models.transformers.transformer_ltx import LTXVideoRotaryPosEmbed, LTXVideoTransformer3DModel
from torch import Tensor, nn

from wamrl_ray.policy import ltx_block

CROSS_VIEW_EVERY = 3
"""Blocks 0, 3, 6, ... attend across views, the others within one (Genie Envisioner)."""

MIN_SIGMA = 0.05
"""Floor of the division that turns a predicted sample into a velocity."""


@dataclass(frozen=True, kw_only=True)
class WorldConfig:
    """Sizes of the video DiT."""

    layers: int = 3
    heads: int = 4
    head_dim: int = 24
    "width = heads x head_dim"
    learned_positions: bool = True
    "add a learned embedding per patch: LTX's rotary positions are relative, a small network would have to infer from "
    "the background where it looks; False for Genie Envisioner's weights"
    prediction: Literal["residual", "velocity"] = "residual"
    "what the last layer predicts. A velocity carries the token's whole noise, which a network narrower than the token "
    "cannot hold; the clean sample minus the newest memory frame is low-dimensional, starts at 'nothing moves' and "
    "converts exactly. velocity is Genie Envisioner's"
    rope_scale: tuple[float, float, float] = (1.0, 256.0, 256.0)
    "position units per frame, row and column; LTX divides by 20, 2048, 2048"

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class WorldOutput:
    velocity: Tensor
    "(B, V, F, gh, gw, C), like the noisy future"
    features: tuple[Tensor, ...]
    "per block: hidden states (B, V * N, width), N = (M + F) gh gw tokens per view"


class WorldModel(LTXVideoTransformer3DModel):
    """`forward(memory, future, sigma, text, text_mask) -> WorldOutput`."""

    def __init__(
        self, config: WorldConfig, *, channels: int, text_width: int, tokens_per_frame: int, views: int
    ) -> None:
        super().__init__(
            in_channels=channels,
            out_channels=channels,
            num_attention_heads=config.heads,
            attention_head_dim=config.head_dim,
            cross_attention_dim=config.width,
            num_layers=config.layers,
            caption_channels=text_width,
        )
        self.sizes = config
        self.view_embed = nn.Parameter(0.02 * torch.randn(max(views, 3), config.width))
        self.view_ada = nn.Sequential(nn.SiLU(), nn.Linear(config.width, 6 * config.width))
        if config.prediction == "residual":
            nn.init.zeros_(self.proj_out.weight)
            nn.init.zeros_(self.proj_out.bias)
        if config.learned_positions:
            self.position_embed = nn.Parameter(0.1 * torch.randn(tokens_per_frame, config.width))

    def forward(self, memory: Tensor, future: Tensor, sigma: Tensor, text: Tensor, text_mask: Tensor) -> WorldOutput:
        """memory (B, V, M, gh, gw, C), noisy future (B, V, F, gh, gw, C), sigma (B,), text (B, L, w), mask (B, L)."""
        batch, views, num_memory, grid_h, grid_w, channels = memory.shape
        num_frames, per_frame = num_memory + future.shape[2], grid_h * grid_w
        tokens = torch.cat([memory, future], dim=2).reshape(batch * views, num_frames * per_frame, channels)

        hidden = self.proj_in(tokens)
        if self.sizes.learned_positions:
            hidden = hidden + self.position_embed.repeat(num_frames, 1)
        ada, embedded = self._modulation(sigma, views, num_memory * per_frame, future.shape[2] * per_frame)
        width, heads = hidden.shape[-1], self.sizes.heads
        rope = video_rope(width, num_frames, grid_h, grid_w, self.sizes.rope_scale, hidden.device)
        caption = self.caption_projection(text)
        bias = ((1.0 - text_mask) * -10000.0)[:, None, None].expand(-1, heads, 1, -1)
        within = (ada, rope, caption.repeat_interleave(views, 0), bias.repeat_interleave(views, 0))
        across = (fold(ada, views), (rope[0].repeat(1, views, 1), rope[1].repeat(1, views, 1)), caption, bias)

        features = []
        for i, block in enumerate(self.transformer_blocks):
            if i % CROSS_VIEW_EVERY == 0:
                hidden = unfold(run_block(block, fold(hidden, views), across), views)
            else:
                hidden = run_block(block, hidden, within)
            features.append(fold(hidden, views))

        first = num_memory * per_frame
        shift, scale = (self.scale_shift_table + embedded[:, first:, None]).unbind(dim=2)
        out = self.proj_out(self.norm_out(hidden[:, first:]) * (1.0 + scale) + shift)
        velocity = self._velocity(out.reshape(future.shape), memory, future, sigma)
        return WorldOutput(velocity=velocity, features=tuple(features))

    def _modulation(self, sigma: Tensor, views: int, memory_tokens: int, future_tokens: int) -> tuple[Tensor, Tensor]:
        """AdaLN parameters (B*V, N, 6 width) and time embeddings (B*V, N, width), spread from two times per sample."""
        batch = sigma.shape[0]
        times = torch.stack([torch.zeros_like(sigma), 1000.0 * sigma], dim=1)
        ada, embedded = self.time_embed(times.flatten(), batch_size=batch, hidden_dtype=self.proj_in.weight.dtype)
        view = self.view_embed[:views].repeat(batch, 1)[:, None]

        def per_token(x: Tensor, of_view: Tensor) -> Tensor:
            x = x.reshape(batch, 2, -1).repeat_interleave(views, 0) + of_view
            of_memory, of_future = x.split(1, dim=1)
            return torch.cat([of_memory.expand(-1, memory_tokens, -1), of_future.expand(-1, future_tokens, -1)], dim=1)

        return per_token(ada, self.view_ada(view)), per_token(embedded, view)

    def _velocity(self, out: Tensor, memory: Tensor, noisy: Tensor, sigma: Tensor) -> Tensor:
        if self.sizes.prediction == "velocity":
            return out
        return (noisy - memory[:, :, -1:] - out) / sigma.clamp(min=MIN_SIGMA).reshape(-1, 1, 1, 1, 1, 1)


def fold(x: Tensor, views: int) -> Tensor:
    """(B*V, N, c) -> (B, V*N, c): the views of a sample as one sequence."""
    return x.reshape(-1, views * x.shape[1], x.shape[2])


def unfold(x: Tensor, views: int) -> Tensor:
    """(B, V*N, c) -> (B*V, N, c)."""
    return x.reshape(-1, x.shape[1] // views, x.shape[2])


Conditions = tuple[Tensor, ltx_block.Rope, Tensor, Tensor]
"""AdaLN parameters, rotary (cos, sin), caption, caption bias (B, heads, 1, L) of one call."""


def run_block(block: Any, hidden: Tensor, conditions: Conditions) -> Tensor:
    ada, rope, caption, bias = conditions
    return ltx_block.run_block(block, hidden, ada, rope, ltx_block.keys_values(block.attn2, caption), bias)


@cache
def video_rope(
    width: int, frames: int, rows: int, columns: int, scale: tuple[float, float, float], device: torch.device
) -> ltx_block.Rope:
    """Cosines and sines (1, frames * rows * columns, width): constants of a grid."""
    with torch.inference_mode(False):  # a training pass may use what an acting one made
        of_device = torch.empty(1, device=device)
        cos, sin = LTXVideoRotaryPosEmbed(width)(of_device, frames, rows, columns, scale)
    return cos, sin
