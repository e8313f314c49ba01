"""The vision transformer.

Dosovitskiy et al., "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
arXiv:2010.11929 (2020).
"""

import torch
from torch import Tensor, nn

from lowtide.zoo.transformer import Block


class ViT(nn.Module):
    """Patches become tokens, a class token gathers them, and one linear layer reads it."""

    def __init__(
        self,
        image: int = 224,
        patch: int = 16,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads, eps=1e-6) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1)
        x = x + self.positions
        x = self.blocks(x)
        x = self.norm(x)
        x = self.head(x[:, 0])
        return x
