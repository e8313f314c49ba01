"""A module from within: its own tensors, where they can be replaced, and its hooks."""

from __future__ import annotations

import torch
from torch import nn

from lowtide.compat.private import Private

PRIVATE = (
    Private("torch.nn.Module._parameters", "where a fake takes the place of a parameter, and of it alone"),
    Private("torch.nn.Module._buffers", "where another tensor takes the place of a buffer"),
    Private("torch.nn.Module._forward_hooks", "what a module's hooks do belongs to its call"),
    Private("torch.nn.modules.batchnorm._NormBase", "the class of all that keep running statistics"),
    Private("torch.nn.Module._modules", "its submodules: not swapped for fakes with its attributes"),
)

TENSORS_AND_SUBMODULES = ("_parameters", "_buffers", "_modules")  # what a module keeps these in
NormWithStatistics = nn.modules.batchnorm._NormBase


def parameters_of(module: nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters that a module itself has, in its own dictionary: to be changed."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers that a module itself has, in its own dictionary: to be changed."""
    return module._buffers


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks of its own."""
    return bool(module._forward_hooks)
