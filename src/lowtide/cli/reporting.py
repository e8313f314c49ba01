"""A report gathered: from a model that is planned for it, or from a plan that was saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.cli.preparing import (
    Asked,
    Cutting,
    chosen_method,
    default_device,
    load_model,
    plans_ops,
    rehearsed,
)
from lowtide.cli.quiet import undisturbed
from lowtide.text.budget import Budget

if TYPE_CHECKING:
    from lowtide.report.content.contents import Contents
    from lowtide.solvers.solution import GraphSolution
    from lowtide.text.progress import Stages
    from lowtide.trace.dry_run import Trace
    from lowtide.zoo.setup import Setup

_PAGE = "html"


@dataclass(frozen=True)
class Extent:
    """What is written, and how much of it is computed: `points` of a frontier, and whether to measure."""

    format: str
    points: int
    measure: bool

    def check_possible(self) -> None:
        """Raise MissingExtra before any work if what is wanted cannot be made."""
        from lowtide.report.page import require_plotly

        if self.format == _PAGE:
            require_plotly()

    def frontier(self, solution: GraphSolution, stage: Stages) -> tuple[GraphSolution, ...]:
        """The frontier, where the format shows one."""
        from lowtide.solvers.frontier import frontier

        if not self.points or self.format != _PAGE:
            return ()
        stage.begin(f"planning op by op within {self.points} budgets")
        return frontier(solution.graph, self.points)


def written(contents: Contents, extent: Extent, path: Path) -> None:
    """Write the report, all of it or nothing."""
    from lowtide.report.export.perfetto import perfetto_text
    from lowtide.report.export.snapshot import snapshot_bytes
    from lowtide.report.page import page
    from lowtide.text.documents import write_bytes

    if extent.format == _PAGE:
        made = page(contents).encode()
    elif extent.format == "snapshot":
        made = snapshot_bytes(contents.planned)
    else:
        made = perfetto_text([contents.plain, contents.planned]).encode()
    write_bytes(path, made)


def contents_of_file(source: str, extent: Extent) -> Contents:
    """A report on a saved plan. What the file does not hold is said to be absent."""
    from lowtide.report.content.contents import of_layers, of_ops
    from lowtide.solvers.files import load_solution
    from lowtide.solvers.solution import GraphSolution
    from lowtide.text.progress import stages

    solution = load_solution(source)
    with stages() as stage:
        if isinstance(solution, GraphSolution):
            found = of_ops(solution, frontier=extent.frontier(solution, stage), notes=solution.graph.notes)
            with_torch = [f"planned with torch {solution.torch_version}"] if solution.torch_version else []
        else:
            found, with_torch = of_layers(solution), []
    return replace(found, about=(*_about(), *with_torch, f"from {Path(source).name}"))


def contents_of_model(
    asked: Asked, budget: Budget, method: str | None, accumulate: int, cutting: Cutting, extent: Extent
) -> Contents:
    """A report on the plan that is made for a model."""
    import torch

    chosen = chosen_method(method, budget, frontier=False)
    where = asked.device or default_device()
    with undisturbed():
        setup = load_model(asked.model, asked.sizes, where if extent.measure else "meta")
        asked = replace(asked, device=where)
        planned = _planned_ops if plans_ops(chosen) else _planned_layers
        contents, plain = planned(asked, setup, chosen, budget, accumulate, cutting, extent)
        if extent.measure:
            contents = _measured(contents, asked, setup, plain)
    return replace(contents, about=(*_about(), f"torch {torch.__version__}"))


def _about() -> tuple[str, ...]:
    from lowtide._version import __version__

    return (f"lowtide {__version__}",)


def _planned_ops(
    asked: Asked,
    setup: Setup,
    method: str,
    budget: Budget,
    accumulate: int,
    cutting: Cutting,
    extent: Extent,
) -> tuple[Contents, Trace]:
    from lowtide.cli.opwise import captured, notes_of, title_of
    from lowtide.planner.api import refuse_cutting
    from lowtide.report.content.contents import of_ops
    from lowtide.report.content.curve import Curve
    from lowtide.text.progress import stages

    refuse_cutting(cutting.granularity, cutting.modules or None)
    with stages() as stage:
        step = captured(asked, setup, accumulate, stage)
        stage.begin("planning op by op")
        solution = step.within(method, budget)
        frontier = extent.frontier(solution, stage)
        plain = Curve("plain", step.plain.graph, step.plain.schedule)
        notes = notes_of(step, setup)
        return of_ops(
            solution, plain, title=title_of(step, setup), frontier=frontier, notes=notes
        ), step.plain


def _planned_layers(
    asked: Asked,
    setup: Setup,
    method: str,
    budget: Budget,
    accumulate: int,
    cutting: Cutting,
    extent: Extent,
) -> tuple[Contents, Trace]:
    from lowtide.cli.layerwise import notes_of, title_of
    from lowtide.planner.api import refuse_op_level_requests
    from lowtide.report.content.contents import of_layers
    from lowtide.report.content.curve import Curve

    refuse_op_level_requests(budget, accumulate, asked.tiles, asked.kernels)
    rehearsal = rehearsed(asked, setup)
    chain = rehearsal.chain(cutting.granularity, cutting.modules or None)
    solution = rehearsal.within(chain, method, budget)
    under = rehearsal.under(solution)
    plain = Curve("plain", rehearsal.plain.graph, rehearsal.plain.schedule)
    planned = Curve(f"planned by {solution.method}", under.graph, under.schedule)
    notes = notes_of(rehearsal, solution, setup)
    found = of_layers(solution, plain, planned, title=title_of(rehearsal, setup), notes=notes)
    return found, rehearsal.plain


def _measured(contents: Contents, asked: Asked, setup: Setup, plain: Trace) -> Contents:
    from lowtide.planner.real_step import RealStep
    from lowtide.report.content.contents import with_readings

    assert asked.device is not None, "where to measure was settled before"
    step = RealStep(asked.spec(setup))
    return with_readings(contents, step.reading(plain), step.reading(plain, contents.solution))
