"""`lowtide report`: a page to look at, and exports of the timeline."""

from __future__ import annotations

from pathlib import Path

import click
from click.core import ParameterSource

from lowtide.cli.options import (
    budget_option,
    cutting_options,
    output_file,
    step_or_file_options,
    tiles_option,
    whole_number,
)
from lowtide.cli.preparing import Asked, Cutting
from lowtide.cli.quiet import hush_libraries
from lowtide.cli.reporting import Extent, contents_of_file, contents_of_model, written
from lowtide.text.budget import Budget

_POINTS = 8
_FEWEST_POINTS = 2
_FOR_A_FILE = (
    "source",
    "frontier",
    "points",
    "format",
    "output",
)  # what a saved plan leaves open
_SUFFIXES = {"html": ".html", "snapshot": ".pickle", "perfetto": ".json"}


def _output(ctx: click.Context, param: click.Parameter, text: str | None) -> Path | None:
    """The file, which ends as its format does."""
    return output_file(_SUFFIXES[ctx.params["format"]])(ctx, param, text)


@click.command("report")
@step_or_file_options
@budget_option(
    "Stay within this: 8GiB, 60% of the plain peak, or min, the lowest peak there is.", lowest=True
)
@click.option("--method", metavar="NAME", help="One of `lowtide solvers`.  [default: as in `lowtide plan`]")
@click.option(
    "--accumulate",
    metavar="N",
    callback=whole_number,
    default="1",
    show_default=True,
    help="Backward calls between two updates: gradients are there when a forward begins.",
)
@tiles_option
@cutting_options
@click.option("--from", "source", metavar="PLAN", help="Report on this plan, saved by `lowtide plan -o`.")
@click.option("--measure", is_flag=True, help="Build the model, train plain and as planned, measure both.")
@click.option(
    "--frontier/--no-frontier", default=True, help="Plan within many budgets, too: peak against time."
)
@click.option(
    "--points", metavar="N", callback=whole_number, help=f"Budgets of the frontier.  [default: {_POINTS}]"
)
@click.option(
    "--format",
    type=click.Choice(list(_SUFFIXES)),
    default="html",
    show_default=True,
    is_eager=True,
    help="A page (.html); the planned step as a memory snapshot for PyTorch's viewer (.pickle, which is what "
    "it reads; lowtide itself never reads one); or both steps as a trace for Perfetto (.json).",
)
@click.option("-o", "--output", metavar="FILE", callback=_output, required=True, help="The file to write.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str | None,
    optimizer: str | None,
    device: str | None,
    profile: bool,
    budget: Budget,
    method: str | None,
    accumulate: int,
    tiles: bool,
    granularity: str,
    modules: tuple[str, ...],
    source: str | None,
    measure: bool,
    frontier: bool,
    points: int | None,
    format: str,
    output: Path,
    **sizes: int | None,
) -> None:
    """Plan MODEL, or take a saved plan, and write a report: one file to look at, which needs no network.

    The page has the memory of the plain and of the planned step, op by op, and what is alive at each of
    them; which layers are kept and which recomputed; peak against time for many budgets; and where each value
    lies in one arena.

    Exit code: 0 it is written, 2 bad request, or no plan fits the budget.
    """
    _check(ctx)
    hush_libraries()
    extent = Extent(format, points or _POINTS if frontier else 0, measure)
    extent.check_possible()
    if source is not None:
        contents = contents_of_file(source, extent)
    else:
        asked = Asked(model or "", sizes, optimizer, device, profile, tiles=tiles)
        cutting = Cutting(granularity, modules)
        contents = contents_of_model(asked, budget, method, accumulate, cutting, extent)
    written(contents, extent, output)
    click.echo(f"wrote {output}")


def _check(ctx: click.Context) -> None:
    """Raise UsageError where options make no sense together."""
    given = ctx.params
    if (given["model"] is None) == (given["source"] is None):
        raise click.UsageError("say what to report on: a MODEL to plan, or --from a saved plan; not both.")
    points = given["points"]
    if points is not None and (points < _FEWEST_POINTS or not given["frontier"]):
        raise click.UsageError(
            f"--points says how many budgets the frontier has: at least {_FEWEST_POINTS}, the plain step and "
            "the lowest, and none with --no-frontier."
        )
    if given["source"] is not None:
        _refuse_planning(ctx)
    if given["measure"] and given["accumulate"] > 1:
        raise click.UsageError("--measure runs a whole step by itself; leave --accumulate out.")


def _refuse_planning(ctx: click.Context) -> None:
    for param in ctx.command.params:
        asked = param.name and ctx.get_parameter_source(param.name) is ParameterSource.COMMANDLINE
        if asked and param.name not in _FOR_A_FILE:
            raise click.UsageError(
                f"--from shows a plan as it was saved; leave {param.opts[0]} out, or give a MODEL."
            )
