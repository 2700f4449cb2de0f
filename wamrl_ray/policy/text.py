"""Instruction to token embeddings: a small frozen T5 encoder over bytes, cached per instruction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class TextEncoder(nn.Module):
    """T5 encoder on ByT5 tokens (bytes, so it needs no vocabulary file).  Frozen: its weights belong to the interface.

    `forward` returns (L, width) float32, padded to `length`, and the (L,) mask that is 1 on real tokens.
    """

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        from transformers import ByT5Tokenizer, T5Config, T5EncoderModel  # slow import, and only policies need it

        self.length = length
        self.tokenizer: Any = ByT5Tokenizer()
        self.encoder = T5EncoderModel(
            T5Config(
                d_model=width, d_kv=width // 4, num_heads=4, d_ff=2 * width, num_layers=layers, vocab_size=384,
                feed_forward_proj="gated-gelu", dropout_rate=0.0,
            )
        )  # fmt: skip
        self.requires_grad_(False)
        self._cache: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    @torch.inference_mode(False)  # a training pass may use what an acting one made
    def forward(self, instruction: str) -> tuple[Tensor, Tensor]:
        if instruction not in self._cache:
            tokens = self.tokenizer(
                instruction, max_length=self.length, padding="max_length", truncation=True, return_tensors="pt"
            ).to(self.encoder.device)
            hidden = self.encoder(**tokens).last_hidden_state[0]
            self._cache[instruction] = (hidden, tokens.attention_mask[0].to(hidden.dtype))
        return self._cache[instruction]

    def forget(self) -> None:
        """Drop cached embeddings: after loading weights or moving to another device."""
        self._cache.clear()
