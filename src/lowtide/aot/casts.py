"""Weights that autocast casts once for several uses.

Autocast keeps the casts of weights until its outermost block ends: a weight that is used again, tied or in a
module that is called twice, is cast once, and what its uses contribute to its gradient is added up in half
precision. Tracing casts it for each use, and adds up in full precision. So the cast is written into the
graph, before the first of these uses, for all of them. Where several graphs use it each of them casts it:
that is said.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Self

import torch
from torch import fx

from lowtide.compat.dispatch import TorchDispatchMode, is_higher_order, without_modes
from lowtide.compat.dynamo import BEGINS_AUTOCAST, ENDS_AUTOCAST
from lowtide.compat.kernels import copied_to
from lowtide.compat.tensors import tensors_in

_TO = copied_to.default
CAST_PER_GRAPH = "autocast casts a weight once for each graph that uses it, in plain training once for all"


def cast_once(module: fx.GraphModule, inputs: Sequence[Any]) -> fx.GraphModule:
    """`module`, or one that does the same where autocast would cast a weight once for several uses.

    Dynamo looks at `module` later, so that it stays as it is.
    """
    given = zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True)
    weights = {node.name for node, arg in given if len(node.users) > 1 and _is_kept(arg)}
    if not weights:
        return module
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    several = [users for users in _uses(graph, weights).items() if len(users[1]) > 1]
    for (weight, dtype, _), users in several:
        with graph.inserting_before(users[0]):
            cast = graph.call_method("to", (weight, dtype))
        cast.meta = {name: value for name, value in users[0].meta.items() if name != "example_value"}
        for user in users:
            user.replace_input_with(weight, cast)
    return fx.GraphModule(module, graph) if several else module


class SharedCasts:
    """Which weights several graphs of a step cast, where one block of autocast is around all of them."""

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype], tuple[weakref.ref[torch.Tensor], int]] = {}

    def watch(
        self, module: fx.GraphModule, inputs: Sequence[Any]
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Makes what runs `module` write down which weights it casts. `module` is looked at now."""
        casts = list(_casts_within_the_block(module, inputs))

        def watched(call: Callable[..., Any]) -> Callable[..., Any]:
            def watched_call(*args: Any) -> Any:
                for position, dtype in casts:
                    self._cast(args[position], dtype)
                return call(*args)

            return watched_call if casts else call

        return watched

    def found(self) -> Iterator[torch.Tensor]:
        """The weights that more than one graph has cast."""
        for reference, count in self._casts.values():
            weight = reference()
            if weight is not None and count > 1:
                yield weight

    def _cast(self, weight: torch.Tensor, dtype: torch.dtype) -> None:
        known = self._casts.get((id(weight), dtype))
        before = known[1] if known is not None and known[0]() is weight else 0
        self._casts[id(weight), dtype] = weakref.ref(weight), before + 1


def _casts_within_the_block(
    module: fx.GraphModule, inputs: Sequence[Any]
) -> Iterator[tuple[int, torch.dtype]]:
    """Which inputs are cast, and to what, before the block of autocast ends that is around the graph."""
    if not _nesting():
        return
    nodes = module.graph.find_nodes(op="placeholder")
    positions = {node: at for at, (node, arg) in enumerate(zip(nodes, inputs, strict=True)) if _is_kept(arg)}
    for weight, dtype, _ in _uses(module.graph, {node.name for node in positions}):
        yield positions[weight], dtype


def _nesting() -> int:
    """How many blocks of autocast are open."""
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _is_kept(arg: Any) -> bool:
    """Whether autocast keeps the casts of this tensor."""
    return isinstance(arg, torch.Tensor) and arg.requires_grad and arg.is_leaf and arg.dtype == torch.float32


def _uses(graph: fx.Graph, weights: Collection[str]) -> dict[tuple[fx.Node, torch.dtype, int], list[fx.Node]]:
    """The calls that cast a weight, by what they cast it to and in which outermost block of autocast."""
    found: dict[tuple[fx.Node, torch.dtype, int], list[fx.Node]] = {}
    with without_modes(), torch.no_grad(), _Blocks() as blocks:
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method") or blocks.follow(node):
                continue
            for weight in node.all_input_nodes:
                device = weight.meta["example_value"].device.type if weight.name in weights else ""
                if device and torch.is_autocast_enabled(device) and blocks.keeps_casts:
                    dtype = torch.get_autocast_dtype(device)
                    if _casts(node, weight, dtype):
                        found.setdefault((weight, dtype, blocks.count), []).append(node)
    return found


class _Blocks:
    """Follows the blocks of autocast in a graph, and switches it on and off as they do."""

    def __init__(self) -> None:
        self.count = 0  # outermost blocks that are over
        self._open: dict[fx.Node, torch.autocast] = {}

    def __enter__(self) -> Self:
        self.keeps_casts = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # fakes are cast here
        self._depth = _nesting()
        return self

    def __exit__(self, *_: object) -> None:
        for block in reversed(self._open.values()):
            block.__exit__(None, None, None)
        torch.set_autocast_cache_enabled(self.keeps_casts)

    def follow(self, node: Any) -> bool:
        """Whether the node begins or ends a block; then that is done."""
        if node.target is BEGINS_AUTOCAST:
            device, dtype, enabled, _ = node.args
            block = self._open[node] = torch.autocast(device, dtype, enabled, cache_enabled=False)
            block.__enter__()
            return True
        if node.target is ENDS_AUTOCAST:
            self._open.pop(node.args[0]).__exit__(None, None, None)
            self.count += not self._open and not self._depth
            return True
        return False


def _casts(node: Any, weight: fx.Node, dtype: torch.dtype) -> bool:
    """Whether all that the call does with the weight is to cast it, for something else that it then does."""
    if is_higher_order(node.target) or any(each.op == "get_attr" for each in node.all_input_nodes):
        return False
    known = weight.meta["example_value"]
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["example_value"])
    with known.fake_mode, _Readers(known) as readers:
        if node.op == "call_method":
            made = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            made = node.target(*args, **kwargs)
    casts = readers.made and all(func is _TO and each.dtype == dtype for func, each in readers.made)
    return bool(casts) and all(made is not each for _, each in readers.made)


class _Readers(TorchDispatchMode):
    """The ops that read a tensor, and what they make of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[tuple[Any, Any]] = []
        self._tensor = tensor

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        is_question = func is torch.ops.prim.device.default
        if not is_question and any(each is self._tensor for each in tensors_in((args, kwargs))):
            self.made.append((func, made))
        return made
