"""A loss for one batch after another: also for those whose labels nobody has when they are planned for.

A loss that closes over the labels of a batch cannot be run for a batch of another size, and the labels of
that one are not known when its forward begins. What such a loss needs is then taken from the batch that it
was first run for.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lowtide.compat.trees import tree_leaves, tree_map
from lowtide.trace.dry_run import Trace
from lowtide.trace.step import Loss, LossWithTargets

_SMALL = 4096  # numbers that a loss makes besides, however small the batch


@dataclass(frozen=True)
class _KnownLoss:
    """What a loss needs beside an output of so many bytes, and which of its tensors get a gradient."""

    output_bytes: int
    growth_bytes: int
    used: frozenset[int]


@dataclass
class LossOfAnyBatch:
    """`loss`, which is called; or, where it raises for a batch, a stand-in that needs as much.

    The stand-in needs, for each byte of the output, what `loss` needed for the batch that `learn` was told
    of, and hands gradients to the same parts of the output. Before that the errors of `loss` are its own.
    """

    loss: Loss
    told: bool = field(default=False, init=False)  # whether the user knows of a stand-in
    stood_in_for: str = field(default="", init=False)  # what the loss raised, when it was last called
    _called_with: tuple[int, frozenset[int]] = field(default=(0, frozenset()), init=False)
    _known: _KnownLoss | None = field(default=None, init=False)

    def __call__(self, output: Any) -> torch.Tensor:
        tensors = tensors_of(output)
        self.stood_in_for = ""
        try:
            number = self.loss(output)
        except Exception as error:  # the user's code may raise anything for a batch that it cannot know
            if self._known is None:
                raise
            self.stood_in_for = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return self._stand_in(self._known, tensors)
        self._called_with = _bytes_of(tensors), _used_by(number, tensors)
        return number

    def learn(self, trace: Trace) -> None:
        """The loss was last called in the step that `trace` is of."""
        if self._known is None:
            output_bytes, used = self._called_with
            self._known = _KnownLoss(output_bytes, _growth_bytes(trace), used)
        if isinstance(self.loss, LossWithTargets):  # of a batch that is not to be held for ever
            self.loss = replace(self.loss, targets=tree_map(_without_numbers, self.loss.targets))

    def _stand_in(self, known: _KnownLoss, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        scaled = -(-known.growth_bytes * _bytes_of(tensors) // max(1, known.output_bytes))
        used = [tensor for position, tensor in enumerate(tensors) if position in known.used]
        number: torch.Tensor = _StandIn.apply(scaled + _SMALL, *used)  # type: ignore[no-untyped-call]
        return number


class _StandIn(torch.autograd.Function):
    """Takes memory for a moment, and hands a gradient to every tensor that it was given."""

    @staticmethod
    def forward(ctx: Any, growth_bytes: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        torch.empty(growth_bytes, dtype=torch.uint8, device=tensors[0].device)
        return tensors[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        return None, *(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds)


def learn_of_loss(loss: Loss | None, plain: Trace) -> None:
    """Let a loss know what it needed in a step, or say that it could not be run for it."""
    if not isinstance(loss, LossOfAnyBatch):
        return
    if not loss.stood_in_for:
        loss.learn(plain)
        return
    if loss.told:
        return
    loss.told = True
    warnings.warn(
        f"lowtide: the loss cannot be run for these inputs ({loss.stood_in_for}): it is counted as for the "
        "first ones, scaled by the size of the output.",
        stacklevel=6,
    )


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors in what a model returns."""
    if dataclasses.is_dataclass(output):
        output = [getattr(output, field.name) for field in dataclasses.fields(output)]
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def _without_numbers(thing: Any) -> Any:
    return torch.empty_like(thing, device="meta") if isinstance(thing, torch.Tensor) else thing


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _used_by(number: Any, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """The positions of those tensors that `number` was made of."""
    ends = {(tensor.grad_fn, tensor.output_nr): place for place, tensor in enumerate(tensors)}
    start = (getattr(number, "grad_fn", None), getattr(number, "output_nr", 0))
    return frozenset(ends[edge] for edge in _edges_to(start, ends) if edge[0] is not None)


def _edges_to(start: tuple[Any, int], ends: Any) -> Iterator[tuple[Any, int]]:
    """Those of `ends` that autograd reaches from `start` without passing through another of them."""
    seen, waiting = {start}, [start]
    while waiting:
        edge = waiting.pop()
        if edge in ends:
            yield edge
            continue
        further = set(getattr(edge[0], "next_functions", ())) - seen
        seen |= further
        waiting += further


def _growth_bytes(trace: Trace) -> int:
    """What a loss, and its own backward, take beside what is there when the model's forward has ended."""
    graph, live = trace.graph, trace.timeline.live_bytes
    ended = max((call.stop for call in trace.calls), default=0)
    ran = {step.runs: place for place, step in enumerate(trace.schedule)}
    of_the_model = (op for op, source in trace.forward_ops.items() if source < ended <= op)
    begin, end = ran[ended], ran[min(of_the_model, default=len(graph.ops) - 1)]
    first = graph.ops[ended]
    made = first.workspace_bytes + sum(graph.counted_bytes(value) for value in first.creates)
    return int(live[begin : max(end, begin + 1)].max()) - (int(live[begin]) - made)
