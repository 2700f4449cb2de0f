"""One LTX transformer block, called by the world model and the action expert on diffusers' modules and weights.

The operations are those of diffusers' own forward, in its order, so the bits are too (a test holds the two equal); what
is left out is its bookkeeping, which costs a small network more than its arithmetic: attention processors found by
signature, a back-end registry, dropout layers of rate 0.  Keys and values of the cross-attention come from outside, so
that a caller may keep them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.transformers.transformer_ltx import apply_rotary_emb
from torch import Tensor

Rope = tuple[Tensor, Tensor]
"""Cosines and sines, (1 or B, tokens, width)."""


def run_block(
    block: Any, hidden: Tensor, ada: Tensor, rope: Rope, keys_values: tuple[Tensor, Tensor], bias: Tensor | None = None
) -> Tensor:
    """hidden (B, N, width), ada (B, N, 6 width), bias of the cross-attention (B, heads, 1, tokens): (B, N, width)."""
    table = block.scale_shift_table[None, None] + ada.reshape(*ada.shape[:2], 6, -1)
    shift_attn, scale_attn, gate_attn, shift_ff, scale_ff, gate_ff = table.unbind(dim=2)
    attended = self_attend(block.attn1, block.norm1(hidden) * (1 + scale_attn) + shift_attn, rope)
    hidden = hidden + attended * gate_attn
    hidden = hidden + cross_attend(block.attn2, hidden, keys_values, bias)
    first, last = block.ff.net[0], block.ff.net[-1]
    normal = block.norm2(hidden) * (1 + scale_ff) + shift_ff
    out: Tensor = hidden + last(F.gelu(first.proj(normal), approximate="tanh")) * gate_ff
    return out


def self_attend(attention: Any, hidden: Tensor, rope: Rope) -> Tensor:
    query = apply_rotary_emb(attention.norm_q(attention.to_q(hidden)), rope)
    key = apply_rotary_emb(attention.norm_k(attention.to_k(hidden)), rope)
    return _mix(attention, query, _split_heads(key, attention), _split_heads(attention.to_v(hidden), attention))


def cross_attend(
    attention: Any, hidden: Tensor, keys_values: tuple[Tensor, Tensor], bias: Tensor | None = None
) -> Tensor:
    return _mix(attention, attention.norm_q(attention.to_q(hidden)), *keys_values, bias)


def keys_values(attention: Any, features: Tensor) -> tuple[Tensor, Tensor]:
    """Of a cross-attention, each (B, heads, tokens, head_dim), from what it attends to, (B, tokens, width)."""
    keys = attention.norm_k(attention.to_k(features))
    return _split_heads(keys, attention), _split_heads(attention.to_v(features), attention)


def _mix(attention: Any, query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None = None) -> Tensor:
    mixed = F.scaled_dot_product_attention(_split_heads(query, attention), keys, values, attn_mask=bias)
    out: Tensor = attention.to_out[0](mixed.transpose(1, 2).flatten(2))
    return out


def _split_heads(x: Tensor, attention: Any) -> Tensor:
    return x.reshape(*x.shape[:2], attention.heads, -1).transpose(1, 2)
