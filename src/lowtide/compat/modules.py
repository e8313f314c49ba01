"""A module from within: its own tensors, where they can be replaced, its hooks, and how it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _of_all

from lowtide.compat.private import Private

PRIVATE = (
    Private("torch.nn.Module._parameters", "where a fake takes the place of a parameter, and of it alone"),
    Private("torch.nn.Module._buffers", "where another tensor takes the place of a buffer"),
    Private("torch.nn.Module._forward_hooks", "what a module's hooks do belongs to its call"),
    Private("torch.nn.Module._forward_pre_hooks", "a plan is for the hooks that there were"),
    Private("torch.nn.Module._backward_hooks", "a plan is for the hooks that there were"),
    Private("torch.nn.Module._backward_pre_hooks", "a plan is for the hooks that there were"),
    Private("torch.nn.modules.module._global_forward_hooks", "hooks of all modules: they count too"),
    Private("torch.nn.modules.module._global_forward_pre_hooks", "hooks of all modules: they count too"),
    Private("torch.nn.modules.module._global_backward_hooks", "hooks of all modules: they count too"),
    Private("torch.nn.modules.module._global_backward_pre_hooks", "hooks of all modules: they count too"),
    Private("torch.nn.Module._call_impl", "calls a module's forward: tells for which module that is"),
    Private("torch.nn.Module._replicate_for_data_parallel._is_replica", "marks what DataParallel has made"),
    Private("torch.nn.modules.batchnorm._NormBase", "the class of all that keep running statistics"),
    Private("torch.nn.Module._modules", "its submodules: not swapped for fakes with its attributes"),
    Private("torch._jit_internal.get_torchscript_modifier", "asks a forward what torch.jit may do with it"),
)

TENSORS_AND_SUBMODULES = ("_parameters", "_buffers", "_modules")  # what a module keeps these in
ASKED_BY_JIT = "_torchscript_modifier"  # what get_torchscript_modifier looks for in a function
OWN_ATTRIBUTES = frozenset(vars(nn.Module()))  # what every module has, whatever its class


def parameters_of(module: nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters that a module itself has, in its own dictionary: to be changed."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The buffers that a module itself has, in its own dictionary: to be changed."""
    return module._buffers


def is_made(module: nn.Module) -> bool:
    """Whether a module's constructor has come so far that it can be asked what it has."""
    return vars(module).keys() >= OWN_ATTRIBUTES


def updates_statistics(module: nn.Module) -> bool:
    """Whether a forward of `module` would write to all its buffers and read none: PyTorch's norms do."""
    is_norm = isinstance(module, nn.modules.batchnorm._NormBase) and module.training
    return is_norm and type(module).forward.__module__.startswith("torch.nn.modules.")


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own around its forward or its backward."""
    return any(_hooks_of(module))


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a module has forward hooks of its own."""
    return bool(module._forward_hooks)


def hooks_below(
    modules: Iterable[tuple[str, nn.Module]],
) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every hook of a model's submodules, with its path, and every hook of all modules, with no path."""
    of_all: tuple[Mapping[int, Any], ...] = (
        _of_all._global_forward_pre_hooks,
        _of_all._global_forward_hooks,
        _of_all._global_backward_pre_hooks,
        _of_all._global_backward_hooks,
    )
    yield from (("", hook) for hooks in of_all for hook in hooks.values())
    for path, module in modules:
        if path:
            yield from ((path, hook) for hooks in _hooks_of(module) for hook in hooks.values())


def _hooks_of(module: nn.Module) -> tuple[Mapping[int, Any], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def module_being_called() -> nn.Module | None:
    """Asked in a forward: the module whose call led to it; None where a forward was called by itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            found: nn.Module = frame.f_locals["self"]
            return found
        frame = frame.f_back
    return None


def is_replica(module: nn.Module) -> bool:
    """Whether torch.nn.DataParallel has made `module` of another one."""
    return bool(getattr(module, "_is_replica", False))
