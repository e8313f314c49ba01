"""A captured graph in two, as AOTAutograd cuts it apart, and what its nodes are."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from lowtide.aot.known import Known
from lowtide.compat.tensors import storage_key, tensors_in
from lowtide.trace.graph_builder import is_op


@dataclass(frozen=True)
class Halves:
    """A captured graph in two: the forward, whose first results are the user's, and the backward, if any."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    user_results: int

    @cached_property
    def ops(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """The nodes that are ops of a `Graph`, in the order in which they run; all others are views."""
        seen: set[int] = set()
        forward = _ops(self.forward.graph, seen)
        return forward, [] if self.backward is None else _ops(self.backward.graph, seen)

    @cached_property
    def given(self) -> list[fx.Node]:
        """What enters the forward."""
        return list(self.forward.graph.find_nodes(op="placeholder"))

    @cached_property
    def constants(self) -> list[fx.Node]:
        """Tensors of the user's code that are there before the step."""
        graphs = (half.graph for half in (self.forward, self.backward) if half is not None)
        return [node for graph in graphs for node in graph.find_nodes(op="get_attr")]

    @cached_property
    def made(self) -> list[Any]:
        """What the forward makes for the user: nodes, and constants."""
        return results_of(self.forward)[: self.user_results]

    @cached_property
    def tangents(self) -> list[fx.Node]:
        """What enters the backward from outside."""
        known = {node.name for node in self.forward.graph.nodes}
        given = () if self.backward is None else self.backward.graph.find_nodes(op="placeholder")
        return [node for node in given if node.name not in known]

    @cached_property
    def gradients(self) -> list[Any]:
        """What the backward makes: nodes, and None where there is no gradient."""
        return [] if self.backward is None else results_of(self.backward)


def identity(module: fx.GraphModule, known: Known) -> str | None:
    """Tells one of Dynamo's graphs from others: what it does with what, and what is known of it.

    None where that cannot be told: there are tensors or graphs inside of it.
    """
    lines = [f"{known}"]
    storages: dict[int, int] = {}
    for node in module.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            return None
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}")
        if node.op == "placeholder":
            lines.append(_given(node.meta.get("example_value"), storages))
    return "\n".join(lines)


def _given(thing: Any, storages: dict[int, int]) -> str:
    """What is told of one input; `storages` are those of the inputs before it."""
    if not isinstance(thing, torch.Tensor):
        return repr(thing)
    if thing.layout is not torch.strided:
        return f"{type(thing)} at {id(thing)}"
    shared = storages.setdefault(storage_key(thing), len(storages))
    place = (thing.device, thing.dtype, tuple(thing.shape), thing.stride(), thing.storage_offset(), shared)
    return f"{place} {thing.requires_grad} {thing.is_leaf}"


def results_of(graph: fx.GraphModule) -> list[Any]:
    """What a graph returns: nodes, and constants."""
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])


def module_stack(node: fx.Node) -> Mapping[str, Any]:
    """The modules whose code `node` comes from, outermost first, as Dynamo knows them."""
    found: Mapping[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return found


def _ops(graph: fx.Graph, seen: set[int]) -> list[fx.Node]:
    """The nodes that make or change something; `seen` are the storages that there were before."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        made = [storage_key(tensor) for tensor in tensors_in(node.meta.get("val"))]
        called = node.op == "call_function" and node.target is not operator.getitem
        if called and is_op(node.target, [storage in seen for storage in made]):
            found.append(node)
        seen.update(made)
    return found
