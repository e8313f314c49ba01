"""Inputs whose gradient autograd itself adds up, one use after another.

What the uses of a tensor contribute to its gradient is added in one order, the latest use first. A graph adds
up the contributions of its own uses and hands on the sum. Where the tensor is used later too, by other graphs
(all layers of a decoder use what the encoder returns) or by the loss, that is another order, and the last
digits of the gradient are others. Such an input enters the graph once for each use, every time as another
view of it: autograd adds what comes back for these as it does without graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.compat.dispatch import without_modes
from lowtide.ir.assumptions import UseByUse


class Entries:
    """What enters the graphs of a step, in the order in which they run."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.Tensor], list[UseByUse | None]]] = {}

    def watch(self, graph: int, module: fx.GraphModule) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Makes what runs `module`, as the graph of this number, write down what enters it.

        `module` is looked at now: compiling it changes it.
        """
        several = _with_several_uses(module)

        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            def watched_call(*args: Any) -> Any:
                for position, tensor in enumerate(args):
                    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                        self._enter(tensor, UseByUse(graph, position) if position in several else None)
                return call(*args)

            return watched_call

        return watched

    def used_outside(self, tensors: Iterable[torch.Tensor]) -> None:
        """What runs between the graphs, or the loss, uses these now."""
        for tensor in tensors:
            self._enter(tensor, None)

    def found(self) -> list[UseByUse]:
        """The inputs that a graph uses several times, and that are used later, too."""
        earlier = [entry for _, entries in self._entries.values() for entry in entries[:-1]]
        return list(dict.fromkeys(entry for entry in earlier if entry is not None))

    def _enter(self, tensor: torch.Tensor, entry: UseByUse | None) -> None:
        known = self._entries.get(id(tensor))
        if known is None or known[0]() is not tensor:
            known = self._entries[id(tensor)] = weakref.ref(tensor), []
        known[1].append(entry)


def enter_use_by_use(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    positions: Collection[int],
    compile_: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """What `compile_` makes of `module`, with the inputs at `positions` entering once for each use.

    Dynamo looks at the inputs of `module` later, so that they stay: another module is compiled.
    """
    uses = {
        position: count for position, count in _with_several_uses(module).items() if position in positions
    }
    if not uses:
        return compile_(module, inputs)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copies))
    given = module.graph.find_nodes(op="placeholder")
    for position in uses:
        _split(copies[given[position]])
    split = fx.GraphModule(module, graph)

    def entering(args: Sequence[Any]) -> list[Any]:
        return [each for position, arg in enumerate(args) for each in _views(arg, uses.get(position, 1))]

    known = [given[at].meta["example_value"] if at in uses else each for at, each in enumerate(inputs)]
    with without_modes(), torch.enable_grad():
        entered = entering(known)
    compiled = compile_(split, entered)
    return lambda *args: compiled(*entering(args))


def _with_several_uses(module: fx.GraphModule) -> dict[int, int]:
    """How often each input is used that is used more than once, and neither changed nor returned."""
    given = module.graph.find_nodes(op="placeholder")
    return {
        position: len(node.users)
        for position, node in enumerate(given)
        if len(node.users) > 1 and not any(map(_changes_or_returns, node.users))
    }


def _changes_or_returns(user: fx.Node) -> bool:
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return user.op == "output" or in_place or name in ("iadd", "isub", "imul", "itruediv", "setitem")


def _split(node: fx.Node) -> None:
    """Give every use of an input but the first an input of its own, in their order."""
    users = [each for each in node.graph.nodes if each in node.users]
    latest = node
    for user in users[1:]:
        with node.graph.inserting_after(latest):
            latest = node.graph.placeholder(f"{node.name}_again")
        latest.target = latest.name  # which no other node has
        latest.meta = dict(node.meta)
        user.replace_input_with(node, latest)


def _views(arg: Any, count: int) -> list[Any]:
    """One view for each use. The last is the first to get a gradient."""
    return [arg] if count == 1 else [arg.view_as(arg) for _ in range(count)]
