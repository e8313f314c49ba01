"""The families that are here, and a small member of each, ready to be trained. Nothing is downloaded."""

from __future__ import annotations

import gc
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.families import batches, configs
from lowtide.trace.step import Example, Loss, training_step

_MOST_PARAMETERS = 40_000_000  # a member that is larger is not small
_SIDE = 96  # of pictures for families that take pictures of any size
_CLASSES = 10

# The heads to train a family with, most telling first; the last has none.
_HEADS = (
    "IMAGE_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "TOKEN_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "QUESTION_ANSWERING",
    "TIME_SERIES_PREDICTION",
    "DEPTH_ESTIMATION",
    "OBJECT_DETECTION",
    "MULTIMODAL_LM",
    "PRETRAINING",
)


@dataclass(frozen=True)
class Subject:
    """A small member of a family, with a batch; `about` says in words what was chosen."""

    model: nn.Module
    example: Example
    loss: Loss | None
    about: dict[str, str]


class NotBuilt(Exception):
    """No small member could be made that trains without lowtide; says what was tried."""


def families() -> list[str]:
    """Every family of the libraries that are installed, 'hf:llama' say, in an order that mixes them."""
    found: list[str] = []
    for library, (package, names, _) in _LIBRARIES.items():
        if find_spec(package) is not None:
            found += [f"{library}:{name}" for name in names()]
    return sorted(found, key=lambda family: zlib.crc32(family.encode()))


def built(family: str, device: str, layers: int) -> Subject:
    """A small member of the family that trains as it is.

    One of transformers is trained with its most telling head; 'hf:beit:BeitForSemanticSegmentation' asks for
    another.

    Raises:
        NotBuilt: none was found.
    """
    library, _, name = family.partition(":")
    return _LIBRARIES[library][2](name, device, layers)


def _placed(model: nn.Module, example: Any, loss: Loss | None, device: str, /, **about: str) -> Subject:
    """The subject on its device, after it has trained there once."""
    torch.manual_seed(0)
    subject = Subject(model.train().to(device), batches.moved(example, device), loss, about)
    training_step(subject.model, subject.example, subject.loss)()
    if all(parameter.grad is None for parameter in subject.model.parameters()):
        raise NotBuilt("nothing gets a gradient")
    subject.model.zero_grad(set_to_none=True)
    return subject


# transformers -------------------------------------------------------------------------------------------


def _hf_names() -> Iterator[str]:
    """Model types, one for each class that is built."""
    seen: set[str] = set()
    for kind in import_module("transformers").CONFIG_MAPPING:
        classes = _hf_classes(kind)
        if classes and classes[0] not in seen:
            seen.add(classes[0])
            yield kind


def _hf_classes(kind: str) -> list[str]:
    """The classes that a model type can be trained as."""
    auto = import_module("transformers.models.auto.modeling_auto")
    mappings = [getattr(auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in _HEADS]
    mappings.append(auto.MODEL_MAPPING_NAMES)
    names = [mapping[kind] for mapping in mappings if kind in mapping]
    return list(dict.fromkeys(name if isinstance(name, str) else name[0] for name in names))


def _hf_built(kind: str, device: str, layers: int) -> Subject:
    transformers = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    refusals: list[str] = []
    kind, _, asked = kind.partition(":")
    head, *more = [asked] if asked else _hf_classes(kind)
    for name in (head, *more[-1:]):
        model_class = getattr(transformers, name)
        for way, config in configs.ways(transformers.CONFIG_MAPPING[kind], layers):
            try:
                model = _small(model_class, config)
                for batch, loss in batches.of_transformers(model):
                    try:
                        words = ", ".join(f"{key} {tuple(value.shape)}" for key, value in batch.items())
                        return _placed(model, batch, loss, device, model=name, shrunk=way, batch=words)
                    except Exception as error:  # noqa: BLE001  a batch that the model does not take
                        refusals.append(f"{name}, {way}: {type(error).__name__}: {str(error)[:120]}")
            except Exception as error:  # noqa: BLE001  sizes that do not go together
                refusals.append(f"{name}, {way}: {type(error).__name__}: {str(error)[:120]}")
            gc.collect()
    raise NotBuilt("; ".join(dict.fromkeys(refusals)) or "no configuration")


def _small(model_class: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        parameters = sum(each.numel() for each in _without_weights(model_class, config))
    if parameters > _MOST_PARAMETERS:
        raise NotBuilt(f"{parameters:,} parameters")
    model: nn.Module = model_class(config)
    return model


def _without_weights(model_class: Any, config: Any) -> list[nn.Parameter]:
    try:
        return list(model_class(config).parameters())
    except (NotImplementedError, RuntimeError):  # it looks at numbers while it is built
        return []


# timm and torchvision -----------------------------------------------------------------------------------


def _timm_names() -> Iterator[str]:
    """One model of every module of timm, its smallest by name."""
    timm = import_module("timm")
    for module in timm.list_modules():
        if models := timm.list_models(module=module):
            yield min(models, key=lambda name: ("tiny" not in name and "small" not in name, len(name), name))


def _timm_built(name: str, device: str, layers: int) -> Subject:
    timm = import_module("timm")
    published = timm.get_pretrained_cfg(name)
    sides = [published.input_size[-1]] if published.fixed_input_size else [_SIDE, published.input_size[-1]]

    def make(side: int) -> nn.Module:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=_CLASSES)
        return model

    return _pictured(make, sides, name, device)


def _torchvision_names() -> Iterator[str]:
    models = import_module("torchvision.models")
    yield from models.list_models(module=models)


def _torchvision_built(name: str, device: str, layers: int) -> Subject:
    models = import_module("torchvision.models")

    def make(side: int) -> nn.Module:
        sized = {"image_size": side} if name.startswith("vit") else {}
        model: nn.Module = models.get_model(name, weights=None, num_classes=_CLASSES, **sized)
        return model

    return _pictured(make, [_SIDE, 224, 299], name, device)


def _pictured(make: Callable[[int], nn.Module], sides: list[int], name: str, device: str) -> Subject:
    refusals = []
    for side in sides:
        try:
            example, loss = batches.of_images(side, _CLASSES)
            return _placed(make(side), example, loss, device, model=name, batch=f"{side}²")
        except Exception as error:  # noqa: BLE001  a size that the model does not take
            refusals.append(f"{side}²: {type(error).__name__}: {str(error)[:120]}")
    raise NotBuilt("; ".join(refusals))


_LIBRARIES: dict[str, tuple[str, Callable[[], Iterator[str]], Callable[[str, str, int], Subject]]] = {
    "hf": ("transformers", _hf_names, _hf_built),
    "timm": ("timm", _timm_names, _timm_built),
    "torchvision": ("torchvision", _torchvision_names, _torchvision_built),
}
