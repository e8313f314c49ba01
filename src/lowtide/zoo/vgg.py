"""VGG, configurations A, B, D and E, with or without batch normalisation.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
arXiv:1409.1556 (2014).
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

WIDTHS: Final = (64, 128, 256, 512, 512)
# Depth to the number of 3x3 convolutions in each of the five stages; a stage ends in a 2x2 max pooling.
STAGES: Final = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}


class VGG(nn.Module):
    """Five stages of 3x3 convolutions and a three-layer classifier."""

    def __init__(self, depth: int, classes: int = 1000, *, batch_norm: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(*_features(STAGES[depth], batch_norm))
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(4096, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x


def _features(repeats: tuple[int, ...], batch_norm: bool) -> Iterator[nn.Module]:
    channels = 3
    for width, count in zip(WIDTHS, repeats, strict=True):
        for _ in range(count):
            yield nn.Conv2d(channels, width, 3, padding=1)
            if batch_norm:
                yield nn.BatchNorm2d(width)
            yield nn.ReLU(inplace=True)
            channels = width
        yield nn.MaxPool2d(2, stride=2)
