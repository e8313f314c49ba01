"""`lowtide fit`: will it fit?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.cli.options import (
    asked_card,
    card_options,
    json_option,
    output_file,
    plot_option,
    size,
    step_options,
)
from lowtide.cli.preparing import Asked, check_can_draw, predicted
from lowtide.cli.quiet import hush_libraries, undisturbed

if TYPE_CHECKING:
    from lowtide.planner.fit import Fit
    from lowtide.zoo.setup import Setup

_DOES_NOT_FIT = 1


@click.command("fit")
@step_options
@click.option("--budget", metavar="SIZE", callback=size, help="Does it fit in this? 24GiB, 80GB, …")
@card_options("Does a training fit on this card, its first steps included? rtx4090, 24GiB, …")
@plot_option("Draw live bytes over the step (.png, .svg).")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    callback=output_file(".json"),
    help="Save the traced graph and schedule (.json).",
)
@json_option
def command(
    model: str,
    optimizer: str | None,
    device: str | None,
    budget: int | None,
    card: str | None,
    reserve: int | None,
    profile: bool,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Predict the peak memory of training MODEL, and whether it fits a budget.

    MODEL is a name from `lowtide zoo`, hf:TYPE (gpt2, bert, llama, vit, …), torchvision:NAME, timm:NAME,
    or path/to/file.py:function, a function that returns (model, example) or (model, example, loss).

    Nothing is allocated and nothing is trained. Exit code: 0 it fits, 1 it does not, 2 bad request.
    """
    hush_libraries()
    check_can_draw(plot)
    found = asked_card(card, reserve)
    if found is not None and budget is not None:
        raise click.UsageError("--budget is for a peak, --card for all that is taken; give one of them.")
    device = device or ("cuda" if found else None)
    with undisturbed():
        setup, fit = predicted(Asked(model, sizes, optimizer, device, profile), found or budget)
    _write(fit, setup, output, plot)
    _answer(fit, setup, as_json)
    if fit.fits is False:
        click.get_current_context().exit(_DOES_NOT_FIT)


def _write(fit: Fit, setup: Setup, output: Path | None, plot: Path | None) -> None:
    """Write what was asked for, once all of it exists."""
    from lowtide.report.picture.plot import write_picture
    from lowtide.solvers.files import save_graph

    picture = None if plot is None else (_picture(fit, setup, plot.suffix), plot)
    if output is not None:
        save_graph(fit.trace.graph, output, fit.trace.schedule)
    if picture is not None:
        write_picture(*picture)


def _picture(fit: Fit, setup: Setup, suffix: str) -> bytes:
    from lowtide.report.picture.plot import draw
    from lowtide.report.text.terminal import headline

    kind = suffix.lower().removeprefix(".")
    title = headline(fit, setup.sizes)
    return draw(fit.trace.timeline, kind, title=title, budget_bytes=fit.budget_bytes)


def _answer(fit: Fit, setup: Setup, as_json: bool) -> None:
    from lowtide.report.text.terminal import print_fit

    if not as_json:
        print_fit(fit, setup.sizes, setup.notes)
        return
    asked = {"model": fit.model, "batch": setup.sizes.get("batch"), "sizes": dict(setup.sizes)}
    notes = {"notes": [*fit.notes, *setup.notes]}
    click.echo(json.dumps({**asked, **fit.to_json(), **notes}, indent=2))
