"""`lowtide saved`: what is kept for the backward, and why?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from lowtide.cli.options import json_option, model_options
from lowtide.cli.preparing import default_device, load_model
from lowtide.cli.quiet import hush_libraries, undisturbed

if TYPE_CHECKING:
    from lowtide.trace.saved_report import Saved
    from lowtide.zoo.setup import Setup


@click.command("saved")
@model_options
@json_option
def command(model: str, device: str | None, as_json: bool, **sizes: int | None) -> None:
    """List what training MODEL keeps for the backward: every value, who needs it, and why.

    MODEL is what `lowtide fit` takes. What takes most comes first; values that differ in nothing but the
    number of their layer share a row. With --json each of them is listed.

    Nothing is allocated and nothing is trained. Exit code: 0 fine, 2 bad request.
    """
    from lowtide.text.progress import waiting

    hush_libraries()
    with undisturbed(), waiting("running the step on fake tensors"):
        setup = load_model(model, sizes)
        found = _found(setup, device)
    _answer(found, setup, as_json)


def _found(setup: Setup, device: str | None) -> Saved:
    from lowtide.trace.saved import saved

    where = device or default_device()
    return saved(setup.model, setup.example, setup.loss, device=where, name=setup.name)


def _answer(found: Saved, setup: Setup, as_json: bool) -> None:
    from lowtide.report.text.saved import print_saved

    if not as_json:
        print_saved(found, setup.sizes, setup.notes)
        return
    asked = {"model": found.model, "batch": setup.sizes.get("batch"), "sizes": dict(setup.sizes)}
    notes = {"notes": [*found.notes, *setup.notes]}
    click.echo(json.dumps({**asked, **found.to_json(), **notes}, indent=2))
