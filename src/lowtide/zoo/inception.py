"""Inception v3 with its auxiliary head.

Szegedy, Vanhoucke, Ioffe, Shlens and Wojna, "Rethinking the Inception Architecture for Computer Vision",
arXiv:1512.00567 (2015).

The module names are those of the original TensorFlow graph, so that published weights load.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[int, int]


class InceptionOutput(NamedTuple):
    """What the model returns in train mode; in eval mode it returns the logits alone."""

    logits: Tensor
    aux_logits: Tensor


class BasicConv2d(nn.Module):
    """Convolution without bias, batch normalisation, in-place ReLU."""

    def __init__(
        self, channels: int, out: int, kernel: int | Pair, *, stride: int = 1, padding: int | Pair = 0
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = self.bn(x)
        return F.relu(x, inplace=True)


def _row(channels: int, out: int, length: int) -> BasicConv2d:
    """The 1 x `length` half of a factorised convolution."""
    return BasicConv2d(channels, out, (1, length), padding=(0, length // 2))


def _column(channels: int, out: int, length: int) -> BasicConv2d:
    """The `length` x 1 half of a factorised convolution."""
    return BasicConv2d(channels, out, (length, 1), padding=(length // 2, 0))


class InceptionA(nn.Module):
    """1x1, 5x5, double 3x3 and pooled branches at the first resolution."""

    def __init__(self, channels: int, pooled: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(channels, 64, 1)
        self.branch5x5_1 = BasicConv2d(channels, 48, 1)
        self.branch5x5_2 = BasicConv2d(48, 64, 5, padding=2)
        self.branch3x3dbl_1 = BasicConv2d(channels, 64, 1)
        self.branch3x3dbl_2 = BasicConv2d(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = BasicConv2d(96, 96, 3, padding=1)
        self.branch_pool = BasicConv2d(channels, pooled, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch1x1(x)
        five = self.branch5x5_1(x)
        five = self.branch5x5_2(five)
        double = self.branch3x3dbl_1(x)
        double = self.branch3x3dbl_2(double)
        double = self.branch3x3dbl_3(double)
        pool = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        pool = self.branch_pool(pool)
        return torch.cat([single, five, double, pool], 1)


class InceptionB(nn.Module):
    """The first reduction: strided 3x3, strided double 3x3 and max pooling."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch3x3 = BasicConv2d(channels, 384, 3, stride=2)
        self.branch3x3dbl_1 = BasicConv2d(channels, 64, 1)
        self.branch3x3dbl_2 = BasicConv2d(64, 96, 3, padding=1)
        self.branch3x3dbl_3 = BasicConv2d(96, 96, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3(x)
        double = self.branch3x3dbl_1(x)
        double = self.branch3x3dbl_2(double)
        double = self.branch3x3dbl_3(double)
        pool = F.max_pool2d(x, kernel_size=3, stride=2)
        return torch.cat([three, double, pool], 1)


class InceptionC(nn.Module):
    """1x1, factorised 7x7, double factorised 7x7 and pooled branches at the second resolution."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(channels, 192, 1)
        self.branch7x7_1 = BasicConv2d(channels, inner, 1)
        self.branch7x7_2 = _row(inner, inner, 7)
        self.branch7x7_3 = _column(inner, 192, 7)
        self.branch7x7dbl_1 = BasicConv2d(channels, inner, 1)
        self.branch7x7dbl_2 = _column(inner, inner, 7)
        self.branch7x7dbl_3 = _row(inner, inner, 7)
        self.branch7x7dbl_4 = _column(inner, inner, 7)
        self.branch7x7dbl_5 = _row(inner, 192, 7)
        self.branch_pool = BasicConv2d(channels, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch1x1(x)
        seven = self.branch7x7_1(x)
        seven = self.branch7x7_2(seven)
        seven = self.branch7x7_3(seven)
        double = self.branch7x7dbl_1(x)
        double = self.branch7x7dbl_2(double)
        double = self.branch7x7dbl_3(double)
        double = self.branch7x7dbl_4(double)
        double = self.branch7x7dbl_5(double)
        pool = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        pool = self.branch_pool(pool)
        return torch.cat([single, seven, double, pool], 1)


class InceptionD(nn.Module):
    """The second reduction: strided 3x3, factorised 7x7 with strided 3x3, and max pooling."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch3x3_1 = BasicConv2d(channels, 192, 1)
        self.branch3x3_2 = BasicConv2d(192, 320, 3, stride=2)
        self.branch7x7x3_1 = BasicConv2d(channels, 192, 1)
        self.branch7x7x3_2 = _row(192, 192, 7)
        self.branch7x7x3_3 = _column(192, 192, 7)
        self.branch7x7x3_4 = BasicConv2d(192, 192, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_1(x)
        three = self.branch3x3_2(three)
        seven = self.branch7x7x3_1(x)
        seven = self.branch7x7x3_2(seven)
        seven = self.branch7x7x3_3(seven)
        seven = self.branch7x7x3_4(seven)
        pool = F.max_pool2d(x, kernel_size=3, stride=2)
        return torch.cat([three, seven, pool], 1)


class InceptionE(nn.Module):
    """The widest block: its 3x3 convolutions fork into a row and a column instead of chaining them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.branch1x1 = BasicConv2d(channels, 320, 1)
        self.branch3x3_1 = BasicConv2d(channels, 384, 1)
        self.branch3x3_2a = _row(384, 384, 3)
        self.branch3x3_2b = _column(384, 384, 3)
        self.branch3x3dbl_1 = BasicConv2d(channels, 448, 1)
        self.branch3x3dbl_2 = BasicConv2d(448, 384, 3, padding=1)
        self.branch3x3dbl_3a = _row(384, 384, 3)
        self.branch3x3dbl_3b = _column(384, 384, 3)
        self.branch_pool = BasicConv2d(channels, 192, 1)

    def forward(self, x: Tensor) -> Tensor:
        single = self.branch1x1(x)
        three = self.branch3x3_1(x)
        three = torch.cat([self.branch3x3_2a(three), self.branch3x3_2b(three)], 1)
        double = self.branch3x3dbl_1(x)
        double = self.branch3x3dbl_2(double)
        double = torch.cat([self.branch3x3dbl_3a(double), self.branch3x3dbl_3b(double)], 1)
        pool = F.avg_pool2d(x, kernel_size=3, stride=1, padding=1)
        pool = self.branch_pool(pool)
        return torch.cat([single, three, double, pool], 1)


class InceptionAux(nn.Module):
    """The auxiliary classifier on the last map of the second resolution, run in train mode only."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv0 = BasicConv2d(channels, 128, 1)
        self.conv1 = BasicConv2d(128, 768, 5)
        self.fc = nn.Linear(768, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(x, kernel_size=5, stride=3)
        x = self.conv0(x)
        x = self.conv1(x)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return x


class InceptionV3(nn.Module):
    """A convolutional stem, eleven mixed blocks at three resolutions, dropout and one linear layer."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = BasicConv2d(3, 32, 3, stride=2)
        self.Conv2d_2a_3x3 = BasicConv2d(32, 32, 3)
        self.Conv2d_2b_3x3 = BasicConv2d(32, 64, 3, padding=1)
        self.maxpool1 = nn.MaxPool2d(3, stride=2)
        self.Conv2d_3b_1x1 = BasicConv2d(64, 80, 1)
        self.Conv2d_4a_3x3 = BasicConv2d(80, 192, 3)
        self.maxpool2 = nn.MaxPool2d(3, stride=2)
        self.Mixed_5b = InceptionA(192, pooled=32)
        self.Mixed_5c = InceptionA(256, pooled=64)
        self.Mixed_5d = InceptionA(288, pooled=64)
        self.Mixed_6a = InceptionB(288)
        self.Mixed_6b = InceptionC(768, inner=128)
        self.Mixed_6c = InceptionC(768, inner=160)
        self.Mixed_6d = InceptionC(768, inner=160)
        self.Mixed_6e = InceptionC(768, inner=192)
        self.AuxLogits = InceptionAux(768, classes)
        self.Mixed_7a = InceptionD(768)
        self.Mixed_7b = InceptionE(1280)
        self.Mixed_7c = InceptionE(2048)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.dropout = nn.Dropout(0.5)
        self.fc = nn.Linear(2048, classes)

    def forward(self, x: Tensor) -> Tensor | InceptionOutput:
        x = self._stem(x)
        x = self.Mixed_5b(x)
        x = self.Mixed_5c(x)
        x = self.Mixed_5d(x)
        x = self.Mixed_6a(x)
        x = self.Mixed_6b(x)
        x = self.Mixed_6c(x)
        x = self.Mixed_6d(x)
        x = self.Mixed_6e(x)
        aux = self.AuxLogits(x) if self.training else None
        x = self.Mixed_7a(x)
        x = self.Mixed_7b(x)
        x = self.Mixed_7c(x)
        x = self.avgpool(x)
        x = self.dropout(x)
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return x if aux is None else InceptionOutput(x, aux)

    def _stem(self, x: Tensor) -> Tensor:
        x = self.Conv2d_1a_3x3(x)
        x = self.Conv2d_2a_3x3(x)
        x = self.Conv2d_2b_3x3(x)
        x = self.maxpool1(x)
        x = self.Conv2d_3b_1x1(x)
        x = self.Conv2d_4a_3x3(x)
        x = self.maxpool2(x)
        return x
