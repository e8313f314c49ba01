"""BatchNorm's backward from its output instead of its input, so that the forward can be done in place.

A BatchNorm that trains writes y = x̂ · weight + bias, with x̂ = (x - mean) · invstd. Its backward needs x̂,
and PyTorch's recomputes it from x: so x must be held beside y, and y cannot be written over it. But x̂ is
as well (y - bias) / weight. A backward that starts there leaves x to be overwritten (Rota Bulò et al.,
arXiv 1712.02616).

What it saves: x, wherever y is held for somebody else anyway: a convolution or a GELU that reads y, say.
Where y would have been overwritten in turn, by a ReLU or by a sum, y is held now instead of x, and nothing
is saved.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.ir.graph import Arg, Graph, Op, Ref
from lowtide.ir.validate import validate

FROM_OUTPUT = "lowtide.batch_norm_backward_from_output.default"

_FORWARDS = ("aten.native_batch_norm.default", "aten.cudnn_batch_norm.default")
# By target: where grad_out, weight, save_mean, save_invstd and output_mask are among the arguments.
_BACKWARDS = {
    "aten.native_batch_norm_backward.default": (0, 2, 5, 6, 9),
    "aten.cudnn_batch_norm_backward.default": (1, 2, 5, 6, None),
}


def normalise_from_output(graph: Graph) -> Graph:
    """The same step, with every backward of a training BatchNorm that can be made to read its output.

    The new op is called with (grad_out, output, weight, bias, save_mean, save_invstd, output_mask), where
    weight and bias may be None, and has the outputs of the one that it replaces: the gradients of input,
    weight and bias. The executor has a kernel for it; PyTorch has none.

    Gradients are not equal in every bit: dividing by the weight rounds, and the smaller a weight is against
    its bias, the more is lost. A weight of exactly zero cannot be divided by, so do not use this where
    weights start at zero. A BatchNorm whose output is changed by another op later on stays as it is.

    Raises:
        MalformedGraph: the graph that was given is not well formed.
    """
    changed = {value for op in graph.ops for value in op.mutates}
    makers = {
        tensor: op
        for op in graph.ops
        if op.target in _FORWARDS
        for tensor in op.outputs
        if tensor is not None
    }
    ops = tuple(_rewritten(graph, op, makers, changed) for op in graph.ops)
    return validate(replace(graph, ops=ops))


def _rewritten(graph: Graph, op: Op, makers: dict[int, Op], changed: set[int]) -> Op:
    """The op, or what stands in for it."""
    if op.target not in _BACKWARDS:
        return op
    gradient, weight, mean, invstd, mask = _BACKWARDS[op.target]
    saved = op.args[invstd]
    forward = makers.get(saved.tensor) if isinstance(saved, Ref) else None
    if forward is None or forward.outputs[0] is None or not _trains(forward):
        return op
    output = forward.outputs[0]
    if graph.tensors[output].value in changed:
        return op
    args: tuple[Arg, ...] = (
        op.args[gradient],
        Ref(output),
        op.args[weight],
        forward.args[2],
        op.args[mean],
        saved,
        (True, True, True) if mask is None else op.args[mask],
    )
    looked_at = [graph.tensors[arg.tensor].value for arg in args if isinstance(arg, Ref)]
    return replace(op, target=FROM_OUTPUT, args=args, kwargs=(), reads=tuple(dict.fromkeys(looked_at)))


def _trains(forward: Op) -> bool:
    """Whether the op normalises by the batch's own statistics, which the formula is for."""
    return len(forward.args) > 5 and forward.args[5] is True
