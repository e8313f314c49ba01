"""Torch's tensors in what an op takes and gives back, and the memory behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def tensors_in(*nests: object) -> Iterator[torch.Tensor]:
    """The tensors in an op's arguments or results, in order.

    These nest lists, tuples and dicts only; a general tree walk would cost more than the op itself.
    """
    for nest in nests:
        if isinstance(nest, torch.Tensor):
            yield nest
        elif isinstance(nest, list | tuple):
            yield from tensors_in(*nest)
        elif isinstance(nest, dict):
            yield from tensors_in(*nest.values())


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], nest: Any) -> Any:
    """An op's arguments or results with every tensor replaced."""
    if isinstance(nest, torch.Tensor):
        return change(nest)
    if isinstance(nest, list | tuple):
        return type(nest)([map_tensors(change, item) for item in nest])
    if isinstance(nest, dict):
        return {key: map_tensors(change, item) for key, item in nest.items()}
    return nest


def leaves(nest: object) -> Iterator[object]:
    """Everything in an op's results that is not itself a list or tuple."""
    if isinstance(nest, list | tuple):
        for item in nest:
            yield from leaves(item)
    else:
        yield nest


def storage_key(tensor: torch.Tensor) -> int:
    """What two tensors share if and only if they share memory, while either is alive."""
    return int(tensor.untyped_storage()._cdata)
