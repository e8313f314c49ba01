"""What generated code holds, read off the code itself: it is run on tensors without numbers.

Inductor decides when it generates code what kernels are fused, in which order they run, which write over what
they read and which memory is handed on. All of it stands in the function that it writes: memory is taken,
dropped and taken over by name. Here that function runs with kernels that do nothing, on fake tensors whose
storages are counted.
"""

from __future__ import annotations

import ast
import builtins
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from lowtide.compat.inductor import fake_mode, without_numbers
from lowtide.compat.tensors import storage_key, tensors_in
from lowtide.cost.generated import CONVOLUTIONS
from lowtide.errors import LowtideError
from lowtide.ir.graph import short_name
from lowtide.ir.simulate import Allocator, allocator_of

_WAY_OUT = 'Nobody can tell what it holds: plan with kernels="eager".'


class UnreadableCode(LowtideError):
    """Generated code that does something which is not known here."""


@dataclass(frozen=True)
class Read:
    """What was read off a function.

    `growth_bytes` is the most that it holds above what is there when it begins, its arguments included. What
    it `made` has no numbers, nor has what it was `given`, but for what it had for itself.
    """

    growth_bytes: int
    given: tuple[Any, ...]
    made: tuple[Any, ...]


def read(
    code: str,
    args: Sequence[Any],
    device: str,
    *,
    owned: Collection[int] = (),
    workspaces: Mapping[str, Sequence[int]] | None = None,
) -> Read:
    """What the function in `code` holds and makes when it is given `args`.

    Nobody else has those of its arguments that it has `owned`, by place: dropped, they are gone. `workspaces`
    are those of library kernels, by the name of the op, in the order in which they run.

    Raises:
        UnreadableCode: the code cannot be run without kernels.
    """
    function = _function(code)
    with fake_mode():
        fakes = [without_numbers(arg) for arg in args]
        others = tuple(fake for place, fake in enumerate(fakes) if place not in owned)
        held = _Storages(allocator_of(device), torch.device(device).type)
        held.add(fakes)
        held.begin()
        library = _Library(torch.ops, held, {name: iter(sizes) for name, sizes in (workspaces or {}).items()})
        try:
            results = _compiled(function, _globals(function, library, held))(None, fakes)
        except (TypeError, ValueError, RuntimeError, AttributeError, NameError, IndexError) as error:
            raise UnreadableCode(
                f"the code that was generated cannot be followed: {error}. {_WAY_OUT}"
            ) from error
    return Read(held.most_bytes, others, tuple(results))


def _function(code: str) -> ast.FunctionDef:
    """The function that runs the kernels."""
    found = [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.FunctionDef) and node.name == "call"
    ]
    if len(found) != 1 or len(found[0].args.args) != 2:
        raise UnreadableCode(
            f"the code that was generated has no function of its own that runs the kernels. {_WAY_OUT}"
        )
    return found[0]


def _compiled(function: ast.FunctionDef, names: dict[str, Any]) -> Callable[[None, list[Any]], Any]:
    module = ast.Module([function], [])
    exec(compile(module, "<generated>", "exec"), names)  # code of Inductor's that is about to run anyway
    call: Callable[[None, list[Any]], Any] = names["call"]
    return call


def _globals(function: ast.FunctionDef, library: _Library, held: _Storages) -> dict[str, Any]:
    """What the names in the function mean here: kernels do nothing, memory is counted."""

    def taken(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, where: str) -> torch.Tensor:
        made: torch.Tensor = held.add(torch.empty_strided(shape, stride, dtype=dtype, device=where))
        return made

    def looked_at(
        tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], step: int
    ) -> torch.Tensor:
        return tensor.as_strided(shape, stride, tensor.storage_offset() + step)

    known: dict[str, Any] = {
        "torch": _Torch(library),
        "aten": _Library(torch.ops.aten, held, library.workspaces),
        "inductor_ops": _Library(torch.ops.inductor, held, library.workspaces),
        "extern_kernels": _Extern(library),
        "reinterpret_tensor": looked_at,
        "empty_strided_cpu": partial(taken, where="cpu"),
        "empty_strided_cpu_pinned": partial(taken, where="cpu"),
        "empty_strided_cuda": partial(taken, where="cuda"),
    }
    names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    kernels = (name for name in names if name not in known and not hasattr(builtins, name))
    return {**{name: _Kernel() for name in kernels}, **known}


class _Kernel:
    """A kernel that does nothing, or whatever else is called for no memory."""

    def __call__(self, *_: Any, **__: Any) -> None:
        return None

    def run(self, *_: Any, **__: Any) -> None:
        """As Triton's kernels are called."""


@dataclass(frozen=True)
class _Library:
    """`torch.ops`, or part of it, whose results are counted."""

    inner: Any
    held: _Storages
    workspaces: Mapping[str, Iterator[int]]

    def __getattr__(self, name: str) -> _Library:
        return _Library(getattr(self.inner, name), self.held, self.workspaces)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = self.inner(*args, **kwargs)
        self.held.add(made)
        name = short_name(str(self.inner))
        self.take_workspace(name, _turned_bytes(args) if name in CONVOLUTIONS else 0)
        return made

    def take_workspace(self, name: str, more: int = 0) -> None:
        """A kernel of this name has run, which has taken so much more."""
        self.held.take_for_a_while(next(self.workspaces.get(name, iter(())), 0) + more)


@dataclass(frozen=True)
class _Extern:
    """Library kernels by their names: most write to memory that they are given."""

    library: _Library

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, out: Any = None, **kwargs: Any) -> Any:
            if out is None:
                return getattr(self.library.aten, name)(*args, **kwargs)
            self.library.take_workspace(name)
            return out

        return call


@dataclass(frozen=True)
class _Torch:
    """The module, as generated code uses it."""

    ops: _Library

    @property
    def cuda(self) -> SimpleNamespace:
        """Which device is the current one does not matter here."""
        return SimpleNamespace(_DeviceGuard=nullcontext, set_device=lambda *_: None)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _turned_bytes(args: Sequence[Any]) -> int:
    """What a convolution copies that does not have its channels last, where something else has."""
    images = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 4]
    others = [image for image in images if not _has_channels_last(image)]
    is_last = any(not image.is_contiguous() for image in images if _has_channels_last(image))
    return sum(image.nbytes for image in others) if is_last else 0


def _has_channels_last(image: torch.Tensor) -> bool:
    return image.is_contiguous(memory_format=torch.channels_last)


class _Storages:
    """The bytes of all storages that are alive."""

    def __init__(self, allocator: Allocator, device: str) -> None:
        self._allocator = allocator
        self._device = device
        self._alive: dict[int, int] = {}
        self._bytes = 0
        self.most_bytes = 0

    def begin(self) -> None:
        """From here on, what is held is counted from what is there."""
        self._bytes = self.most_bytes = 0

    def add(self, made: Any) -> Any:
        """What was made is held from now on, until it is dropped."""
        for tensor in tensors_in(made):
            key = storage_key(tensor)
            if key in self._alive or tensor.device.type != self._device:
                continue
            size = self._allocator.held(tensor.untyped_storage().nbytes())
            self._alive[key] = size
            self._bytes += size
            weakref.finalize(tensor.untyped_storage(), self._drop, key).atexit = False
        self.most_bytes = max(self.most_bytes, self._bytes)
        return made

    def take_for_a_while(self, size: int) -> None:
        """A kernel takes so much for a while."""
        self.most_bytes = max(self.most_bytes, self._bytes + size)

    def _drop(self, key: int) -> None:
        self._bytes -= self._alive.pop(key, 0)
