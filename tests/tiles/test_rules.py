"""How a dimension passes each kernel: as its rule says, and with the numbers of the plain one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lowtide.execute.memory import Memory
from lowtide.ir.graph import Graph, Op
from lowtide.tiles.region import Region
from lowtide.tiles.rules import RULES, Slot, slots
from lowtide.tiles.tile import tile
from tests.helpers.sliced import assert_same, one_op, region_of, results_of

aten = torch.ops.aten
_SEED = torch.Generator().manual_seed(0)


def part(*shape: int) -> Tensor:
    """Numbers between 0.1 and 0.9: every function here is defined for them."""
    return torch.rand(*shape, generator=_SEED) * 0.8 + 0.1


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_SEED)


def whole(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=_SEED)


def words(text: str) -> list[str]:
    return text.split()


def overload(name: str) -> Any:
    kernel, _, kind = name.partition(".")
    return getattr(getattr(aten, kernel), kind)


def flags(*shape: int) -> Tensor:
    return randn(*shape) > 0


# The referee ------------------------------------------------------------------------------------------


def places(graph: Graph, op: Op) -> Iterator[tuple[Slot | int, int]]:
    """Where an op takes and makes tensors, and which."""
    yield from slots(op)
    yield from ((at, made) for at, made in enumerate(op.outputs) if made is not None)


def spec(graph: Graph, op: Op) -> str:
    """A letter for every dimension: c is carried, s summed over, x couples, . has one element."""
    words = []
    for where, number in places(graph, op):
        word = ""
        for dim, size in enumerate(graph.tensors[number].shape):
            found = region_of(graph, op, where, [dim]) if size > 1 else "."
            if isinstance(found, Region):
                word += "s" if found.ops[op.id].summed and isinstance(where, tuple) else "c"
            else:
                word += "." if found == "." else "x"
        words.append(word or "-")
    made = sum(number is not None for number in op.outputs)
    return f"{' '.join(words[:-made])} -> {' '.join(words[-made:])}".strip()


def assert_slices_do_the_same(graph: Graph, given: dict[str, Tensor], op: Op) -> int:
    """Along every dimension that passes, in two and in three slices. How many there are."""
    expected = results_of(graph, given)
    count = 0
    for where, number in places(graph, op):
        for dim, size in enumerate(graph.tensors[number].shape):
            region = region_of(graph, op, where, [dim])
            if size == 1 or isinstance(region, str):
                continue
            count += 1
            for slices in {2, min(3, size)}:
                tiled = tile(graph, region, slices)
                assert tiled.tiled is not None
                assert [block.count for block in tiled.tiled.blocks] == [slices]
                for memory in (Memory.DIRECT, Memory.STATIC):
                    assert_same(results_of(tiled, given, memory), expected)
    return count


def the_op(func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Graph, dict[str, Tensor], Op]:
    graph, given = one_op(func, *args, **options)
    (op,) = graph.ops
    return graph, given, op


# Element by element -----------------------------------------------------------------------------------

X, Y, ROW, COLUMN = part(4, 6), part(4, 6), part(6), part(4, 1)
N, M = whole(9, 4, 6) + 1, whole(9, 4, 6) + 1
B = flags(4, 6)

_UNARY = words(
    "abs acos asin atan ceil clone cos cosh elu erf erfc exp exp2 expm1 floor gelu hardsigmoid hardswish "
    "hardtanh isfinite isinf isnan leaky_relu log log10 log1p log2 logical_not mish neg ones_like reciprocal "
    "relu round rsqrt sgn sigmoid sign silu sin sinh softplus sqrt square tan tanh trunc zeros_like"
)
_BINARY = words(
    "add.Tensor atan2.default copysign.Tensor div.Tensor eq.Tensor floor_divide.default fmod.Tensor "
    "ge.Tensor gt.Tensor hypot.default le.Tensor logaddexp.default lt.Tensor maximum.default minimum.default "
    "mul.Tensor ne.Tensor pow.Tensor_Tensor remainder.Tensor rsub.Tensor sub.Tensor xlogy.Tensor "
    "logical_and.default logical_or.default logical_xor.default"
)
_OF_GRADIENT = words(
    "gelu_backward hardsigmoid_backward hardswish_backward mish_backward sigmoid_backward silu_backward "
    "tanh_backward"
)


FLOAT32 = torch.float32
POINTWISE: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    *((getattr(aten, name).default, (X,), {}) for name in _UNARY),
    *((overload(name), (X, other), {}) for name in _BINARY for other in (Y, ROW, COLUMN)),
    *((getattr(aten, name).default, (Y, X), {}) for name in _OF_GRADIENT),
    *((getattr(aten, name).Tensor, (N, M), {}) for name in ("bitwise_and", "bitwise_or", "bitwise_xor")),
    (aten.bitwise_not.default, (N,), {}),
    (aten._to_copy.default, (X,), {"dtype": torch.bfloat16}),
    (aten.add.Scalar, (X, 2.0), {}),
    (aten.add.Tensor, (ROW, X), {"alpha": 3}),
    (aten.add.Tensor, (X, torch.tensor(2.0)), {}),
    (aten.addcdiv.default, (X, ROW, Y), {"value": 2.0}),
    (aten.addcmul.default, (ROW, X, COLUMN), {}),
    (aten.clamp.default, (X, 0.3, 0.6), {}),
    (aten.clamp.Tensor, (X, None, ROW), {}),
    (aten.clamp_max.default, (X, 0.5), {}),
    (aten.clamp_min.default, (X, 0.5), {}),
    (aten.elu_backward.default, (Y, 1.0, 1.0, 1.0, False, X), {}),
    (aten.empty_like.default, (X,), {}),
    (aten.fill.Scalar, (X, 2.0), {}),
    (aten.full_like.default, (X, 2.0), {}),
    (aten.hardtanh_backward.default, (Y, X, 0.3, 0.6), {}),
    (aten.leaky_relu_backward.default, (Y, randn(4, 6), 0.1, False), {}),
    (aten.lerp.Scalar, (X, Y, 0.5), {}),
    (aten.lerp.Tensor, (X, Y, COLUMN), {}),
    (aten.masked_fill.Scalar, (X, B, 0.0), {}),
    (aten.masked_fill.Tensor, (X, flags(4, 1), torch.tensor(2.0)), {}),
    (aten.mul.Tensor, (X.t(), Y.t()), {}),
    (aten.native_dropout_backward.default, (X, B, 2.0), {}),
    (aten.pow.Scalar, (2.0, X), {}),
    (aten.pow.Tensor_Scalar, (X, 3), {}),
    (aten.softplus_backward.default, (Y, X, 1.0, 20.0), {}),
    (aten.threshold_backward.default, (Y, randn(4, 6), 0.0), {}),
    (aten.where.self, (B, X, Y), {}),
    (aten.where.self, (flags(4, 1), X, torch.tensor(0.0)), {}),
]


def called(case: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> str:
    return f"{case[0]} {' '.join(str(tuple(each.shape)) for each in case[1] if isinstance(each, Tensor))}"


@pytest.mark.parametrize("case", POINTWISE, ids=called)
def test_pointwise_kernels_carry_every_dimension(case: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
    graph, given, op = the_op(*case)
    assert set(spec(graph, op)) <= set("c.- >")
    if "empty" not in op.target:
        assert assert_slices_do_the_same(graph, given, op) >= 2


# By hand ----------------------------------------------------------------------------------------------

IMAGES = randn(4, 6, 5, 5)
KERNELS, BIAS = randn(8, 6, 3, 3), randn(8)
GROUPED = randn(8, 3, 3, 3)
ONES, TWOS = [1, 1], [2, 2]
LOGITS, LABELS = randn(4, 6).log_softmax(1), whole(6, 4)
PIXELS, PIXEL_LABELS = randn(4, 6, 2, 2).log_softmax(1), whole(6, 4, 2, 2)
SOME_LABELS = torch.where(torch.arange(4) == 1, -100, LABELS)
POOLED, AT = aten.max_pool2d_with_indices(IMAGES, TWOS, TWOS)
DEEP = randn(2, 4, 6) * torch.arange(1, 9).view(2, 4, 1)  # rows are not alike
DEEP_NORMED = aten.native_layer_norm(DEEP, [6], ROW, ROW, 1e-5)
NORMED = aten.native_layer_norm(X, [6], ROW, ROW, 1e-5)
GROUP_NORMED = aten.native_group_norm(IMAGES, part(6), part(6), 4, 6, 25, 2, 1e-5)
NLL = aten.nll_loss_forward(LOGITS, SOME_LABELS, ROW, 1, -100)
NLL_2D = aten.nll_loss2d_forward(PIXELS, PIXEL_LABELS, None, 1, -100)

TABLE: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
    ("cx -> cx", aten._softmax.default, (X, 1, False), {}),
    ("xc -> xc", aten._softmax.default, (X, 0, False), {}),
    ("cx -> cx", aten._safe_softmax.default, (X, -1), {}),
    ("cx -> cx", aten._log_softmax.default, (X, 1, False), {}),
    ("cx -> cx", aten.cumsum.default, (X, 1), {}),
    ("xc -> xc", aten.cumprod.default, (X, -2), {}),
    ("xc -> xc", aten.flip.default, (X, [0]), {}),
    ("xx -> xx", aten.flip.default, (X, [0, 1]), {}),
    ("cx cx -> cx", aten._softmax_backward_data.default, (Y, X.softmax(1), 1, FLOAT32), {}),
    ("xc xc -> xc", aten._log_softmax_backward_data.default, (Y, X.log_softmax(0), 0, FLOAT32), {}),
    ("ss -> -", aten.sum.default, (X,), {}),
    ("sc -> c", aten.sum.dim_IntList, (X, [0]), {}),
    ("cs -> c.", aten.sum.dim_IntList, (X, [-1], True), {}),
    ("ss -> -", aten.sum.dim_IntList, (X, [0, 1]), {}),
    ("ss -> ..", aten.sum.dim_IntList, (X, [], True), {}),
    ("xx -> -", aten.mean.default, (X,), {}),
    ("cx -> c", aten.mean.dim, (X, [1]), {}),
    ("xc -> c", aten.amax.default, (X, [0]), {}),
    ("cx -> c.", aten.amin.default, (X, [1], True), {}),
    ("xx -> -", aten.amin.default, (X,), {}),
    ("cx -> c", aten.logsumexp.default, (X, [1]), {}),
    ("cx -> c", aten.var.correction, (X, [1]), {"correction": 1}),
    ("cx -> c.", aten.var.dim, (X, [1], False, True), {}),
    ("xx -> -", aten.var.default, (X, True), {}),
    ("xx -> -", aten.var.correction, (X,), {}),
    ("xx -> -", aten.any.default, (B,), {}),
    ("cx -> c", aten.any.dim, (B, 1), {}),
    ("xc -> c", aten.all.dim, (B, 0), {}),
    ("cx cx -> cx", aten.cat.default, ([X, part(4, 3)], 1), {}),
    ("xc xc -> xc", aten.cat.default, ([X, part(3, 6)], -2), {}),
    ("cx -> cx", aten.constant_pad_nd.default, (X, [0, 1]), {}),
    ("xc -> xc", aten.constant_pad_nd.default, (X, [0, 0, 2, -1]), {}),
    ("cc -> cc", aten.constant_pad_nd.default, (X, [0, 0]), {}),
    ("cx -> cx", aten.slice_backward.default, (part(4, 3), [4, 6], 1, 1, 4, 1), {}),
    ("xc -> xc", aten.slice_backward.default, (part(2, 6), [4, 6], 0, 2, 4, 1), {}),
    ("c -> cx", aten.select_backward.default, (part(4), [4, 6], 1, 2), {}),
    ("c -> xc", aten.select_backward.default, (part(6), [4, 6], 0, 3), {}),
    ("cxx -> cxx", aten.tril.default, (part(4, 3, 6),), {}),
    ("xx -> xx", aten.triu.default, (X, 1), {}),
    ("-> cc", aten.full.default, ([4, 6], 2.0), {}),
    ("-> cc", aten.ones.default, ([4, 6],), {}),
    ("-> cc", aten.zeros.default, ([4, 6],), {}),
    ("xx -> cc", aten.new_full.default, (X, [3, 5], 2.0), {}),
    ("xx -> cc", aten.new_ones.default, (X, [4, 5]), {}),
    ("x -> cc", aten.new_zeros.default, (ROW, [4, 5]), {}),
    ("cx cc -> cc", aten.gather.default, (X, 1, whole(6, 4, 3)), {}),
    ("xc cc -> cc", aten.gather.default, (X, 0, whole(4, 3, 6)), {}),
    ("cx cx cx -> cx", aten.scatter.src, (X, 1, torch.tensor([[2, 0, 5]]).expand(4, 3).clone(), Y), {}),
    ("xc xc -> xc", aten.scatter.value, (X, 0, whole(4, 2, 6), 2.0), {}),
    ("cx cx cx -> cx", aten.scatter_add.default, (X, 1, whole(6, 4, 6), Y), {}),
    ("xc c -> cc", aten.embedding.default, (X, whole(4, 3)), {}),
    ("xc cc -> ccc", aten.embedding.default, (X, whole(4, 3, 2), 1), {}),
    ("sc s -> xc", aten.embedding_dense_backward.default, (X, whole(5, 4), 5, -1, False), {}),
    ("sc s -> xc", aten.embedding_dense_backward.default, (X, whole(5, 4), 5, 2, False), {}),
    ("cs sc -> cc", aten.mm.default, (X, part(6, 3)), {}),
    ("cs sc -> cc", aten.mm.default, (part(6, 4).t(), part(3, 6).t()), {}),
    ("ccs csc -> ccc", aten.bmm.default, (part(2, 4, 6), part(2, 6, 3)), {}),
    ("c cx xc -> cc", aten.addmm.default, (part(3), X, part(6, 3)), {}),
    ("cc cx xc -> cc", aten.addmm.default, (part(4, 3), X, part(6, 3)), {"beta": 2, "alpha": 0.5}),
    ("c. cx xc -> cc", aten.addmm.default, (COLUMN, X, part(6, 3)), {}),
    ("- cx xc -> cc", aten.addmm.default, (torch.tensor(2.0), X, part(6, 3)), {}),
    ("ccc ccx cxc -> ccc", aten.baddbmm.default, (part(2, 4, 3), part(2, 4, 6), part(2, 6, 3)), {}),
    (".c. ccx cxc -> ccc", aten.baddbmm.default, (part(1, 4, 1), part(2, 4, 6), part(2, 6, 3)), {}),
    (
        "cxxx xxxx x -> cxxx",
        aten.convolution.default,
        (IMAGES, KERNELS, BIAS, ONES, ONES, ONES, False, [0, 0], 1),
        {},
    ),
    (
        "cxxx xxxx -> cxxx",
        aten.convolution.default,
        (IMAGES, GROUPED, None, TWOS, ONES, ONES, False, [0, 0], 2),
        {},
    ),
    (
        "cxx xxx -> cxx",
        aten.convolution.default,
        (randn(4, 6, 5), randn(6, 3, 2), None, [1], [0], [1], True, [0], 1),
        {},
    ),
    (
        "sxxx sxxx xxxx -> cxxx xxxx x",
        aten.convolution_backward.default,
        (
            randn(4, 8, 5, 5),
            IMAGES,
            KERNELS,
            [8],
            ONES,
            ONES,
            ONES,
            False,
            [0, 0],
            1,
            [True, True, True],
        ),
        {},
    ),
    (
        "sxxx sxxx xxxx -> xxxx",
        aten.convolution_backward.default,
        (
            randn(4, 8, 3, 3),
            IMAGES,
            GROUPED,
            None,
            TWOS,
            ONES,
            ONES,
            False,
            [0, 0],
            2,
            [False, True, False],
        ),
        {},
    ),
    ("cxxx -> cxxx cxxx", aten.max_pool2d_with_indices.default, (IMAGES, TWOS, TWOS), {}),
    (
        "cxxx cxxx cxxx -> cxxx",
        aten.max_pool2d_with_indices_backward.default,
        (randn(4, 6, 2, 2), IMAGES, TWOS, TWOS, [0, 0], ONES, False, AT),
        {},
    ),
    ("cxxx -> cxxx", aten.avg_pool2d.default, (IMAGES, TWOS, TWOS), {}),
    (
        "cxxx cxxx -> cxxx",
        aten.avg_pool2d_backward.default,
        (randn(4, 6, 2, 2), IMAGES, TWOS, TWOS, [0, 0], False, True, None),
        {},
    ),
    ("cxxx -> cxxx", aten._adaptive_avg_pool2d.default, (IMAGES, [3, 2]), {}),
    ("cxxx cxxx -> cxxx", aten._adaptive_avg_pool2d_backward.default, (randn(4, 6, 3, 2), IMAGES), {}),
    ("cx x x -> cx c. c.", aten.native_layer_norm.default, (X, [6], ROW, ROW, 1e-5), {}),
    ("cxx -> cxx c.. c..", aten.native_layer_norm.default, (part(4, 3, 6), [3, 6], None, None, 1e-5), {}),
    (
        "sx sx s. s. x x -> cx x x",
        aten.native_layer_norm_backward.default,
        (Y, X, [6], NORMED[1], NORMED[2], ROW, ROW, [True, True, True]),
        {},
    ),
    (
        "sx sx s. s. x -> x",
        aten.native_layer_norm_backward.default,
        (Y, X, [6], NORMED[1], NORMED[2], ROW, None, [False, True, False]),
        {},
    ),
    (
        "ssx ssx ss. ss. x x -> ccx x x",
        aten.native_layer_norm_backward.default,
        (randn(2, 4, 6), DEEP, [6], *DEEP_NORMED[1:], ROW, ROW, [True, True, True]),
        {},
    ),
    ("ccx x x -> ccx cc. cc.", aten.native_layer_norm.default, (DEEP, [6], ROW, ROW, 1e-5), {}),
    ("ccx x -> ccx cc.", aten._fused_rms_norm.default, (DEEP, [6], ROW, 1e-5), {}),
    ("ccx -> ccx", aten._softmax.default, (DEEP, 2, False), {}),
    ("cxc cxc -> cxc", aten._softmax_backward_data.default, (DEEP, DEEP.softmax(1), 1, FLOAT32), {}),
    ("ccx ccx -> ccx", aten._log_softmax_backward_data.default, (DEEP, DEEP.softmax(2), 2, FLOAT32), {}),
    ("cxc -> cxc", aten.cumsum.default, (DEEP, 1), {}),
    ("ccx ccx ccx -> ccx", aten.scatter_add.default, (DEEP, 2, whole(6, 2, 4, 6), DEEP), {}),
    ("ccx ccc -> ccc", aten.gather.default, (DEEP, 2, whole(6, 2, 4, 3)), {}),
    ("ssc ss -> xc", aten.embedding_dense_backward.default, (DEEP, whole(5, 2, 4), 5, -1, False), {}),
    ("cx x -> cx c.", aten._fused_rms_norm.default, (X, [6], ROW, 1e-5), {}),
    ("cx -> cx c.", aten._fused_rms_norm.default, (X, [6], None, 1e-5), {}),
    (
        "cxxx x x -> cxxx cx cx",
        aten.native_group_norm.default,
        (IMAGES, part(6), part(6), 4, 6, 25, 2, 1e-5),
        {},
    ),
    (
        "sxxx sxxx sx sx x -> cxxx x x",
        aten.native_group_norm_backward.default,
        (
            randn(4, 6, 5, 5),
            IMAGES,
            GROUP_NORMED[1],
            GROUP_NORMED[2],
            part(6),
            4,
            6,
            25,
            2,
            [True, True, True],
        ),
        {},
    ),
    (
        "sxxx sxxx sx sx x -> x x",
        aten.native_group_norm_backward.default,
        (
            randn(4, 6, 5, 5),
            IMAGES,
            GROUP_NORMED[1],
            GROUP_NORMED[2],
            part(6),
            4,
            6,
            25,
            2,
            [False, True, True],
        ),
        {},
    ),
    ("sx s -> - -", aten.nll_loss_forward.default, (LOGITS, LABELS, None, 1, -100), {}),
    ("sx s x -> - -", aten.nll_loss_forward.default, (LOGITS, SOME_LABELS, ROW, 1, -100), {}),
    ("sx s -> - -", aten.nll_loss_forward.default, (LOGITS, SOME_LABELS, None, 2, -100), {}),
    ("sx s -> c -", aten.nll_loss_forward.default, (LOGITS, SOME_LABELS, None, 0, -100), {}),
    ("sx s -> - -", aten.nll_loss_forward.default, (LOGITS.bfloat16(), SOME_LABELS, None, 1, -100), {}),
    (
        "- cx c x - -> cx",
        aten.nll_loss_backward.default,
        (torch.tensor(2.0), LOGITS, SOME_LABELS, ROW, 1, -100, NLL[1]),
        {},
    ),
    (
        "c cx c - -> cx",
        aten.nll_loss_backward.default,
        (part(4), LOGITS, SOME_LABELS, None, 0, -100, torch.tensor(0.0)),
        {},
    ),
    ("sxss sss -> - -", aten.nll_loss2d_forward.default, (PIXELS, PIXEL_LABELS, None, 1, -100), {}),
    ("sxss sss x -> - -", aten.nll_loss2d_forward.default, (PIXELS, PIXEL_LABELS, ROW, 2, 3), {}),
    (
        "- cxcc ccc - -> cxcc",
        aten.nll_loss2d_backward.default,
        (torch.tensor(2.0), PIXELS, PIXEL_LABELS, None, 1, -100, NLL_2D[1]),
        {},
    ),
    ("xx xx -> -", aten.mse_loss.default, (X, Y), {}),
    ("ss ss -> -", aten.mse_loss.default, (X, Y, 2), {}),
    ("cc cc -> cc", aten.mse_loss.default, (X, Y, 0), {}),
    ("ss ss -> -", aten.smooth_l1_loss.default, (X, Y, 2, 0.5), {}),
    ("xx xx -> -", aten.smooth_l1_loss.default, (X, Y, 1, 0.5), {}),
    ("ss ss -> -", aten.huber_loss.default, (X, Y, 2, 0.1), {}),
    ("xx xx -> -", aten.huber_loss.default, (X, Y), {}),
    ("ss ss s -> -", aten.binary_cross_entropy_with_logits.default, (X, Y, None, ROW, 2), {}),
    ("xx xx -> -", aten.binary_cross_entropy_with_logits.default, (X, Y, None, None, 1), {}),
    ("cc cc c -> cc", aten.binary_cross_entropy_with_logits.default, (X, Y, ROW, None, 0), {}),
]


def described(row: tuple[str, Any, tuple[Any, ...], dict[str, Any]]) -> str:
    return f"{row[1]} {row[0]}"


@pytest.mark.parametrize("row", TABLE, ids=described)
def test_dimensions_pass_as_they_are_told_here_and_slices_do_the_same(
    row: tuple[str, Any, tuple[Any, ...], dict[str, Any]],
) -> None:
    said, *case = row
    graph, given, op = the_op(case[0], case[1], case[2])
    assert spec(graph, op) == said
    assert assert_slices_do_the_same(graph, given, op) == said.count("c") + said.count("s")


def test_a_kernel_that_cuda_alone_has() -> None:
    x, row, column = (torch.empty(*shape, device="meta") for shape in ((4, 6), (6,), (4, 1)))
    backward = aten._fused_rms_norm_backward.default
    graph, _, op = the_op(backward, (x, x.clone(), [6], column, row, [True, True]), {})
    assert spec(graph, op) == "sx sx s. x -> cx x"
    graph, _, op = the_op(backward, (x, x.clone(), [6], column, None, [True, False]), {})
    assert spec(graph, op) == "cx cx c. -> cx"


@pytest.mark.parametrize("func", [aten.empty.memory_format, aten.new_empty.default])
def test_what_makes_memory_makes_less_of_it(func: Any) -> None:
    """What is there is nothing to compare."""
    args = ([4, 6],) if func is aten.empty.memory_format else (part(3), [4, 6])
    graph, _, op = the_op(func, args, {})
    assert spec(graph, op) in ("-> cc", "x -> cc")
    region = region_of(graph, op, 0, [0])
    assert isinstance(region, Region)
    made = [each for each in tile(graph, region, 2).ops if each.target == op.target]
    assert [each.args[-1] for each in made] == [(2, 6), (2, 6)]


def test_every_rule_is_in_a_table() -> None:
    seen = {str(case[0]).split(".")[1] for case in POINTWISE} | {str(row[1]).split(".")[1] for row in TABLE}
    own = {"empty", "new_empty", "native_dropout", "_fused_rms_norm_backward"}
    assert {*RULES} - seen == own, "these have their own tests"


# Refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "dims", "reason"),
    [
        ((aten._softmax.default, X, 1, False), [1], "aten._softmax couples what is sliced"),
        ((aten._softmax.default, X, 1, False), [0, 1], "aten._softmax couples what is sliced"),
        ((aten.mean.default, X), [0], "aten.mean couples what is sliced"),
        ((aten.sum.dim_IntList, X, [0]), [0, 1], "aten.sum couples what is sliced"),
        ((aten.mm.default, X, part(6, 3)), [0, 1], "aten.mm couples what is sliced"),
        ((aten.mse_loss.default, X, Y), [0], "aten.mse_loss has no rule for slices"),
        ((aten.sort.default, X, 1), [0], "aten.sort has no rule for slices"),
        ((aten.embedding_dense_backward.default, X, whole(5, 4), 5, -1, True), [0], "has no rule for slices"),
        ((aten.native_dropout.default, X[:, :5], 0.5, True), [0], "dropout draws random numbers"),
        ((aten.bernoulli.default, X), [0], "aten.bernoulli draws random numbers"),
        ((aten.add_.Tensor, X.clone(), Y), [0], "aten.add_ has no rule for slices"),
        ((aten.nll_loss_forward.default, LOGITS[0], LABELS[0], None, 1, -100), [0], "no rule for slices"),
        (
            (
                aten.native_batch_norm.default,
                IMAGES,
                part(6),
                part(6),
                part(6),
                part(6),
                False,
                0.1,
                1e-5,
            ),
            [0],
            "aten.native_batch_norm has no rule for slices",
        ),
    ],
    ids=lambda each: str(each[0]) if isinstance(each, tuple) else None,
)
def test_what_does_not_pass_says_why(case: tuple[Any, ...], dims: list[int], reason: str) -> None:
    graph, _, op = the_op(case[0], case[1:], {})
    refusal = region_of(graph, op, (0, 0), dims)
    assert isinstance(refusal, str)
    assert refusal.endswith(reason)
