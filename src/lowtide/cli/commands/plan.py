"""`lowtide plan`: what to recompute."""

from __future__ import annotations

from pathlib import Path

import click

from lowtide.cli.layerwise import answer_layers
from lowtide.cli.options import (
    EFFORTS,
    asked_card,
    budget_option,
    card_options,
    cutting_options,
    json_option,
    kernels_option,
    output_file,
    plot_option,
    step_options,
    tiles_option,
    whole_number,
)
from lowtide.cli.opwise import answer_frontier, answer_ops
from lowtide.cli.preparing import Asked, Cutting, Wanted, check_can_draw, chosen_method, plans_ops, searching
from lowtide.cli.quiet import hush_libraries
from lowtide.text.budget import Budget

_POINTS = 12
_FEWEST_POINTS = 2


@click.command("plan")
@step_options
@budget_option(
    "Stay within this: 8GiB, 60% of the plain peak, or min, the lowest peak there is.", lowest=True
)
@card_options("Stay on this card, with all that is taken of it from the first step on: rtx4090, 24GiB, …")
@click.option(
    "--method",
    metavar="NAME",
    help="One of `lowtide solvers`; ops: auto, and nothing but op by op.  [default: auto with a budget, by "
    "layers where a step cannot be captured; without one hong-linear, layer by layer, because it finds the "
    "least peak at once]",
)
@click.option(
    "--effort",
    type=click.Choice(EFFORTS),
    default="full",
    show_default=True,
    help="How long auto and evict search: quick is four times as fast and adds a little more time.",
)
@click.option(
    "--accumulate",
    metavar="N",
    callback=whole_number,
    default="1",
    show_default=True,
    help="Backward calls between two updates: gradients are there when a forward begins.",
)
@tiles_option
@kernels_option
@cutting_options
@click.option(
    "--verify",
    is_flag=True,
    help="Build the model and try the plan: a real step must do what a plain one does, within the budget.",
)
@click.option("--frontier", is_flag=True, help="Every budget at once: peak against time, down to the lowest.")
@click.option(
    "--points", metavar="N", callback=whole_number, help=f"Budgets of a frontier.  [default: {_POINTS}]"
)
@plot_option("Draw live bytes over the step, plain and planned, or the frontier (.png, .svg).")
@click.option("-o", "--output", metavar="FILE", callback=output_file(".json"), help="Save the plan (.json).")
@json_option
def command(
    model: str,
    optimizer: str | None,
    device: str | None,
    profile: bool,
    budget: Budget,
    card: str | None,
    reserve: int | None,
    method: str | None,
    effort: str,
    accumulate: int,
    tiles: bool,
    kernels: str,
    granularity: str,
    modules: tuple[str, ...],
    verify: bool,
    frontier: bool,
    points: int | None,
    plot: Path | None,
    output: Path | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Plan what to recompute of MODEL, so that training it peaks lower.

    MODEL is what `lowtide fit` takes. Within a budget the step is planned op by op: its whole peak stays
    within, and as little time is added as can be. What cannot be captured is planned layer by layer instead,
    and a note says so; `--method ops` insists. A method for chains plans layers instead, and its plan is
    tried out in a dry run of the model. `--verify` builds the model and runs real steps.
    `lowtide.apply(model, lowtide.load_solution("plan.json"))` puts a saved plan to work.

    Exit code: 0 there is a plan, 2 bad request, no plan fits the budget, or a plan was tried and is wrong.
    """
    hush_libraries()
    check_can_draw(plot)
    if (found := asked_card(card, reserve)) is not None:
        if budget.is_given:
            raise click.UsageError("--budget is for a peak, --card for all that is taken; give one of them.")
        budget, device = Budget.parse(found), device or "cuda"
    _check_frontier(frontier, points, budget, output, verify, tiles, kernels)
    chosen = searching(chosen_method(method, budget, frontier), effort)
    asked = Asked(model, sizes, optimizer, device, profile, real=verify, tiles=tiles, kernels=kernels)
    wanted = Wanted(plot, output, as_json)
    cutting = Cutting(granularity, modules)
    if isinstance(chosen, str) and not plans_ops(chosen):
        answer_layers(asked, chosen, budget, accumulate, cutting, wanted)
    elif frontier:
        answer_frontier(asked, chosen, accumulate, cutting, points or _POINTS, wanted)
    else:
        answer_ops(asked, chosen, budget, accumulate, cutting, wanted, insists=method not in (None, "auto"))


def _check_frontier(
    frontier: bool,
    points: int | None,
    budget: Budget,
    output: Path | None,
    verify: bool,
    tiles: bool,
    kernels: str,
) -> None:
    if not frontier:
        if points is not None:
            raise click.UsageError("--points says how many budgets a --frontier has; give both.")
        return
    if budget.is_given:
        raise click.UsageError("--frontier plans for every budget; leave --budget or --frontier out.")
    if output is not None:
        raise click.UsageError("--frontier makes many plans. Save one of them: --budget and -o.")
    if verify:
        raise click.UsageError("--frontier makes many plans. Verify one of them: --budget and --verify.")
    if tiles:
        raise click.UsageError("--frontier is of one graph. Slice it for a budget: --budget and --tiles.")
    if kernels != "eager":
        raise click.UsageError("--frontier is of eager kernels. Plan for a budget: --budget and --kernels.")
    if points is not None and points < _FEWEST_POINTS:
        raise click.UsageError(
            f"a frontier has at least {_FEWEST_POINTS} points, the plain step and the lowest; not {points}."
        )
