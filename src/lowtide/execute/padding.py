"""Batches padded to a few lengths, as their owner says: nothing is padded that nobody has named."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from lowtide.errors import BadRequest


def class_of(length: int, classes: Collection[int]) -> int:
    """The shortest of `classes` that `length` fits in.

    Raises:
        BadRequest: it fits in none.
    """
    found = min((each for each in classes if each >= length), default=None)
    if found is None:
        raise BadRequest(
            f"a length of {length} fits in none of the classes {', '.join(map(str, sorted(classes)))}. "
            "Cut it off, or choose classes from all lengths that come."
        )
    return found


def padded(
    batch: Mapping[str, Any] | tuple[Any, ...],
    classes: Collection[int],
    fill: Mapping[str, float] | tuple[float, ...],
    *,
    dim: int = 1,
    leave: Collection[str | int] = (),
) -> Any:
    """`batch` with everything that `fill` names as long as the shortest of `classes` that it fits in.

    `fill` says with what: {"input_ids": tokenizer.pad_token_id, "attention_mask": 0, "labels": -100} for a
    batch with names, (0, -100) for one that is a tuple. It is added at the end of dimension `dim`. Whether a
    model looks away from padding is between its mask, its loss and what is filled in; nothing is guessed: a
    tensor as long as the others that `fill` does not name is refused, unless it is among those to `leave`.

    For a data loader: `collate_fn=lambda samples: lowtide.padded(collate(samples), classes, fill)`.

    Raises:
        BadRequest: the batch fits in no class, what is named is not there, or lengths differ.
    """
    is_named = isinstance(batch, Mapping)
    parts: dict[Any, Any] = dict(batch.items() if isinstance(batch, Mapping) else enumerate(batch))
    wanted: dict[Any, float] = dict(fill.items() if isinstance(fill, Mapping) else enumerate(fill))
    if is_named != isinstance(fill, Mapping):
        raise BadRequest(
            f"the batch is a {type(batch).__name__}, and what to fill in a {type(fill).__name__}. Give names "
            "for a batch with names, and a tuple for a tuple."
        )
    length = _length_of(parts, wanted, dim)
    _refuse_forgotten(parts, {*wanted, *leave}, length, dim)
    to = class_of(length, classes)
    for name, value in wanted.items():
        part = parts[name]
        parts[name] = pad(part, _at_the_end(part.dim(), dim, to - length), value=value)
    return parts if is_named else tuple(parts.values())


def _length_of(parts: Mapping[Any, Any], wanted: Mapping[Any, float], dim: int) -> int:
    lengths = {}
    for name in wanted:
        part = parts.get(name)
        if not isinstance(part, torch.Tensor) or part.dim() <= dim:
            raise BadRequest(
                f"{name!r} is to be padded along dimension {dim}, and the batch has no such tensor. It has: "
                f"{', '.join(map(repr, parts))}."
            )
        lengths[name] = part.shape[dim]
    if len(set(lengths.values())) != 1:
        raise BadRequest(f"what is padded together has one length, and these differ: {lengths}.")
    return next(iter(lengths.values()))


def _refuse_forgotten(parts: Mapping[Any, Any], known: Collection[Any], length: int, dim: int) -> None:
    for name, part in parts.items():
        is_long = isinstance(part, torch.Tensor) and part.dim() > dim and part.shape[dim] == length
        if is_long and name not in known:
            raise BadRequest(
                f"{name!r} is {length} long as well, and nobody says with what to fill it. Name it in fill, "
                f"or leave it as it is: leave=[{name!r}]."
            )


def _at_the_end(dims: int, dim: int, count: int) -> list[int]:
    """What `pad` takes: pairs of how much before and after, the last dimension first."""
    return [*[0, 0] * (dims - 1 - dim), 0, count]
