"""`lowtide compare`: every method side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.cli.options import budget_option, cutting_options, json_option, plot_option, step_options
from lowtide.cli.preparing import Asked, check_can_draw, default_device, load_model, rehearsed
from lowtide.cli.quiet import hush_libraries, undisturbed
from lowtide.text.budget import Budget

if TYPE_CHECKING:
    from lowtide.planner.compare import Comparison
    from lowtide.zoo.setup import Setup


@click.command("compare")
@step_options
@budget_option("Stay within this: 8GiB, or 60% of the plain peak.")
@click.option(
    "--method",
    "methods",
    metavar="NAME",
    multiple=True,
    help="One of those in `lowtide solvers` that plan layers; may be given several times.  "
    "[default: all that apply]",
)
@cutting_options
@click.option("--measure", is_flag=True, help="Build the model, train a few steps under each plan, measure.")
@plot_option("Draw peak against extra time, a point a method (.png, .svg).")
@json_option
def command(
    model: str,
    optimizer: str | None,
    device: str | None,
    profile: bool,
    budget: Budget,
    methods: tuple[str, ...],
    granularity: str,
    modules: tuple[str, ...],
    measure: bool,
    plot: Path | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Compare the plans that different methods make for training MODEL.

    MODEL is what `lowtide fit` takes. Each plan is tried out in a dry run of the model; ratios are to
    keep-all, plain training, which is always the first row. A method that finds no plan says why. With a
    budget only methods that take one are asked.

    Exit code: 0 fine, 2 bad request.
    """
    hush_libraries()
    from lowtide.planner.compare import check_methods, compare
    from lowtide.text.progress import progress_bar, waiting

    check_can_draw(plot)
    check_methods(methods)  # before any work
    with undisturbed():
        where = device or default_device()
        with waiting("building the model"):
            setup = load_model(model, sizes, where if measure else "meta")
        rehearsal = rehearsed(Asked(model, sizes, optimizer, where, profile), setup)
        with progress_bar("comparing") as progress:
            comparison = compare(
                rehearsal,
                methods=methods or None,
                granularity=granularity,
                modules=modules or None,
                budget=budget.given,
                measure=measure,
                progress=progress,
            )
    if plot is not None:
        _draw(comparison, setup, plot)
    _answer(comparison, setup, as_json)


def _title(comparison: Comparison, setup: Setup) -> str:
    from lowtide.report.text.terminal import asked

    return asked(setup.name, setup.sizes, comparison.optimizer, comparison.device)


def _draw(comparison: Comparison, setup: Setup, plot: Path) -> None:
    from lowtide.report.picture.plot import write_picture
    from lowtide.report.picture.trade import draw_trade

    kind = plot.suffix.lower().removeprefix(".")
    write_picture(draw_trade(comparison, kind, title=_title(comparison, setup)), plot)


def _answer(comparison: Comparison, setup: Setup, as_json: bool) -> None:
    from lowtide.report.text.compared import print_comparison
    from lowtide.report.text.planned import what_is_unknown

    unknown = what_is_unknown(comparison.timed, comparison.profiled_on)
    notes = [*unknown, *comparison.notes, *setup.notes]
    if not as_json:
        print_comparison(_title(comparison, setup), comparison, notes)
        return
    asked = {"model": setup.name, "batch": setup.sizes.get("batch"), "sizes": dict(setup.sizes)}
    click.echo(json.dumps({**comparison.to_json(), **asked, "notes": notes}, indent=2))
