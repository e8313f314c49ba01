"""How an op leaves its results where it is told to: written there by the kernel, or computed and moved.

PyTorch declares a variant with `out=` for nearly every op, but many of these were generated: they compute the
result elsewhere and copy it. A real one has a kernel of its own for the device, and the dispatcher knows.
Some ops have no such variant, but are made of others that have.

Not every variant does what its op does: one adds to what lies where it writes, another makes the place
larger. So they are tried before they are let into an arena: see `leaves_what_it_returns`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from typing import Any

import torch

from lowtide.compat.dispatch import has_kernel, schema_of
from lowtide.compat.kernels import cudnn_allows_tf32, is_cudnn_convolution, rnn_layer_for_training
from lowtide.compat.tensors import leaves
from lowtide.cost.op_bench import resolve
from lowtide.ir.graph import Graph

aten = torch.ops.aten

Outs = Sequence[torch.Tensor | None]
Args = list[Any]
Kwargs = dict[str, Any]
Write = Callable[[Args, Kwargs, Outs], None]

_RETURNED_AS_IT_LIKES = (
    "aten.cudnn_batch_norm.default",  # how much it leaves for its backward, only it knows
    "aten.mse_loss.default",  # makes a place for one number as large as its arguments first, and warns of it
    "aten.smooth_l1_loss.default",
    "aten._fft_c2c.default",  # the kernels of their variants call those of the ops, and copy
    "aten._fft_c2r.default",
    "aten._fft_r2c.default",
)
# Ops that are told where in their first argument's storage to look, and which argument tells them.
OFFSETS: Mapping[str, int] = {"aten.as_strided_scatter.default": 4}
_FACTORY_KEYWORDS = {"dtype", "layout", "device", "pin_memory", "memory_format"}


class Way(StrEnum):
    """How a result gets where it should be."""

    WRITTEN = "written"  # the kernel writes it there
    MOVED = "moved"  # the kernel returns it in memory of its own, from where it is copied


@dataclass(frozen=True)
class Writer:
    """What to call so that the results are found in given tensors."""

    way: Way
    bind: Callable[[Args, Kwargs, Outs], Callable[[], object]]
    is_variant: bool = False  # PyTorch's own, which may do something else than the op


def writer(target: str, device: str, args: Args) -> Writer:
    """How the op `target` writes on a device ('cpu', 'cuda'), called with arguments like these.

    The results are those that the op returns, to the last bit.
    """
    other = _OTHER_DOORS.get(target)
    if other is not None and (write := other(device, args)) is not None:
        return Writer(Way.WRITTEN, lambda args, kwargs, outs: partial(write, args, kwargs, outs))
    into = None if target in _RETURNED_AS_IT_LIKES else _with_out(target, device)
    if into is None:
        return mover(target)
    overload, names, dropped = into

    def bind(args: Args, kwargs: Kwargs, outs: Outs) -> Callable[[], object]:
        if any(out is None for out in outs):  # a result that nobody wants has no place to be written to
            return mover(target).bind(args, kwargs, outs)
        kept = {name: value for name, value in kwargs.items() if name not in dropped}
        return partial(_call, overload, args, {**kept, **dict(zip(names, outs, strict=True))})

    return Writer(Way.WRITTEN, bind, is_variant=True)


def mover(target: str) -> Writer:
    """Has any op compute its results where it likes, and moves them."""
    func = kernel(target)
    return Writer(Way.MOVED, lambda args, kwargs, outs: Move(func, args, kwargs, list(outs)))


def leaves_what_it_returns(writer: Writer, target: str, args: Args, kwargs: Kwargs, outs: Outs) -> bool:
    """Whether a writer leaves in tensors like `outs`, full of junk, what the op returns, and lets them be as
    large as they are. Takes as much memory as the op's results do twice."""
    if any(out is None for out in outs):
        return False  # then it moves them
    try:
        tried = [_full_of_junk(out) for out in outs if out is not None]
        looked = [_looks(out) for out in tried]
        writer.bind(args, kwargs, tried)()
    except RuntimeError:  # it refuses tensors like these, or there is no memory to try it in
        return False
    results = tensor_leaves(kernel(target)(*args, **kwargs))
    return [_looks(out) for out in tried] == looked and all(map(_are_same, results, tried))


def _full_of_junk(like: torch.Tensor) -> torch.Tensor:
    junk = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return junk.fill_(float("nan") if junk.is_floating_point() or junk.is_complex() else -1)


