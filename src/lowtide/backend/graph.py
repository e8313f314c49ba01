"""One captured graph: planned alone when it is compiled, and watched until all of its step are planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from lowtide.aot.codegen import SectionCode, emit
from lowtide.aot.draw import Drawn, drawn
from lowtide.aot.mark import Mark
from lowtide.aot.planned_graph import PlannedGraph
from lowtide.backend.observe import storages_of
from lowtide.backend.settled import settled
from lowtide.backend.solve import planned_alone, without_others
from lowtide.compat.dynamo import take_a_list
from lowtide.errors import BadRequest
from lowtide.execute.out_of_memory import explained
from lowtide.solvers.solution import GraphSolution

if TYPE_CHECKING:
    from lowtide.backend.step import CompiledStep


class StepGraph(PlannedGraph):
    """One captured graph, watched while it follows a plan of its own, and then planned with the others."""

    def __init__(self, step: CompiledStep) -> None:
        super().__init__(step.request.kernels)
        self._step = step
        self._drawn: Drawn | None = None
        self._alone: SectionCode | None = None
        self._by_itself: GraphSolution | None = None

    @property
    def drawn(self) -> Drawn:
        """The graph by itself, and what comes and goes."""
        assert self._drawn is not None, "AOTAutograd partitions, then compiles, then runs"
        return self._drawn

    @cached_property
    def settled(self) -> Drawn:
        """The same where it runs by the schedule of its own."""
        assert self._by_itself is not None, "planned alone when it was compiled"
        graph = without_others(self._by_itself.graph)
        return settled(replace(self.drawn, graph=graph), self._by_itself.schedule)

    def partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
        """Cut the joint graph in two, and plan it alone, as low as possible."""
        if any(isinstance(given, torch.SymInt) for given in inputs[0]):
            raise BadRequest(
                "a budget is planned for sizes that are numbers, and Dynamo made some of them symbols. "
                "Compile with dynamic=False; every size is then planned for when it is met."
            )
        halves = super().partition(joint, inputs, **options)
        found = drawn(self.halves, frozenset(options.get("static_lifetime_input_indices") or ()))
        if self._step.request.profile:
            found = replace(found, graph=self.kernels.with_costs(found.graph))
        self._drawn = found
        first = planned_alone(found.graph, self._step.request)
        self._by_itself = first
        self._alone = emit(self.halves, first.graph, first.schedule, 0)
        return halves

    def without_backward(self, graph: fx.GraphModule) -> Callable[[list[Any]], Any]:
        """It is not planned, and runs as it is."""
        take_a_list(graph.graph)
        graph.recompile()
        run: Callable[[list[Any]], Any] = graph.forward
        return run

    def run_forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        mark = self._step.next_mark(self)
        if mark is not None:
            mark = self._step.prepared(mark, args)
        with explained(None, self._solution(mark), "the forward"):
            if mark is not None:
                results = self.code(mark).forward.forward(args)
                return results, self._step.follow(self, mark)
            assert self._alone is not None, "planned alone when it was compiled"
            given = storages_of(args)
            results = self._alone.forward.forward(args)
        made = storages_of(results[: self.halves.user_results])
        return results, self._step.watch(self, given, made)

    def run_backward(self, mark: Mark, args: list[Any]) -> Any:
        with explained(None, self._solution(mark), "the backward", began=0):
            return self._run_backward(mark, args)

    def _run_backward(self, mark: Mark, args: list[Any]) -> Any:
        run = self._step.done(self, mark)
        if run is None or mark.plan is not None:
            return super().run_backward(mark, args)
        tangents = storages_of(args[len(args) - len(self.halves.tangents) :])
        gradients = super().run_backward(mark, args)
        self._step.watch_backward(run, tangents, storages_of(gradients))
        return gradients

    def _solution(self, mark: Mark | None) -> GraphSolution | None:
        """The plan that a run follows."""
        return self._by_itself if mark is None or mark.plan is None else self._step.solution(mark)

    def code(self, mark: Mark) -> SectionCode:
        """The code for a section of a plan, or, while it is watched, for the graph alone."""
        if mark.plan is not None:
            return self._step.code(mark)
        assert self._alone is not None, "planned alone when it was compiled"
        return self._alone
