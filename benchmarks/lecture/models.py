"""The two networks of Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016).

    resnet  the pre-activation ResNet for ImageNet, of about any depth: batch 32, 224 x 224, 1,000 classes
    lstm    four layers of 1,024, unrolled to any length: batch 64, inputs of 50, 5,000 classes at every step

The sizes are arguments, so that tests can be small. Both end in their loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.errors import BadRequest
from lowtide.trace.step import Example
from lowtide.zoo.lstm import Cell
from lowtide.zoo.preresnet import Bottleneck

PUBLISHED: Final = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
WIDTHS: Final = (64, 128, 256, 512)
LEAST_DEPTH: Final = 14  # one block in each stage


@dataclass(frozen=True)
class Network:
    """A model that returns its loss, and a batch for it."""

    name: str
    model: nn.Module
    example: Example


def resnet(depth: int, batch: int = 32, image: int = 224, classes: int = 1000) -> Network:
    """The ResNet of `depth` layers and a batch of random images."""
    model = PreResNet(stages(depth), classes)
    example = (torch.randn(batch, 3, image, image), torch.randint(0, classes, (batch,)))
    return Network(f"resnet {depth}", model, example)


def lstm(
    length: int, batch: int = 64, layers: int = 4, width: int = 1024, inputs: int = 50, classes: int = 5000
) -> Network:
    """The LSTM unrolled to `length` steps and a batch of random sequences."""
    model = UnrolledLSTM(layers, width, inputs, classes)
    example = (torch.randn(batch, length, inputs), torch.randint(0, classes, (batch, length)))
    return Network(f"lstm {length}", model, example)


def stages(depth: int) -> tuple[int, ...]:
    """How many bottleneck blocks make each stage: as published up to 200, beyond in the proportions of 200.

    A block has three convolutions, the stem and the classifier are a layer each: a depth is 3n + 2.

    Raises:
        BadRequest: there is no such depth.
    """
    if depth in PUBLISHED:
        return PUBLISHED[depth]
    if depth < LEAST_DEPTH or depth % 3 != 2:
        raise BadRequest(
            f"a ResNet of bottleneck blocks has 3n + 2 layers, {LEAST_DEPTH} or more (50, 1001), not {depth}."
        )
    blocks = depth // 3
    pattern = PUBLISHED[200]
    first, second, _, last = (max(1, round(blocks * count / sum(pattern))) for count in pattern)
    return first, second, blocks - first - second - last, last


class PreResNet(nn.Module):
    """The stem of ImageNet's ResNets, four stages of pre-activation blocks, a last activation, the loss."""

    def __init__(self, counts: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels = WIDTHS[0]
        self.stem = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        blocks: list[nn.Module] = []
        for stage, (width, count) in enumerate(zip(WIDTHS, counts, strict=True)):
            for number in range(count):
                blocks.append(Bottleneck(channels, width, stride=2 if stage and not number else 1))
                channels = width * Bottleneck.expansion
        self.blocks = nn.Sequential(*blocks)
        self.bn = nn.BatchNorm2d(channels)
        self.fc = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.pool(self.stem(images)))
        x = F.relu(self.bn(x)).mean(dim=(2, 3))
        return F.cross_entropy(self.fc(x), labels)


class UnrolledLSTM(nn.Module):
    """A stack of cells, step by step, with the loss at every step, so that it can be dropped too."""

    def __init__(self, layers: int, width: int, inputs: int, classes: int) -> None:
        super().__init__()
        self.width = width
        self.cells = nn.ModuleList(Cell(width) for _ in range(layers))
        self.cells[0].input = nn.Linear(inputs, 4 * width)  # the first layer reads the batch
        self.head = nn.Linear(width, classes)

    def forward(self, signals: Tensor, labels: Tensor) -> Tensor:
        zeros = signals.new_zeros(signals.shape[0], self.width)
        states = [(zeros, zeros) for _ in self.cells]
        total = signals.new_zeros(())
        for signal, label in zip(signals.unbind(1), labels.unbind(1), strict=True):
            for index, cell in enumerate(self.cells):
                states[index] = cell(signal, *states[index])
                signal = states[index][0]
            total = total + F.cross_entropy(self.head(signal), label)
        return total / labels.shape[1]
