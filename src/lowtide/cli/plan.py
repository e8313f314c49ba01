"""`lowtide plan`: which layers to recompute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.options import (
    budget_option,
    cutting_options,
    json_option,
    output_file,
    plot_option,
    step_options,
)
from lowtide.cli.preparing import check_can_draw, chosen_method, load_model, rehearsed
from lowtide.cli.quiet import hush_libraries, undisturbed

if TYPE_CHECKING:
    from lowtide.planning import Rehearsal
    from lowtide.solution import Solution
    from lowtide.zoo.setup import Setup


@click.command("plan")
@step_options
@budget_option("Stay within this: 8GiB, or 60% of the plain peak.")
@click.option(
    "--method",
    metavar="NAME",
    help="One of `lowtide solvers`.  [default: rotor with a budget, because it adds the least time; "
    "hong-linear without one, because it finds the least peak at once]",
)
@cutting_options
@plot_option("Draw live bytes over the step, plain and planned (.png, .svg).")
@click.option("-o", "--output", metavar="FILE", callback=output_file(".json"), help="Save the plan (.json).")
@json_option
def command(
    model: str,
    optimizer: str | None,
    device: str | None,
    profile: bool,
    budget: str | None,
    method: str | None,
    granularity: str,
    modules: tuple[str, ...],
    plot: Path | None,
    output: Path | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Plan which layers of MODEL to recompute, so that training it peaks lower.

    MODEL is what `lowtide fit` takes. The plan is tried out in a dry run of the model: the planned peak
    is that of the whole step. `lowtide.apply(model, lowtide.load_solution("plan.json"))` puts a saved plan
    to work.

    Exit code: 0 there is a plan, 2 bad request, or no plan fits the budget.
    """
    hush_libraries()
    check_can_draw(plot)
    chosen = chosen_method(method, budget)
    with undisturbed():
        setup = load_model(model, sizes)
        rehearsal = rehearsed(setup, optimizer=optimizer, device=device, profile=profile)
        chain = rehearsal.chain(granularity, modules or None)
        solution = rehearsal.solve(chain, chosen, budget)
        picture = None if plot is None else (_picture(rehearsal, solution, setup, plot.suffix), plot)
    _write(solution, output, picture)
    _answer(rehearsal, solution, setup, as_json)


def _picture(rehearsal: Rehearsal, solution: Solution, setup: Setup, suffix: str) -> bytes:
    from lowtide.report.plot import draw_plan

    return draw_plan(
        rehearsal.plain.timeline,
        rehearsal.under(solution).timeline,
        suffix.lower().removeprefix("."),
        title=_title(rehearsal, setup),
        method=solution.method,
        budget_bytes=solution.budget_bytes,
    )


def _write(solution: Solution, output: Path | None, picture: tuple[bytes, Path] | None) -> None:
    """Write what was asked for, once all of it exists."""
    from lowtide.files import save_solution
    from lowtide.report.plot import write_picture

    if output is not None:
        save_solution(solution, output)
    if picture is not None:
        write_picture(*picture)


def _title(rehearsal: Rehearsal, setup: Setup) -> str:
    from lowtide.report.terminal import asked

    return asked(setup.name, setup.sizes, rehearsal.optimizer, rehearsal.plain.graph.device)


def _answer(rehearsal: Rehearsal, solution: Solution, setup: Setup, as_json: bool) -> None:
    from lowtide.report.planned import print_plan, what_is_unknown

    graph = rehearsal.plain.graph
    unknown = what_is_unknown(solution.chain.timed, graph.profiled_on)
    notes = [*unknown, *graph.notes, *setup.notes]
    if as_json:
        click.echo(json.dumps({**_document(rehearsal, solution, setup), "notes": notes}, indent=2))
    else:
        print_plan(_title(rehearsal, setup), solution, notes)


def _document(rehearsal: Rehearsal, solution: Solution, setup: Setup) -> dict[str, Any]:
    from dataclasses import asdict

    from lowtide.report.planned import proof
    from lowtide.report.stretches import stretches

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
