"""The pre-activation ResNet for CIFAR, of any valid depth.

He, Zhang, Ren and Sun, "Identity Mappings in Deep Residual Networks", arXiv:1603.05027 (2016).

The depth alone decides the kind of block, as in the tables of the paper:

- 164 or more and of the form 9n + 2 (164, 1001): n bottleneck blocks in each of the three stages;
- otherwise of the form 6n + 2 (20, 110, 1202): n basic blocks in each stage;
- anything else is no depth of this network.

A block that changes the shape projects its shortcut with a 1x1 convolution that reads the activated input,
and strides in the first convolution, as in the code of the authors.
"""

from typing import ClassVar, Final

import torch
from torch import Tensor, nn

WIDTHS: Final = (16, 32, 64)
FIRST_BOTTLENECK: Final = 164


class BasicBlock(nn.Module):
    """Two rounds of batch normalisation, ReLU and 3x3 convolution."""

    expansion: ClassVar[int] = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _projection(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(x))
        identity = x if self.shortcut is None else self.shortcut(out)
        out = self.conv1(out)
        out = self.conv2(self.relu(self.bn2(out)))
        out += identity
        return out


class Bottleneck(nn.Module):
    """The same with 1x1, 3x3 and 1x1 convolutions, the last of which widens four times."""

    expansion: ClassVar[int] = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 1, stride=stride, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = _projection(channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.bn1(x))
        identity = x if self.shortcut is None else self.shortcut(out)
        out = self.conv1(out)
        out = self.conv2(self.relu(self.bn2(out)))
        out = self.conv3(self.relu(self.bn3(out)))
        out += identity
        return out


Block = type[BasicBlock] | type[Bottleneck]


class PreResNet(nn.Module):
    """A 3x3 stem, three stages of blocks, and a last activation before pooling and the linear layer."""

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        block, count = layout(depth)
        first, second, third = (width * block.expansion for width in WIDTHS)
        self.stem = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        self.stage1 = _stage(block, WIDTHS[0], WIDTHS[0], count, stride=1)
        self.stage2 = _stage(block, first, WIDTHS[1], count, stride=2)
        self.stage3 = _stage(block, second, WIDTHS[2], count, stride=2)
        self.bn = nn.BatchNorm2d(third)
        self.relu = nn.ReLU(inplace=True)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(third, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.stage1(x)
        x = self.stage2(x)
        x = self.stage3(x)
        x = self.relu(self.bn(x))
        x = torch.flatten(self.avgpool(x), 1)
        x = self.fc(x)
        return x


def layout(depth: int) -> tuple[Block, int]:
    """The kind of block for a depth and how many of them make a stage; ValueError for an invalid depth."""
    if depth >= FIRST_BOTTLENECK and depth % 9 == 2:
        return Bottleneck, depth // 9
    if depth >= 8 and depth % 6 == 2:
        return BasicBlock, depth // 6
    raise ValueError(
        f"a pre-activation ResNet has a depth of 6n + 2 (8, 14, 20, ..., 110, ...) "
        f"or, from {FIRST_BOTTLENECK} on, of 9n + 2 (164, 173, ..., 1001, ...), not {depth}"
    )


def _stage(block: Block, channels: int, width: int, count: int, stride: int) -> nn.Sequential:
    out = width * block.expansion
    return nn.Sequential(block(channels, width, stride), *(block(out, width, 1) for _ in range(count - 1)))


def _projection(channels: int, out: int, stride: int) -> nn.Conv2d | None:
    if stride == 1 and channels == out:
        return None
    return nn.Conv2d(channels, out, 1, stride=stride, bias=False)
