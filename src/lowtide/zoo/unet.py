"""U-Net, with two of today's habits: padded convolutions, so output and input have one size, and batch norm.

Ronneberger, Fischer and Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation",
arXiv:1505.04597 (2015).
"""

from itertools import pairwise
from typing import Final

import torch
from torch import Tensor, nn

LEVELS: Final = 4  # poolings on the way down; an image side must be divisible by 2 ** LEVELS


class DoubleConv(nn.Sequential):
    """Two rounds of 3x3 convolution, batch normalisation and ReLU."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__(
            nn.Conv2d(channels, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, padding=1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """Images (batch, channels, side, side) to per-pixel logits (batch, classes, side, side)."""

    def __init__(self, classes: int = 2, width: int = 64, channels: int = 3) -> None:
        super().__init__()
        widths = [width << level for level in range(LEVELS + 1)]
        pairs = list(pairwise(widths))
        self.enter = DoubleConv(channels, width)
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(DoubleConv(high, low) for high, low in pairs)
        self.upsample = nn.ModuleList(nn.ConvTranspose2d(low, high, 2, stride=2) for high, low in pairs[::-1])
        self.up = nn.ModuleList(DoubleConv(low, high) for high, low in pairs[::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(self.pool(x))
        for upsample, up in zip(self.upsample, self.up, strict=True):
            x = torch.cat([skips.pop(), upsample(x)], 1)
            x = up(x)
        x = self.head(x)
        return x
