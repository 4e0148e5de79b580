"""tfdist's `transformer` in PyTorch, for texts of up to 256 words of a vocabulary of 20,000 and 10 classes."""

from __future__ import annotations

import torch
from torch import nn


class Transformer(nn.Module):
    """Four blocks of 128 units with 4 heads, normalized before attention; the average over the words is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(20_000, 128), nn.Embedding(256, 128)
        block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, norm=nn.LayerNorm(128), enable_nested_tensor=False)
        self.classes = nn.Linear(128, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        there = tokens != 0
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.blocks(x, src_key_padding_mask=~there) * there[..., None]
        return self.classes(x.sum(1) / there.sum(1, keepdim=True))
