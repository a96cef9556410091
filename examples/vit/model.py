"""A small vision transformer (A. Dosovitskiy and others, ICLR 2021)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ViT(nn.Module):
    def __init__(
        self, size: int = 8, patch: int = 2, width: int = 64, heads: int = 4, depth: int = 2
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (size // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.encoder = nn.TransformerEncoder(
            layer, depth, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1)
        return self.head(self.encoder(tokens + self.positions)[:, 0])
