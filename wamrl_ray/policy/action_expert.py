"""The action expert: LTX blocks over action tokens; block i cross-attends to the features of video block i.

Parameter names are Genie Envisioner's (`action_*`).  One state token at network time 0 stands before the H noisy
action tokens.  The keys and values of the video features do not depend on sigma: `keys_values` computes them once per
decision and every denoising step reuses them, with the same bits as computing them anew.

A policy that explores by Flow-Noise has one part more, the noise head: an MLP on the last hidden state that says how
large each entry's noise should be.  Its last layer starts at zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.normalization import AdaLayerNormSingle
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformerBlock
from torch import Tensor, nn

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
    """`forward(keys_values, x, sigma, state_token) -> velocity, raw std`."""

    def __init__(
        self, config: ExpertConfig, *, channels: int, feature_width: int, layers: int, noise_head: bool = False
    ) -> None:
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
        self.action_noise_head: nn.Sequential | None = None
        if noise_head:
            last = nn.Linear(width // 2, channels)
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)
            self.action_noise_head = nn.Sequential(nn.Linear(width, width // 2), nn.SiLU(), last)

    def keys_values(self, features: Sequence[Tensor]) -> KeysValues:
        """Cross-attention keys and values of per-block features (B, tokens, feature width)."""
        blocks: list[Any] = list(self.action_blocks)
        return tuple(_keys_values(block.attn2, f) for block, f in zip(blocks, features, strict=True))

    def forward(
        self, keys_values: KeysValues, x: Tensor, sigma: Tensor, state_token: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """x (B, H, D) at noise level sigma (B,), state token (B, D): velocity (B, H, D), raw std (B, H, D) or None.

        Keys and values may be of B / m decisions: then each serves m rows that follow one another.
        """
        batch, horizon, _ = x.shape
        hidden = self.action_proj_in(torch.cat([state_token[:, None], x], dim=1))
        times = torch.stack([torch.zeros_like(sigma), 1000.0 * sigma], dim=1)
        ada, embedded = self.action_time_embed(times.flatten(), batch_size=batch, hidden_dtype=x.dtype)
        spread = torch.tensor([1, horizon], device=x.device)
        ada = ada.reshape(batch, 2, -1).repeat_interleave(spread, dim=1)
        rope = action_rope(horizon + 1, hidden.shape[-1], self.rope_base, x.device)
        for block, kv in zip(self.action_blocks, keys_values, strict=True):
            hidden = _run_block(block, hidden, kv, ada, rope)
        shift, scale = (self.action_scale_shift_table[None] + embedded.reshape(batch, 2, -1)[:, 1:]).unbind(dim=1)
        normed = self.norm_out(hidden[:, 1:])
        velocity: Tensor = self.action_proj_out(normed * (1.0 + scale[:, None]) + shift[:, None])
        return velocity, None if self.action_noise_head is None else self.action_noise_head(normed)


def action_rope(length: int, width: int, base: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines (1, length, width), pairs interleaved.

    angle = theta^linspace(0, 1, width/2) * pi/2 * (2 pos / base - 1), theta = 1e4 (Genie Envisioner).
    """
    frequency = 10000.0 ** torch.linspace(0.0, 1.0, width // 2, device=device)
    position = 2.0 * torch.arange(length, device=device) / base - 1.0
    angle = (position[:, None] * frequency * (math.pi / 2.0)).repeat_interleave(2, dim=-1)[None]
    return angle.cos(), angle.sin()


def _keys_values(attention: Any, features: Tensor) -> tuple[Tensor, Tensor]:
    keys = attention.norm_k(attention.to_k(features))
    values = attention.to_v(features)
    return _split_heads(keys, attention), _split_heads(values, attention)


def _split_heads(x: Tensor, attention: Any) -> Tensor:
    return x.reshape(*x.shape[:2], attention.heads, -1).transpose(1, 2)


def _cross_attend(attention: Any, hidden: Tensor, keys_values: tuple[Tensor, Tensor]) -> Tensor:
    """hidden (B, tokens, width), keys and values of B / m decisions: m rows ask the same keys as one long row would."""
    decisions, tokens = len(keys_values[0]), hidden.shape[1]
    query = attention.norm_q(attention.to_q(hidden)).reshape(decisions, -1, hidden.shape[2])
    mixed = F.scaled_dot_product_attention(_split_heads(query, attention), *keys_values).transpose(1, 2)
    mixed = mixed.reshape(len(hidden), tokens, -1)
    out: Tensor = attention.to_out[0](mixed)
    return out


def _run_block(
    block: Any, hidden: Tensor, keys_values: tuple[Tensor, Tensor], ada: Tensor, rope: tuple[Tensor, Tensor]
) -> Tensor:
    """The LTX block's forward with its cross-attention fed from cached keys and values (a test holds the two equal)."""
    table = block.scale_shift_table[None, None] + ada.reshape(*ada.shape[:2], 6, -1)
    shift_attn, scale_attn, gate_attn, shift_ff, scale_ff, gate_ff = table.unbind(dim=2)
    attended = block.attn1(block.norm1(hidden) * (1 + scale_attn) + shift_attn, image_rotary_emb=rope)
    hidden = hidden + attended * gate_attn
    hidden = hidden + _cross_attend(block.attn2, hidden, keys_values)
    out: Tensor = hidden + block.ff(block.norm2(hidden) * (1 + scale_ff) + shift_ff) * gate_ff
    return out
