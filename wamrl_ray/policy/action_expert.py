"""The action expert: LTX blocks over action tokens; block i cross-attends to the features of video block i.

Parameter names are Genie Envisioner's (`action_*`).  One state token at network time 0 stands before the H noisy
action tokens.  The keys and values of the video features do not depend on sigma: `keys_values` computes them once per
decision and every denoising step reuses them, with the same bits as computing them anew.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from diffusers.models.normalization import AdaLayerNormSingle
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock
from torch import Tensor, nn

from wamrl_ray.policy import ltx_block

KeysValues = tuple[tuple[Tensor, Tensor], ...]
"""Per block: keys and values (B, heads, tokens, head_dim)."""


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Sizes of the action expert; it has as many blocks as the world model."""

    heads: int = 4
    head_dim: int = 24
    "width = heads x head_dim"
    rope_base: int = 57
    "positions per half turn of the slowest rotation, fixed whatever the chunk length (Genie Envisioner)"

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


class ActionExpert(nn.Module):
    """`forward(keys_values, x, sigma, state_token) -> velocity`."""

    def __init__(self, config: ExpertConfig, *, channels: int, feature_width: int, layers: int) -> None:
        super().__init__()
        width = config.width
        self.action_proj_in = nn.Linear(channels, width)
        self.action_time_embed = AdaLayerNormSingle(width, use_additional_conditions=False)
        self.action_scale_shift_table = nn.Parameter(torch.randn(2, width) / width**0.5)
        self.action_blocks = nn.ModuleList(
            LTXVideoTransformerBlock(
                dim=width,
                num_attention_heads=config.heads,
                attention_head_dim=config.head_dim,
                cross_attention_dim=feature_width,
            )
            for _ in range(layers)
        )
        self.norm_out = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.action_proj_out = nn.Linear(width, channels)
        self.rope_base = config.rope_base

    def keys_values(self, features: Sequence[Tensor]) -> KeysValues:
        """Cross-attention keys and values of per-block features (B, tokens, feature width)."""
        blocks: list[Any] = list(self.action_blocks)
        return tuple(ltx_block.keys_values(block.attn2, f) for block, f in zip(blocks, features, strict=True))

    def forward(self, keys_values: KeysValues, x: Tensor, sigma: Tensor, state_token: Tensor) -> Tensor:
        """x (B, H, D) at noise level sigma (B,), state token (B, D): velocity (B, H, D)."""
        batch, horizon, _ = x.shape
        hidden = self.action_proj_in(torch.cat([state_token[:, None], x], dim=1))
        times = torch.stack([torch.zeros_like(sigma), 1000.0 * sigma], dim=1)
        ada, embedded = self.action_time_embed(times.flatten(), batch_size=batch, hidden_dtype=x.dtype)
        state_ada, action_ada = ada.reshape(batch, 2, -1).split(1, dim=1)
        ada = torch.cat([state_ada, action_ada.expand(-1, horizon, -1)], dim=1)
        rope = action_rope(horizon + 1, hidden.shape[-1], self.rope_base, x.device)
        for block, kv in zip(self.action_blocks, keys_values, strict=True):
            hidden = ltx_block.run_block(block, hidden, ada, rope, kv)
        shift, scale = (self.action_scale_shift_table[None] + embedded.reshape(batch, 2, -1)[:, 1:]).unbind(dim=1)
        out: Tensor = self.action_proj_out(self.norm_out(hidden[:, 1:]) * (1.0 + scale[:, None]) + shift[:, None])
        return out


@cache
def action_rope(length: int, width: int, base: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, length, width), pairs interleaved.

    angle = theta^linspace(0, 1, width/2) * pi/2 * (2 pos / base - 1), theta = 1e4 (Genie Envisioner).
    """
    with torch.inference_mode(False):  # a training pass may use what an acting one made
        frequency = 10000.0 ** torch.linspace(0.0, 1.0, width // 2, device=device)
        position = 2.0 * torch.arange(length, device=device) / base - 1.0
        angle = (position[:, None] * frequency * (math.pi / 2.0)).repeat_interleave(2, dim=-1)[None]
        return angle.cos(), angle.sin()
