"""One of Dynamo's graphs on its way through AOTAutograd: what every backend of lowtide does with it.

AOTAutograd traces forward and backward of a graph together and has the joint graph cut in two, here so that
everything the backward wants is kept: what to recompute is for lowtide to decide. Then it makes an autograd
function of the two halves. The same graph may run several times in a step, so each run of a forward leaves a
mark for its backward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.aot.eager_kernels import use_eager_kernels
from lowtide.aot.halves import Halves, results_of
from lowtide.aot.mark import Mark
from lowtide.aot.unused_draws import draw_once, name_results_of_unused_draws
from lowtide.aot.unused_outputs import cut_off
from lowtide.compat.composites import as_they_run
from lowtide.compat.dynamo import Run, aot_autograd, boxed, default_partition, drawing_as_eager


class CapturedGraph(ABC):
    """One captured graph. A kind of backend says what runs in place of its halves.

    AOTAutograd partitions, then compiles, then runs. `halves` are there from the partition on; for a graph in
    which nothing needs a backward there is none, and they are there when the forward is compiled.
    """

    def __init__(self) -> None:
        self._halves: Halves | None = None

    # What a kind of backend decides ---------------------------------------------------------------------

    @abstractmethod
    def run_forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        """The results of the forward, and the mark for its backward, written. Empties `args`."""

    @abstractmethod
    def run_backward(self, mark: Mark, args: list[Any]) -> Any:
        """The results of the backward that belongs to the forward with this mark. Empties `args`."""

    def without_backward(self, graph: fx.GraphModule) -> Run:
        """What runs a graph in which nothing needs a backward."""
        return lambda args: self.run_forward(args)[0]

    def partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
        """Cut the joint graph in two. Whoever has more to do before or after extends this."""
        forward, backward = _cut_in_two(joint, inputs, **options)
        self._halves = Halves(forward, backward, options["num_fwd_outputs"])
        return forward, backward

    # What all of them do --------------------------------------------------------------------------------

    @property
    def halves(self) -> Halves:
        """The graph as it was cut."""
        assert self._halves is not None, "AOTAutograd partitions, then compiles, then runs"
        return self._halves

    def compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], gradientless: Sequence[int] = ()
    ) -> Callable[..., Any]:
        """What Dynamo is to call in place of `module`, of whose outputs `gradientless` get no gradient."""
        compile_ = aot_autograd(
            fw_compiler=self._compile_forward,
            bw_compiler=self._compile_backward,
            partition_fn=self.partition,
            keep_inference_input_mutations=True,  # updates of buffers become ops of the forward
        )
        with drawing_as_eager(), as_they_run():
            return cut_off(module, gradientless, lambda: compile_(module, inputs))

    def _compile_forward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Run:
        if self._halves is not None:
            return boxed(self._forward)
        self._halves = Halves(graph, None, len(results_of(graph)))
        return boxed(self.without_backward(graph))

    def _compile_backward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Run:
        return boxed(self._backward)

    def _forward(self, args: list[Any]) -> list[Any]:
        results, mark = self.run_forward(args)
        user = self.halves.user_results
        return [*results[:user], mark, *results[user:]]  # what is saved comes last, and the mark first of it

    def _backward(self, args: list[Any]) -> Any:
        mark = Mark.read(args.pop(0))
        return self.run_backward(mark, args)


def _cut_in_two(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Forward and backward of a joint graph, with eager's kernels, keeping everything.

    The same joint graph is always cut into the same ops, in the same order.
    """
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
        node.meta.pop("saved_tensor_with_no_vc_check", None)
    use_eager_kernels(joint)
    name_results_of_unused_draws(joint)
    forward, backward = default_partition(joint, inputs, **options)
    draw_once(forward, backward)
    return forward, backward
