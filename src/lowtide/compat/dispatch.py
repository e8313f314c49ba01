"""How an op finds its kernel: modes that see it on its way, its schema, and whether there is a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass_type

from lowtide.compat.private import Private
from lowtide.compat.tensors import tensors_in

PRIVATE = (
    Private("torch.utils._python_dispatch.TorchDispatchMode", "sees every op on its way to its kernel"),
    Private(
        "torch.utils._python_dispatch.TorchDispatchMode.ignore_compile_internals",
        "a mode that says yes is off while Dynamo compiles, and sees what runs then",
    ),
    Private(
        "torch.utils._python_dispatch.TorchDispatchMode.supports_higher_order_operators",
        "a mode that says yes is handed torch.cond and its like",
    ),
    Private("torch.utils._python_dispatch._disable_current_modes", "runs an op for real in a dry run"),
    Private(
        "torch.utils._python_dispatch.is_traceable_wrapper_subclass_type",
        "tells tensors that are made of tensors (DTensor), whose ops come once more on these",
    ),
    Private("torch.overrides._get_current_function_mode", "tells whether another mode is on above ours"),
    Private("torch._ops.OpOverload", "what an op is that has a schema; higher-order ones have none"),
    Private("torch._ops.HigherOrderOperator", "what an op is that is given functions, torch.cond say"),
    Private("torch._ops.OpOverload._schema", "arguments and results of an op, and what it writes to"),
    Private(
        "torch._C._dispatch_has_kernel_for_dispatch_key", "tells whether a device has a kernel for an op"
    ),
)


def without_modes() -> AbstractContextManager[Any]:
    """While the block runs, no dispatch mode sees anything."""
    found: AbstractContextManager[Any] = _disable_current_modes()
    return found


def function_mode() -> Any:
    """The innermost torch function mode that is on; None if none is."""
    return _get_current_function_mode()


def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class are made of other tensors, as DTensors are."""
    return is_traceable_wrapper_subclass_type(kind)


def is_plain_op(func: object) -> bool:
    """Whether `func` is an op with a schema and tags."""
    return isinstance(func, torch._ops.OpOverload)


def is_higher_order(func: object) -> bool:
    """Whether `func` is an op that is given functions."""
    return isinstance(func, torch._ops.HigherOrderOperator)


def schema_of(func: Any) -> Any:
    """The schema of an op; None if it has none."""
    return getattr(func, "_schema", None)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors that a call of `func` writes to, as its schema says."""
    schema = schema_of(func)
    if not schema.is_mutable:
        return
    for position, argument in enumerate(schema.arguments):
        if argument.is_write:
            yield from tensors_in(args[position] if position < len(args) else kwargs.get(argument.name))


def has_kernel(func: Any, device: str) -> bool:
    """Whether there is a kernel of this op for "cpu" or "cuda"."""
    schema = schema_of(func)
    name = f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, device.upper()))
