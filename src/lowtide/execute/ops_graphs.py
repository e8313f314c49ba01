"""Planned graphs at work: a Dynamo backend whose graphs run as a schedule says.

AOTAutograd makes an autograd function of each captured graph and calls two compiled halves. Here these
halves are code that was generated from the schedule (see `aot.codegen`). One graph may serve several
sections of a step (equal blocks are compiled once), and each of these may be planned differently: so the
forward asks which section it is, and leaves a mark for its backward.

A step need not take the path that was planned: it may leave layers out (LayerDrop), and goes on with the
section that it meets next; a path that leaves sections out holds no more than the whole. A graph that is no
section of the plan runs by a schedule of its own that keeps as little as possible, and that is told.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import fx

from lowtide.aot.between import beyond, nodes_between
from lowtide.aot.codegen import SectionCode, WrittenCode, emit, kind_of, kind_of_section
from lowtide.aot.draw import drawn
from lowtide.aot.graph_backend import Spares
from lowtide.aot.halves import Halves, identity
from lowtide.aot.kernels import Kernels
from lowtide.aot.known import known_of
from lowtide.aot.mark import Mark
from lowtide.aot.planned_graph import PlannedGraph
from lowtide.compat.autograd import next_number
from lowtide.compat.dynamo import take_a_list
from lowtide.execute.corrected import Corrected
from lowtide.inductor.section import generated_section
from lowtide.ir.assumptions import NodesBetween
from lowtide.ir.graph import Graph
from lowtide.ir.keep import keep_only
from lowtide.ir.schedule import Schedule
from lowtide.ir.simulate import simulate
from lowtide.solvers import solve
from lowtide.solvers.method import Effort
from lowtide.solvers.ops.evict import Evict
from lowtide.text.budget import LOWEST

Explain: TypeAlias = Callable[[str, int], AbstractContextManager[None]]  # what runs, and since which node


def _unexplained(doing: str, began: int) -> AbstractContextManager[None]:
    return nullcontext()


class Execution:
    """A Dynamo backend for one planned step.

    `begin` says that a forward begins: the graphs that run from then on are sections of the plan, in their
    order. `end` says that it is over. `astray` is told of what is not in the plan.
    """

    def __init__(
        self,
        graph: Graph,
        schedule: Schedule,
        spares: Spares | None = None,
        astray: Callable[[str], None] = lambda how: None,
        budget_bytes: int | None = None,
        explain: Explain = _unexplained,
    ) -> None:
        self.graph = graph
        self._corrected = Corrected(graph, schedule, budget_bytes)
        self.kernels = Kernels.of(graph)
        self.schedules = [
            schedule
        ]  # the last one is followed; forwards before it may still wait for their backward
        self.astray = astray
        self._explain = explain
        self._began = 0
        self._waiting: list[int] = []  # the sections that have not run in this forward
        self._latest = -1  # the last one that has
        self._has_begun = False
        self.compiled = 0  # graphs
        self._spares = spares or Spares()

    @cached_property
    def growth_bytes(self) -> int:
        """What the planned step holds at most, beyond what is there before it."""
        return simulate(self.graph, self.schedules[-1]).growth_bytes

    @cached_property
    def _kinds(self) -> list[int]:
        """What each section does, in one number."""
        sections = 1 + max((op.section for op in self.graph.ops), default=-1)
        return [kind_of_section(self.graph, section) for section in range(sections)]

    def with_kernels(self, code: WrittenCode, halves: Halves, section: int) -> SectionCode:
        """The code for a section, run by the kernels that the plan is for."""
        if self.kernels is Kernels.EAGER:
            return code
        tangents = [node.meta.get("val") for node in halves.tangents]
        return generated_section(code, halves.user_results, tangents, self._corrected.reading(section))

    @property
    def sections(self) -> int:
        """How many graphs the planned step runs."""
        return len(self._kinds)

    def follow(self, schedule: Schedule) -> None:
        """From the next forward on, do as another schedule of the same graph says."""
        self.schedules.append(schedule)

    def begin(self) -> None:
        """A forward of the whole model begins.

        Raises:
            InfeasibleBudget: no code that was generated for any plan was within the budget.
        """
        self.follow_better()
        self._waiting, self._latest, self._began = list(range(len(self._kinds))), -1, next_number()
        if self._has_begun:
            self._spares.hold(())  # whatever is compiled later is compiled because something has changed
        self._has_begun = True

    def explained(self, doing: str) -> AbstractContextManager[None]:
        """In this block running out of memory is an error that is explained."""
        return self._explain(doing, self._began)

    def follow_better(self) -> bool:
        """Follow a better plan, if what became known of the code for this one calls for that.

        Raises:
            InfeasibleBudget: no code that was generated for any plan was within the budget.
        """
        better = self._corrected.next_plan()
        if better is not None:
            self.follow(better)
        return better is not None

    def end(self, output: Any) -> None:
        """The forward is over, with this output. Where numbers decide its path, look at which one it took."""
        found = next((each for each in self.graph.assumptions if isinstance(each, NodesBetween)), None)
        if found is not None and (more := beyond(nodes_between(output), found)):
            self.astray(f"a part of it runs that is not in the plan, nor in any captured graph ({more[0]})")

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
        self.compiled += 1
        known = known_of(1 + self._latest, self.graph.assumptions)
        graph, spare = _ScheduledGraph(self), self._spares.take(identity(module, known))
        return graph.compile(module, inputs, known) if spare is None else graph.compile_as(spare)

    def section_of(self, kind: int) -> int | None:
        """The section that begins to run now and does what `kind` says; None if the plan has none left.

        Sections are met in their order, and those before the one that is met are left out. Where none that
        comes fits, one that was left out does: each runs at most once in a forward.
        """
        fitting = [section for section in self._waiting if self._kinds[section] == kind]
        found = next((section for section in fitting if section > self._latest), next(iter(fitting), None))
        if found is None:
            return None
        if found < self._latest:
            self.astray("parts of it run in another order")
        self._waiting.remove(found)
        self._latest = max(self._latest, found)
        return found


class _ScheduledGraph(PlannedGraph):
    """One captured graph, and the code for each section that it serves."""

    def __init__(self, execution: Execution) -> None:
        super().__init__(execution.kernels)
        self._execution = execution
        self._planned: dict[Mark, SectionCode] = {}

    @cached_property
    def _kind(self) -> int:
        return kind_of(self.halves)

    @cached_property
    def _alone(self) -> SectionCode:
        """The code for a run that nobody has planned.

        It keeps nothing that can be made again, unless running all of it again at once would take more than
        the whole step was to take: then it goes as low as it can by itself.
        """
        if self.halves.backward is None:
            return WrittenCode(_taking_a_list(self.halves.forward), None)
        graph = drawn(self.halves, frozenset()).graph
        least = keep_only(graph, frozenset(), is_part=True)
        if simulate(graph, least).growth_bytes > self._execution.growth_bytes:
            least = solve(graph, Evict(Effort.QUICK), LOWEST).schedule
        return emit(self.halves, graph, least, 0)

    def run_forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        section = self._execution.section_of(self._kind)
        if section is None:
            if any(self.halves.ops):
                self._execution.astray("a part of it runs that is not in the plan")
            return self._alone.forward.forward(args), Mark(None, 0).write()
        mark = self._prepared(section, args)
        return self.code(mark).forward.forward(args), mark.write()

    def run_backward(self, mark: Mark, args: list[Any]) -> Any:
        with self._execution.explained("the backward"):
            return super().run_backward(mark, args)

    def _prepared(self, section: int, args: Sequence[Any]) -> Mark:
        """The mark of a run whose code is there, and within the budget as far as that is known."""
        while True:
            mark = Mark(len(self._execution.schedules) - 1, section)
            self.code(mark).prepare(args)
            if not self._execution.follow_better():
                return mark

    def code(self, mark: Mark) -> SectionCode:
        """The code for a section under a schedule, generated when it is first wanted."""
        if mark.plan is None:
            return self._alone
        if mark not in self._planned:
            execution = self._execution
            schedule = execution.schedules[mark.plan]
            code = emit(self.halves, execution.graph, schedule, mark.section)
            self._planned[mark] = execution.with_kernels(code, self.halves, mark.section)
        return self._planned[mark]


def _taking_a_list(graph: fx.GraphModule) -> fx.GraphModule:
    take_a_list(graph.graph)
    graph.recompile()
    return graph
