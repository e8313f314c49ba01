"""Planned graphs at work: a Dynamo backend whose graphs run as a schedule says.

AOTAutograd makes an autograd function of each captured graph and calls two compiled halves. Here these
halves are code that was generated from the schedule (see `aot.codegen`). One graph may serve several
sections of a step (equal blocks are compiled once), and each of these may be planned differently: so the
forward asks which section it is, and leaves a mark for its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from lowtide.aot.codegen import SectionCode, emit
from lowtide.aot.graph_backend import Spares
from lowtide.aot.halves import identity
from lowtide.aot.mark import Mark
from lowtide.aot.planned_graph import PlannedGraph
from lowtide.aot.unused_outputs import gradientless
from lowtide.errors import CannotApply
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule


class Execution:
    """A Dynamo backend for one planned step.

    `begin` says that a forward begins: the graphs that run from then on are the sections of the plan, in
    their order.
    """

    def __init__(self, graph: Graph, schedule: Schedule, spares: Spares | None = None) -> None:
        self.graph = graph
        self.schedules = [
            schedule
        ]  # the last one is followed; forwards before it may still wait for their backward
        self._sections = 1 + max((op.section for op in graph.ops), default=-1)
        self._next = 0
        self._has_begun = False
        self._spares = spares or Spares()
        self._numbers: dict[int, int] = {}  # of Dynamo's graphs, by the section that each was compiled for

    def follow(self, schedule: Schedule) -> None:
        """From the next forward on, do as another schedule of the same graph says."""
        self.schedules.append(schedule)

    def begin(self) -> None:
        """A forward of the whole model begins."""
        self._next = 0
        if self._has_begun:
            self._spares.hold(())  # whatever is compiled later is compiled because something has changed
        self._has_begun = True

    @property
    def backend(self) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
        """The Dynamo backend. It refers to this object weakly: Dynamo holds backends until it is reset."""
        reference = weakref.ref(self)

        def compile_(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            execution = reference()
            assert execution is not None, "nothing is compiled for a model that is no longer there"
            return execution.compile(module, inputs)

        return compile_

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs."""
        # What is compiled again, because something that it was compiled for has changed, keeps its number.
        number = self._numbers.setdefault(self._next, len(self._numbers))
        cut_off = gradientless(self.graph.assumptions, number)
        graph, spare = _ScheduledGraph(self), self._spares.take(identity(module, cut_off))
        return graph.compile(module, inputs, cut_off) if spare is None else graph.compile_as(spare)

    def next_section(self) -> int:
        """The section that begins to run now."""
        section = self._next
        self._next += 1
        if section >= self._sections:
            raise CannotApply(
                f"the step does not run as it was planned: more than {self._sections} captured graphs run. "
                "Plan it again, for this model and this batch."
            )
        return section


class _ScheduledGraph(PlannedGraph):
    """One captured graph, and the code for each section that it serves."""

    def __init__(self, execution: Execution) -> None:
        super().__init__()
        self._execution = execution
        self._planned: dict[Mark, SectionCode] = {}

    def run_forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        section = self._execution.next_section()
        mark = Mark(len(self._execution.schedules) - 1, section)
        return self.code(mark).forward.forward(args), mark.write()

    def code(self, mark: Mark) -> SectionCode:
        """The code for a section under a schedule, generated when it is first wanted."""
        if mark not in self._planned:
            assert mark.plan is not None, "every forward runs by a schedule"
            execution = self._execution
            schedule = execution.schedules[mark.plan]
            self._planned[mark] = emit(self.halves, execution.graph, schedule, mark.section)
        return self._planned[mark]
