"""`lowtide worst`: which length of an epoch peaks highest, and which do not fit?"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.options import asked_card, card_options, json_option, size, step_options, whole_number
from lowtide.cli.preparing import default_device, load_model
from lowtide.cli.quiet import hush_libraries, undisturbed
from lowtide.errors import BadFile, BadRequest
from lowtide.text.card import Card

if TYPE_CHECKING:
    from lowtide.planner.batch_steps import Batch
    from lowtide.planner.shape_classes import ShapeClasses
    from lowtide.planner.worst import Epoch
    from lowtide.text.progress import Stages
    from lowtide.zoo.setup import Setup

_DOES_NOT_FIT = 1
_LENGTH = "tokens"


@click.command("worst")
@step_options
@click.option("--lengths", metavar="N,N,…", help="The lengths that come, in tokens: 128,512,2048.")
@click.option(
    "--lengths-file",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The same from a file: a JSON list, a JSON object {length: samples}, or a length a line.",
)
@card_options("Which fit on all of this card? rtx4090, 24GiB, …")
@click.option("--memory", metavar="SIZE", callback=size, help="Which peaks fit in this? 24GiB, 80GB, …")
@click.option("--method", metavar="NAME", help="One of `lowtide solvers` that plan ops.  [default: auto]")
@click.option(
    "--shapes",
    metavar="N",
    callback=whole_number,
    help="Choose so many lengths to pad to, and the largest batch of each that fits in the memory.",
)
@json_option
def command(
    model: str,
    optimizer: str | None,
    device: str | None,
    profile: bool,
    lengths: str | None,
    lengths_file: Path | None,
    card: str | None,
    reserve: int | None,
    memory: int | None,
    method: str | None,
    shapes: int | None,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Name the length at which training MODEL peaks highest, and those that do not fit in some memory.

    MODEL is what `lowtide fit` takes. The step is traced at two or three lengths and scaled from there to all
    that come; the worst is traced as it is. Nothing is trained.

    Exit code: 0 all lengths fit as the step is written, or no memory is named, 1 some do not, 2 bad request.
    """
    from lowtide.text.progress import stages

    hush_libraries()
    counts = _counts(lengths, lengths_file)
    there_is = _memory(card, reserve, memory)
    _check(sizes, shapes, there_is)
    where = device or ("cuda" if isinstance(there_is, Card) else default_device())
    step = {"optimizer": optimizer, "device": where, "profile": profile, "method": method}
    with undisturbed(), stages() as stage:
        setup = _loaded(model, sizes, max(counts))
        found = _worst(setup, model, sizes, counts, stage, memory=there_is, **step)
        classes = _shapes(setup, model, sizes, counts, stage, shapes, memory=there_is, **step)
    _answer(found, classes, setup, as_json)
    if found.fits is False:
        click.get_current_context().exit(_DOES_NOT_FIT)


def _counts(text: str | None, file: Path | None) -> Mapping[int, int]:
    from lowtide.planner.lengths import counted_lengths

    if (text is None) == (file is None):
        raise click.UsageError("say which lengths come: either --lengths 128,512 or --lengths-file FILE.")
    return counted_lengths(_read(file) if file is not None else _numbers((text or "").split(",")))


def _read(file: Path) -> list[int] | dict[int, int]:
    text = file.read_text(encoding="utf-8")
    if file.suffix.lower() != ".json":
        return _numbers(text.split())
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BadFile(file, f"it is no JSON: {error}") from None
    if isinstance(found, dict):
        return dict(zip(_numbers(list(found)), _numbers(list(map(str, found.values()))), strict=True))
    if not isinstance(found, list):
        raise BadFile(file, "it has neither a list of lengths nor an object {length: samples}")
    return _numbers(list(map(str, found)))


def _numbers(words: Sequence[str]) -> list[int]:
    for word in words:
        if not word.strip().isdecimal():
            raise BadRequest(f"cannot read '{word:.60}' as a length. Write whole numbers: 128,512,2048.")
    return list(map(int, words))


def _memory(card: str | None, reserve: int | None, memory: int | None) -> Card | int | None:
    found = asked_card(card, reserve)
    if found is not None and memory is not None:
        raise click.UsageError("--memory is for a peak, --card for all that is taken; give one of them.")
    return found if found is not None else memory


def _check(sizes: Mapping[str, int | None], shapes: int | None, memory: Card | int | None) -> None:
    if sizes[_LENGTH] is not None:
        raise click.UsageError("--tokens is what --lengths say; leave it out.")
    if shapes is not None and memory is None:
        raise click.UsageError(
            "--shapes are for a memory that their batches are to fill; give --memory or --card."
        )


def _loaded(model: str, sizes: Mapping[str, int | None], longest: int) -> Setup:
    setup = load_model(model, {**sizes, _LENGTH: longest})
    if _LENGTH not in setup.sizes:
        raise BadRequest(
            f"{model} takes no tokens, so it has no lengths. Give the function a parameter called tokens."
        )
    return setup


def _given(model: str, sizes: Mapping[str, int | None], length: int) -> Batch:
    """What the model is given at that length."""
    from lowtide.planner.batch_steps import Batch

    setup = load_model(model, {**sizes, _LENGTH: length})
    return Batch(setup.example, setup.loss)


def _worst(
    setup: Setup,
    model: str,
    sizes: Mapping[str, int | None],
    counts: Mapping[int, int],
    stage: Stages,
    **wishes: Any,
) -> Epoch:
    from lowtide.planner.worst import worst

    return worst(
        setup.model,
        counts,
        partial(_given, model, sizes),
        name=setup.name,
        progress=stage.update,
        telling=stage.begin,
        **wishes,
    )


def _shapes(
    setup: Setup,
    model: str,
    sizes: Mapping[str, int | None],
    counts: Mapping[int, int],
    stage: Stages,
    most: int | None,
    **wishes: Any,
) -> ShapeClasses | None:
    from lowtide.planner.shape_classes import shape_classes

    if most is None:
        return None
    return shape_classes(
        setup.model,
        counts,
        lambda batch, length: _given(model, {**sizes, "batch": batch}, length),
        classes=most,
        name=setup.name,
        progress=stage.update,
        telling=stage.begin,
        **wishes,
    )


def _answer(found: Epoch, shapes: ShapeClasses | None, setup: Setup, as_json: bool) -> None:
    from lowtide.report.text.lengths import print_epoch
    from lowtide.report.text.terminal import asked

    sizes = {name: value for name, value in setup.sizes.items() if name != _LENGTH}
    if not as_json:
        print_epoch(asked(setup.name, sizes, found.optimizer, found.device), found, shapes, setup.notes)
        return
    document = {**found.to_json(), "sizes": sizes, "notes": [*found.notes, *setup.notes]}
    if shapes is not None:
        document["classes"] = shapes.to_json()
    click.echo(json.dumps(document, indent=2))
