"""Models by the words a user writes: a zoo name, hf:TYPE, torchvision:NAME, timm:NAME or file.py:function.

Unless another device is asked for, our own models and those of other libraries are built on the meta
device, so that nothing is allocated however large they are, and a user's file runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

import torch

from lowtide import zoo
from lowtide.cost.measure import present_device
from lowtide.errors import BadRequest, UnknownModel
from lowtide.zoo.setup import Setup
from lowtide.zoo.sources.foreign import from_timm, from_torchvision, from_transformers
from lowtide.zoo.sources.user_files import from_file

_LIBRARIES: Mapping[str, Callable[[str, Mapping[str, int]], Setup]] = {
    "hf": from_transformers,
    "torchvision": from_torchvision,
    "timm": from_timm,
}


def load(spec: str, sizes: Mapping[str, int], device: str = "meta") -> Setup:
    """The model that `spec` names, with a batch for it.

    `sizes` are the ones the user gave, among batch, image, tokens, classes, layers, width, heads and
    vocab; what is not given has the model's usual value, and the batch is 1.

    With a `device` that is not meta, everything is built there for real, with the same random numbers each
    time; a user's file then runs with that as its default device.

    Raises:
        UnknownModel: no model goes by that name; the error carries the nearest names.
        BadRequest: a size does not suit the model; a file or function is missing, raises, or returns
            something else than a model and an example.
        MissingExtra: the library that has the model is not installed.
        DeviceMissing: the device is not on this machine.
    """
    if device != "meta":
        present_device(device, "measure")
        torch.manual_seed(0)
    path, _, function = spec.rpartition(":")
    if spec.endswith(".py"):
        path, function = spec, ""
    if path.endswith(".py"):
        with nullcontext() if device == "meta" else torch.device(device):
            return from_file(path, function, sizes)
    library, _, name = spec.partition(":")
    build = _LIBRARIES.get(library.strip().lower())
    with torch.device(device):
        sizes = {"batch": 1, **sizes}
        return build(name, sizes) if build is not None else _from_zoo(spec, sizes)


def _from_zoo(name: str, sizes: Mapping[str, int]) -> Setup:
    try:
        found = zoo.workload(name, zoo.Sizes(**sizes))
    except zoo.UnknownModel:
        raise UnknownModel(name, zoo.names()) from None
    except zoo.BadSize as error:
        raise BadRequest(str(error)) from None
    return Setup(found.name, found.model, found.kwargs or found.args, found.loss, sizes)
