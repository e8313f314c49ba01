"""Views of what was changed in place: what their gradients pass through.

Where a view, or what it looks at, is changed in place, PyTorch gives the view another node: one that writes
its gradient into new memory, laid out as what it looks at. For tensor subclasses, which fake tensors are, it
looks at the changed tensor anew instead and takes the nodes of that, which need no memory. The dry run
recognises these looks, for nobody holds their results, and repeats what the other node would have done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.compat.autograd import next_number, number_of, running_node
from lowtide.compat.dispatch import schema_of
from lowtide.compat.tensors import storage_key

aten = torch.ops.aten

Run = Callable[..., torch.Tensor]  # an op on its arguments, written down
_Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


@dataclass(frozen=True, slots=True)
class _Glance:
    """A look at a tensor, and the number of the node that is to give its gradient."""

    result: weakref.ref[torch.Tensor]
    is_whole: bool
    layout: _Layout  # of the tensor that is looked at
    number: int


class ReplayedViews:
    """Tells PyTorch's own looks from those of the user, and what gradients that flow through them take."""

    def __init__(self) -> None:
        self._row: list[_Glance] = []  # each at the one before, and no other op since
        self._layouts: dict[int, _Layout] = {}  # of changed tensors, by the node of the first look

    def forward(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """An op of a forward has run."""
        makes_node = func is not aten.detach.default and torch.is_grad_enabled()
        if not makes_node or not _is_look(func, args, result) or not args[0].requires_grad:
            self._settle()
            return
        if not self._row or self._row[-1].result() is not args[0]:
            self._settle()
        is_whole = result.numel() == args[0].numel()
        layout = tuple(args[0].shape), args[0].stride()
        self._row.append(_Glance(weakref.ref(result), is_whole, layout, next_number() - 1))

    def backward(self, func: Any, args: tuple[Any, ...], result: Any, run: Run) -> Any:
        """What `func` returns, in new memory if it is the gradient of a look of PyTorch's own."""
        self._settle()
        node = running_node()
        layout = None if node is None else self._layouts.get(number_of(node))
        if layout is None or not _is_look(func, args, result) or tuple(result.shape) != layout[0]:
            return result
        memory = run(aten.new_zeros.default, result, [result.numel()])
        return run(aten.copy_.default, memory.as_strided(*layout), result)

    def _settle(self) -> None:
        """The row is over. If nobody holds any of it any more, it was PyTorch's own.

        What shows a part alone has its gradient written into new memory either way.
        """
        row, self._row = self._row, []
        if row and all(look.is_whole and look.result() is None for look in row):
            self._layouts[row[0].number] = row[0].layout


def _is_look(func: Any, args: tuple[Any, ...], result: Any) -> bool:
    """Whether an op shows the memory of its first argument and changes nothing."""
    if not isinstance(result, torch.Tensor) or not args or not isinstance(args[0], torch.Tensor):
        return False
    schema = schema_of(func)
    is_pure = schema is not None and not schema.is_mutable
    return is_pure and storage_key(result) == storage_key(args[0])
