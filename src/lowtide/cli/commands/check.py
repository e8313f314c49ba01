"""`lowtide check`: has the peak grown?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lowtide.cli.options import json_option, size, step_options
from lowtide.cli.preparing import Asked, predicted
from lowtide.cli.quiet import hush_libraries, undisturbed
from lowtide.errors import BadRequest

if TYPE_CHECKING:
    from lowtide.planner.baseline import Judgement
    from lowtide.planner.fit import Fit
    from lowtide.zoo.setup import Setup

_TOO_MUCH = 1
_WRITE = "Write it with --write-baseline, and put it under version control."


def _tolerance(ctx: click.Context, param: click.Parameter, text: str) -> str:
    """A part of the peak, or bytes."""
    from lowtide.planner.baseline import tolerance_bytes

    try:
        tolerance_bytes(text, 1 << 60)
    except BadRequest as error:
        raise click.BadParameter(str(error), ctx, param) from None
    return text


@click.command("check")
@step_options
@click.option("--max-peak", metavar="SIZE", callback=size, help="The peak may be this at most: 8GiB, …")
@click.option(
    "--baseline", metavar="FILE", type=click.Path(path_type=Path), help="Compare with this file (.json)."
)
@click.option(
    "--tolerance",
    metavar="PART|SIZE",
    default="2%",
    show_default=True,
    callback=_tolerance,
    help="By how much the peak may differ from the baseline's.",
)
@click.option("--write-baseline", is_flag=True, help="Write the file instead of comparing with it.")
@json_option
def command(
    model: str,
    optimizer: str | None,
    device: str | None,
    profile: bool,
    max_peak: int | None,
    baseline: Path | None,
    tolerance: str,
    write_baseline: bool,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Check that training MODEL peaks no higher than it may, or than it did: a guard for CI.

    MODEL is what `lowtide fit` takes, and the peak is the one that it predicts. What grew is told by module.

    Nothing is allocated and nothing is trained. Exit code: 0 it does not, 1 it does, 2 bad request.
    """
    from lowtide.planner.baseline import judge, load_baseline, save_baseline
    from lowtide.testing import baseline_of

    hush_libraries()
    _check_request(max_peak, baseline, write_baseline)
    kept = None if baseline is None or write_baseline else load_baseline(baseline, _WRITE)
    with undisturbed():
        setup, fit = predicted(Asked(model, sizes, optimizer, device, profile), max_peak)
        found = baseline_of(fit, setup.example, dict(setup.sizes))
    judgement = None if kept is None else judge(kept, found, tolerance)
    if baseline is not None and write_baseline:
        save_baseline(found, baseline)
    _answer(fit, setup, judgement, baseline if write_baseline else None, as_json)
    if fit.fits is False or _grew(judgement):
        click.get_current_context().exit(_TOO_MUCH)


def _check_request(max_peak: int | None, baseline: Path | None, write_baseline: bool) -> None:
    if max_peak is None and baseline is None:
        raise click.UsageError("there is nothing to check against: give --max-peak or --baseline.")
    if write_baseline and baseline is None:
        raise click.UsageError("--write-baseline writes the file that --baseline names; give both.")
    if write_baseline and baseline is not None and not baseline.parent.is_dir():
        raise click.UsageError(f"there is no directory '{baseline.parent}' to write '{baseline.name}' to.")


def _grew(judgement: Judgement | None) -> bool:
    from lowtide.planner.baseline import Verdict

    return judgement is not None and judgement.verdict is Verdict.GREW


def _answer(fit: Fit, setup: Setup, judgement: Judgement | None, written: Path | None, as_json: bool) -> None:
    from lowtide.report.text.guarded import print_check

    notes = [*(judgement.notes if judgement else ()), *fit.notes, *setup.notes]
    if not as_json:
        print_check(fit, setup.sizes, judgement, written, notes)
        return
    document: dict[str, Any] = {
        "model": fit.model,
        "sizes": dict(setup.sizes),
        "device": fit.device,
        "optimizer": fit.optimizer,
        "peak_bytes": fit.peak_bytes,
        "max_peak_bytes": fit.budget_bytes,
        "passes": fit.fits is not False and not _grew(judgement),
        "baseline": None if judgement is None else judgement.to_json(),
        "written": None if written is None else str(written),
        "notes": notes,
    }
    click.echo(json.dumps(document, indent=2))
