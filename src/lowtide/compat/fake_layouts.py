"""How what a kernel makes lies in memory, and of which type it is, where a fake says otherwise.

Fakes are laid out as most kernels lay things out: densely, in the order of what they were given. Some kernels
on the CPU have an order of their own, and a fake that does not follow them is looked at in a shape in which
the real tensor has to be copied. And some leave more memory behind what they make than a fake has: the copy
of a slice is a slice of a copy. Norms have means and deviations in full precision where their weights or
statistics are (under autocast), and their fakes in half. A grid is in half precision under autocast, and its
fake in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.compat.kernels import copied_to, functional_batch_norm
from lowtide.compat.patches import patched
from lowtide.compat.private import Private
from lowtide.compat.tensors import tensors_in

PRIVATE = (
    Private("torch._prims_common.suggest_memory_format", "whether a tensor has its channels last"),
    Private("torch._subclasses.fake_tensor.FakeTensorMode.dispatch", "runs one op on fakes"),
    Private("torch.ops.aten._native_batch_norm_legit", "a BatchNorm that may keep no statistics"),
    Private("torch.ops.aten._native_batch_norm_legit_no_training", "a BatchNorm in evaluation"),
    Private("torch.ops.aten._log_softmax_backward_data", "the backward of a logarithm of probabilities"),
    Private("torch.ops.aten.mkldnn_rnn_layer_backward", "the backward of a recurrent layer on the CPU"),
    Private("torch._debug_has_internal_overlap", "whether a tensor names a place in memory twice"),
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


def _pointwise(made: torch.Tensor, *args: Any) -> tuple[int, ...]:
    """As the gradient lies, and where that does not tell, as what it is a gradient of."""
    gradient, x, *_ = tensors_in(args)
    return torch.mul(gradient, x).stride()


def _rows_of_rows(made: torch.Tensor, *args: Any) -> tuple[int, ...]:
    """What is made of rows lies row by row, also where a dimension has one element."""
    given = list(tensors_in(args))
    if 1 not in made.shape or any(each is made or each.shape != made.shape for each in given):
        return made.stride()
    return _row_by_row(made) if all(each.is_contiguous() for each in given) else made.stride()


def _once_in_memory(made: torch.Tensor, x: torch.Tensor, *args: Any) -> tuple[int, ...]:
    """A number that is repeated is one place in memory in every dimension, also in those of one element."""
    return made.stride() if x.dim() else (0,) * made.dim()


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
    **dict.fromkeys(
        (
            aten.elu_backward.default,
            aten.hardsigmoid_backward.default,
            aten.hardswish_backward.default,
            aten.hardtanh_backward.default,
            aten.native_dropout_backward.default,
            aten.softplus_backward.default,
        ),
        _pointwise,
    ),
    aten.expand.default: _once_in_memory,
    **dict.fromkeys(
        (
            aten._log_softmax_backward_data.default,
            aten.native_layer_norm_backward.default,
            aten.mse_loss_backward.default,
            aten.smooth_l1_loss_backward.default,
            aten.huber_loss_backward.default,
            aten.rrelu_with_noise.default,
            aten.rrelu_with_noise_functional.default,
        ),
        _row_by_row,
    ),
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


def _copy_of_all(args: Sequence[Any], made: Any) -> torch.Tensor:
    """The memory around what is changed is copied with it."""
    before = args[0]
    if torch._debug_has_internal_overlap(before) == 1:  # a place more than once: no memory to look at alike
        return torch.empty_like(before)
    elements = before.untyped_storage().nbytes() // before.element_size()
    memory: torch.Tensor = before.new_empty(elements)
    return memory.as_strided(before.shape, before.stride(), before.storage_offset())


def _in_memory_of_all(args: Sequence[Any], made: torch.Tensor) -> torch.Tensor:
    """A loss lies in the memory of all the numbers that it is the mean or the sum of."""
    if made.dim():
        return made
    numbers = math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))
    memory: torch.Tensor = made.new_empty(max(1, numbers))
    return memory.as_strided((), ())


def _biases_apart(args: Sequence[Any], made: Any) -> Any:
    """The two biases of a recurrent layer get gradients of their own, though of the same numbers."""
    return (*made[:4], torch.empty_like(made[4]), *made[5:])


_MADE_ANEW: Mapping[Any, Callable[[Sequence[Any], Any], Any]] = {
    **dict.fromkeys(
        (
            aten.as_strided_scatter.default,
            aten.copy.default,
            aten.diagonal_scatter.default,
            aten.select_scatter.default,
            aten.slice_scatter.default,
        ),
        _copy_of_all,
    ),
    **dict.fromkeys(
        (
            aten.binary_cross_entropy.default,
            aten.mse_loss.default,
            aten.smooth_l1_loss.default,
            aten.soft_margin_loss.default,
        ),
        _in_memory_of_all,
    ),
    aten.mkldnn_rnn_layer_backward.default: _biases_apart,
}
_LIKE_WHAT_IS_COPIED = (copied_to.default, aten.clone.default)  # pointwise, and no pointwise kernels


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
        elif made is not NotImplemented and func is aten.affine_grid_generator.default:
            made = _as_autocast_has_products(made)
        strides_of, made_anew = _strides_of(func), _MADE_ANEW.get(func)
        if (strides_of is None and made_anew is None) or made is NotImplemented or kwargs:
            return made
        if made_anew is not None and all(map(_is_ours, tensors_in(args, made))):
            with mode:
                made = made_anew(args, made)
        if strides_of is None:
            return made
        if isinstance(made, torch.Tensor):
            return _laid_out(made, strides_of, args)
        return (_laid_out(made[0], strides_of, args), *made[1:])

    why = "strides are those that kernels choose"
    with patched(FakeTensorMode, "dispatch", dispatch, why=why, since="torch 2.11"):
        yield


def _with_full_statistics(made: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a norm makes, its means and deviations in full precision where it mixes that with half.

    New statistics, if it makes any, are of the type of the old ones.
    """
    x, *others = (arg for arg in args if isinstance(arg, torch.Tensor))
    before, statistics, after = made[:1], made[_MEAN_AND_DEVIATION], made[3:]
    after = tuple(new.to(old.dtype) for new, old in zip(after, others[-2:], strict=False))
    if x.dtype not in _HALF or all(other.dtype in _HALF for other in others):
        return (*before, *statistics, *after)
    return (*before, *(each.to(torch.float32) for each in statistics), *after)


def _as_autocast_has_products(made: torch.Tensor) -> torch.Tensor:
    """What a kernel makes by a matrix product, to which autocast applies."""
    device = made.device.type
    is_cast = torch.is_autocast_enabled(device) and made.dtype is not torch.float64
    return made.to(torch.get_autocast_dtype(device)) if is_cast else made


def _strides_of(func: Any) -> _Strides | None:
    found = _ON_CPU.get(func)
    is_kernel = func.namespace == "aten" and func not in _LIKE_WHAT_IS_COPIED
    return _rows_of_rows if found is None and is_kernel and torch.Tag.pointwise in func.tags else found


def _is_ours(tensor: torch.Tensor) -> bool:
    """Whether a fake is on the CPU and its sizes are numbers, none of them a symbol."""
    return tensor.device.type == "cpu" and all(type(size) is int for size in tensor.shape)


def _laid_out(made: Any, strides_of: _Strides, args: tuple[Any, ...]) -> Any:
    """`made` with the strides of a kernel on the CPU; other kernels do as fakes do."""
    if made is None or not _is_ours(made):
        return made
    strides = strides_of(made, *args)
    return made if strides == made.stride() else made.as_strided(made.shape, strides)
