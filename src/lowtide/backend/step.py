"""The graphs of one `torch.compile`, and the schedules that they follow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from lowtide.aot.codegen import SectionCode, emit
from lowtide.aot.mark import Mark
from lowtide.aot.tangents import with_held_tangents
from lowtide.backend.graph import StepGraph
from lowtide.backend.observe import Run, Storages, joined_runs
from lowtide.backend.request import Request
from lowtide.backend.solve import solved_by_all, with_others
from lowtide.compat.autograd import after_backward
from lowtide.compat.ddp import let_go_of_old_buckets
from lowtide.compat.dynamo_caches import forget_tracing
from lowtide.compat.tensors import StorageWeakRef
from lowtide.solvers.solution import GraphSolution


@dataclass(kw_only=True)
class WatchedRun(Run):
    """One run of one graph in a step that is watched. Its mark is there as long as its backward may come."""

    graph: StepGraph
    mark: StorageWeakRef
    waiting: bool = True  # for its backward


@dataclass(frozen=True)
class StepPlan:
    """A schedule for the graphs that run in one kind of step, and the code for each."""

    graphs: tuple[StepGraph, ...]
    solution: GraphSolution
    sections: tuple[SectionCode, ...]


class CompiledStep:
    """The graphs of one `torch.compile`, and the schedules that they follow.

    A new step begins when a forward runs and no graph waits for its backward, or when the graphs of a plan
    have all run.
    """

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self.options = options
        self.request = Request.read(options)
        self.plans: list[StepPlan] = []
        self.watched: list[WatchedRun] = []
        self._following: StepPlan | None = None
        self._next = 0

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs."""
        return StepGraph(self).compile(module, inputs)

    def next_mark(self, graph: StepGraph) -> Mark | None:
        """Which plan `graph` is to follow now, and as which of its sections; None: it is to be watched."""
        if self._following is not None and self._next == len(self._following.graphs):
            self._following = None
        if self._following is None:
            self._plan_what_was_watched()
            self._following = next((plan for plan in self.plans if plan.graphs[0] is graph), None)
            self._next = 0
        if self._following is None:
            return None
        if self._following.graphs[self._next] is not graph:  # another kind of step
            self._following = None
            return None
        self._next += 1
        return Mark(self.plans.index(self._following), self._next - 1)

    def watch(self, graph: StepGraph, given: Storages, made: Storages) -> torch.Tensor:
        """A forward that follows no plan is over. Returns its mark, written."""
        mark = Mark(None, len(self.watched)).write()
        reference = StorageWeakRef(mark.untyped_storage())
        self.watched.append(
            WatchedRun(drawn=graph.drawn, given=given, made=made, graph=graph, mark=reference)
        )
        return mark

    def watched_run(self, graph: StepGraph, mark: Mark) -> WatchedRun | None:
        """The run of `graph` with this mark; None if its step has been planned without it."""
        run = self.watched[mark.section] if mark.section < len(self.watched) else None
        return run if run is not None and run.graph is graph else None

    def watch_backward(self, run: WatchedRun, tangents: Storages, gradients: Storages) -> None:
        """The backward of a forward that followed no plan is over."""
        run.tangents, run.gradients, run.waiting = tangents, gradients, False
        after_backward(self.look)

    def look(self) -> None:
        """A backward is over: see what is held by others than autograd."""
        for run in self.watched:
            if not run.waiting:
                run.look()

    def _plan_what_was_watched(self) -> None:
        let_go_of_old_buckets()
        forget_tracing()
        if any(run.waiting and not run.mark.expired() for run in self.watched):
            return
        runs, self.watched = [run for run in self.watched if not run.waiting], []
        if not runs:
            return
        whole = with_held_tangents(with_others(joined_runs(runs)))
        solution = solved_by_all(whole, self.request)
        sections = tuple(
            emit(run.graph.halves, whole, solution.schedule, section) for section, run in enumerate(runs)
        )
        self.plans.append(StepPlan(tuple(run.graph for run in runs), solution, sections))
