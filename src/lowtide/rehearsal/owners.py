"""Who holds what: the modules and optimizers of this process, found wherever they are."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import nn

from lowtide.compat.modules import is_made
from lowtide.compat.tensors import storage_key
from lowtide.ir.simulate import Category

Owned: TypeAlias = tuple[torch.Tensor, Category, str]


class Owners:
    """Modules that no other module has, and optimizers; those that there were at the last look around."""

    def __init__(self) -> None:
        self._roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def look_around(self) -> None:
        """Find them all. That takes a while: it is for when something new may be there."""
        modules: list[nn.Module] = []
        within: set[int] = set()
        for thing in gc.get_objects():
            kind = type(thing)  # not isinstance: proxies would import what they stand for
            if issubclass(kind, nn.Module) and is_made(thing):
                modules.append(thing)
                within.update(id(child) for child in thing.children())
            elif issubclass(kind, torch.optim.Optimizer) and "param_groups" in vars(thing):
                self._optimizers.add(thing)
        self._roots = weakref.WeakSet(module for module in modules if id(module) not in within)

    def met(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer takes a step."""
        self._optimizers.add(optimizer)

    def trained(self) -> Iterator[Owned]:
        """What optimizers work on, and what they keep."""
        for optimizer in list(self._optimizers):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    yield from _with_gradient(parameter, "a parameter")
            yield from _states(optimizer, {})

    def owned(self) -> Iterator[Owned]:
        """What all of them have, with names. What has been told of may come again."""
        names: dict[int, str] = {}
        for root in list(self._roots):
            for name, parameter in root.named_parameters():
                names[id(parameter)] = name
                yield from _with_gradient(parameter, name)
            for name, buffer in root.named_buffers():
                yield buffer, Category.BUFFERS, name
        for optimizer in list(self._optimizers):
            yield from _states(optimizer, names)


def _with_gradient(parameter: torch.Tensor, name: str) -> Iterator[Owned]:
    yield parameter, Category.PARAMETERS, name
    if parameter.is_leaf and parameter.grad is not None:
        yield parameter.grad, Category.GRADIENTS, f"{name}.grad"


def _states(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Iterator[Owned]:
    for parameter, state in optimizer.state.items():
        name = names.get(id(parameter), "a parameter")
        for key, thing in state.items() if isinstance(state, dict) else ():
            if isinstance(thing, torch.Tensor):
                yield thing, Category.OPTIMIZER_STATE, f"{name}.{key}"


PLAIN = (torch.Tensor, nn.Parameter)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor has memory of its own kind: it is no fake, no wrapper of others, and not sparse."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided


def keys_of(owned: Iterator[Owned], *, on_cuda: bool = False) -> Iterator[tuple[int, Category, str, int]]:
    """The same by storage, with its bytes: what is on the CPU, or on CUDA."""
    for tensor, category, name in owned:
        if is_plain(tensor) and tensor.device.type == ("cuda" if on_cuda else "cpu"):
            yield storage_key(tensor), category, name, tensor.untyped_storage().nbytes()
