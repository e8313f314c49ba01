"""DenseNet-BC for ImageNet, in its plain form: every concatenation is kept for the backward pass.

Huang, Liu, van der Maaten and Weinberger, "Densely Connected Convolutional Networks",
arXiv:1608.06993 (2016).
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BOTTLENECK: Final = 4  # the 1x1 convolution of a layer makes this many times the growth

# Depth to the growth, the channels of the stem and the layers in each dense block.
BLOCKS: Final = {
    121: (32, 64, (6, 12, 24, 16)),
    161: (48, 96, (6, 12, 36, 24)),
    169: (32, 64, (6, 12, 32, 32)),
    201: (32, 64, (6, 12, 48, 32)),
}


class DenseLayer(nn.Module):
    """`growth` new channels out of every feature map made before it in the block."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels, BOTTLENECK * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        squeezed = self._squeeze(features)
        new: Tensor = self.conv2(self.relu2(self.norm2(squeezed)))
        return new

    def _squeeze(self, features: list[Tensor]) -> Tensor:
        # A method of its own, so that without gradients the concatenation dies before conv2 runs.
        joined = torch.cat(features, 1)
        squeezed: Tensor = self.conv1(self.relu1(self.norm1(joined)))
        return squeezed


class DenseBlock(nn.Module):
    """Layers that each read the input of the block and the outputs of all layers before."""

    def __init__(self, count: int, channels: int, growth: int) -> None:
        super().__init__()
        for index in range(count):
            self.add_module(f"denselayer{index + 1}", DenseLayer(channels + index * growth, growth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.children():
            features.append(layer(features))
        return torch.cat(features, 1)


class DenseNet(nn.Module):
    """A strided stem, four dense blocks with halving transitions between them, one linear layer."""

    def __init__(self, depth: int, classes: int = 1000) -> None:
        super().__init__()
        growth, channels, counts = BLOCKS[depth]
        self.features = _stem(channels)
        for index, count in enumerate(counts, start=1):
            self.features.add_module(f"denseblock{index}", DenseBlock(count, channels, growth))
            channels += count * growth
            if index < len(counts):
                self.features.add_module(f"transition{index}", _transition(channels))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        out: Tensor = F.relu(features, inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        out = torch.flatten(out, 1)
        out = self.classifier(out)
        return out


def _stem(channels: int) -> nn.Sequential:
    stem = nn.Sequential()
    stem.add_module("conv0", nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False))
    stem.add_module("norm0", nn.BatchNorm2d(channels))
    stem.add_module("relu0", nn.ReLU(inplace=True))
    stem.add_module("pool0", nn.MaxPool2d(3, stride=2, padding=1))
    return stem


def _transition(channels: int) -> nn.Sequential:
    transition = nn.Sequential()
    transition.add_module("norm", nn.BatchNorm2d(channels))
    transition.add_module("relu", nn.ReLU(inplace=True))
    transition.add_module("conv", nn.Conv2d(channels, channels // 2, 1, bias=False))
    transition.add_module("pool", nn.AvgPool2d(2, stride=2))
    return transition
