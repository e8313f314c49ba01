"""`lowtide batch`: how large a batch fits?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.options import (
    asked_card,
    card_options,
    json_option,
    size,
    step_options,
    tiles_option,
    whole_number,
)
from lowtide.cli.preparing import default_device, load_model
from lowtide.cli.quiet import hush_libraries, undisturbed
from lowtide.errors import BadRequest
from lowtide.text.card import Card

if TYPE_CHECKING:
    from lowtide.cost.measure import Reading
    from lowtide.ir.graph import Graph
    from lowtide.planner.batch import LargestBatch
    from lowtide.planner.batch_steps import Batch
    from lowtide.text.progress import Stages
    from lowtide.zoo.setup import Setup


@click.command("batch")
@step_options
@card_options("Train on all of this card: rtx4090, 24GiB, …  [default: the GPU that is here]")
@click.option("--memory", metavar="SIZE", callback=size, help="For the peak alone, not a card: 24GiB.")
@click.option(
    "--time-limit",
    metavar="TIMES",
    type=float,
    help="With a plan, a step takes at most so many times as long as without recomputation: 1.2.",
)
@click.option(
    "--multiple-of",
    metavar="N",
    callback=whole_number,
    default="1",
    show_default=True,
    help="Look at multiples of this alone.",
)
@click.option("--method", metavar="NAME", help="One of `lowtide solvers` that plan ops.  [default: auto]")
@tiles_option
@click.option("--measure", is_flag=True, help="Train on the batches that were found, and measure.")
@json_option
def command(
    model: str,
    optimizer: str | None,
    device: str | None,
    profile: bool,
    card: str | None,
    reserve: int | None,
    memory: int | None,
    time_limit: float | None,
    multiple_of: int,
    method: str | None,
    tiles: bool,
    measure: bool,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Find the largest batch on which MODEL trains within some memory, as it is and with a plan.

    MODEL is what `lowtide fit` takes. The step is captured at two small batches and scaled from there;
    nothing is tried out, so nothing runs out of memory. What is found is checked by a capture at that batch.

    Exit code: 0 there is one, 2 bad request, or not even the smallest batch fits.
    """
    from lowtide.text.progress import stages

    hush_libraries()
    there_is = _memory(card, reserve, memory)
    where = device or ("cuda" if isinstance(there_is, Card) else default_device())
    _check(sizes, measure, where)
    with undisturbed(), stages() as stage:
        setup = _loaded(model, sizes)
        answer = _found(
            setup,
            model,
            sizes,
            stage,
            memory=there_is,
            time_limit=time_limit,
            multiple_of=multiple_of,
            optimizer=optimizer,
            device=where,
            profile=profile,
            method=method,
            tiles=tiles,
        )
        readings = _measured(answer, model, sizes, stage) if measure else {}
    _answer(answer, setup, readings, as_json)


def _memory(card: str | None, reserve: int | None, memory: int | None) -> Card | int:
    """What there is: a card, bytes for a peak, or the GPU that is here."""
    found = asked_card(card, reserve)
    if found is not None and memory is not None:
        raise click.UsageError("--memory is for a peak, --card for all that is taken; give one of them.")
    if found is not None or memory is not None:
        return found or memory or 0
    from lowtide.planner.on_card import card_here

    here = card_here()
    if here is None:
        raise click.UsageError("there is no GPU here to be filled. Say --card NAME|SIZE, or --memory SIZE.")
    return here


def _check(sizes: Mapping[str, int | None], measure: bool, device: str) -> None:
    if sizes["batch"] is not None:
        raise click.UsageError("--batch is what is looked for; leave it out.")
    if measure:
        from lowtide.cost.measure import present_device

        present_device(device, "measure")


def _loaded(model: str, sizes: Mapping[str, int | None]) -> Setup:
    setup = load_model(model, {**sizes, "batch": 1})
    if "batch" not in setup.sizes:
        raise BadRequest(
            f"{model} takes no batch, so no other can be tried. Give the function a parameter called batch."
        )
    return setup


def _given(
    model: str, sizes: Mapping[str, int | None], batch: int, device: str = "meta"
) -> tuple[Any, Batch]:
    """The model, and what it is given at that batch."""
    from lowtide.planner.batch_steps import Batch

    setup = load_model(model, {**sizes, "batch": batch}, device)
    return setup.model, Batch(setup.example, setup.loss)


def _found(
    setup: Setup, model: str, sizes: Mapping[str, int | None], stage: Stages, **wishes: Any
) -> LargestBatch:
    from lowtide.planner.batch import largest_batch

    return largest_batch(
        setup.model,
        lambda batch: _given(model, sizes, batch)[1],
        name=setup.name,
        progress=stage.update,
        telling=stage.begin,
        **wishes,
    )


def _measured(
    answer: LargestBatch, model: str, sizes: Mapping[str, int | None], stage: Stages
) -> dict[str, Reading]:
    """A reading for each batch that was found, by the name of its row. Models live one after the other."""
    from lowtide.planner.batch import measure_reached

    readings = {}
    for name, reached in (("plain", answer.plain), ("planned", answer.planned)):
        if reached is not None:
            stage.begin(f"training on a batch of {reached.batch}")
            real, batch = _given(model, sizes, reached.batch, answer.device)
            readings[name] = measure_reached(
                reached, real, batch, optimizer=answer.optimizer, device=answer.device
            )
            del real, batch
    return readings


def _unknown_of(graph: Graph, answer: LargestBatch) -> list[str]:
    from lowtide.report.text.planned import what_is_unknown

    return what_is_unknown(any(op.seconds for op in graph.ops), graph.profiled_on, answer.card)


def _answer(answer: LargestBatch, setup: Setup, readings: Mapping[str, Reading], as_json: bool) -> None:
    from lowtide.report.text.batched import print_largest_batch
    from lowtide.report.text.terminal import asked

    sizes = {name: value for name, value in setup.sizes.items() if name != "batch"}
    graph = answer.planned.solution.graph if answer.planned and answer.planned.solution else None
    unknown = [] if graph is None else _unknown_of(graph, answer)
    notes = [*unknown, *answer.notes, *setup.notes]
    if not as_json:
        title = asked(setup.name, sizes, answer.optimizer, answer.device)
        print_largest_batch(title, answer, readings, notes)
        return
    document = {**answer.to_json(), "sizes": sizes, "notes": notes}
    for name, reading in readings.items():
        document[name] |= {
            "measured_peak_bytes": reading.peak_bytes,
            "measured_seconds": reading.seconds,
            "measured_samples_per_second": document[name]["batch"] / reading.seconds,
        }
    click.echo(json.dumps(document, indent=2))
