"""tfdist's `transformer` in PyTorch, for texts of up to 256 words from a vocabulary of 20,000, and 10 classes."""

from __future__ import annotations

import torch
from torch import nn


class Transformer(nn.Module):
    """Four blocks of 128 units with 4 heads and normalization before attention; classifies the average over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(20_000, 128), nn.Embedding(256, 128)
        block = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, norm=nn.LayerNorm(128), enable_nested_tensor=False)
        self.classes = nn.Linear(128, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = tokens != 0
        x = self.words(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.blocks(x, src_key_padding_mask=~mask) * mask[..., None]
        return self.classes(x.sum(1) / mask.sum(1, keepdim=True))
