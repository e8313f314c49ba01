"""A model planned op by op, within one budget or within many, and the answer to that."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.layerwise import tell_layers
from lowtide.cli.preparing import Asked, Cutting, Wanted
from lowtide.cli.quiet import undisturbed
from lowtide.text.budget import Budget

if TYPE_CHECKING:
    from lowtide.planner.ops import StepBudget
    from lowtide.planner.verify import Verification
    from lowtide.solvers.method import Scheduler
    from lowtide.solvers.solution import GraphSolution
    from lowtide.text.progress import Stages
    from lowtide.zoo.setup import Setup


def answer_ops(
    asked: Asked,
    method: str | Scheduler,
    budget: Budget,
    accumulate: int,
    cutting: Cutting,
    wanted: Wanted,
    insists: bool,
) -> None:
    """Plan which ops to recompute within a budget, and tell; by layers, if nothing insists on ops."""
    from lowtide.planner.api import refuse_cutting
    from lowtide.planner.ladder import Ladder
    from lowtide.planner.verify import tried
    from lowtide.solvers.solution import Solution
    from lowtide.text.progress import stages

    refuse_cutting(cutting.granularity, cutting.modules or None)
    with undisturbed(), stages() as stage:
        setup = asked.load()
        ladder = Ladder(asked.spec(setup, stage.update, accumulate), method)
        stage.begin("running the step on fake tensors")
        _ = ladder.step.plain
        stage.begin("capturing its ops and planning")
        solution = ladder.within(budget, insists)
        verified = None
        if asked.real:
            stage.begin("running plain and planned steps")
            verified = tried(ladder.spec, solution, ladder.step.plain)
    if isinstance(solution, Solution):
        tell_layers(ladder.rehearsal, solution, setup, wanted, verified)
    else:
        step = ladder.step if budget.card is None else ladder.step.on(budget.card)
        _tell_ops(step, solution, setup, wanted, verified)


def _tell_ops(
    step: StepBudget,
    solution: GraphSolution,
    setup: Setup,
    wanted: Wanted,
    verified: Verification | None,
) -> None:
    from lowtide.report.text.scheduled import print_schedule

    picture = None if wanted.plot is None else _picture(step, solution, setup, wanted.kind)
    wanted.write(solution, picture)
    notes = [*([solution.remark] if solution.remark else []), *notes_of(step, setup)]
    notes += [] if verified is None else [str(verified)]
    use = None if step.card is None else step.use_of(solution)
    notes += [] if use is None else [str(use)]
    if wanted.as_json:
        document = {**_about(step, setup), **_plan_to_json(solution), "card": use and use.to_json()}
        _print_json({**document, "verified": verified and asdict(verified)}, notes)
    else:
        print_schedule(title_of(step, setup), solution, notes=notes)


def answer_frontier(
    asked: Asked,
    method: str | Scheduler,
    accumulate: int,
    cutting: Cutting,
    points: int,
    wanted: Wanted,
) -> None:
    """Plan within many budgets, from the plain step to the lowest peak, and tell."""
    from lowtide.planner.api import refuse_cutting
    from lowtide.report.picture.frontier import frontier_picture, print_frontier
    from lowtide.solvers.frontier import frontier
    from lowtide.text.progress import stages

    refuse_cutting(cutting.granularity, cutting.modules or None)
    with undisturbed(), stages() as stage:
        setup = asked.load()
        step = captured(asked, setup, accumulate, stage)
        stage.begin(f"planning op by op within {points} budgets")
        found = frontier(step.graph, points, method)
        title = title_of(step, setup)
        # Tables and pictures have keep-all by themselves.
        planned = [solution for solution in found if solution.recomputed] or found
        picture = None if wanted.plot is None else frontier_picture(title, planned, wanted.kind)
    wanted.write(None, picture)
    notes = [*_captured_otherwise(step, found), *notes_of(step, setup)]
    if wanted.as_json:
        _print_json({**_about(step, setup), **_frontier_to_json(found)}, notes)
    else:
        print_frontier(title, planned, notes)


def captured(asked: Asked, setup: Setup, accumulate: int, stage: Stages) -> StepBudget:
    """The step, traced, captured and profiled."""
    from lowtide.planner.ops import StepBudget

    step = StepBudget(asked.spec(setup, stage.update, accumulate))
    stage.begin("running the step on fake tensors")
    _ = step.plain
    stage.begin("capturing its ops")
    _ = step.graph
    return step


# Answers ----------------------------------------------------------------------------------------------


def _picture(step: StepBudget, solution: GraphSolution, setup: Setup, kind: str) -> bytes:
    from lowtide.report.picture.plot import draw_plan

    return draw_plan(
        step.plain.timeline,
        solution.timeline,
        kind,
        title=title_of(step, setup),
        method=solution.method,
        budget_bytes=solution.budget_bytes,
    )


def title_of(step: StepBudget, setup: Setup) -> str:
    """The step that was planned, in one line."""
    from lowtide.report.text.terminal import asked
    from lowtide.trace.step import optimizer_name

    return asked(setup.name, setup.sizes, optimizer_name(step.spec.optimizer), step.graph.device)


def notes_of(step: StepBudget, setup: Setup) -> list[str]:
    """What to know about the figures of a step."""
    from lowtide.report.text.planned import what_is_unknown

    timed = any(op.seconds for op in step.graph.ops)
    seen = dict.fromkeys([*step.plain.graph.notes, *step.graph.notes])
    earlier = (
        [f"gradients are there when a forward begins: {step.spec.accumulate} backward calls make one update"]
        if step.spec.accumulate > 1
        else []
    )
    return [*what_is_unknown(timed, step.graph.profiled_on, step.card), *earlier, *seen, *setup.notes]


def _captured_otherwise(step: StepBudget, found: Sequence[GraphSolution]) -> list[str]:
    """What to know where the captured step, with everything kept, peaks elsewhere than the written one."""
    from lowtide.text.units import format_bytes

    kept_bytes, written_bytes = found[0].peak_bytes, step.plain_peak_bytes
    if kept_bytes == written_bytes or step.spec.accumulate > 1:  # which the written one knows nothing of
        return []
    return [f"as it is written the step peaks at {format_bytes(written_bytes)}; keep-all is the captured one"]


# JSON -------------------------------------------------------------------------------------------------


def _print_json(document: dict[str, Any], notes: list[str]) -> None:
    click.echo(json.dumps({**document, "notes": notes}, indent=2))


def _about(step: StepBudget, setup: Setup) -> dict[str, Any]:
    return {
        "model": setup.name,
        "batch": setup.sizes.get("batch"),
        "sizes": dict(setup.sizes),
        "device": step.graph.device,
        "optimizer": step.spec.optimizer,
        "accumulate": step.spec.accumulate,
        "ops": len(step.graph.ops),
        "plain_peak_bytes": step.plain_peak_bytes,
    }


def _plan_to_json(solution: GraphSolution) -> dict[str, Any]:
    from lowtide.solvers.summary import shares
    from lowtide.solvers.tiled_summary import families

    plain_bytes = solution.plain_peak_bytes
    assert plain_bytes is not None, "a step's budget tells what it holds without a plan"
    return {
        "method": solution.method,
        **_point_to_json(solution),
        "saved_bytes": plain_bytes - solution.peak_bytes,
        "lower_bound_bytes": solution.lower_bound_bytes,
        "least_extra_seconds": solution.least_extra_seconds if solution.seconds else None,
        "plain_seconds": _plain_seconds(solution) or None,
        "tiles": [asdict(family) for family in families(solution.graph)],
        "modules": [asdict(share) for share in shares(solution)],
    }


def _plain_seconds(solution: GraphSolution) -> float:
    tiled = solution.graph.tiled
    return solution.seconds if tiled is None else sum(op.seconds for op in tiled.plain.ops)


def _frontier_to_json(found: Sequence[GraphSolution]) -> dict[str, Any]:
    return {
        "method": found[0].method,
        "lower_bound_bytes": found[0].lower_bound_bytes,
        "plain_seconds": found[0].seconds or None,
        "points": [_point_to_json(solution) for solution in found],
    }


def _point_to_json(solution: GraphSolution) -> dict[str, Any]:
    timed = bool(solution.seconds)
    return {
        "budget_bytes": solution.budget_bytes,
        "predicted_peak_bytes": solution.peak_bytes,
        "extra_seconds": solution.extra_seconds if timed else None,
        "extra_seconds_ratio": solution.extra_seconds_ratio if timed else None,
        "recomputed_ops": sum(solution.recomputed.values()),
        "status": solution.status.value,
        "planning_seconds": solution.planning_seconds,
    }
