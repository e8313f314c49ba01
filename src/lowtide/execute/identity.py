"""Which model, and which inputs: what a plan was made for, in words that can be compared."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from lowtide.compat.trees import keystr, tree_leaves_with_path
from lowtide.ir.graph import Graph

_NUMBER = re.compile(r"(^|=)(-?(\d+\.\d+|\d+(\.\d+)?e[+-]\d+|inf)|nan)$")


def fingerprint(model: nn.Module) -> str:
    """Tells models apart: their parameters and buffers by name, shape and type."""
    named = [*model.named_parameters(), *model.named_buffers()]
    lines = [f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def skeleton(graph: Graph) -> str:
    """Tells graphs apart: their ops and what these read and make, whatever they cost."""
    lines = [f"{op.target} {op.reads} {op.creates} {op.mutates} {op.section}" for op in graph.ops]
    lines += [f"{value.bytes} {value.role}" for value in graph.values]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def inputs_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """What `model` is called with, described; however the call is written, by position or by keyword."""
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):  # it will fail by itself, or says nothing of its parameters
        return described_inputs(args, kwargs)
    return described_inputs(bound.args, bound.kwargs)


def described_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Arguments, as far as shapes and paths depend on them: 'float32[2, 3]', '3', "mask['q']=bool[8]".

    A tensor's strides are among it where it is not contiguous, and whether it wants a gradient.
    """
    named = [("", thing) for thing in args] + sorted(kwargs.items(), key=itemgetter(0))
    return tuple(line for name, thing in named for line in _described(thing, name))


def but_for_numbers(described: tuple[str, ...]) -> tuple[str, ...]:
    """The same for arguments that differ in floating-point numbers; most often they run the same ops."""
    return tuple(_NUMBER.sub(r"\1a number", line) for line in described)


def _described(thing: Any, name: str) -> list[str]:
    found = ((name + keystr(path), _leaf(leaf)) for path, leaf in tree_leaves_with_path(thing))
    return sorted(f"{where}={leaf}" if where else leaf for where, leaf in found)


def _leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        kind = f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        return f"{kind}{_strides(leaf)}{' with a gradient' if leaf.requires_grad else ''}"
    is_plain = leaf is None or isinstance(leaf, (bool, int, float, str))
    return repr(leaf) if is_plain else type(leaf).__qualname__


def _strides(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided:
        return f" {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_contiguous():
        return ""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    channels_last = tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    return " channels last" if channels_last else f" with strides {list(tensor.stride())}"
