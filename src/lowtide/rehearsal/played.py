"""CUDA played by the CPU: what a script moves to "cuda", or makes there, stays here and is known to be there.

On a machine without CUDA a script falls back to the CPU by itself (`if torch.cuda.is_available()`), or names
"cuda" and would fail. In the second case it says exactly what is on the card. In the first, what it moves to
its device is moved to "cpu", where it is already: that is told by the same calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from lowtide.compat.patches import patched
from lowtide.ir.cuda_allocator import CachingAllocator
from lowtide.ir.simulate import Category
from lowtide.rehearsal.watch import CardWatch

_TO, _CUDA, _CPU = torch.Tensor.to, torch.Tensor.cuda, torch.Tensor.cpu


class PlayedByCpu(TorchFunctionMode):
    """Takes "cuda" out of calls, and tells a watch what they move or make."""

    def __init__(self, watch: CardWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.compiler.is_compiling():  # Dynamo reads this: devices alone are of interest to it
            return func(*map(_here, args), **{name: _here(thing) for name, thing in kwargs.items()})
        if func is _CUDA:
            return self._moved(args[0], ("cuda",), {})
        if func is _CPU:
            return self._left(args[0])
        if func is _TO and (device := _device(args, kwargs)) is not None:
            return self._moved(args[0], args[1:], kwargs, names_cuda(device))
        if names_cuda(kwargs.get("device")):
            self._watch.heard_of_device()
            with self._watch.making(Category.TEMPORARIES):
                return func(*args, **{**kwargs, "device": "cpu"})
        return func(*args, **kwargs)

    def _moved(
        self, tensor: torch.Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], to_cuda: bool = True
    ) -> torch.Tensor:
        """What `tensor.to(…)` of a device makes."""
        watch = self._watch
        args, kwargs = tuple(map(_here, args)), {name: _here(thing) for name, thing in kwargs.items()}
        if to_cuda:
            watch.heard_of_device()
        elif watch.told_of_device and watch.knows(tensor):
            with watch.leaving():
                return tensor.to(*args, **{**kwargs, "copy": True})
        if watch.knows(tensor) or (watch.told_of_device and not to_cuda):
            return tensor.to(*args, **kwargs)
        if isinstance(tensor, nn.Parameter):
            if not to_cuda:  # it is found when it is used, and stays the same object
                return tensor.to(*args, **kwargs)
            with watch.making(Category.PARAMETERS):
                return tensor.to(*args, **{**kwargs, "copy": True})
        with watch.making(Category.BATCH):
            return tensor.to(*args, **{**kwargs, "copy": True})

    def _left(self, tensor: torch.Tensor) -> torch.Tensor:
        """What `tensor.cpu()` makes."""
        if not self._watch.knows(tensor):
            return tensor.cpu()
        with self._watch.leaving():
            return tensor.to("cpu", copy=True)


def names_cuda(device: object) -> bool:
    """Whether a device is CUDA, however it is written."""
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


def _here(thing: Any) -> Any:
    return "cpu" if names_cuda(thing) else thing


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> object | None:
    """The device that `tensor.to` is given, if it is given one."""
    given = kwargs.get("device", args[1] if len(args) > 1 else None)
    return given if isinstance(given, (str, torch.device)) else None


# What asks CUDA itself ------------------------------------------------------------------------------


@contextmanager
def cuda_answers(watch: CardWatch) -> Iterator[None]:
    """While the block runs, `torch.cuda` tells of the card what a replay knows, and waits for nothing."""
    ledger = watch.ledger

    def allocator() -> CachingAllocator:
        watch.bury()
        return ledger.replay.allocator

    def reset_peaks(device: object = None) -> None:
        now = allocator()
        now.peak_allocated_bytes, now.peak_reserved_bytes = now.allocated_bytes, now.reserved_bytes

    def empty_cache() -> None:
        watch.bury()
        ledger.empty_cache()

    answers: dict[str, Callable[..., Any]] = {
        "empty_cache": empty_cache,
        "synchronize": lambda device=None: None,
        "set_device": lambda device: None,
        "memory_allocated": lambda device=None: allocator().allocated_bytes,
        "memory_reserved": lambda device=None: allocator().reserved_bytes,
        "max_memory_allocated": lambda device=None: allocator().peak_allocated_bytes,
        "max_memory_reserved": lambda device=None: allocator().peak_reserved_bytes,
        "reset_peak_memory_stats": reset_peaks,
    }
    with ExitStack() as stack:
        for name, answer in answers.items():
            why = "a card that is not there answers"
            stack.enter_context(patched(torch.cuda, name, answer, why=why, since="torch 2.11"))
        stack.enter_context(
            patched(torch, "load", _loading(watch, torch.load), why="loads to a card", since="torch 2.11")
        )
        yield


def _loading(watch: CardWatch, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def load(*args: Any, **kwargs: Any) -> Any:
        if not names_cuda(kwargs.get("map_location")):
            return plain(*args, **kwargs)
        watch.heard_of_device()
        with watch.making(Category.PARAMETERS):
            return plain(*args, **{**kwargs, "map_location": "cpu"})

    return load
