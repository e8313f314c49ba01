"""ResNet for ImageNet, version 1.5: a bottleneck strides in its 3x3 convolution, not in its first 1x1.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", arXiv:1512.03385 (2015).
"""

from typing import ClassVar, Final

import torch
from torch import Tensor, nn


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around an identity (or projected) shortcut."""

    expansion: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out: Tensor = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around the shortcut; the last one widens four times."""

    expansion: ClassVar[int] = 4

    def __init__(self, channels: int, width: int, stride: int, downsample: nn.Module | None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out: Tensor = self.conv1(x)
        out = self.bn1(out)
        out = self.relu(out)
        out = self.conv2(out)
        out = self.bn2(out)
        out = self.relu(out)
        out = self.conv3(out)
        out = self.bn3(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        out = self.relu(out)
        return out


Block = type[BasicBlock] | type[Bottleneck]

# Depth to the kind of block and the number of blocks in each of the four stages.
STAGES: Final[dict[int, tuple[Block, tuple[int, int, int, int]]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
    152: (Bottleneck, (3, 8, 36, 3)),
}


class ResNet(nn.Module):
    """A strided stem, four stages of residual blocks, global average pooling and one linear layer."""

    def __init__(self, depth: int, classes: int = 1000) -> None:
        super().__init__()
        block, counts = STAGES[depth]
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = _stage(block, 64, 64, counts[0], stride=1)
        self.layer2 = _stage(block, 64 * block.expansion, 128, counts[1], stride=2)
        self.layer3 = _stage(block, 128 * block.expansion, 256, counts[2], stride=2)
        self.layer4 = _stage(block, 256 * block.expansion, 512, counts[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(512 * block.expansion, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = self.bn1(x)
        x = self.relu(x)
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return x


def _stage(block: Block, channels: int, width: int, count: int, stride: int) -> nn.Sequential:
    out = width * block.expansion
    downsample = None
    if stride != 1 or channels != out:
        downsample = nn.Sequential(
            nn.Conv2d(channels, out, 1, stride=stride, bias=False),
            nn.BatchNorm2d(out),
        )
    first = block(channels, width, stride, downsample)
    return nn.Sequential(first, *(block(out, width, 1, None) for _ in range(count - 1)))
