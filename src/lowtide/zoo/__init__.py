"""Networks to measure: a name and a few sizes give a model, one batch for it and a loss.

`workload("vgg19", Sizes(batch=32))` builds on the current default device, so that under
`torch.device("meta")` nothing is allocated. `names()` lists the fixed names; beside them,
`preresnet<depth>` names a pre-activation ResNet of any valid depth (see `lowtide.zoo.preresnet`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.text.names import same_name
from lowtide.zoo import densenet, preresnet, resnet, unet, vgg
from lowtide.zoo.alexnet import AlexNet
from lowtide.zoo.gpt import GPT
from lowtide.zoo.inception import InceptionOutput, InceptionV3
from lowtide.zoo.lstm import LSTM
from lowtide.zoo.mlp import MLP
from lowtide.zoo.vit import ViT

__all__ = ["BadSize", "Sizes", "UnknownModel", "Workload", "known_as", "names", "workload"]


class UnknownModel(ValueError):
    """No model of the zoo has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no model is called {name!r}; there are {', '.join(names())} and preresnet<depth>")
        self.name = name


class BadSize(ValueError):
    """A size that the model does not have or cannot take."""


@dataclass(frozen=True)
class Workload:
    """A model, one batch for it, and how its output becomes a loss."""

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Tensor] | None  # None when the output is the loss or carries `.loss`


@dataclass(frozen=True)
class Sizes:
    """What a user may set; None means the usual value of the model."""

    batch: int
    image: int | None = None
    tokens: int | None = None
    classes: int | None = None
    layers: int | None = None
    width: int | None = None
    heads: int | None = None
    vocab: int | None = None


Dims = Mapping[str, int]  # the sizes of one model, `batch` among them, every one with its value
Batch = tuple[tuple[Any, ...], Callable[[Any], Tensor]]  # positional arguments, and the loss of the output


@dataclass(frozen=True)
class Entry:
    """What stands behind a name; the keys of `defaults` are the sizes that apply beside `batch`."""

    model: Callable[[Dims], nn.Module]
    batch: Callable[[Dims], Batch]
    defaults: Dims
    min_image: int = 1
    image_step: int = 1  # what the side of an image must be a multiple of


def names() -> tuple[str, ...]:
    """Every fixed name, sorted; `preresnet<depth>` comes on top of these."""
    return tuple(sorted(REGISTRY))


def known_as(name: str) -> str:
    """What the zoo calls a model that is written in another way, as 'ResNet-50' is; else `name`."""
    return same_name(name, names()) or name.lower()


def workload(name: str, sizes: Sizes) -> Workload:
    """The model in train mode and a random batch, both on the current default device.

    Raises UnknownModel for a name that is not in the zoo and BadSize for a size that does not fit it.
    """
    name = known_as(name)
    entry = _entry(name)
    dims = _dims(name, entry, sizes)
    args, loss = entry.batch(dims)
    return Workload(name, entry.model(dims), args, {}, loss)


def _entry(name: str) -> Entry:
    if name in REGISTRY:
        return REGISTRY[name]
    match = re.fullmatch(r"preresnet([1-9][0-9]{0,4})", name)
    if match is None:
        raise UnknownModel(name)
    depth = int(match[1])
    try:
        preresnet.layout(depth)
    except ValueError as error:
        raise BadSize(f"{name}: {error}") from error
    return _classifier(partial(preresnet.PreResNet, depth), image=32, classes=10)


def _dims(name: str, entry: Entry, sizes: Sizes) -> Dims:
    """The sizes given, completed with the defaults, once every one of them is known to fit."""
    given: dict[str, int] = {key: value for key, value in asdict(sizes).items() if value is not None}
    known = ("batch", *entry.defaults)
    strays = [key for key in given if key not in known]
    if strays:
        raise BadSize(f"{name} has no {' or '.join(strays)}: the sizes that apply are {', '.join(known)}")
    for key, value in given.items():
        if value < 1:
            raise BadSize(f"{name}: {key} must be at least 1, not {value}")
    dims = {**entry.defaults, **given}
    _check_image(name, entry, dims)
    _check_heads(name, dims)
    return dims


def _check_image(name: str, entry: Entry, dims: Dims) -> None:
    if "image" not in dims:
        return
    image = dims["image"]
    if image < entry.min_image:
        raise BadSize(
            f"{name}: image must be at least {entry.min_image}, not {image}: pooling would reach zero"
        )
    if image % entry.image_step:
        raise BadSize(f"{name}: image must be a multiple of {entry.image_step}, not {image}")


