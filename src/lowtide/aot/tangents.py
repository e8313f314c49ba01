"""Gradients that autograd hands to a captured backward, and holds on to until that is over.

A schedule drops a gradient after the last op of the backward that reads it. From torch 2.13 on autograd hands
it over for good; before, the tuple of arguments in the call keeps it alive, and so it has to be counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from lowtide.ir.graph import Graph, Op, Phase, argument_tensors
from lowtide.ir.recomputable import BETWEEN_GRAPHS, between_graphs

RETURN = "lowtide.backward.return"
HANDED_OVER = hasattr(torch.autograd.Function, "boxed_grads_call")


def with_held_tangents(graph: Graph, handed_over: bool = HANDED_OVER) -> Graph:
    """`graph` with an op at the end of each captured backward that needs every gradient it was given."""
    held = {} if handed_over else _tangents(graph)
    last = {op.section: op.id for op in graph.ops if op.phase is Phase.BACKWARD and op.section in held}
    ops: list[Op] = []
    for op in graph.ops:
        ops.append(replace(op, id=len(ops)))
        if last.get(op.section) == op.id:
            given_back = between_graphs(RETURN, Phase.BACKWARD, held[op.section], module=op.module)
            ops.append(replace(given_back, id=len(ops)))
    return replace(graph, ops=tuple(ops))


def _tangents(graph: Graph) -> Mapping[int, Mapping[int, int]]:
    """By section: the gradients that its backward is given, and how it looks at each."""
    found: dict[int, dict[int, int]] = {}
    for op in graph.ops:
        if op.phase is not Phase.BACKWARD or op.section == BETWEEN_GRAPHS:
            continue
        for tensor in argument_tensors(op):
            value = graph.tensors[tensor].value
            maker = graph.creator.get(value)
            if maker is None or value not in op.reads:
                continue
            if graph.ops[maker].phase is Phase.BACKWARD and graph.ops[maker].section != op.section:
                found.setdefault(op.section, {}).setdefault(value, tensor)
    return found
