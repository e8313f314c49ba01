"""Outputs that the backward does not begin at.

AOTAutograd takes every differentiable output of a graph to get a gradient. Where a step calls backward on the
loss alone, autograd hands it zeros for the others, as large as they are (the scores of a language model
are what its peak is made of), and adds them up. So outputs that got nothing but zeros when the step was
captured are cut off from the graph. Should a gradient reach them after all, it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.errors import CannotApply


def differentiable_outputs(module: fx.GraphModule) -> list[int]:
    """The positions of a Dynamo graph's outputs that autograd may hand a gradient to."""
    (output,) = module.graph.find_nodes(op="output")
    return [
        position
        for position, node in enumerate(output.args[0])
        if isinstance(node, fx.Node) and getattr(node.meta.get("example_value"), "requires_grad", False)
    ]


def cut_off(
    module: fx.GraphModule, outputs: Sequence[int], compile_: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """What `compile_` makes of `module`, with `outputs` cut off from the graph."""
    outputs = [each for each in outputs if each in differentiable_outputs(module)]
    if not outputs:
        return compile_()
    graph = module.graph
    (result,) = graph.find_nodes(op="output")
    returned = list(result.args[0])
    with graph.inserting_before(result):
        for position in outputs:
            returned[position] = graph.call_method("detach", (returned[position],))
    result.args = (tuple(returned),)
    module.recompile()
    compiled = compile_()

    def call(*args: Any) -> Any:
        results = list(compiled(*args))
        anchor = next((each for each in results if _is_differentiable(each)), None)
        if anchor is not None:
            for position in outputs:
                results[position] = _Refusal.apply(results[position], anchor)  # type: ignore[no-untyped-call]
        return tuple(results)

    return call


def _is_differentiable(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor) and thing.requires_grad


class _Refusal(torch.autograd.Function):
    """The same tensor, at which no backward may begin. One that passes by without a gradient may pass."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is None:
            return None, None
        raise CannotApply(
            "a backward reaches an output of the model that it did not reach when the step was planned: the "
            "plan is for a backward from the loss alone. Plan with a `loss` that uses this output too."
        )
