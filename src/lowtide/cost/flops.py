"""Floating-point operations of a graph's ops, by PyTorch's own formulas."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lowtide.ir.graph import Arg, Graph, Op, Ref, Symbol

_FORMULAS: Mapping[str, Callable[..., int]] = {str(op): formula for op, formula in flop_registry.items()}
# The counter knows these on CUDA only. How many of their arguments its formulas take.
_FOR_CPU: Mapping[str, tuple[Callable[..., int], int]] = {
    "aten._scaled_dot_product_flash_attention_for_cpu": (sdpa_flop_count, 3),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": (sdpa_backward_flop_count, 4),
}


def flops_of(graph: Graph, op: Op) -> int:
    """What PyTorch's counter says of one op: matrix products, convolutions and attention; else zero."""
    name = op.target.rsplit(".", 1)[0].removesuffix("_")
    if name not in _FORMULAS and name not in _FOR_CPU:
        return 0
    args = [_shaped(graph, arg) for arg in op.args if not isinstance(arg, Symbol)]
    if "scaled_dot_product" in name:
        args = _heads_repeated(args, first=1 if name.endswith("_backward") else 0)
    if name in _FOR_CPU:
        formula, count = _FOR_CPU[name]
        return int(formula(*args[:count]))
    kwargs = {key: _shaped(graph, arg) for key, arg in op.kwargs if key != "out"}
    made = [None if output is None else graph.tensors[output].shape for output in op.outputs]
    return _FORMULAS[name](*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made))


def _heads_repeated(args: list[Any], first: int) -> list[Any]:
    """Keys and values of an attention with as many heads as its queries, as the kernel repeats them.

    The counter before torch 2.13 refuses fewer. `first` is the position of the queries.
    """
    heads = args[first][1]
    repeated = [(shape[0], heads, *shape[2:]) for shape in args[first + 1 : first + 3]]
    return [*args[: first + 1], *repeated, *args[first + 3 :]]


def _shaped(graph: Graph, arg: Arg) -> Any:
    """The formulas take shapes where ops take tensors."""
    if isinstance(arg, Ref):
        return graph.tensors[arg.tensor].shape
    return tuple(_shaped(graph, item) for item in arg) if isinstance(arg, tuple) else arg
