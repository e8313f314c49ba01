"""The autograd engine from within: which node runs, what nodes have saved, and PyTorch's checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn

from lowtide.compat.patches import patched
from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._C._current_graph_task_id", "tells whether a backward is running"),
    Private("torch._C._current_autograd_node", "tells which node of the backward is running"),
    Private("torch.autograd._get_sequence_nr", "the number that the next node will get"),
    Private("torch.autograd.graph.Node._sequence_nr", "ties a node to the forward op that made it"),
    Private(
        "torch.autograd.graph.Node._raw_saved_result",
        "what a node has saved is in attributes that begin like this, as it was packed",
    ),
    Private(
        "torch.autograd.Variable._execution_engine.queue_callback", "calls back when the backward is over"
    ),
    Private(
        "torch._C._autograd._top_saved_tensors_default_hooks",
        "tells which hooks a tensor that is saved now would go through",
    ),
    Private(
        "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
        "PyTorch's own checkpoint, opened and closed in different calls",
    ),
)

_SAVED = "_raw_saved_"  # _raw_saved_result, _raw_saved_self, …


def in_backward() -> bool:
    """Whether the autograd engine is running a backward, in this thread."""
    return torch._C._current_graph_task_id() != -1


def running_node() -> Any:
    """The node whose backward is running; None if there is none."""
    return torch._C._current_autograd_node()


def in_users_function() -> bool:
    """Whether the node whose backward is running is a custom autograd function."""
    return isinstance(running_node(), torch.autograd.function.BackwardCFunction)


def number_of(node: Any) -> int:
    """The number of a node: they are counted, in each thread, as the forward makes them."""
    return int(node._sequence_nr())


def next_number() -> int:
    """The number that the next node of this thread will get."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def nodes_behind(roots: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Every node that the roots keep alive, once."""
    waiting: list[Any] = [root.grad_fn for root in roots]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting.extend(next_node for next_node, _ in node.next_functions)


def saved_by(node: Any) -> Iterator[tuple[str, object]]:
    """What a node has saved through PyTorch, by attribute, as it was packed."""
    for name in dir(node):
        if name.startswith(_SAVED):
            found = getattr(node, name)
            for packed in found if isinstance(found, (list, tuple)) else (found,):
                yield name.removeprefix(_SAVED), packed.data


def after_backward(call: Callable[[], None]) -> None:
    """Inside of a backward: have `call` called when it is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


@contextmanager
def told_of_functions(tell: Callable[[], None]) -> Iterator[None]:
    """While the block runs, have `tell` called before every custom autograd function."""
    own = vars(torch.autograd.Function)["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        tell()
        return own.__get__(None, cls)(*args, **kwargs)

    why = "no hook of PyTorch tells of them"
    with patched(torch.autograd.Function, "apply", classmethod(apply), why=why, since="torch 2.11"):
        yield


def saving_hooks() -> object:
    """The hooks that a tensor saved now would go through."""
    found: object = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def checkpoint(
    recompute: Callable[..., None], tensors: Sequence[torch.Tensor]
) -> Generator[None, None, None]:
    """PyTorch's checkpoint: it opens at the first `next`, and closes at the second.

    In the backward it calls `recompute(*tensors)`, with the random streams of the first run, until everything
    that was saved is there again.
    """
    generator: Generator[None, None, None] = _checkpoint_without_reentrant_generator(
        recompute,
        True,  # random streams are those of the first run
        noop_context_fn,
        "default",
        False,
        True,  # stop once everything that was saved is there again
        *tensors,
    )
    return generator
