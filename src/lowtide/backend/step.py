"""The graphs of one `torch.compile`, and the schedules that they follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from lowtide.aot.codegen import SectionCode, emit
from lowtide.aot.halves import Halves
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
from lowtide.execute.corrected import Corrected
from lowtide.inductor.section import generated_section
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.solvers.refereed import extra_seconds
from lowtide.solvers.solution import GraphSolution
from lowtide.text.units import format_bytes


@dataclass(kw_only=True)
class StepRun:
    """One run of one graph in a step. Its mark is there as long as its backward may come."""

    graph: StepGraph
    mark: StorageWeakRef
    watched: Run | None = None  # None where it follows the plan of a step
    waiting: bool = True  # for its backward

    @property
    def may_go_on(self) -> bool:
        """Whether its backward is still to come, as far as anybody knows."""
        return self.waiting and not self.mark.expired()

    @property
    def has_failed(self) -> bool:
        """Whether its backward began while it was watched, and never came to its end."""
        return self.watched is not None and not self.waiting and not self.watched.is_whole


@dataclass(frozen=True)
class StepPlan:
    """A schedule for the graphs that run in one kind of step, and the code for each that follows it.

    The first ones, as many as are `shared` with other kinds of steps, have none: they run by schedules of
    their own, for when they run nobody knows yet which kind of step it is.
    """

    number: int
    shared: int
    solution: GraphSolution
    sections: tuple[SectionCode | None, ...]
    corrected: Corrected
    planned: tuple[int, ...]  # the graphs that the solution is of, by when they run


@dataclass
class Path:
    """A kind of step: the graphs that run in it, in their order, and its plan once there is one."""

    graphs: tuple[StepGraph, ...]
    shared: int = 0  # so many of its first graphs run in another kind of step as well
    plan: StepPlan | None = None

    def begins_with(self, graphs: Sequence[StepGraph]) -> bool:
        """Whether these are its first graphs."""
        return _in_common(self.graphs, graphs) == len(graphs)

    @property
    def is_planned(self) -> bool:
        """Whether it has a plan, made since another kind of step was found to begin like it."""
        return self.plan is not None and self.plan.shared == self.shared


class CompiledStep:
    """The graphs of one `torch.compile`, and the schedules that they follow.

    A new step begins when a forward runs and no graph waits for its backward, or when all graphs of a kind
    of step have run. Each kind is watched once, and once more when another is met that begins like it.
    """

    def __init__(self, options: Mapping[str, Any] | None) -> None:
        self.options = options
        Request.read(options)
        self.paths: list[Path] = []
        self._plans: list[StepPlan] = []  # by number: a forward may still wait that followed an old one
        self._runs: list[StepRun] = []  # of the step that goes on
        self._has_told = False  # of a first step that held too much
        self._parameters: dict[StorageWeakRef, int] = {}  # of all graphs that were watched, and their bytes

    @property
    def request(self) -> Request:
        """What the options ask for now: a budget that could not be kept may have been raised."""
        return Request.read(self.options)

    @property
    def solutions(self) -> tuple[GraphSolution, ...]:
        """The plans that are followed."""
        return tuple(path.plan.solution for path in self.paths if path.plan is not None)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile one of Dynamo's graphs."""
        return StepGraph(self).compile(module, inputs)

    def next_mark(self, graph: StepGraph) -> Mark | None:
        """Which plan `graph` is to follow now, as which of its sections; None: its own, and is watched."""
        if self._is_over():
            self._begin()
        path = self._path([*self._ran, graph])
        if path is None or path.plan is None or not path.is_planned:
            return None
        section = len(self._runs)
        return None if path.plan.sections[section] is None else Mark(path.plan.number, section)

    def code(self, mark: Mark) -> SectionCode:
        """The code that a run with this mark follows, which is of a plan."""
        assert mark.plan is not None, "a graph has its own code where it follows no plan"
        code = self._plans[mark.plan].sections[mark.section]
        assert code is not None, "only a section with code is marked"
        return code

    def solution(self, mark: Mark) -> GraphSolution:
        """The plan that a run with this mark follows."""
        assert mark.plan is not None, "a graph has its own plan where it follows no other"
        return self._plans[mark.plan].solution

    def prepared(self, mark: Mark, args: Sequence[Any]) -> Mark:
        """The mark of this section in the first plan whose code is within the budget, as far as is known."""
        while True:
            self.code(mark).prepare(args)
            path = next(path for path in self.paths if path.plan and path.plan.number == mark.plan)
            self._correct(path)
            assert path.plan is not None, "it has one"
            if path.plan.number == mark.plan:
                return mark
            mark = Mark(path.plan.number, mark.section)

    def follow(self, graph: StepGraph, mark: Mark) -> torch.Tensor:
        """`graph` runs by a plan now. Returns its mark, written."""
        return self._enter(graph, mark, None)

    def watch(self, graph: StepGraph, given: Storages, made: Storages) -> torch.Tensor:
        """A forward that follows no plan is over. Returns its mark, written."""
        watched = Run(drawn=graph.drawn, given=given, made=made)
        self._parameters |= watched.parameters
        return self._enter(graph, Mark(None, len(self._runs)), watched)

    def done(self, graph: StepGraph, mark: Mark) -> Run | None:
        """A backward of `graph` runs. Returns what is watched of it; None if its step is over."""
        run = self._runs[mark.section] if mark.section < len(self._runs) else None
        if run is None or run.graph is not graph:
            return None
        run.waiting = False
        return run.watched

    def watch_backward(self, run: Run, tangents: Storages, gradients: Storages) -> None:
        """The backward of a forward that followed no plan is over."""
        run.tangents, run.gradients, run.is_whole = tangents, gradients, True
        after_backward(self.look)

    def look(self) -> None:
        """A backward is over: see what is held by others than autograd."""
        for run in self._runs:
            if run.watched is not None and not run.waiting:
                run.watched.look()

    def _enter(self, graph: StepGraph, mark: Mark, watched: Run | None) -> torch.Tensor:
        written = mark.write()
        reference = StorageWeakRef(written.untyped_storage())
        self._runs.append(StepRun(graph=graph, mark=reference, watched=watched))
        return written

    @property
    def _ran(self) -> tuple[StepGraph, ...]:
        return tuple(run.graph for run in self._runs)

    def _path(self, graphs: Sequence[StepGraph]) -> Path | None:
        """The only kind of step that begins with these graphs."""
        found = [path for path in self.paths if path.begins_with(graphs)]
        return found[0] if len(found) == 1 else None

    def _is_over(self) -> bool:
        if not any(run.may_go_on for run in self._runs):
            return True
        path = self._path(self._ran)
        return path is not None and path.is_planned and len(path.graphs) == len(self._runs)

    def _begin(self) -> None:
        """A step begins: plan for the one before, if there is anything to plan."""
        let_go_of_old_buckets()
        forget_tracing()
        runs = self._runs
        if all(run.waiting for run in runs) or any(run.has_failed for run in runs):  # no backward, no step
            self._runs = []
            return
        path = self._path_of(tuple(run.graph for run in runs))
        _reconsider(path, runs)
        self._correct(path)
        if not path.is_planned and all(run.watched is not None for run in runs):
            path.plan = self._planned(path, runs)
            self._plans.append(path.plan)
        self._runs = []  # not before: what could not be planned is planned again when the budget is raised

    def _path_of(self, graphs: tuple[StepGraph, ...]) -> Path:
        """The kind of step in which these graphs run, which may have been met now for the first time."""
        for path in self.paths:
            if path.graphs == graphs:
                return path
        made = Path(graphs)
        for path in self.paths:
            shared = _in_common(path.graphs, graphs)
            path.shared, made.shared = max(path.shared, shared), max(made.shared, shared)
        self.paths.append(made)
        return made

    def _planned(self, path: Path, runs: Sequence[StepRun]) -> StepPlan:
        """A plan for a step that was watched. Graphs that had no backward in it run as they are."""
        watched = {at: run.watched for at, run in enumerate(runs) if run.watched and not run.waiting}
        alone = {at: replace(run, drawn=runs[at].graph.settled) for at, run in watched.items()}
        parts = [alone[at] if at < path.shared else run for at, run in watched.items()]
        whole = self._with_others(parts)
        solution = solved_by_all(whole, self.request)
        first = self._with_others(list(alone.values()))
        self._tell_of_first(simulate(first, straight(first)).peak_bytes)
        graphs = {at: runs[at].graph for at in watched}
        return self._plan(path, solution, graphs, len(runs), self._correcting(solution))

    def _correcting(self, solution: GraphSolution) -> Corrected:
        """What becomes known of the code that is generated for a solution."""
        return Corrected(solution.graph, solution.schedule, self.request.budget_bytes)

    def _plan(
        self,
        path: Path,
        solution: GraphSolution,
        graphs: Mapping[int, StepGraph],
        runs: int,
        corrected: Corrected,
    ) -> StepPlan:
        """A solution as code for these of the graphs of a step, by when they run."""
        halves = {at: graph.halves for at, graph in graphs.items()}
        codes = {
            at: self._with_kernels(halves[at], solution, section, corrected)
            for section, at in enumerate(halves)
            if at >= path.shared
        }
        sections = tuple(codes.get(at) for at in range(runs))
        return StepPlan(len(self._plans), path.shared, solution, sections, corrected, tuple(graphs))

    def _with_kernels(
        self, halves: Halves, solution: GraphSolution, section: int, corrected: Corrected
    ) -> SectionCode:
        code = emit(halves, solution.graph, solution.schedule, section)
        if solution.graph.fused is None:
            return code
        tangents = [node.meta.get("val") for node in halves.tangents]
        return generated_section(code, halves.user_results, tangents, corrected.reading(section))

    def _correct(self, path: Path) -> None:
        """Where generated code was found to need more than its plan says, follow another plan from now on."""
        plan = path.plan
        if plan is None or not path.is_planned or (schedule := plan.corrected.next_plan()) is None:
            return
        solution = replace(
            plan.solution,
            schedule=schedule,
            peak_bytes=simulate(plan.solution.graph, schedule).peak_bytes,
            extra_seconds=extra_seconds(plan.solution.graph, schedule),
        )
        graphs = {at: path.graphs[at] for at in plan.planned}
        path.plan = self._plan(path, solution, graphs, len(path.graphs), plan.corrected)
        self._plans.append(path.plan)

    def _with_others(self, runs: Sequence[Run]) -> Graph:
        """The graph of a step with these runs, and what is there besides."""
        given = {storage for run in runs for storage in run.given}
        others = (size for each, size in self._parameters.items() if each not in given and not each.expired())
        return with_held_tangents(with_others(joined_runs(runs), sum(others)))

    def _tell_of_first(self, peak_bytes: int) -> None:
        """Say where a step that was watched may have held more than the budget."""
        budget_bytes = self.request.budget_bytes
        if budget_bytes is None or peak_bytes <= budget_bytes or self._has_told:
            return
        self._has_told = True
        warnings.warn(
            "lowtide: in the first step of a kind each of its graphs keeps as little as it can by itself, "
            "for the others are not known yet. So that step may have held up to "
            f"{format_bytes(peak_bytes)}, more than the budget of {format_bytes(budget_bytes)}. All others "
            "like it are within the budget.",
            stacklevel=2,
        )


def _reconsider(path: Path, runs: Sequence[StepRun]) -> None:
    """Let go of a plan if a graph had a backward that had none in the step that was watched for it.

    That step was broken off between two graphs, by an error or an interrupt.
    """
    had_backward = {at for at, run in enumerate(runs) if not run.waiting}
    if path.plan is not None and not had_backward.issubset(path.plan.planned):
        path.plan = None


def _in_common(some: Sequence[StepGraph], others: Sequence[StepGraph]) -> int:
    """How many graphs both begin with."""
    found = 0
    for one, other in zip(some, others, strict=False):
        if one is not other:
            break
        found += 1
    return found
