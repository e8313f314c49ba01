"""A model planned layer by layer, and the answer to that."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.preparing import Asked, Cutting, Wanted, rehearsed
from lowtide.cli.quiet import undisturbed
from lowtide.text.budget import Budget

if TYPE_CHECKING:
    from lowtide.planner.layers import Rehearsal
    from lowtide.planner.verify import Verification
    from lowtide.solvers.solution import Solution
    from lowtide.zoo.setup import Setup


def answer_layers(
    asked: Asked, method: str, budget: Budget, accumulate: int, cutting: Cutting, wanted: Wanted
) -> None:
    """Plan which layers to recompute, try that out, and tell."""
    from lowtide.planner.api import refuse_op_level_requests
    from lowtide.planner.verify import tried
    from lowtide.text.progress import waiting

    refuse_op_level_requests(budget, accumulate, asked.tiles, asked.kernels)
    with undisturbed():
        with waiting("building the model"):
            setup = asked.load()
        rehearsal = rehearsed(asked, setup)
        with waiting("planning layer by layer"):
            chain = rehearsal.chain(cutting.granularity, cutting.modules or None)
            solution = rehearsal.within(chain, method, budget)
        with waiting("running plain and planned steps"):
            verified = tried(rehearsal.spec, solution, rehearsal.plain) if asked.real else None
    tell_layers(rehearsal, solution, setup, wanted, verified)


def tell_layers(
    rehearsal: Rehearsal,
    solution: Solution,
    setup: Setup,
    wanted: Wanted,
    verified: Verification | None,
) -> None:
    """Write the files that are wanted of a plan of layers, and print it."""
    with undisturbed():
        picture = None if wanted.plot is None else _picture(rehearsal, solution, setup, wanted.kind)
    wanted.write(solution, picture)
    _answer(rehearsal, solution, setup, wanted.as_json, verified)


def _picture(rehearsal: Rehearsal, solution: Solution, setup: Setup, kind: str) -> bytes:
    from lowtide.report.picture.plot import draw_plan

    return draw_plan(
        rehearsal.plain.timeline,
        rehearsal.under(solution).timeline,
        kind,
        title=title_of(rehearsal, setup),
        method=solution.method,
        budget_bytes=solution.budget_bytes,
    )


def title_of(rehearsal: Rehearsal, setup: Setup) -> str:
    """The step that was planned, in one line."""
    from lowtide.report.text.terminal import asked
    from lowtide.trace.step import optimizer_name

    return asked(setup.name, setup.sizes, optimizer_name(rehearsal.optimizer), rehearsal.plain.graph.device)


def notes_of(rehearsal: Rehearsal, solution: Solution, setup: Setup) -> list[str]:
    """What to know about the figures of a step."""
    from lowtide.report.text.planned import what_is_unknown

    graph = rehearsal.plain.graph
    remark = [solution.remark] if solution.remark else []
    return [*remark, *what_is_unknown(solution.chain.timed, graph.profiled_on), *graph.notes, *setup.notes]


def _answer(
    rehearsal: Rehearsal,
    solution: Solution,
    setup: Setup,
    as_json: bool,
    verified: Verification | None,
) -> None:
    from lowtide.report.text.planned import print_plan

    notes = notes_of(rehearsal, solution, setup) + ([] if verified is None else [str(verified)])
    if as_json:
        document = {**_document(rehearsal, solution, setup), "verified": verified and asdict(verified)}
        click.echo(json.dumps({**document, "notes": notes}, indent=2))
    else:
        print_plan(title_of(rehearsal, setup), solution, notes)


def _document(rehearsal: Rehearsal, solution: Solution, setup: Setup) -> dict[str, Any]:
    from lowtide.report.content.stretches import stretches
    from lowtide.report.text.planned import proof

    tried = solution.confirmation
    assert tried is not None, "a rehearsal confirms what it solves"
    timed = solution.chain.timed
    return {
        "model": setup.name,
        "batch": setup.sizes.get("batch"),
        "sizes": dict(setup.sizes),
        "device": rehearsal.plain.graph.device,
        "optimizer": rehearsal.optimizer,
        "method": solution.method,
        "layers": len(solution.chain),
        "plan": str(solution.plan),
        "checkpoints": list(solution.checkpoints),
        "plain_peak_bytes": tried.plain_peak_bytes,
        "predicted_peak_bytes": tried.peak_bytes,
        "chain_peak_bytes": solution.peak_bytes,
        "saved_bytes": tried.plain_peak_bytes - tried.peak_bytes,
        "budget_bytes": solution.budget_bytes,
        "lower_bound_bytes": solution.lower_bound_bytes,
        "objective_bytes": solution.objective_bytes,
        "extra_seconds": tried.extra_seconds if timed else None,
        "plain_seconds": tried.plain_seconds if timed else None,
        "extra_seconds_ratio": tried.extra_seconds / tried.plain_seconds if timed else None,
        "recomputed_ops": tried.recomputed_ops,
        "status": solution.status.value,
        "proof": proof(solution),
        "planning_seconds": solution.planning_seconds,
        "stretches": [asdict(stretch) for stretch in stretches(solution.chain, solution.plan)],
    }
