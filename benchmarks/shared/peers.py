"""What a user picks today to train within less memory, each as a model to train in a `with` block.

√n segments             equal stretches of the layers, each in a checkpoint, as `checkpoint_sequential` does
library checkpointing   a checkpoint around every block, as Hugging Face's models offer
torch.compile           Inductor, with a budget for the activations that are saved, between 0 and 1
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shared.subjects import Made
from lowtide.compat.dynamo import activation_budget
from lowtide.planner.checkpointed import run_segments
from lowtide.planner.peer_ways import PARTS
from lowtide.zoo.densenet import DenseNet
from lowtide.zoo.inception import InceptionOutput, InceptionV3
from lowtide.zoo.resnet import ResNet
from lowtide.zoo.vgg import VGG

SEGMENTS = "√n segments"
LIBRARY = "library checkpointing"


@dataclass(frozen=True)
class Peer:
    """A way to train with less memory; `under` gives the model to call."""

    name: str
    under: Callable[[], AbstractContextManager[nn.Module]]


def eager_peers(made: Made) -> list[Peer]:
    """Those that run op by op, as plain training does."""
    if made.checkpoint is not None:
        return [Peer(LIBRARY, partial(library_checkpointing, made))]
    return [Peer(SEGMENTS, partial(in_segments, made.model))]


def compiled_peers(made: Made) -> list[Peer]:
    """Inductor's, from everything saved to nothing saved."""
    return [Peer(f"torch.compile {budget}", partial(compiled, made.model, budget)) for budget in PARTS]


@contextmanager
def library_checkpointing(made: Made) -> Iterator[nn.Module]:
    """The model, with its library's own checkpointing switched on."""
    assert made.checkpoint is not None
    made.checkpoint(True)
    try:
        yield made.model
    finally:
        made.checkpoint(False)


@contextmanager
def compiled(model: nn.Module, budget: float) -> Iterator[nn.Module]:
    """The model compiled by Inductor; `budget` is a part of the bytes that it would save for the backward."""
    with activation_budget(budget):
        found: Any = torch.compile(model)
        yield found


# √n segments ----------------------------------------------------------------------------------------------


@contextmanager
def in_segments(model: nn.Module) -> Iterator[nn.Module]:
    """The model with its layers in √n segments."""
    yield _Segmented(model)


class _Segmented(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.run = partial(_FORWARDS[type(model)], model)

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


def _root(layers: Sequence[nn.Module]) -> int:
    return round(math.sqrt(len(layers)))


def _vgg(model: VGG, x: Tensor) -> Tensor:
    layers = [*model.features, model.avgpool, nn.Flatten(1), *model.classifier]
    return run_segments(layers, _root(layers), x)


def _resnet(model: ResNet, x: Tensor) -> Tensor:
    stem = [model.conv1, model.bn1, model.relu, model.maxpool]
    blocks = [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]
    layers = [*stem, *blocks, model.avgpool, nn.Flatten(1), model.fc]
    return run_segments(layers, _root(layers), x)


def _densenet(model: DenseNet, x: Tensor) -> Tensor:
    layers = list(model.features)
    x = run_segments(layers, _root(layers), x)
    x = nn.functional.adaptive_avg_pool2d(nn.functional.relu(x, inplace=True), (1, 1))
    logits: Tensor = model.classifier(torch.flatten(x, 1))
    return logits


def _inception(model: InceptionV3, x: Tensor) -> InceptionOutput:
    """The auxiliary head reads what is between the third segment and the fourth."""
    names = [name for name, _ in model.named_children()]
    early = [getattr(model, name) for name in names[: names.index("AuxLogits")]]
    x = run_segments(early, 3, x)
    aux = model.AuxLogits(x)
    x = run_segments([model.Mixed_7a, model.Mixed_7b, model.Mixed_7c], 1, x)
    x = torch.flatten(model.dropout(model.avgpool(x)), 1)
    return InceptionOutput(model.fc(x), aux)


_FORWARDS: dict[type[nn.Module], Callable[..., Any]] = {
    VGG: _vgg,
    ResNet: _resnet,
    DenseNet: _densenet,
    InceptionV3: _inception,
}
