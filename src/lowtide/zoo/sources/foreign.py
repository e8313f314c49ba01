"""Models of other libraries, with random weights: nothing is downloaded and no checkpoint is read."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, reduce
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.errors import BadRequest, MissingExtra, UnknownModel
from lowtide.text.names import same_name
from lowtide.zoo.setup import Setup, refuse_strays

_MOST_TOKENS = 1024  # the default length of a text, where the model takes that many
_IMAGE = 224

# transformers --------------------------------------------------------------------------------------

# What lowtide calls a size, and the name that transformers' configurations agree on.
_FIELDS = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
    "classes": "num_labels",
    "image": "image_size",
}
_OF_TEXTS = ("tokens", "width", "layers", "heads", "vocab")
_OF_PICTURES = ("image", "classes", "width", "layers", "heads")
# What keeps its proportion when a size changes: bert with --width 1024 has the inner width of bert-large.
_FOLLOWERS = {"hidden_size": "intermediate_size", "num_attention_heads": "num_key_value_heads"}

# The heads that have a loss, most telling first: bert has a causal head too, but is not trained with it.
_HEADS = {
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES": "AutoModelForImageClassification",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "AutoModelForSeq2SeqLM",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "AutoModelForMaskedLM",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "AutoModelForCausalLM",
}


def from_transformers(kind: str, sizes: Mapping[str, int]) -> Setup:
    """The default configuration of a model type (gpt2, bert, llama, vit, …), changed where `sizes` say so."""
    name = f"hf:{kind}"
    transformers = _library("transformers", extra="hf", purpose=f"{name}")
    kind = _kind(kind, name, transformers.CONFIG_MAPPING)
    name = f"hf:{kind}"
    head = _head(kind)
    pictures = head == "AutoModelForImageClassification"
    with _quiet(transformers), _building(name):
        configuration = transformers.CONFIG_MAPPING[kind]
        config = _configured(configuration, name, sizes, _OF_PICTURES if pictures else _OF_TEXTS)
        model: nn.Module = getattr(transformers, head).from_config(config)
    example = _pictures(config, sizes) if pictures else _texts(name, config, sizes)
    return Setup(name, model.train(), example, None, sizes)


def _head(kind: str) -> str:
    mappings = import_module("transformers.models.auto.modeling_auto")
    for mapping, head in _HEADS.items():
        if kind in getattr(mappings, mapping):
            return head
    raise BadRequest(
        f"hf:{kind} has no head with a loss that lowtide knows (language model or image classifier). "
        "Build the model in a file of your own: path/to/file.py:function."
    )


def _configured(configuration: Any, name: str, sizes: Mapping[str, int], apply: tuple[str, ...]) -> Any:
    usual = configuration()
    has = {size: field for size, field in _FIELDS.items() if getattr(usual, field, None) is not None}
    refuse_strays(name, sizes, ("batch", *(size for size in apply if size in ("tokens", "image", *has))))
    changed = {has[size]: value for size, value in sizes.items() if size in has}
    for leader, follower in _FOLLOWERS.items():
        size = getattr(usual, follower, None)
        if leader in changed and isinstance(size, int):
            changed[follower] = max(1, size * changed[leader] // getattr(usual, leader))
    if getattr(usual, "is_encoder_decoder", False) and getattr(usual, "decoder_start_token_id", None) is None:
        changed["decoder_start_token_id"] = 0  # T5 comes without one and cannot make decoder inputs of labels
    return configuration(**changed)


def _texts(name: str, config: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    positions = getattr(config, "max_position_embeddings", None) or sizes.get("tokens", _MOST_TOKENS)
    tokens = sizes.get("tokens", min(_MOST_TOKENS, positions))
    if tokens > positions:
        raise BadRequest(f"{name} has {positions} positions, so {tokens} tokens are too many for it")
    shape = (sizes["batch"], tokens)
    return {
        "input_ids": torch.randint(config.vocab_size, shape),
        "labels": torch.randint(config.vocab_size, shape),
    }


def _pictures(config: Any, sizes: Mapping[str, int]) -> dict[str, Any]:
    side = sizes.get("image", getattr(config, "image_size", _IMAGE))  # some take images of any size
    height, width = (side, side) if isinstance(side, int) else side
    batch = sizes["batch"]
    return {
        "pixel_values": torch.randn(batch, getattr(config, "num_channels", 3), height, width),
        "labels": torch.randint(config.num_labels, (batch,)),
    }


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without remarks on special tokens that a smaller vocabulary does not have, and the like."""
    logging = transformers.utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


# torchvision and timm ------------------------------------------------------------------------------


def from_torchvision(kind: str, sizes: Mapping[str, int]) -> Setup:
    """An image classifier of torchvision.models."""
    name = f"torchvision:{kind}"
    models = _library("torchvision", extra="torchvision", purpose=name).models
    kind = _kind(kind, name, models.list_models(module=models))
    name = f"torchvision:{kind}"
    refuse_strays(name, sizes, ("batch", "image", "classes"))
    classes = sizes.get("classes", 1000)
    with _building(name):
        model: nn.Module = models.get_model(kind, weights=None, num_classes=classes)
    side = sizes.get("image", 299 if kind == "inception_v3" else _IMAGE)
    return _classifier(name, model, (3, side, side), classes, sizes)


def from_timm(kind: str, sizes: Mapping[str, int]) -> Setup:
    """An image classifier of timm, at the input size it was published with."""
    name = f"timm:{kind}"
    timm = _library("timm", extra="timm", purpose=name)
    if not timm.is_model(kind):
        kind = _kind(kind, name, timm.list_models())
        name = f"timm:{kind}"
    refuse_strays(name, sizes, ("batch", "image", "classes"))
    classes = sizes.get("classes", 1000)
    with _building(name):
        model = timm.create_model(kind, pretrained=False, num_classes=classes)
    channels, height, width = model.default_cfg["input_size"]
    shape = (channels, sizes.get("image", height), sizes.get("image", width))
    return _classifier(name, model, shape, classes, sizes)


def _classifier(
    name: str, model: nn.Module, image: tuple[int, int, int], classes: int, sizes: Mapping[str, int]
) -> Setup:
    batch = sizes["batch"]
    loss = partial(_classification_loss, target=torch.randint(classes, (batch,)))
    return Setup(name, model.train(), (torch.randn(batch, *image),), loss, sizes)


def _classification_loss(output: Any, target: Tensor) -> Tensor:
    """The cross entropy of every head: inception and googlenet have auxiliary ones."""
    heads = output if isinstance(output, tuple) else (output,)
    return reduce(operator.add, [F.cross_entropy(head, target) for head in heads if head is not None])


# both ----------------------------------------------------------------------------------------------


def _kind(written: str, name: str, known: Iterable[str]) -> str:
    """What a library calls a model. `name` is the whole of what the user wrote: 'torchvision:ResNet18'."""
    known = list(known)
    found = same_name(written, known)
    if found is None:
        library = name.partition(":")[0]
        raise UnknownModel(name, [f"{library}:{each}" for each in known])
    return found


def _library(package: str, *, extra: str, purpose: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtra(package, extra, purpose) from None


@contextmanager
def _building(name: str) -> Iterator[None]:
    """Turn what another library says about sizes that do not go together into a bad request."""
    try:
        yield
    except (ValueError, TypeError, AttributeError, AssertionError, RuntimeError, ImportError) as error:
        raise BadRequest(f"{name} cannot be built with these sizes: {error}") from error
