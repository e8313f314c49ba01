"""Which model, and which inputs: what a plan was made for, in words that can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from lowtide.compat.trees import tree_flatten
from lowtide.ir.graph import Graph


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


def described_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """What a model is called with, as far as shapes and paths depend on it: 'float32[2, 3, 32, 32]', '3'."""
    leaves = tree_flatten((args, {key: kwargs[key] for key in sorted(kwargs)}))[0]
    return tuple(
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, torch.Tensor)
        else repr(leaf)
        for leaf in leaves
        if isinstance(leaf, (torch.Tensor, bool, int, float, str))
    )
