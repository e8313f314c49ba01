"""Batches for models whose forward nobody here has read: made from the names of its arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.families.configs import WORDS
from lowtide.compat.trees import tree_map
from lowtide.trace.losses import tensors_of

BATCH = 4
TOKENS = 128
_FIRST_WORD, _LAST_WORD = 5, WORDS - 128  # those between are no special tokens
_SAMPLES = 8000  # half a second of sound

Batch = dict[str, Any]
Loss = Callable[[Any], Tensor]


def mean_square(output: Any) -> Tensor:
    """A loss of everything that a model returns and that can be trained."""
    found = [tensor for tensor in tensors_of(output) if tensor.requires_grad and tensor.is_floating_point()]
    if not found:
        raise ValueError("the model returns nothing that requires gradients")
    return torch.stack([tensor.float().square().mean() for tensor in found]).sum()


def of_transformers(model: Any) -> Iterator[tuple[Batch, Loss | None]]:
    """Batches to try in turn, and the loss; None where the model makes one of its labels."""
    takes = inspect.signature(model.forward).parameters
    for inputs in _inputs(model, set(takes)):
        for labels in _labels(model, inputs) if "labels" in takes else ():
            yield {**inputs, "labels": labels}, None
        yield inputs, mean_square


def _inputs(model: Any, takes: set[str]) -> Iterator[Batch]:
    config, main = model.config, getattr(model, "main_input_name", "input_ids")
    makers: dict[str, Callable[[Any], Iterator[Tensor]]] = {
        "input_ids": _words,
        "pixel_values": _pictures,
        "input_values": _sound,
        "input_features": _features,
        "past_values": _series,
        "pixel_values_videos": _films,
    }
    main = main[0] if isinstance(main, list) else main
    names = [main, *(name for name in makers if name != main)]
    for name in names:
        if name in makers and name in takes:
            for tensor in makers[name](config):
                yield from _completed(config, takes, {name: tensor})


def _completed(config: Any, takes: set[str], batch: Batch) -> Iterator[Batch]:
    """The batch alone, and with what some models want besides."""
    yield batch
    if "decoder_input_ids" in takes:
        yield {**batch, "decoder_input_ids": _some_words(config)}
    if "input_ids" in batch and "bbox" in takes:
        yield {**batch, "bbox": torch.zeros(BATCH, TOKENS, 4, dtype=torch.long)}
    if "task_inputs" in takes:  # what to look for, in words
        yield {**batch, "task_inputs": _some_words(config)[:, :77]}
    if "input_ids" in takes and "input_ids" not in batch:
        yield {**batch, "input_ids": _some_words(config)}
    if "input_ids" in batch and "pixel_values" in takes:
        for pictures in _pictures(config):
            yield {**batch, "pixel_values": pictures}
    if "input_ids" in batch and "input_features" in takes:
        for features in _features(config):
            yield {**batch, "input_features": features}


def _labels(model: Any, inputs: Batch) -> Iterator[Tensor]:
    """What the labels may be: words, classes of samples, classes of tokens."""
    config = model.config
    classes = getattr(config, "num_labels", None) or 2
    if "input_ids" in inputs:
        yield inputs["input_ids"].clone()
    yield torch.randint(classes, (BATCH,))
    if "input_ids" not in inputs:
        yield _some_words(config)[:, :16]
        if "pixel_values" in inputs and inputs["pixel_values"].dim() == 4:
            yield torch.randint(classes, (BATCH, *inputs["pixel_values"].shape[-2:]))


# What comes in ------------------------------------------------------------------------------------------


def _words(config: Any) -> Iterator[Tensor]:
    yield _some_words(config)
    if (places := _found(config, "max_position_embeddings", TOKENS)) < TOKENS:
        yield _some_words(config)[:, : max(4, places - 4)].contiguous()


def _some_words(config: Any) -> Tensor:
    last = min(_LAST_WORD, _found(config, "vocab_size", WORDS))
    return torch.randint(min(_FIRST_WORD, last - 1), last, (BATCH, TOKENS))


def _pictures(config: Any) -> Iterator[Tensor]:
    side = _found(config, "image_size", 224)
    height, width = (side, side) if isinstance(side, int) else tuple(side)[-2:]
    channels = _found(config, "num_channels", 3)
    shape = (channels if isinstance(channels, int) else 3, height, width)
    yield torch.randn(BATCH, *shape)
    yield torch.randn(2, _found(config, "num_frames", 8), *shape)


def _films(config: Any) -> Iterator[Tensor]:
    side, frames = _found(config, "crop_size", 224), _found(config, "frames_per_clip", 8)
    yield torch.randn(2, min(frames, 8), 3, side, side)


def _sound(config: Any) -> Iterator[Tensor]:
    yield torch.randn(BATCH, _SAMPLES)
    yield torch.randn(BATCH, _found(config, "audio_channels", 1), _SAMPLES)
    yield torch.randn(BATCH, _found(config, "max_length", 1024), _found(config, "num_mel_bins", 128))


def _features(config: Any) -> Iterator[Tensor]:
    bins = _found(config, "num_mel_bins", 80)
    frames = 2 * _found(config, "max_source_positions", TOKENS)
    yield torch.randn(BATCH, bins, min(frames, 3000))
    per_frame = _found(config, "input_feat_per_channel", _found(config, "feature_projection_input_dim", bins))
    yield torch.randn(BATCH, TOKENS, per_frame)


def _series(config: Any) -> Iterator[Tensor]:
    channels = _found(config, "num_input_channels", 1)
    yield torch.randn(BATCH, _found(config, "context_length", 64), channels)


def _found(config: Any, name: str, otherwise: Any) -> Any:
    """A field of a configuration, or of one within it."""
    if getattr(config, name, None) is not None:
        return getattr(config, name)
    for part in vars(config).values():
        if hasattr(part, "model_type") and (value := _found(part, name, None)) is not None:
            return value
    return otherwise


def moved(example: Any, device: str) -> Any:
    """The same batch on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, example)


def of_images(side: int, classes: int) -> tuple[tuple[Tensor], Loss]:
    """A batch of square pictures, and a loss of every head that a classifier has."""
    return (torch.randn(BATCH, 3, side, side),), partial(_classified, target=torch.randint(classes, (BATCH,)))


def _classified(output: Any, target: Tensor) -> Tensor:
    heads = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
    return torch.stack([nn.functional.cross_entropy(head, target.to(head.device)) for head in heads]).sum()
