"""Planned graphs at work: a Dynamo backend whose graphs run as a schedule says.

AOTAutograd makes an autograd function of each captured graph and calls two compiled halves. Here these
halves are code that was generated from the schedule (see `emission`). One graph may serve several
sections of a step (equal blocks are compiled once), and each of these may be planned differently: so the
forward asks which section it is, and leaves a mark for its backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from torch import fx
from torch._dynamo.backends.common import aot_autograd

from lowtide.aot.codegen import Halves, Planned, emit
from lowtide.aot.mark import Mark
from lowtide.aot.sections import boxed, cut_in_two
from lowtide.aot.unused_outputs import cut_off, gradientless
from lowtide.errors import CannotApply
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import Schedule

_FRAMES_TO_AUTOGRAD = 12


class Execution:
    """A Dynamo backend for one planned step.

    `begin` says that a forward begins: the graphs that run from then on are the sections of the plan, in
    their order.
    """

    def __init__(self, graph: Graph, schedule: Schedule) -> None:
        self.graph = graph
        self.schedules = [
            schedule
        ]  # the last one is followed; forwards before it may still wait for their backward
        self._sections = 1 + max((op.section for op in graph.ops), default=-1)
        self._next = 0
        self._numbers: dict[int, int] = {}  # of Dynamo's graphs, by the section that each was compiled for

    def follow(self, schedule: Schedule) -> None:
        """From the next forward on, do as another schedule of the same graph says."""
        self.schedules.append(schedule)

    def begin(self) -> None:
        """A forward of the whole model begins."""
        self._next = 0

    def backend(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs."""
        graph = _PlannedGraph(self)
        compile_ = aot_autograd(
            fw_compiler=graph.compile_forward,
            bw_compiler=graph.compile_backward,
            partition_fn=graph.partition,
            keep_inference_input_mutations=True,
        )
        # Planning anything else empties Dynamo's caches: a graph that is compiled again keeps its number.
        number = self._numbers.setdefault(self._next, len(self._numbers))
        cut = gradientless(self.graph.assumptions, number)
        return cut_off(module, cut, lambda: compile_(module, inputs))

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


class _PlannedGraph:
    """One captured graph, and the code for each section that it serves."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self._halves: Halves | None = None
        self._planned: dict[tuple[int, int], Planned] = {}

    def partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
        """Cut the joint graph in two, keeping everything, as it was cut when it was captured."""
        forward, backward = cut_in_two(joint, inputs, **options)
        self._halves = Halves(forward, backward, options["num_fwd_outputs"])
        return forward, backward

    def compile_forward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """A callable that runs the forward of whichever section is next."""
        if self._halves is None:  # nothing in it needs a backward
            self._halves = Halves(graph, None, len(graph.graph.output_node().args[0]))  # type: ignore[arg-type]

        def run(args: list[Any]) -> Any:
            section = self._execution.next_section()
            schedule = len(self._execution.schedules) - 1
            planned = self.planned(schedule, section)
            results = planned.forward.forward(args)
            if planned.backward is None:
                return results
            user = self.halves.user_results
            return [*results[:user], Mark(schedule, section).write(), *results[user:]]

        return boxed(run)

    def compile_backward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """A callable that runs the backward of the section whose mark it is given."""

        def run(args: list[Any]) -> Any:
            refuse_graphs_of_the_backward()
            schedule, section = Mark.read(args.pop(0))
            assert schedule is not None, "every forward here runs by a schedule"
            backward = self.planned(schedule, section).backward
            assert backward is not None, "only a forward with a backward leaves a mark"
            return backward.forward(args)

        return boxed(run)

    @property
    def halves(self) -> Halves:
        """The graph as it was cut."""
        assert self._halves is not None, "AOTAutograd partitions, then compiles, then runs"
        return self._halves

    def planned(self, schedule: int, section: int) -> Planned:
        """The code for a section under a schedule, generated when it is first wanted."""
        key = schedule, section
        if key not in self._planned:
            execution = self._execution
            self._planned[key] = emit(self.halves, execution.graph, execution.schedules[schedule], section)
        return self._planned[key]


def refuse_graphs_of_the_backward() -> None:
    """Raise an error if the backward that runs now is to be differentiated itself.

    PyTorch would refuse that too, but only when it comes to it, and without saying what to do. AOTAutograd
    calls the backward through a function of that name then; autograd itself cannot be asked.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_TO_AUTOGRAD):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code.co_name == "_double_backward":
            raise CannotApply(
                "a planned backward cannot be differentiated (create_graph=True). Take the plan off for such "
                "steps (lowtide.remove(model)), or compute that term with a copy of the model without a plan."
            )
