"""Random ops whose results nobody uses.

Drawing advances the random state, so what is drawn later depends on it: such an op runs as in eager, in the
forward and once, and its result is dropped at once.
"""

from __future__ import annotations

import operator

import torch
from torch import fx


def name_results_of_unused_draws(joint: fx.GraphModule) -> None:
    """Give each draw of several results a node that takes one: the partitioner wants to see tensors."""
    for node in list(joint.graph.nodes):
        if is_draw(node) and not node.users and isinstance(node.meta.get("val"), tuple | list):
            with joint.graph.inserting_after(node):
                first = joint.graph.call_function(operator.getitem, (node, 0))
            first.meta = {**node.meta, "val": node.meta["val"][0]}


def draw_once(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Take draws of the forward out of the backward, where the partitioner repeats them for nobody."""
    drawn = {node.name for node in forward.graph.nodes if is_draw(node)}
    for node in reversed(backward.graph.nodes):
        if is_draw(node) and node.name in drawn and not node.users:
            backward.graph.erase_node(node)
    backward.graph.eliminate_dead_code()
    backward.recompile()


def is_draw(node: fx.Node) -> bool:
    """Whether `node` draws random numbers."""
    tags = getattr(node.target, "tags", ())
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in tags
