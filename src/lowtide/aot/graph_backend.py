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

from lowtide.aot.casts import cast_once
from lowtide.aot.eager_kernels import use_eager_kernels
from lowtide.aot.halves import Halves, identity, results_of
from lowtide.aot.kernels import Kernels
from lowtide.aot.known import NOTHING, Known
from lowtide.aot.mark import Mark
from lowtide.aot.unreached import Unreached
from lowtide.aot.unused_draws import draw_once, name_results_of_unused_draws
from lowtide.aot.unused_outputs import cut_off, differentiable_outputs
from lowtide.aot.use_by_use import enter_use_by_use
from lowtide.compat.composites import as_they_run
from lowtide.compat.draws import filled_as_they_lie
from lowtide.compat.dynamo import (
    Run,
    aot_autograd,
    autocast_left_before_backward,
    boxed,
    default_partition,
    drawing_as_eager,
    nothing_written_over,
)
from lowtide.compat.fake_kernels import as_kernels_do
from lowtide.compat.gradient_layouts import gradients_laid_out
from lowtide.compat.views import views_as_they_run
from lowtide.ir.strides import viewed


class CapturedGraph(ABC):
    """One captured graph. A kind of backend says what runs in place of its halves.

    AOTAutograd partitions, then compiles, then runs. `halves` are there from the partition on; for a graph in
    which nothing needs a backward there is none, and they are there when the forward is compiled.
    """

    def __init__(self, kernels: Kernels = Kernels.EAGER) -> None:
        self.kernels = kernels
        self._apart: TakenApart | None = None

    # What a kind of backend decides ---------------------------------------------------------------------

    @abstractmethod
    def run_forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        """The results of the forward, and the mark for its backward, written. Empties `args`."""

    @abstractmethod
    def run_backward(self, mark: Mark, args: list[Any]) -> Any:
        """The results of the backward that belongs to the forward with this mark. Empties `args`."""

    def without_backward(self, graph: fx.GraphModule) -> Run | None:
        """What runs a graph in which nothing needs a backward; None for `run_forward`."""
        return None

    def partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
        """Cut the joint graph in two. Whoever has more to do before or after extends this."""
        forward, backward = _cut_in_two(joint, inputs, **options)
        self.apart.halves = Halves(forward, backward, options["num_fwd_outputs"])
        return forward, backward

    # What all of them do --------------------------------------------------------------------------------

    @property
    def apart(self) -> TakenApart:
        """The graph as AOTAutograd has made it run."""
        assert self._apart is not None, "a graph is compiled first"
        return self._apart

    @property
    def halves(self) -> Halves:
        """The graph as it was cut."""
        assert self.apart.halves is not None, "AOTAutograd partitions, then compiles, then runs"
        return self.apart.halves

    def compile(
        self, module: fx.GraphModule, inputs: Sequence[Any], known: Known = NOTHING
    ) -> Callable[..., Any]:
        """What Dynamo is to call in place of `module`, of whose inputs and outputs something is `known`."""
        self._apart = TakenApart(self, identity(module, known))
        return self._apart.compile(module, inputs, known)

    def compile_as(self, apart: TakenApart) -> Callable[..., Any]:
        """The same for a graph that another backend has compiled, which is done with it."""
        self._apart, apart.runner = apart, self
        call, apart.call = apart.call, None
        assert call is not None, "it was compiled"
        return call


class TakenApart:
    """A graph on its way through AOTAutograd, and what came out: a function that calls two halves.

    What runs in place of the halves is for a `CapturedGraph` to say, and may become another's task: taking a
    graph apart is most of the work, and tensors and their fakes are all the same to what comes of it.
    """

    def __init__(self, runner: CapturedGraph, identity: str | None) -> None:
        self.runner: CapturedGraph | None = runner
        self.identity = identity
        self.halves: Halves | None = None
        self.call: Callable[..., Any] | None = None
        self._unreached = Unreached()

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any], known: Known) -> Callable[..., Any]:
        """What Dynamo is to call."""
        compile_ = aot_autograd(
            fw_compiler=self._compile_forward,
            bw_compiler=self._compile_backward,
            partition_fn=self._partition,
            keep_inference_input_mutations=True,  # updates of buffers become ops of the forward
            decompositions=dict(self.runs.kernels.decompositions),
        )
        with (
            drawing_as_eager(),
            autocast_left_before_backward(),
            nothing_written_over(),
            as_they_run(),
            filled_as_they_lie(),
            as_kernels_do(),
            views_as_they_run(viewed),
            gradients_laid_out(known.layouts),
        ):
            outputs = [at for at in differentiable_outputs(module) if at not in known.gradientless]
            call = enter_use_by_use(
                cast_once(module, inputs),
                inputs,
                known.use_by_use,
                lambda module, inputs: cut_off(module, known.gradientless, lambda: compile_(module, inputs)),
            )
        self.call = self._unreached.watching(outputs, call)
        return self.call

    @property
    def runs(self) -> CapturedGraph:
        """Who runs the halves."""
        assert self.runner is not None, "a spare graph is taken by a backend before it runs"
        return self.runner

    def _partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
        return self.runs.partition(joint, inputs, **options)

    def _compile_forward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Run:
        if self.halves is not None:
            return boxed(self._forward)
        self.halves = Halves(graph, None, len(results_of(graph)))
        return boxed(self.runs.without_backward(graph) or self._forward_alone)

    def _compile_backward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Run:
        return boxed(self._backward)

    def _forward(self, args: list[Any]) -> list[Any]:
        results, mark = self.runs.run_forward(args)
        user = self.runs.halves.user_results
        return [*results[:user], mark, *results[user:]]  # what is saved comes last, and the mark first of it

    def _forward_alone(self, args: list[Any]) -> Sequence[Any]:
        return self.runs.run_forward(args)[0]

    def _backward(self, args: list[Any]) -> Any:
        mark = Mark.read(args.pop(0))
        return self._unreached.without(self.runs.halves, self.runs.run_backward(mark, args))


class Spares:
    """Graphs that a capture has taken apart, until the plan that is made of them is put to work."""

    def __init__(self) -> None:
        self._graphs: list[TakenApart] = []

    def hold(self, graphs: Sequence[TakenApart]) -> None:
        """Hold these, and no others, and nothing of the capture that took them apart, nor of its model."""
        self._graphs = list(graphs)
        for each in self._graphs:
            each.runner = None

    def take(self, identity: str | None) -> TakenApart | None:
        """A graph of this identity, which is not held any longer."""
        found = next((each for each in self._graphs if each.identity == identity is not None), None)
        self._graphs = [each for each in self._graphs if each is not found]
        return found

    def handed_on(self) -> Spares:
        """All of them, which are not held here any longer."""
        found = Spares()
        found._graphs, self._graphs = self._graphs, []
        return found


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
    _never_copied(backward)
    return forward, backward


def _never_copied(backward: fx.GraphModule) -> None:
    """AOTAutograd has a copy of the backward compiled, in the middle of a step, and nobody here looks at it.

    Where the user's code makes constants, copying them would be taken for a part of that step.
    """
    backward.__dict__["__deepcopy__"] = lambda _: backward