def _check_heads(name: str, dims: Dims) -> None:
    if "heads" in dims and dims["width"] % dims["heads"]:
        raise BadSize(f"{name}: width {dims['width']} is not divisible by heads {dims['heads']}")


def _classifier(
    model: Callable[[int], nn.Module], image: int = 224, classes: int = 1000, min_image: int = 1
) -> Entry:
    """An image classifier that only its number of classes shapes."""
    defaults = {"image": image, "classes": classes}
    return Entry(lambda dims: model(dims["classes"]), _labelled_images, defaults, min_image)


# The losses are partials of plain functions, so that their targets can be found and moved.


def _labelled_images(dims: Dims) -> Batch:
    loss = partial(F.cross_entropy, target=_labels(dims))
    return (_images(dims),), loss


def _labelled_images_twice(dims: Dims) -> Batch:
    loss = partial(_two_headed_loss, target=_labels(dims))
    return (_images(dims),), loss


def _labelled_pixels(dims: Dims) -> Batch:
    labels = torch.randint(dims["classes"], (dims["batch"], dims["image"], dims["image"]))
    return (_images(dims),), partial(F.cross_entropy, target=labels)


def _labelled_vectors(dims: Dims) -> Batch:
    vectors = torch.randn(dims["batch"], 784)
    return (vectors,), partial(F.cross_entropy, target=_labels(dims))


def _labelled_sequences(dims: Dims) -> Batch:
    sequences = torch.randn(dims["batch"], dims["tokens"], dims["width"])
    return (sequences,), partial(F.cross_entropy, target=_labels(dims))


def _text(dims: Dims) -> Batch:
    stream = torch.randint(dims["vocab"], (dims["batch"], dims["tokens"] + 1))
    # Copies, so that neither the input nor the target keeps the whole stream alive.
    tokens, following = stream[:, :-1].clone(), stream[:, 1:].clone()
    return (tokens,), partial(_next_token_loss, target=following)


def _images(dims: Dims) -> Tensor:
    return torch.randn(dims["batch"], 3, dims["image"], dims["image"])


def _labels(dims: Dims) -> Tensor:
    return torch.randint(dims["classes"], (dims["batch"],))


def _two_headed_loss(output: InceptionOutput, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target) + 0.4 * F.cross_entropy(output.aux_logits, target)


def _next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), target.view(-1))


REGISTRY: Final[Mapping[str, Entry]] = {
    "alexnet": _classifier(AlexNet, min_image=63),
    **{f"vgg{depth}": _classifier(partial(vgg.VGG, depth), min_image=32) for depth in vgg.STAGES},
    **{
        f"vgg{depth}_bn": _classifier(partial(vgg.VGG, depth, batch_norm=True), min_image=32)
        for depth in vgg.STAGES
    },
    **{f"resnet{depth}": _classifier(partial(resnet.ResNet, depth)) for depth in resnet.STAGES},
    **{
        f"densenet{depth}": _classifier(partial(densenet.DenseNet, depth), min_image=29)
        for depth in densenet.BLOCKS
    },
    "inception_v3": Entry(
        lambda dims: InceptionV3(dims["classes"]),
        _labelled_images_twice,
        {"image": 299, "classes": 1000},
        min_image=299,  # the 5x5 convolution of the auxiliary head has nothing to slide over below that
    ),
    "unet": Entry(
        lambda dims: unet.UNet(dims["classes"], dims["width"]),
        _labelled_pixels,
        {"image": 128, "classes": 2, "width": 64},
        image_step=2**unet.LEVELS,
    ),
    "mlp": Entry(
        lambda dims: MLP(784, dims["width"], dims["classes"]),
        _labelled_vectors,
        {"width": 4096, "classes": 10},
    ),
    "lstm": Entry(
        lambda dims: LSTM(dims["layers"], dims["width"], dims["classes"]),
        _labelled_sequences,
        {"tokens": 64, "width": 512, "layers": 2, "classes": 10},
    ),
    "gpt": Entry(
        lambda dims: GPT(dims["layers"], dims["width"], dims["heads"], dims["vocab"], dims["tokens"]),
        _text,
        {"tokens": 1024, "layers": 12, "width": 768, "heads": 12, "vocab": 50257},
    ),
    "vit": Entry(
        lambda dims: ViT(dims["image"], 16, dims["layers"], dims["width"], dims["heads"], dims["classes"]),
        _labelled_images,
        {"image": 224, "classes": 1000, "layers": 12, "width": 768, "heads": 12},
        image_step=16,
    ),
}
