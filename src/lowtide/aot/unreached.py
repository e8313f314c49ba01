"""Outputs that no gradient reaches, where nobody knew that beforehand.

Autograd hands zeros to a captured backward for these, and weights that nothing but such outputs depends on
would get gradients of zeros, which an optimizer with momentum or weight decay takes for gradients. In plain
training they get none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from lowtide.aot.halves import Halves
from lowtide.errors import CannotApply


class Unreached:
    """Hears, for one captured graph, which of its outputs get no gradient in the backward that begins now."""

    def __init__(self) -> None:
        self._outputs: tuple[int, ...] = ()
        self._unreached: set[int] = set()

    def watching(self, outputs: Sequence[int], call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which returns the graph's results; `outputs` are those that a gradient may reach."""
        self._outputs = tuple(outputs)
        if len(outputs) < 2:  # a backward does not run for nothing
            return call

        def watched(*args: Any) -> Any:
            results = call(*args)
            for number, position in enumerate(self._outputs):
                if isinstance(results[position], torch.Tensor) and results[position].requires_grad:
                    results[position].register_hook(partial(self._hear, number))
            return results

        return watched

    def _hear(self, number: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:
            self._unreached.add(number)

    def without(self, halves: Halves, gradients: Sequence[Any]) -> Sequence[Any]:
        """What the backward has made, with none in place of gradients that are made of zeros alone.

        Raises:
            CannotApply: a gradient is wanted that the planned step had no use for, and gave up.
        """
        unreached, self._unreached = self._unreached, set()
        tangents = halves.tangents
        if len(tangents) != len(self._outputs):
            unreached = set()
        reached = _depending_on([node for number, node in enumerate(tangents) if number not in unreached])
        found = list(zip(halves.gradients, gradients, strict=True))
        if any(gradient is None and node in reached for node, gradient in found):
            raise CannotApply(
                "the backward begins at an output that the loss did not use when the step was planned. "
                "Plan it again with this loss."
            )
        return [gradient if node in reached or not unreached else None for node, gradient in found]


def _depending_on(nodes: Collection[fx.Node]) -> set[fx.Node]:
    """These nodes, and all that are made of them."""
    found = set(nodes)
    waiting = list(nodes)
    while waiting:
        users = set(waiting.pop().users) - found
        found |= users
        waiting += users
    return found
