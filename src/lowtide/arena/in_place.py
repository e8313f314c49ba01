"""Which ops write their result over an input, and why the others do not.

An op may work in place if it reads every element of an input before it writes the element of the result at
the same place, and looks nowhere else afterwards. What remains to be asked of a schedule is that nobody
reads that input again.

    take_overs(graph, schedule)   results that take over the memory of an input
    obstacles(graph, schedule)    for every other op the input that comes closest, and what is in the way
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lowtide.ir.graph import Graph, Op, Ref, Tensor, argument_tensors
from lowtide.ir.schedule import Schedule
from lowtide.ir.validate import item_bytes
from lowtide.ir.walk import walk


@dataclass(frozen=True, slots=True)
class TakeOver:
    """At step `position` the value `output` is written over the value `input`."""

    position: int
    output: int
    input: int


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The op computed at step `position` has a result of its own: `reason` says why, as a sentence.

    `candidate` is the input that comes closest to being overwritten; None if the op reads no tensor.
    """

    position: int
    op: int
    candidate: int | None
    reason: str


def _elementwise(names: str, positions: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {f"aten.{name}": positions for name in names.split()}


# By target, the positions of the arguments that the first output may overwrite, the preferred one first.
OVERWRITES: Mapping[str, tuple[int, ...]] = {
    **_elementwise(
        "relu.default sigmoid.default tanh.default exp.default log.default neg.default abs.default "
        "sqrt.default rsqrt.default reciprocal.default sin.default cos.default erf.default gelu.default "
        "silu.default elu.default mish.default leaky_relu.default hardtanh.default hardswish.default "
        "hardsigmoid.default softplus.default clamp.default clamp_min.default clamp_max.default "
        "pow.Tensor_Scalar clone.default add.Scalar sub.Scalar mul.Scalar div.Scalar masked_fill.Scalar",
        (0,),
    ),
    **_elementwise("add.Tensor sub.Tensor mul.Tensor div.Tensor maximum.default minimum.default", (0, 1)),
    # The gradient first: what it is the gradient of may be wanted again.
    **_elementwise(
        "threshold_backward.default sigmoid_backward.default tanh_backward.default gelu_backward.default "
        "silu_backward.default mish_backward.default leaky_relu_backward.default hardtanh_backward.default "
        "hardswish_backward.default hardsigmoid_backward.default softplus_backward.default",
        (0, 1),
    ),
    **_elementwise("elu_backward.default", (0, 5)),
    **_elementwise("native_dropout_backward.default", (0,)),
    **_elementwise("where.self", (1, 2)),
    **_elementwise("addcmul.default addcdiv.default", (0, 1, 2)),
    # These form their sums before they write, and then write each element from the one that it replaces.
    **_elementwise("native_batch_norm.default", (0,)),
    "lowtide.batch_norm_backward_from_output.default": (0,),
}

_UNKNOWN = "{op} is not known to read each element before it writes the same one"
# By name, why an op cannot.
_REASONS: Mapping[str, str] = {
    name: reason
    for reason, names in {
        "each result of {op} needs whole rows and columns of its inputs": (
            "mm bmm addmm baddbmm "
            "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
            "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"
        ),
        "each result of {op} needs a whole row of its input, which others need too": (
            "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data "
            "native_layer_norm native_layer_norm_backward"
        ),
        "each result of {op} needs a neighbourhood of its input, which others need too": (
            "convolution convolution_backward max_pool2d_with_indices max_pool2d_with_indices_backward "
            "avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward"
        ),
        "{op} sums over its input: the result has another shape": (
            "sum mean amax amin nll_loss_forward nll_loss2d_forward"
        ),
        "{op} moves elements: it would overwrite some before it reads them": (
            "cat embedding embedding_dense_backward gather index flip"
        ),
        "{op} has no kernel that writes over its input": "native_batch_norm_backward native_dropout",
    }.items()
    for name in names.split()
}


def take_overs(graph: Graph, schedule: Schedule) -> tuple[TakeOver, ...]:
    """The results that can be written over an input: as many as there are, in the order of the schedule.

    The input was made in the graph, on its device, and is looked at by the op exactly as the result is: equal
    shape, strides, offset and size of an element, in a storage of equal bytes. The schedule frees it right
    after this compute, so the op is its last reader. What an op does that changes an argument (`mutates`) is
    in place already and not listed.

    The schedule has to be one that `simulate` accepts.
    """
    found: list[TakeOver] = []
    for position, op, freed in _computes(graph, schedule):
        for value in overwritable(graph, op):
            if value in freed:
                found.append(TakeOver(position, graph.tensors[_first_output(op)].value, value))
                break
    return tuple(found)


def overwritable(graph: Graph, op: Op) -> Iterator[int]:
    """The values that the op's first output may be written over once nobody else needs them, best first."""
    result = _own_result(graph, op)
    if result is None:
        return
    for value in _candidates(graph, op):
        if _mismatch(graph, op, value, result) is None:
            yield value


def obstacles(graph: Graph, schedule: Schedule) -> tuple[Obstacle, ...]:
    """Why the other ops are not done in place: one for each compute that makes a value of its own.

    Computes of the same op are listed one by one: what is in the way of the first may be gone at the second.
    The schedule has to be one that `simulate` accepts.
    """
    done = {over.position for over in take_overs(graph, schedule)}
    readers = _readers(graph, schedule)
    found: list[Obstacle] = []
    for position, op, _ in _computes(graph, schedule):
        if position not in done and any(graph.values[v].device == graph.device for v in op.creates):
            found.append(Obstacle(position, op.id, *_reason(graph, op, readers.get(position, {}))))
    return tuple(found)


# What an op could overwrite -------------------------------------------------------------------------------


def _first_output(op: Op) -> int:
    assert op.outputs[0] is not None
    return op.outputs[0]


def _own_result(graph: Graph, op: Op) -> Tensor | None:
    """The op's first output, if it may be written over an argument and has a new value to itself."""
    if op.target not in OVERWRITES or op.mutates or not op.outputs or op.outputs[0] is None:
        return None
    result = graph.tensors[op.outputs[0]]
    others = {graph.tensors[tensor].value for tensor in op.outputs[1:] if tensor is not None}
    alone = result.value in op.creates and result.value not in others
    return result if alone and graph.values[result.value].device == graph.device else None


def _candidates(graph: Graph, op: Op) -> Iterator[int]:
    """The values of the arguments that the op's kernel could write over, best first."""
    for position in OVERWRITES[op.target]:
        arg = op.args[position] if position < len(op.args) else None
        if isinstance(arg, Ref) and (value := graph.tensors[arg.tensor].value) in op.reads:
            yield value


def _mismatch(graph: Graph, op: Op, value: int, result: Tensor) -> str | None:
    """Why `result` can never lie where `value` does, whoever else reads it; None if it can."""
    name = f"'{graph.values[value].name}'"
    if graph.values[value].device != graph.device:
        return f"{name} is on another device"
    if value not in graph.creator:
        return f"its input {name} is resident"
    if graph.values[value].bytes != graph.values[result.value].bytes:
        return (
            f"sizes differ: {name} has {graph.values[value].bytes} bytes, the result "
            f"{graph.values[result.value].bytes}"
        )
    views = [graph.tensors[tensor] for tensor in argument_tensors(op)]
    if any(_geometry(view) != _geometry(result) for view in views if view.value == value):
        return f"the result does not lie in memory as {name} does"
    if result.dtype.startswith("complex"):
        return f"kernels round complex numbers otherwise where they write over them, and {name} has some"
    return None


def _geometry(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride, tensor.offset, item_bytes(tensor.dtype)


# What is in the way ---------------------------------------------------------------------------------------


def _computes(graph: Graph, schedule: Schedule) -> Iterator[tuple[int, Op, set[int]]]:
    """Every compute: its position, its op, and what is freed after it and before the next."""
    freed: set[int] = set()
    waiting: tuple[int, Op] | None = None
    for event in walk(graph, schedule):
        if event.op is not None:
            if waiting is not None:
                yield *waiting, freed
            waiting, freed = (event.position, event.op), set()
        freed.update(event.died)
    if waiting is not None:
        yield *waiting, freed


def _readers(graph: Graph, schedule: Schedule) -> dict[int, dict[int, int]]:
    """For each compute, by position, and each value that it reads: the next op to do so in the same life."""
    following: dict[int, int] = {}
    found: dict[int, dict[int, int]] = {}
    for event in reversed(list(walk(graph, schedule))):
        if (op := event.op) is None:
            continue  # whoever reads it after that reads what was made again
        touched = dict.fromkeys((*op.reads, *op.mutates))
        found[event.position] = {value: following[value] for value in touched if value in following}
        following.update(dict.fromkeys(touched, op.id))
        for value in op.creates:
            following.pop(value, None)
    return found


def _reason(graph: Graph, op: Op, next_reader: Mapping[int, int]) -> tuple[int | None, str]:
    """The input that comes closest to being overwritten, and why it is not."""
    result = _own_result(graph, op)
    if result is None:
        return _likeliest(graph, op), _refusal(op)
    candidates = list(_candidates(graph, op))
    mismatches = {value: _mismatch(graph, op, value, result) for value in candidates}
    for value, mismatch in mismatches.items():
        if mismatch is None:
            return value, _held(graph, value, next_reader)
    if not candidates:
        return None, f"{_short(op)} is given no tensor that it could write over"
    closest = next((value for value in candidates if value in graph.creator), candidates[0])
    return closest, mismatches[closest] or ""


def _refusal(op: Op) -> str:
    """Why an op never writes its result over an input."""
    if op.mutates:
        return f"{_short(op)} changes an input already"
    if op.target in OVERWRITES:
        return f"the first result of {_short(op)} is not a value of its own on the device"
    if not op.reads:
        return f"{_short(op)} reads no tensor"
    return _REASONS.get(_short(op), _UNKNOWN).format(op=_short(op))


def _likeliest(graph: Graph, op: Op) -> int | None:
    """What one would overwrite first: an input made in the graph, as large as the result, the largest."""
    sizes = {graph.values[value].bytes for value in op.creates}

    def rank(value: int) -> tuple[bool, bool, int]:
        size = graph.values[value].bytes
        return value in graph.creator, size in sizes, size

    return max(dict.fromkeys(op.reads), key=rank, default=None)


def _held(graph: Graph, value: int, next_reader: Mapping[int, int]) -> str:
    name = f"'{graph.values[value].name}'"
    if value in next_reader:
        return f"{name} is still needed by {_named(graph.ops[next_reader[value]])}"
    if value in graph.outputs:
        return f"{name} outlives the step"
    return f"{name} is not freed before the next op, though nobody reads it again"


def _named(op: Op) -> str:
    """An op in the middle of a sentence: 'the backward of sigmoid', 'mm in head'."""
    where = f" in '{op.module}'" if op.module else ""
    forward, found, _ = _short(op).partition("_backward")
    return f"the backward of {_FORWARDS.get(forward, forward)}{where}" if found else f"{forward}{where}"


def _short(op: Op) -> str:
    """'mm' for 'aten.mm.default'."""
    return op.target.removeprefix("aten.").removeprefix("lowtide.").partition(".")[0]


_FORWARDS = {"threshold": "relu"}  # whose backward goes by another name
