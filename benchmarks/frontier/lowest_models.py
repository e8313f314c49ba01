"""Models whose lowest peaks are sought: a few million parameters each, so that a CPU trains them.

Each takes its labels and returns its loss: then the whole step is one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shared.subjects import Made, gpt2
from lowtide import zoo
from lowtide.zoo.gpt import GPT

CLASSES = 100


class WithLoss(nn.Module):
    """A classifier, of images or of pixels or of tokens, that is given the classes and returns the loss."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor, classes: Tensor) -> Tensor:
        logits = self.classifier(x)
        if logits.dim() == 3:  # tokens: the classes come last
            logits = logits.transpose(1, 2)
        return F.cross_entropy(logits, classes)


def _images(classifier: nn.Module, batch: int, side: int) -> Made:
    model = WithLoss(classifier)
    return Made(model, (torch.randn(batch, 3, side, side), torch.randint(CLASSES, (batch,))))


# VGG ------------------------------------------------------------------------------------------------------


def vgg() -> Made:
    """VGG-19's depth at half its width and a small head, 16×64²."""
    widths = (32, 64, 128, 256, 256)
    layers: list[nn.Module] = []
    channels = 3
    for width, count in zip(widths, (2, 2, 4, 4, 4), strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(4 * channels, 256), nn.ReLU(inplace=True), nn.Linear(256, CLASSES)]
    return _images(nn.Sequential(*layers, *head), 16, 64)


def resnet50() -> Made:
    """ResNet-50, 8×96²."""
    sizes = zoo.Sizes(batch=1, image=96, classes=CLASSES)
    return _images(zoo.workload("resnet50", sizes).model, 8, 96)


# DenseNet -------------------------------------------------------------------------------------------------


class _DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.squeeze_norm = nn.BatchNorm2d(channels)
        self.squeeze = nn.Conv2d(channels, 4 * growth, 1, bias=False)
        self.grow_norm = nn.BatchNorm2d(4 * growth)
        self.grow = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(F.relu(self.squeeze_norm(x)))
        grown: Tensor = self.grow(F.relu(self.grow_norm(x)))
        return grown


class _DenseBlock(nn.Module):
    """Every layer reads the concatenation of what came before, made anew for it."""

    def __init__(self, count: int, channels: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_DenseLayer(channels + i * growth, growth) for i in range(count))

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


def densenet() -> Made:
    """Three dense blocks of 6, 8 and 6 layers, growth 16, at full resolution, 8×64²."""
    growth, channels = 16, 32
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1)]
    for count in (6, 8, 6):
        layers.append(_DenseBlock(count, channels, growth))
        channels += count * growth
        layers += [
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels // 2, 1),
            nn.AvgPool2d(2),
        ]
        channels //= 2
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)]
    return _images(nn.Sequential(*layers, *head), 8, 64)


# U-Net ----------------------------------------------------------------------------------------------------


def _convolutions(channels: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs in (channels, width):
        layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)]
        layers.append(nn.ReLU(inplace=True))
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down and up again, with a skip across at each resolution; the width doubles on the way down."""

    def __init__(self, width: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels)]
        self.down = nn.ModuleList(_convolutions(*pair) for pair in zip([3, *widths], widths, strict=False))
        self.bottom = _convolutions(widths[-1], widths[-1])
        below = [widths[-1], *reversed(widths)]
        sides = list(zip(below, reversed(widths), strict=False))
        self.widen = nn.ModuleList(nn.ConvTranspose2d(inputs, out, 2, stride=2) for inputs, out in sides)
        self.up = nn.ModuleList(_convolutions(2 * out, out) for _, out in sides)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, up in zip(self.widen, self.up, strict=True):
            x = up(torch.cat([widen(x), skips.pop()], 1))
        logits: Tensor = self.out(x)
        return logits


def unet() -> Made:
    """Four levels from 24 channels, four classes a pixel, 4×128²."""
    batch, side, classes = 4, 128, 4
    labels = torch.randint(classes, (batch, side, side))
    return Made(WithLoss(UNet(24, 4, classes)), (torch.randn(batch, 3, side, side), labels))


# Sequences ------------------------------------------------------------------------------------------------


class GPT2Loss(nn.Module):
    """Hugging Face's GPT-2; its loss, and nothing else, outlives the forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        return loss


def gpt2_of_8() -> Made:
    """Hugging Face's GPT-2, 8 layers of 256, 4×256 tokens, dropout on."""
    sizes = {"n_layer": 8, "n_embd": 256, "n_head": 8, "vocab_size": 1000, "n_positions": 256}
    model = gpt2(**sizes, attn_pdrop=0.0)
    model.config.use_cache = False
    model.train()
    return Made(GPT2Loss(model), (torch.randint(1000, (4, 256)),))


class UnrolledLSTM(nn.Module):
    """A cell of PyTorch's own, called once for each moment; the loss is the square of one output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(width, width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = carry = x.new_zeros(x.shape[1], x.shape[2])
        for moment in x.unbind():
            hidden, carry = self.cell(moment, (hidden, carry))
        loss: Tensor = self.head(hidden).square().mean()
        return loss


def lstm() -> Made:
    """128 wide, 64 moments, batch 128."""
    return Made(UnrolledLSTM(128), (torch.randn(64, 128, 128),))


def gpt_of_12() -> Made:
    """12 blocks of 64, 8×128 tokens: the step on which PyTorch's own budget was tried."""
    model = WithLoss(GPT(layers=12, width=64, heads=4, vocab=256, context=128))
    return Made(model, (torch.randint(256, (8, 128)), torch.randint(256, (8, 128))))


MODELS: Mapping[str, Callable[[], Made]] = {
    "U-Net": unet,
    "DenseNet": densenet,
    "ResNet-50": resnet50,
    "GPT-2, 8 layers": gpt2_of_8,
    "LSTM, 64 moments": lstm,
    "VGG": vgg,
}


def built(make: Callable[[], Made]) -> Made:
    """That model, the same each time."""
    torch.manual_seed(0)
    return make()
