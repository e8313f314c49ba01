"""`lowtide rehearse`: what would a training do on a card?"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lowtide.cli.options import json_option, plot_option, whole_number
from lowtide.cli.preparing import check_can_draw
from lowtide.cli.quiet import hush_libraries

if TYPE_CHECKING:
    from lowtide.rehearsal.on_card import CardRehearsal
    from lowtide.rehearsal.outcome import Rehearsed

_DOES_NOT_FIT = 1
_SCRIPT_FAILED = 2
_INTERRUPTED = 130
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:true"


@click.command(
    "rehearse",
    context_settings={"ignore_unknown_options": True, "help_option_names": ["--help"]},
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--card", metavar="NAME|SIZE", required=True, help="The card, or its memory: rtx4090, 16GiB, 24GB, …"
)
@click.option("--reserve", metavar="SIZE", help="What others hold of it: a display, …")
@click.option("--steps", metavar="N", callback=whole_number, help="End after so many steps of each part.")
@plot_option("Draw what was held over the training (.png, .svg).")
@json_option
def command(
    script: str,
    args: tuple[str, ...],
    card: str,
    reserve: str | None,
    steps: int | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Run the training SCRIPT with its ARGS, and tell what it would do on a card.

    On CUDA it runs under a real cap. Without, it runs on the CPU, its own loop and data, and every
    allocation is replayed as CUDA's allocator would have it. What the script prints comes first.

    With --steps, passes over a DataLoader end after N optimizer steps, or N batches in validation, and the
    script after N steps, or 2 N where it has a DataLoader. Options of the script that are called as one of
    these go after a --, with all of its arguments.

    Exit code: 0 what was seen fits, 1 it does not, 2 bad request, or an error of the script's own.
    """
    from lowtide.rehearsal.on_card import card as on_card
    from lowtide.rehearsal.outcome import Ended
    from lowtide.rehearsal.script import compiled_script, run_script

    hush_libraries()
    check_can_draw(plot)
    code = compiled_script(script)
    rehearsal = on_card(card, reserve=reserve or 0, steps=steps, expandable_segments=_expandable(os.environ))
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        failure = _run(rehearsal, lambda: run_script(code, script, args))
    sys.stdout.flush()
    found = rehearsal.found
    _answer(found, script, failure, plot, as_json)
    if not found.fits:
        click.get_current_context().exit(_DOES_NOT_FIT)
    if found.ended is Ended.INTERRUPTED:
        click.get_current_context().exit(_INTERRUPTED)
    if failure:
        click.get_current_context().exit(_SCRIPT_FAILED)


def _expandable(settings: Mapping[str, str]) -> bool:
    """Whether PyTorch's allocator is set to have segments that grow."""
    return any(_EXPANDABLE in settings.get(name, "").lower().replace(" ", "") for name in _SETTINGS)


def _run(rehearsal: CardRehearsal, run: Callable[[], None]) -> str:
    """Run the script, and say how it failed, if it did."""
    from lowtide.rehearsal.script import scripts_error

    try:
        with rehearsal:
            run()
    except KeyboardInterrupt:
        return ""
    except SystemExit as leaving:
        if not leaving.code:
            return ""
        if not isinstance(leaving.code, int):  # as Python does: a message, and 1
            click.echo(leaving.code, err=True)
        return f"the script exited with {leaving.code if isinstance(leaving.code, int) else 1}"
    except Exception as error:  # noqa: BLE001  the user's code may raise anything, and must not end ours
        click.echo(scripts_error(error), err=True)
        return f"the script raised {type(error).__name__}"
    return ""


def _answer(found: Rehearsed, script: str, failure: str, plot: Path | None, as_json: bool) -> None:
    from lowtide.report.picture.plot import write_picture
    from lowtide.report.picture.rehearsed import draw_rehearsed
    from lowtide.report.text.rehearsed import print_rehearsed

    if plot is not None:
        kind = plot.suffix.lower().removeprefix(".")
        write_picture(draw_rehearsed(found, kind, title=Path(script).name), plot)
    if as_json:
        click.echo(json.dumps({"script": script, **found.to_json(), "failure": failure or None}, indent=2))
    else:
        print_rehearsed(found, script, failure)
