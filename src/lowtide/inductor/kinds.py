"""What Inductor does with each op: leaves it to whoever wants its result, or runs it."""

from __future__ import annotations

import torch

from lowtide.cost.op_bench import resolve
from lowtide.fusion.fuse import Treatment
from lowtide.ir.graph import Graph, Op, short_name

# Pointwise for a compiler, which eager PyTorch does not call so: they copy, fill or look up.
_POINTWISE = frozenset(
    {
        "_to_copy",
        "arange",
        "constant_pad_nd",
        "convert_element_type",
        "empty_like",
        "expand",
        "fill",
        "full",
        "full_like",
        "gather",
        "inductor_lookup_seed",
        "inductor_randint",
        "inductor_random",
        "iota",
        "new_full",
        "new_ones",
        "new_zeros",
        "ones",
        "ones_like",
        "scalar_tensor",
        "slice_backward",
        "tril",
        "triu",
        "zeros",
        "zeros_like",
    }
)
# Captured as a whole where stretches may run in slices: numbers for each row, which are small, and what is
# computed of them element by element.
_ROW_BY_ROW = frozenset(
    {
        "_log_softmax",
        "_log_softmax_backward_data",
        "_softmax",
        "_softmax_backward_data",
        "nll_loss_backward",
    }
)
_REDUCTIONS = frozenset(
    {
        "nll_loss_forward",
        "amax",
        "amin",
        "any",
        "all",
        "argmax",
        "argmin",
        "mean",
        "native_group_norm",
        "native_layer_norm",
        "prod",
        "std_mean",
        "sum",
        "var",
        "var_mean",
    }
)


_CONSTANTS = frozenset({"full", "full_like", "new_zeros", "zeros", "zeros_like"})


def kind_of(graph: Graph, op: Op) -> Treatment:
    """What Inductor does with an op of `graph`."""
    if op.target.startswith("lowtide.") or op.random:
        return Treatment.WHOLE
    name = short_name(op.target)
    if name in _REDUCTIONS:
        return Treatment.REDUCTION
    if op.mutates or op.updates:
        return Treatment.REDUCTION  # writes, and computes on the way what it writes
    if op.target == "aten.scatter.value":  # one number into a constant: a comparison of indices
        into = graph.creator.get(op.reads[0])
        is_constant = into is not None and short_name(graph.ops[into].target) in _CONSTANTS
        return Treatment.POINTWISE if is_constant else Treatment.WHOLE
    tags = getattr(resolve(op.target), "tags", ())
    is_pointwise = name in _POINTWISE or name in _ROW_BY_ROW or torch.Tag.pointwise in tags
    return Treatment.POINTWISE if is_pointwise else Treatment.WHOLE