def _looks(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.untyped_storage().nbytes()


def _are_same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    if one is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def kernel(target: str) -> Callable[..., Any]:
    """What computes an op: PyTorch's, or lowtide's own."""
    return _OWN_KERNELS.get(target) or resolve(target)


def _call(func: Any, args: Args, kwargs: Kwargs) -> object:
    # The arguments stay in the list, where a new batch may replace them.
    return func(*args, **kwargs)


@dataclass(frozen=True)
class Move:
    """A call whose results are copied to where they should be.

    A result that looks different from its place stays where the kernel put it, and becomes the place: some
    kernels return a few bytes on another device (attention's seeds), or as many, or of the type, as they see
    fit.
    """

    func: Callable[..., Any]
    args: Args
    kwargs: Kwargs
    outs: list[torch.Tensor | None]

    def __call__(self) -> None:
        results = tensor_leaves(self.func(*self.args, **self.kwargs))
        for position, (out, result) in enumerate(zip(self.outs, results, strict=True)):
            if out is None or result is None:
                continue
            if (out.device, out.shape, out.dtype) == (result.device, result.shape, result.dtype):
                out.copy_(result)
            else:
                self.outs[position] = result


def tensor_leaves(result: object) -> list[torch.Tensor | None]:
    """The results of an op as a graph lists them."""
    return [leaf for leaf in leaves(result) if leaf is None or isinstance(leaf, torch.Tensor)]


@cache
def _with_out(target: str, device: str) -> tuple[Any, tuple[str, ...], frozenset[str]] | None:
    """The variant of an op that writes where it is told, the names under which it is told, and what it is
    not told; None if the device has no kernel for one."""
    if target in _OWN_KERNELS:
        return None
    func = resolve(target)
    # By type too: a power with a number for exponent is another kernel than one with a tensor.
    wanted = [(argument.name, str(argument.type)) for argument in schema_of(func).arguments]
    for overload in map(partial(getattr, func.overloadpacket), func.overloadpacket.overloads()):
        outs = tuple(a.name for a in schema_of(overload).arguments if a.is_out)
        given = [(a.name, str(a.type)) for a in schema_of(overload).arguments if not a.is_out]
        dropped = frozenset(name for name, _ in wanted) - frozenset(name for name, _ in given)
        same = [entry for entry in wanted if entry[0] not in dropped] == given
        same = same and dropped <= _FACTORY_KEYWORDS
        if len(outs) == len(schema_of(func).returns) > 0 and same and has_kernel(overload, device):
            return overload, outs, dropped
    return None


# What it comes to -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moves:
    """The computes whose results get where they should be in one way: how many, how many bytes, which ops."""

    way: Way
    computes: int
    bytes: int
    targets: tuple[str, ...]


def moves(graph: Graph, computed: Iterable[int], writers: Mapping[int, Writer]) -> tuple[Moves, ...]:
    """How the results of these ops are written, one entry for each way."""
    found: dict[Way, dict[str, list[int]]] = {way: {} for way in Way}
    for number in computed:
        if number in writers:
            by_target = found[writers[number].way]
            by_target.setdefault(graph.ops[number].target, []).append(_made_bytes(graph, number))
    return tuple(
        Moves(way, sum(map(len, by.values())), sum(map(sum, by.values())), tuple(sorted(by)))
        for way, by in found.items()
    )


def extra_bytes(graph: Graph, computed: Iterable[int], writers: Mapping[int, Writer]) -> int:
    """The most that one of these ops takes while it runs: its kernel's workspace, and results to be moved."""
    most = 0
    for number in computed:
        moved = number in writers and writers[number].way is Way.MOVED
        own = graph.ops[number].workspace_bytes
        most = max(most, own + (_made_bytes(graph, number) if moved else 0))
    return most


def _made_bytes(graph: Graph, number: int) -> int:
    return sum(graph.counted_bytes(value) for value in graph.ops[number].creates)


# Through other doors ----------------------------------------------------------------------------------
# Each does what the op itself does inside, step by step, but with `out=`.


def _relu(device: str, args: Args) -> Write | None:
    def write(args: Args, kwargs: Kwargs, outs: Outs) -> None:
        torch.clamp_min(args[0], 0, out=outs[0])

    return write


def _copy(device: str, args: Args) -> Write | None:
    def write(args: Args, kwargs: Kwargs, outs: Outs) -> None:
        assert outs[0] is not None
        outs[0].copy_(args[0])

    return write


def _embedding(device: str, args: Args) -> Write | None:
    def write(args: Args, kwargs: Kwargs, outs: Outs) -> None:
        weight, indices = args[:2]
        assert outs[0] is not None
        rows = outs[0].view(-1, weight.shape[1])
        torch.index_select(weight, 0, indices.reshape(-1), out=rows)

    return write if args[0].dim() == 2 else None


def _filled(number: float | None = None, *, position: int = 1) -> Callable[[str, Args], Write | None]:
    def write(args: Args, kwargs: Kwargs, outs: Outs) -> None:
        assert outs[0] is not None
        outs[0].fill_(args[position] if number is None else number)

    return lambda device, args: write


def _convolution(device: str, args: Args) -> Write | None:
    """cuDNN's convolution, and the bias added to it, which is what PyTorch does with both."""
    x, weight, *_, transposed, _, _ = args
    if device != "cuda" or transposed or x.dim() != 4:
        return None
    dense = x.is_contiguous() and weight.is_contiguous()  # else PyTorch makes copies first
    if not is_cudnn_convolution(args) or not dense:
        return None

    def write(args: Args, kwargs: Kwargs, outs: Outs) -> None:
        x, weight, bias, stride, padding, dilation, _, _, groups = args
        settings = torch.backends.cudnn
        deterministic = settings.deterministic or torch.are_deterministic_algorithms_enabled()
        aten.cudnn_convolution.out(
            x, weight, padding, stride, dilation, groups,
            settings.benchmark, deterministic, cudnn_allows_tf32(),
            out=outs[0],
        )  # fmt: skip
        if bias is not None:
            assert outs[0] is not None
            outs[0].add_(bias.view(1, -1, 1, 1))

    return write


def _as_strided_scatter(device: str, args: Args) -> Write | None:
    """The kernel would copy all of the storage that its argument is a part of: here, the arena."""

    def write(args: Args, kwargs: Kwargs, outs: Outs) -> None:
        whole, part, shape, stride, *offset = args
        (out,) = outs
        assert out is not None
        start = offset[0] - whole.storage_offset() if offset and offset[0] is not None else 0
        out.copy_(whole)
        out.as_strided(shape, stride, out.storage_offset() + start).copy_(part)

    return write


def _scattered(part_of: Callable[..., torch.Tensor]) -> Callable[[str, Args], Write | None]:
    """A copy that has another part. The kernels would copy all of the storage, too."""

    def write(args: Args, kwargs: Kwargs, outs: Outs) -> None:
        whole, part, *where = args
        (out,) = outs
        assert out is not None
        out.copy_(whole)
        part_of(out, *where, **kwargs).copy_(part)

    return lambda device, args: write


def _overwritten(device: str, args: Args) -> Write | None:
    def write(args: Args, kwargs: Kwargs, outs: Outs) -> None:
        assert outs[0] is not None
        outs[0].copy_(args[1])

    return write


def _left_as_it_is(device: str, args: Args) -> Write | None:
    return lambda args, kwargs, outs: None


_OTHER_DOORS: Mapping[str, Callable[[str, Args], Write | None]] = {
    "aten.relu.default": _relu,
    "aten.clone.default": _copy,
    "aten._to_copy.default": _copy,
    "aten.embedding.default": _embedding,
    "aten.convolution.default": _convolution,
    "aten.copy.default": _overwritten,
    "aten.as_strided_scatter.default": _as_strided_scatter,
    "aten.diagonal_scatter.default": _scattered(aten.diagonal.default),
    "aten.select_scatter.default": _scattered(aten.select.int),
    "aten.slice_scatter.default": _scattered(aten.slice.Tensor),
    "aten.empty.memory_format": _left_as_it_is,
    "aten.empty_like.default": _left_as_it_is,
    "aten.empty_permuted.default": _left_as_it_is,
    "aten.empty_strided.default": _left_as_it_is,
    "aten.new_empty.default": _left_as_it_is,
    "aten.new_empty_strided.default": _left_as_it_is,
    "aten.zeros.default": _filled(0),
    "aten.zeros_like.default": _filled(0),
    "aten.new_zeros.default": _filled(0),
    "aten.ones.default": _filled(1),
    "aten.ones_like.default": _filled(1),
    "aten.full.default": _filled(),
    "aten.full_like.default": _filled(),
}


# lowtide's own kernels --------------------------------------------------------------------------------


def _batch_norm_backward_from_output(
    gradient: torch.Tensor,
    output: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    inverse_deviation: torch.Tensor,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """A BatchNorm's backward that looks at what it made, not at what it was given.

    What was normalised is (output - bias) / weight, so no weight may be zero; it is equal to the usual
    backward up to rounding.
    """
    along = [1, -1] + [1] * (output.dim() - 2)
    over = [axis for axis in range(output.dim()) if axis != 1]
    normal = output if bias is None else output - bias.view(along)
    if weight is not None:
        normal = normal / weight.view(along)
    bias_gradient = gradient.sum(over)
    weight_gradient = (gradient * normal).sum(over)
    scale = inverse_deviation if weight is None else inverse_deviation * weight
    count = output.numel() // output.shape[1]
    centred = gradient - (bias_gradient / count).view(along) - normal * (weight_gradient / count).view(along)
    made = (centred * scale.view(along), weight_gradient, bias_gradient)
    return tuple(result if wanted else None for result, wanted in zip(made, mask, strict=True))


_OWN_KERNELS: Mapping[str, Callable[..., Any]] = {
    "lowtide.batch_norm_backward_from_output.default": _batch_norm_backward_from_output,
    "aten.mkldnn_rnn_layer.default": rnn_layer_for_training,  # without gradients it leaves nothing for them
}
