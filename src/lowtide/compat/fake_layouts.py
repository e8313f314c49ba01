"""How what a kernel makes lies in memory, and of which type it is, where a fake says otherwise.

Fakes are laid out as most kernels lay things out: densely, in the order of what they were given. Some kernels
on the CPU have an order of their own, and a fake that does not follow them is looked at in a shape in which
the real tensor has to be copied. Norms have means and deviations in full precision where their weights or
statistics are (under autocast), and their fakes in half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.compat.kernels import functional_batch_norm
from lowtide.compat.patches import patched
from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._prims_common.suggest_memory_format", "whether a tensor has its channels last"),
    Private("torch._subclasses.fake_tensor.FakeTensorMode.dispatch", "runs one op on fakes"),
    Private("torch.ops.aten._native_batch_norm_legit", "a BatchNorm that may keep no statistics"),
    Private("torch.ops.aten._native_batch_norm_legit_no_training", "a BatchNorm in evaluation"),
)

aten = torch.ops.aten

_Strides = Callable[..., tuple[int, ...]]  # of an op's first result, by its arguments


def _as_suggested_by(position: int) -> _Strides:
    """Channels last where an argument has them last, else row by row."""

    def strides(made: torch.Tensor, *args: Any) -> tuple[int, ...]:
        layout = suggest_memory_format(args[position])
        return torch.empty(made.shape, device="meta").contiguous(memory_format=layout).stride()

    return strides


def _row_by_row(made: torch.Tensor, *args: Any) -> tuple[int, ...]:
    return torch.empty(made.shape, device="meta").stride()


def _pointwise(made: torch.Tensor, gradient: torch.Tensor, x: torch.Tensor, *rest: Any) -> tuple[int, ...]:
    """As the gradient lies, and where that does not tell, as what it is a gradient of."""
    return torch.add(gradient, x).stride()


_ON_CPU: Mapping[Any, _Strides] = {
    **dict.fromkeys(
        (
            aten.native_batch_norm.default,
            aten._native_batch_norm_legit.default,
            aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_no_training.default,
            functional_batch_norm.default,
            aten.native_group_norm.default,
            aten.max_unpool2d.default,
        ),
        _as_suggested_by(0),
    ),
    **dict.fromkeys(
        (
            aten.native_batch_norm_backward.default,
            aten.native_group_norm_backward.default,
            aten.reflection_pad2d_backward.default,
            aten.replication_pad2d_backward.default,
        ),
        _as_suggested_by(1),
    ),
    **dict.fromkeys((aten.hardswish_backward.default, aten.softplus_backward.default), _pointwise),
    **dict.fromkeys((aten.rrelu_with_noise.default, aten.rrelu_with_noise_functional.default), _row_by_row),
}

_HALF = frozenset({torch.bfloat16, torch.float16})
_MEAN_AND_DEVIATION = slice(1, 3)  # among the results of a norm
_NORMS = frozenset(
    {
        aten.native_layer_norm.default,
        aten.native_group_norm.default,
        aten.native_batch_norm.default,
        aten._native_batch_norm_legit.default,
        aten._native_batch_norm_legit.no_stats,
        aten._native_batch_norm_legit_no_training.default,
        functional_batch_norm.default,
    }
)


@contextmanager
def laid_out_as_kernels_do() -> Iterator[None]:
    """While the block runs, what fakes make is of the types that kernels make, and on the CPU lies in memory
    as what they make there."""
    before: Callable[..., Any] = FakeTensorMode.dispatch

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made: Any = before(mode, func, types, args, kwargs)
        if made is not NotImplemented and func in _NORMS:
            made = _with_full_statistics(made, args)
        elif made is not NotImplemented and func is aten.native_group_norm_backward.default:
            made = (made[0] if made[0] is None else made[0].to(args[1].dtype), *made[1:])
        strides_of = _ON_CPU.get(func)
        if strides_of is None or made is NotImplemented or kwargs:
            return made
        if isinstance(made, torch.Tensor):
            return _laid_out(made, strides_of, args)
        return (_laid_out(made[0], strides_of, args), *made[1:])

    why = "strides are those that kernels choose"
    with patched(FakeTensorMode, "dispatch", dispatch, why=why, since="torch 2.11"):
        yield


def _with_full_statistics(made: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a norm makes, its means and deviations in full precision where it mixes that with half."""
    x, *others = (arg for arg in args if isinstance(arg, torch.Tensor))
    if x.dtype not in _HALF or all(other.dtype in _HALF for other in others):
        return made
    before, statistics, after = made[:1], made[_MEAN_AND_DEVIATION], made[3:]
    return (*before, *(each.to(torch.float32) for each in statistics), *after)


def _laid_out(made: Any, strides_of: _Strides, args: tuple[Any, ...]) -> Any:
    """`made` with the strides of a kernel on the CPU; other kernels do as fakes do."""
    if made is None or made.device.type != "cpu":
        return made
    strides = strides_of(made, *args)
    return made if strides == made.stride() else made.as_strided(made.shape, strides)
