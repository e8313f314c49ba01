"""Compiled training within budgets: nine steps, each by everything that people train it with and by lowtide.

    python -m benchmarks.compiled.compiled measure --rows FILE.json --commit HASH  on the machine with a GPU
    python -m benchmarks.compiled.compiled measure --rows FILE.json --tiny         in small, for a CPU
    python -m benchmarks.compiled.compiled report --rows FILE.json                 Markdown and a picture

What `lowtide compare --peers` does, row by row: a process for each step, and a row is written as soon as it
is there, one that fails with its reason. A row that is there for the same commit is not measured again; with
`--keep-peers` nor is one of others than lowtide, of whichever commit. After `--seconds` no row begins.

In 25 minutes: `measure --rows FILE.json --commit HASH --seconds 540` twice, at first for what tells most,

    --ways '^(eager|compile 1|lowtide inductor(, all kept|, lowest|( tiles)? within [0-9]+MiB))$'

then without `--ways`: rows that are there are not measured again, and plans stay within their peaks.

A step is the same for all: forward, loss, backward, gradients from None, no optimizer. Milliseconds are the
median of 7 steps that take turns with 7 eager ones, the peak is that of the second step and later ones.
Code is compiled anew for each row, unless `--caches` lets it come from disk, which the row then says.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.compiled.report import report
from benchmarks.compiled.subjects import LARGE, TINY, Step
from benchmarks.frontier.frontier import GRACE_SECONDS, OutOfTime, Rows, guarded, tell
from benchmarks.shared.machines import again, device
from benchmarks.shared.subjects import Made
from lowtide.planner.peer_ways import PeerKind, PeerRow, PeerTrial, PeerWishes, TrainingWay
from lowtide.planner.peers import trying
from lowtide.solvers import at_effort
from lowtide.text.budget import Budget
from lowtide.trace.spec import StepSpec

REPEATS = 7


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--rows", type=Path, required=True, help="where they are written")
    measuring.add_argument("--commit", default="unknown", help="of the code, to be written down")
    measuring.add_argument("--steps", help=f"some of {','.join(LARGE)}")
    measuring.add_argument("--ways", help="those whose labels match, '^(eager|compile)' say")
    measuring.add_argument("--no-compile", action="store_true", help="nothing that is compiled")
    measuring.add_argument("--no-tiles", action="store_true", help="no plans with tiles")
    measuring.add_argument("--caches", action="store_true", help="compiled code may come from disk")
    measuring.add_argument("--effort", default="full", help="how long plans are searched for: full, quick")
    measuring.add_argument("--seconds", type=float, default=540, help="after that no new row begins")
    measuring.add_argument("--row-seconds", type=float, default=150, help="a row that takes longer failed")
    measuring.add_argument("--retry", action="store_true", help="measure rows that failed again")
    measuring.add_argument("--keep-peers", action="store_true", help="those of other commits will do")
    measuring.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    measuring.add_argument("--alone", metavar="STEP", help="this one, in this process")
    reporting = commands.add_parser("report")
    reporting.add_argument("--rows", type=Path, required=True)
    reporting.add_argument("-o", "--output", type=Path, help="FILE.md beside the rows, unless told")
    chosen = parser.parse_args()
    if chosen.command == "report":
        report(json.loads(chosen.rows.read_text()), chosen.output or chosen.rows.with_suffix(".md"))
    elif chosen.alone is not None:
        del sys.argv[sys.argv.index("--alone") :]  # the command, to be written down as it was given
        measure_alone(chosen, chosen.alone)
    else:
        measure_all(chosen)


def steps(chosen: argparse.Namespace) -> Mapping[str, Step]:
    """The steps that were chosen."""
    found = TINY if chosen.tiny else LARGE
    if chosen.steps is None:
        return found
    unknown = set(chosen.steps.split(",")) - set(found)
    if unknown:
        raise SystemExit(f"no step {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    return {key: found[key] for key in chosen.steps.split(",")}


def measure_all(chosen: argparse.Namespace) -> None:
    """Each step in a process of its own: one that breaks the device leaves the others alone."""
    deadline = time.monotonic() + chosen.seconds
    for key in steps(chosen):
        left = deadline - time.monotonic()
        if left <= 0:
            print("out of time; call again to go on", file=sys.stderr)
            return
        alone = again("--seconds", f"{left:.0f}", "--alone", key)
        try:
            code = str(subprocess.run(alone, check=False, timeout=left + 2 * GRACE_SECONDS).returncode)
        except subprocess.TimeoutExpired:
            code = "no answer in time"
        if code != "0":
            print(f"{key}: the process ended with {code}; its rows so far are kept", file=sys.stderr)


# One step -------------------------------------------------------------------------------------------------


def measure_alone(chosen: argparse.Namespace, key: str) -> None:
    """Every row of one step that was chosen and is not there yet."""
    deadline = time.monotonic() + chosen.seconds
    rows = Rows(chosen.rows, chosen.commit)
    step = steps(chosen)[key]
    built = guarded(lambda: {"made": build(step)}, chosen.row_seconds)
    about = {"subject": step.sample.name, "step": key}
    if "error" in built:
        put(rows, {**about, "label": "eager", "kind": PeerKind.EAGER.value, **built})
        return
    about["library"] = step.sample.library()
    made: Made = built["made"]
    spec = StepSpec(made.model, made.example, made.loss, device=device(), name=step.sample.name)
    with trying(spec, wishes(chosen, step), REPEATS) as trial:
        for way in trial.ways():
            known = known_row(rows, step.sample.name, way, chosen)
            if known is not None:
                note_peak(trial, known)
                continue
            left = deadline - time.monotonic()
            if not is_chosen(chosen, way) or left <= 0:
                continue
            limit = min(chosen.row_seconds, left + GRACE_SECONDS)
            row = guarded(lambda way=way: as_json(trial.row(way)), limit)  # type: ignore[misc]
            if row.get("failure") != OutOfTime.__name__ or limit == chosen.row_seconds:
                put(rows, {**about, "label": way.label, "kind": way.kind.value, **row})


def build(step: Step) -> Made:
    """The model and its batch, on the device."""
    torch.manual_seed(0)
    with torch.device(device()):
        return step.sample.build()


def wishes(chosen: argparse.Namespace, step: Step) -> PeerWishes:
    return PeerWishes(
        method=at_effort("auto", chosen.effort),
        budgets=tuple(map(Budget.parse, step.budgets)),
        compiled=not chosen.no_compile,
        tiles=not chosen.no_tiles,
        from_cache=chosen.caches,
    )


def is_chosen(chosen: argparse.Namespace, way: TrainingWay) -> bool:
    return chosen.ways is None or re.search(chosen.ways, way.label) is not None


def known_row(
    rows: Rows, subject: str, way: TrainingWay, chosen: argparse.Namespace
) -> dict[str, Any] | None:
    """The row of this way, if it need not be measured."""
    found = rows.find(subject, way.label)
    if found is None and chosen.keep_peers and way.kind is not PeerKind.PLANNED:
        found = next(
            (row for row in rows.all if (row["subject"], row["label"]) == (subject, way.label)), None
        )
    return None if found is None or (chosen.retry and "error" in found) else found


def note_peak(trial: PeerTrial, row: Mapping[str, Any]) -> None:
    """Have plans stay within what an earlier run has measured."""
    if "peak_bytes" in row:
        trial.peaks[row["label"]] = row["peak_bytes"]


def as_json(row: PeerRow) -> dict[str, Any]:
    """A row as benchmarks write it."""
    if row.reading is None:
        return {"error": row.problem, "failure": "Refused", "remark": row.remark}
    found = {key: value for key, value in row.to_json().items() if value is not None}
    for key in ("label", "kind", "seconds", "eager_seconds", "predicted_peak_bytes"):
        found.pop(key, None)
    found["ms"] = 1e3 * row.reading.seconds
    if row.reading.eager_seconds is not None:
        found["eager_ms"] = 1e3 * row.reading.eager_seconds
    if row.predicted_peak_bytes is not None:
        found["predicted_bytes"] = row.predicted_peak_bytes
    return found


def put(rows: Rows, row: dict[str, Any]) -> None:
    rows.put(row)
    tell(row["step"], row["label"], row)


if __name__ == "__main__":
    main()
