"""`lowtide compare`: every method side by side; or, with --peers, every way to train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from lowtide.cli.options import (
    EFFORTS,
    budget_option,
    cutting_options,
    json_option,
    plot_option,
    several_budgets,
    step_options,
)
from lowtide.cli.preparing import Asked, check_can_draw, default_device, load_model, rehearsed
from lowtide.cli.quiet import hush_libraries, undisturbed
from lowtide.text.budget import Budget

if TYPE_CHECKING:
    from lowtide.planner.compare import Comparison
    from lowtide.planner.peers import PeerComparison
    from lowtide.zoo.setup import Setup

_OF_METHODS = {"budget": "--budget", "methods": "--method", "modules": "--module", "measure": "--measure"}
_OF_PEERS = {"budgets": "--budgets", "compiled": "--no-compile", "tiles": "--no-tiles", "effort": "--effort"}
_INTERRUPTED = 130  # as shells say it


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
@click.option(
    "--peers",
    is_flag=True,
    help="Compare ways to train instead, all measured: eager, checkpointing, torch.compile, lowtide.",
)
@click.option(
    "--budgets",
    metavar="SIZE|PART,…",
    callback=several_budgets,
    help="With --peers: budgets for lowtide, beside what the others hold: 60%,8GiB.",
)
@click.option("--compile/--no-compile", "compiled", default=True, help="With --peers: torch.compile too.")
@click.option("--tiles/--no-tiles", default=True, help="With --peers: also plans that run in slices.")
@click.option(
    "--effort",
    type=click.Choice(EFFORTS),
    default="full",
    show_default=True,
    help="With --peers: how long lowtide searches for each plan.",
)
@plot_option("Draw peak against time, a point a method or a way to train (.png, .svg).")
@json_option
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: str,
    optimizer: str | None,
    device: str | None,
    profile: bool,
    budget: Budget,
    methods: tuple[str, ...],
    granularity: str,
    modules: tuple[str, ...],
    measure: bool,
    peers: bool,
    budgets: tuple[str, ...],
    compiled: bool,
    tiles: bool,
    effort: str,
    plot: Path | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Compare the plans that different methods make for training MODEL, or ways to train it.

    MODEL is what `lowtide fit` takes. Each plan is tried out in a dry run of the model; ratios are to
    keep-all, plain training, which is always the first row. A method that finds no plan says why. With a
    budget only methods that take one are asked.

    With --peers the model is built and trained in every way there is, a few steps each: eager, its library's
    checkpointing, torch.compile at several memory budgets, and by lowtide within what each of those holds.
    Ctrl-C ends that with the rows so far.

    Exit code: 0 fine, 2 bad request, 130 interrupted.
    """
    _refuse_of_the_other(ctx, peers)
    hush_libraries()
    if peers:
        asked = Asked(model, sizes, optimizer, device or default_device(), profile, real=True)
        found = _compare_peers(asked, plot, as_json, budgets, compiled, tiles, effort)
        ctx.exit(_INTERRUPTED if found.interrupted else 0)
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


def _refuse_of_the_other(ctx: click.Context, peers: bool) -> None:
    """Raise UsageError for an option that says something of the comparison that was not asked for."""
    for name, option in (_OF_METHODS if peers else _OF_PEERS).items():
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            what = "compares methods, and --peers ways to train" if peers else "is for --peers"
            raise click.UsageError(f"{option} {what}; leave it out.")


def _compare_peers(
    asked: Asked,
    plot: Path | None,
    as_json: bool,
    budgets: tuple[str, ...],
    compiled: bool,
    tiles: bool,
    effort: str,
) -> PeerComparison:
    from lowtide.planner.peers import compare_peers
    from lowtide.report.picture.peers import draw_peers
    from lowtide.report.picture.plot import write_picture
    from lowtide.report.text.peers import print_peers
    from lowtide.report.text.terminal import asked as described
    from lowtide.text.progress import stages

    check_can_draw(plot)
    with undisturbed(), stages() as stage:
        stage.begin("building the model")
        setup = asked.load()
        found = compare_peers(
            setup.model,
            setup.example,
            loss=setup.loss,
            optimizer=asked.optimizer,
            budgets=budgets,
            compiled=compiled,
            tiles=tiles,
            effort=effort,
            profile=asked.profile,
            device=asked.device,
            name=setup.name,
            progress=stage.update,
            telling=stage.begin,
        )
    title = described(setup.name, setup.sizes, found.optimizer, found.device)
    if plot is not None:
        write_picture(draw_peers(found, plot.suffix.lower().removeprefix("."), title=title), plot)
    if as_json:
        document = {**found.to_json(), "batch": setup.sizes.get("batch"), "sizes": dict(setup.sizes)}
        click.echo(json.dumps({**document, "notes": list(setup.notes)}, indent=2))
    else:
        print_peers(title, found, setup.notes)
    return found


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
