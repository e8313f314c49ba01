"""How a dimension passes through an op, by name of the kernel.

A rule gives the dimensions of every tensor that an op takes and makes a label each, as in a sum over indices:

    mm            a (m, k)  b (k, n)  →  (m, n)        summed over k
    softmax       (0, 1, 2)           →  (0, 1, 2)     1 couples, if it is taken along that
    convolution   x (n, …)  w (…)     →  (n, …)        all but n couple

Equal labels are carried from one tensor to another. A tensor that does not have the label is independent of
it: as an argument each slice takes all of it, as a result it is the sum over the slices if the rule says that
the label is summed. A label that couples ties slices together, and so does one that a result lacks. Without a
rule nothing passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from lowtide.ir.graph import Arg, Graph, Op, Ref, short_name
from lowtide.ir.strides import is_dense

Slot: TypeAlias = tuple[int | str, int]  # position or name of an argument, and of an item where it is a list
Labels: TypeAlias = tuple[str, ...]  # "" is a dimension along which the tensor repeats itself

_FREE = ""


@dataclass(frozen=True)
class Averaged:
    """A result that is a mean: a sum, if argument `position` is `number`, that is divided in the end."""

    result: int
    by: int  # the result that it is divided by
    position: int
    number: int


@dataclass(frozen=True)
class Labelled:
    """The labels of one op. `sized` are whole numbers among its arguments that are the size of a label."""

    takes: Mapping[Slot, Labels]
    makes: tuple[Labels | None, ...]
    summed: frozenset[str] = frozenset()
    couples: frozenset[str] = frozenset()
    sized: Mapping[Slot, str] | None = None
    averaged: Averaged | None = None


class OpView:
    """An op, as its rule sees it."""

    def __init__(self, graph: Graph, op: Op) -> None:
        self.graph = graph
        self.op = op

    def arg(self, position: int, name: str = "", default: Arg = None) -> Arg:
        """An argument, by position or name."""
        if position < len(self.op.args):
            return self.op.args[position]
        return dict(self.op.kwargs).get(name, default)

    def number(self, position: int, name: str = "", default: int = 0) -> int:
        """An argument that is a whole number."""
        found = self.arg(position, name, default)
        return found if isinstance(found, int) else default

    def numbers(self, position: int, name: str = "") -> tuple[int, ...]:
        """An argument that is a list of whole numbers."""
        found = self.arg(position, name)
        items = found if isinstance(found, tuple) else (found,)
        return tuple(item for item in items if isinstance(item, int))

    def shape(self, position: int) -> tuple[int, ...]:
        """The shape of an argument that is a tensor; none if it is something else."""
        found = self.arg(position)
        return self.graph.tensors[found.tensor].shape if isinstance(found, Ref) else ()

    def made(self, position: int = 0) -> tuple[int, ...]:
        """The shape of a result."""
        found = self.op.outputs[position]
        return () if found is None else self.graph.tensors[found].shape

    def tensors(self) -> Iterator[tuple[Slot, tuple[int, ...]]]:
        """Where the op takes tensors, and their shapes."""
        for slot, tensor in slots(self.op):
            yield slot, self.graph.tensors[tensor].shape


Rule: TypeAlias = Callable[[OpView], Labelled | None]
RULES: dict[str, Rule] = {}


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def slots(op: Op) -> Iterator[tuple[Slot, int]]:
    """The tensors that an op is called with, and where."""
    given: list[tuple[int | str, Arg]] = [*enumerate(op.args), *op.kwargs]
    for key, arg in given:
        items = arg if isinstance(arg, tuple) else (arg,)
        for item, found in enumerate(items):
            if isinstance(found, Ref):
                yield (key, item), found.tensor


def labelled(graph: Graph, op: Op) -> Labelled | None:
    """The labels of an op; None where there is no rule for it, or none for how it is called."""
    rule = RULES.get(short_name(op.target))
    if rule is None or op.mutates or op.updates or (op.random and rule is not _dropout):
        return None
    return rule(OpView(graph, op))


def _rule(*names: str) -> Callable[[Rule], Rule]:
    def enter(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return enter


def _names(count: int) -> Labels:
    return tuple(map(str, range(count)))


def _stretched(shape: tuple[int, ...], to: tuple[int, ...]) -> Labels | None:
    """Labels of an operand that is stretched to a result of shape `to`; None where it is not."""
    first = len(to) - len(shape)
    if first < 0:
        return None
    labels = (
        str(first + dim) if size == to[first + dim] else _FREE if size == 1 else None
        for dim, size in enumerate(shape)
    )
    found = tuple(labels)
    return None if None in found else tuple(label or _FREE for label in found)


# Element by element ---------------------------------------------------------------------------------------

_POINTWISE = _words(
    "_to_copy abs acos add addcdiv addcmul asin atan atan2 bitwise_and bitwise_not bitwise_or "
    "bitwise_xor ceil clamp clamp_max clamp_min clone copysign cos cosh div elu elu_backward eq "
    "erf erfc exp exp2 expm1 fill floor floor_divide fmod full_like ge gelu gelu_backward gt "
    "hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward "
    "hypot isfinite isinf isnan le leaky_relu leaky_relu_backward lerp log log10 log1p log2 "
    "logaddexp logical_and logical_not logical_or logical_xor lt masked_fill maximum minimum "
    "mish mish_backward mul native_dropout_backward ne neg ones_like pow reciprocal relu "
    "remainder round rsqrt rsub sgn sigmoid sigmoid_backward sign silu silu_backward sin sinh "
    "softplus softplus_backward sqrt square sub tan tanh tanh_backward threshold_backward trunc "
    "where xlogy zeros_like empty_like "
)


@_rule(*_POINTWISE)
def _pointwise(call: OpView) -> Labelled | None:
    shape = call.made()
    takes = {slot: _stretched(given, shape) for slot, given in call.tensors()}
    if None in takes.values() or any(call.made(other) != shape for other in range(len(call.op.outputs))):
        return None
    labels = _names(len(shape))
    known = {slot: found for slot, found in takes.items() if found is not None}
    return Labelled(known, tuple(labels for _ in call.op.outputs))


@_rule("native_dropout")
def _dropout(call: OpView) -> Labelled | None:
    """What is dropped is drawn for all elements at once, and depends on how many there are alone."""
    given, rate = call.arg(0), call.arg(1)
    if not isinstance(given, Ref) or call.arg(2) is not True or not isinstance(rate, float):
        return None
    x = call.graph.tensors[given.tensor]
    is_whole = not x.offset and is_dense(x.shape, x.stride)
    return _pointwise(call) if is_whole and 0 < rate < 1 else None


@_rule("full", "ones", "zeros", "empty")
def _new(call: OpView) -> Labelled | None:
    labels = _names(len(call.made()))
    return Labelled({}, (labels,), sized={(0, dim): label for dim, label in enumerate(labels)})


@_rule("new_full", "new_ones", "new_zeros", "new_empty")
def _new_like(call: OpView) -> Labelled | None:
    labels = _names(len(call.made()))
    own = tuple("of its own" for _ in call.shape(0))
    sized: dict[Slot, str] = {(1, dim): label for dim, label in enumerate(labels)}
    return Labelled({(0, 0): own}, (labels,), couples=frozenset(own), sized=sized)


# Along a dimension ----------------------------------------------------------------------------------------


@_rule("_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "flip")
def _along(call: OpView) -> Labelled | None:
    labels = _names(len(call.made()))
    return Labelled({(0, 0): labels}, (labels,), couples=_chosen(call, 1, len(labels)))


@_rule("_softmax_backward_data", "_log_softmax_backward_data")
def _along_backward(call: OpView) -> Labelled | None:
    labels = _names(len(call.made()))
    return Labelled({(0, 0): labels, (1, 0): labels}, (labels,), couples=_chosen(call, 2, len(labels)))


def _chosen(call: OpView, position: int, dims: int) -> frozenset[str]:
    return frozenset(str(dim % max(dims, 1)) for dim in call.numbers(position))


@_rule("sum", "mean", "amax", "amin", "logsumexp", "var", "any", "all")
def _reduction(call: OpView) -> Labelled | None:
    shape = call.shape(0)
    labels = _names(len(shape))
    kernel = short_name(call.op.target)
    is_of_all = call.op.target == "aten.var.default"  # it takes a flag where others take dimensions
    gone = frozenset[str]() if is_of_all else _chosen(call, 1, len(shape))
    gone = gone or frozenset(labels)
    if len(call.op.outputs) != 1:
        return None
    keeps = len(call.made()) == len(shape)
    kept = tuple(_FREE if label in gone else label for label in labels if keeps or label not in gone)
    additive = kernel == "sum"
    return Labelled(
        {(0, 0): labels},
        (kept,),
        summed=gone if additive else frozenset(),
        couples=frozenset() if additive else gone,
    )


@_rule("cat")
def _cat(call: OpView) -> Labelled | None:
    shape = call.made()
    labels = _names(len(shape))
    if any(len(given) != len(shape) for _, given in call.tensors()):
        return None
    dim = call.number(1, "dim") % len(shape)
    return Labelled({slot: labels for slot, _ in call.tensors()}, (labels,), couples=frozenset({str(dim)}))


@_rule("constant_pad_nd")
def _pad(call: OpView) -> Labelled | None:
    labels = _names(len(call.made()))
    amounts = call.numbers(1)
    padded = {str(len(labels) - 1 - at // 2) for at, amount in enumerate(amounts) if amount}
    return Labelled({(0, 0): labels}, (labels,), couples=frozenset(padded))


@_rule("slice_backward", "select_backward")
def _put_back(call: OpView) -> Labelled | None:
    labels = _names(len(call.made()))
    dim = call.number(2) % len(labels)
    given = labels
    if short_name(call.op.target) == "select_backward":
        given = tuple(label for at, label in enumerate(labels) if at != dim)
    sized: dict[Slot, str] = {(1, at): label for at, label in enumerate(labels)}
    return Labelled({(0, 0): given}, (labels,), couples=frozenset({str(dim)}), sized=sized)


@_rule("tril", "triu")
def _triangle(call: OpView) -> Labelled | None:
    labels = _names(len(call.made()))
    return Labelled({(0, 0): labels}, (labels,), couples=frozenset(labels[-2:]))


# By an index ----------------------------------------------------------------------------------------------


@_rule("gather")
def _gather(call: OpView) -> Labelled | None:
    return _indexed(call, index=2, others=(), labels_of=call.made(), beside=0)


@_rule("scatter", "scatter_add")
def _scatter(call: OpView) -> Labelled | None:
    others = (3,) if isinstance(call.arg(3), Ref) else ()
    return _indexed(call, index=2, others=(2, *others), labels_of=call.made(), beside=2)


def _indexed(
    call: OpView, index: int, others: tuple[int, ...], labels_of: tuple[int, ...], beside: int
) -> Labelled | None:
    """Rows are independent of one another where tensor and index have as many; along `dim` they are not."""
    tensor, found = call.shape(0), call.shape(index)
    if len(tensor) != len(found) or not tensor:
        return None
    dim = call.number(1) % len(tensor)
    labels = _names(len(labels_of))
    same = all(size == other for at, (size, other) in enumerate(zip(tensor, found, strict=True)) if at != dim)
    if not same:
        return None
    apart = tuple("along" if at == dim else label for at, label in enumerate(labels))
    takes: dict[Slot, Labels] = {(0, 0): labels, (index, 0): labels, **{(at, 0): labels for at in others}}
    takes[beside, 0] = apart
    if beside:
        takes |= {(at, 0): apart for at in others}
    return Labelled(takes, (labels,), couples=frozenset({"along"} | ({str(dim)} if beside else set())))


@_rule("embedding")
def _embedding(call: OpView) -> Labelled | None:
    rows = _names(len(call.shape(1)))
    return Labelled({(0, 0): ("v", "e"), (1, 0): rows}, ((*rows, "e"),), couples=frozenset({"v"}))


@_rule("embedding_dense_backward")
def _embedding_backward(call: OpView) -> Labelled | None:
    rows = _names(len(call.shape(1)))
    if call.arg(4):
        return None  # by how often an index is there: all of them have to be seen
    return Labelled(
        {(0, 0): (*rows, "e"), (1, 0): rows},
        (("v", "e"),),
        summed=frozenset(rows),
        couples=frozenset({"v"}),
    )


# Products -------------------------------------------------------------------------------------------------


@_rule("mm")
def _mm(call: OpView) -> Labelled | None:
    return Labelled({(0, 0): ("m", "k"), (1, 0): ("k", "n")}, (("m", "n"),), summed=frozenset("k"))


@_rule("bmm")
def _bmm(call: OpView) -> Labelled | None:
    takes: dict[Slot, Labels] = {(0, 0): ("b", "m", "k"), (1, 0): ("b", "k", "n")}
    return Labelled(takes, (("b", "m", "n"),), summed=frozenset("k"))


@_rule("addmm", "baddbmm")
def _added(call: OpView) -> Labelled | None:
    """What is added is added once: the inner dimension couples."""
    shape = call.made()
    labels = ("b", "m", "n")[-len(shape) :]
    first = len(shape) - len(call.shape(0))
    bias = tuple(
        _FREE if size == 1 and shape[first + at] != 1 else labels[first + at]
        for at, size in enumerate(call.shape(0))
    )
    batch = labels[:-2]
    return Labelled(
        {(0, 0): bias, (1, 0): (*batch, "m", "k"), (2, 0): (*batch, "k", "n")},
        (labels,),
        couples=frozenset("k"),
    )


# Images ---------------------------------------------------------------------------------------------------


def _batched(
    call: OpView, batched: tuple[int, ...], made: tuple[bool, ...], whole: tuple[int, ...] = ()
) -> Labelled:
    """An op of which only the first dimension, of the arguments `batched`, is independent."""

    def by_batch(shape: tuple[int, ...]) -> Labels:
        return ("n", *("inside" for _ in shape[1:]))

    takes: dict[Slot, Labels] = {(at, 0): by_batch(call.shape(at)) for at in batched if call.shape(at)}
    takes |= {(at, 0): tuple("inside" for _ in call.shape(at)) for at in whole if call.shape(at)}
    makes = tuple(
        None
        if output is None
        else by_batch(call.made(at))
        if made[at]
        else tuple("inside" for _ in call.made(at))
        for at, output in enumerate(call.op.outputs)
    )
    return Labelled(takes, makes, summed=frozenset("n"), couples=frozenset({"inside"}))


@_rule("convolution")
def _convolution(call: OpView) -> Labelled | None:
    return _batched(call, (0,), (True,), whole=(1, 2))


@_rule("convolution_backward")
def _convolution_backward(call: OpView) -> Labelled | None:
    return _batched(call, (0, 1), (True, False, False), whole=(2,))


@_rule("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d")
def _pool(call: OpView) -> Labelled | None:
    return _batched(call, (0,), (True, True)) if len(call.shape(0)) == 4 else None


@_rule("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward")
def _pool_backward(call: OpView) -> Labelled | None:
    return _batched(call, tuple(slot[0] for slot, _ in call.tensors() if isinstance(slot[0], int)), (True,))


# Normalisation --------------------------------------------------------------------------------------------


@_rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(call: OpView) -> Labelled | None:
    shape = call.shape(0)
    rows = _names(len(shape) - len(call.numbers(1)))
    inside = tuple("inside" for _ in call.numbers(1))
    takes: dict[Slot, Labels] = {(0, 0): (*rows, *inside)}
    takes |= {(at, 0): inside for at in (2, 3) if call.shape(at)}
    makes = tuple(
        (*rows, *(inside if at == 0 else (_FREE,) * len(inside))) for at in range(len(call.op.outputs))
    )
    return Labelled(takes, makes, couples=frozenset({"inside"}))


@_rule("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(call: OpView) -> Labelled | None:
    shape = call.shape(0)
    rows = _names(len(shape) - len(call.numbers(2)))
    inside = tuple("inside" for _ in call.numbers(2))
    statistics = (3, 4) if short_name(call.op.target).startswith("native") else (3,)
    weights = (5, 6) if len(statistics) == 2 else (4,)
    full, narrow = (*rows, *inside), (*rows, *(_FREE for _ in inside))
    takes: dict[Slot, Labels] = {(0, 0): full, (1, 0): full, **{(at, 0): narrow for at in statistics}}
    takes |= {(at, 0): inside for at in weights if call.shape(at)}
    makes = tuple(
        None if output is None else full if at == 0 else inside for at, output in enumerate(call.op.outputs)
    )
    return Labelled(takes, makes, summed=frozenset(rows), couples=frozenset({"inside"}))


@_rule("native_group_norm")
def _group_norm(call: OpView) -> Labelled | None:
    found = _batched(call, (0,), (True, True, True), whole=(1, 2))
    return Labelled(found.takes, found.makes, couples=found.couples, sized={(3, 0): "n"})


@_rule("native_group_norm_backward")
def _group_norm_backward(call: OpView) -> Labelled | None:
    found = _batched(call, (0, 1, 2, 3), (True, False, False), whole=(4,))
    return Labelled(found.takes, found.makes, found.summed, found.couples, sized={(5, 0): "n"})


# Losses ---------------------------------------------------------------------------------------------------

_NONE, _MEAN, _SUM = range(3)


@_rule("nll_loss_forward", "nll_loss2d_forward")
def _nll(call: OpView) -> Labelled | None:
    shape, reduction = call.shape(0), call.number(3)
    if len(shape) < 2:
        return None
    rows = _rows(shape)
    averaged = Averaged(0, by=1, position=3, number=_SUM) if reduction == _MEAN else None
    takes: dict[Slot, Labels] = {(0, 0): (rows[0], "c", *rows[1:]), (1, 0): rows, (2, 0): ("c",)}
    makes: tuple[Labels | None, ...] = (rows if reduction == _NONE else (), ())
    return Labelled(
        {slot: labels for slot, labels in takes.items() if call.shape(int(slot[0]))},
        makes,
        summed=frozenset(rows),
        couples=frozenset("c"),
        averaged=averaged,
    )


@_rule("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward(call: OpView) -> Labelled | None:
    shape = call.shape(1)
    if len(shape) < 2:
        return None
    rows = _rows(shape)
    full = (rows[0], "c", *rows[1:])
    gradient = rows if call.number(4) == _NONE else ()
    takes: dict[Slot, Labels] = {(0, 0): gradient, (1, 0): full, (2, 0): rows, (3, 0): ("c",), (6, 0): ()}
    return Labelled(
        {slot: labels for slot, labels in takes.items() if isinstance(call.arg(int(slot[0])), Ref)},
        (full,),
        couples=frozenset("c"),
    )


def _rows(shape: tuple[int, ...]) -> Labels:
    return ("n", *(f"s{at}" for at in range(len(shape) - 2)))


@_rule("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
def _distance(call: OpView) -> Labelled | None:
    """A mean knows how many there are in all, which a slice does not: it couples."""
    positions = {"binary_cross_entropy_with_logits": 4}
    reduction = call.number(positions.get(short_name(call.op.target), 2), "reduction", _MEAN)
    shape = call.shape(0)
    takes = {slot: _stretched(given, shape) for slot, given in call.tensors()}
    if reduction == _MEAN or None in takes.values():
        return None
    labels = _names(len(shape))
    known = {slot: found for slot, found in takes.items() if found is not None}
    return Labelled(known, (labels if reduction == _NONE else (),), summed=frozenset(labels))


# What is linear in an argument ----------------------------------------------------------------------------

_IN_THE_FIRST = _words(
    "div neg sum _to_copy clone slice_backward select_backward constant_pad_nd nll_loss_backward "
    "nll_loss2d_backward _log_softmax_backward_data _softmax_backward_data embedding_dense_backward "
    "convolution_backward native_layer_norm_backward _fused_rms_norm_backward "
    "native_dropout_backward gelu_backward silu_backward tanh_backward sigmoid_backward "
    "hardtanh_backward leaky_relu_backward threshold_backward native_group_norm_backward "
    "avg_pool2d_backward max_pool2d_with_indices_backward "
)

# Positions of the arguments in each of which alone all results are linear, the others being held.
LINEAR: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("mm", "bmm", "mul"), (0, 1)),
    **dict.fromkeys(_IN_THE_FIRST, (0,)),
}
SUMS = frozenset({"add", "sub"})  # linear in both arguments together
