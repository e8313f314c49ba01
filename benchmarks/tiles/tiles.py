"""Below one op: steps in which logits, or one convolution, decide the peak, by peers and by lowtide's tiles.

    python -m benchmarks.tiles.tiles measure --rows FILE.json --commit HASH  on the machine with the GPU
    python -m benchmarks.tiles.tiles measure --rows FILE.json --small        in small, for a CPU
    python -m benchmarks.tiles.tiles table --rows FILE.json                  dated Markdown and a picture

One process for each step: peers first, then lowtide, which is asked for the lowest peak and for the least
time within what a peer holds. Kernels are PyTorch's own. A row is written as soon as it is there.

A step is the same for all: forward, loss, backward, gradients from None, no optimizer; only the loss is
referenced. Milliseconds are the median of 7 steps after 3, the peak is the allocator's over those 7.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.frontier.frontier import Rows, Trial, clean_up, guarded, tell
from benchmarks.shared.machines import again, device
from benchmarks.standing.standing import PEERS
from benchmarks.tiles.report import report
from benchmarks.tiles.subjects import LARGE, LOWEST, SMALL, Question, Subject
from lowtide.ir.graph import Graph
from lowtide.planner.ops import StepBudget
from lowtide.solvers.solution import GraphSolution


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--rows", type=Path, required=True, help="where they are written")
    measuring.add_argument("--commit", default="unknown", help="of the code, to be written down")
    measuring.add_argument("--steps", help=f"some of {','.join(LARGE)}")
    measuring.add_argument("--seconds", type=float, default=540, help="after that no new process begins")
    measuring.add_argument("--row-seconds", type=float, default=150, help="a row that takes longer failed")
    measuring.add_argument("--small", action="store_true", help="sizes for a CPU")
    measuring.add_argument("--alone", metavar="STEP", help="this one, in this process")
    tabling = commands.add_parser("table")
    tabling.add_argument("--rows", type=Path, required=True)
    tabling.add_argument("-o", "--output", type=Path, help="FILE.md beside the rows, unless told")
    chosen = parser.parse_args()
    if chosen.command == "table":
        report(json.loads(chosen.rows.read_text()), chosen.output or chosen.rows.with_suffix(".md"))
    elif chosen.alone is not None:
        del sys.argv[sys.argv.index("--alone") :]  # the command, to be written down as it was given
        measure(chosen, subjects(chosen)[chosen.alone])
    else:
        deadline = time.monotonic() + chosen.seconds
        for key in chosen.steps.split(",") if chosen.steps else subjects(chosen):
            left = deadline - time.monotonic()
            if left > 0:
                run_alone(key, left)


def subjects(chosen: argparse.Namespace) -> Mapping[str, Subject]:
    return SMALL if chosen.small else LARGE


def run_alone(key: str, seconds: float) -> None:
    """A process of its own, which writes its rows as they are there."""
    try:
        subprocess.run(again("--alone", key), check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{key}: out of time", file=sys.stderr)


class TiledTrial(Trial):
    """A step whose plans may run stretches of it in slices."""

    @cached_property
    def budget(self) -> StepBudget:
        found = super().budget
        return replace(found, spec=replace(found.spec, tiles=True))


def measure(chosen: argparse.Namespace, subject: Subject) -> None:
    """All rows of one step."""
    rows = Rows(chosen.rows, chosen.commit)
    torch.manual_seed(0)
    with torch.device(device()):
        trial = TiledTrial(subject.sample.name, subject.sample.build())
    about = {"subject": trial.name, "library": subject.sample.library()}
    for peer in subject.peers:
        row = guarded(partial(by_peer, trial, peer), chosen.row_seconds)
        put(rows, {**about, "label": peer, "kind": "peer", **row})
        clean_up(trial.made.model)
    for question in subject.questions:
        row = guarded(partial(by_lowtide, trial, question, rows), chosen.row_seconds)
        asked = {
            "most_mib": question.most_mib,
            "most_ms": question.most_ms,
            "most_times": question.most_times,
        }
        label = LOWEST if question.within == LOWEST else f"within {question.within}"
        put(rows, {**about, "label": label, "kind": "planned", **asked, **row})
        clean_up(trial.made.model)


def put(rows: Rows, row: dict[str, Any]) -> None:
    rows.put(row)
    tell(row["subject"], row["label"], row)


def by_peer(trial: Trial, peer: str) -> dict[str, Any]:
    with PEERS[peer](trial.made) as model:
        return trial.measured(model)


def by_lowtide(trial: Trial, question: Question, rows: Rows) -> dict[str, Any]:
    """A plan with tiles, measured, and what is cut."""
    row = trial.planned(wanted(trial, question, rows))
    (plan,) = lowtide.plans_of(trial.made.model)
    assert isinstance(plan, GraphSolution), "what has tiles is planned op by op"
    return {**row, "tiles": described(plan.graph)}


def wanted(trial: Trial, question: Question, rows: Rows) -> str | int:
    if question.within == LOWEST:
        return "min"
    if question.within[0].isdigit():
        return question.within
    reached = rows.find(trial.name, question.within) or {}
    if "peak_bytes" not in reached:
        raise LookupError(f"there is no peak to stay within: {question.within!r} was not measured")
    return int(reached["peak_bytes"])


def described(graph: Graph) -> list[dict[str, Any]]:
    """What runs in slices: where, in how many, and the largest tensor that is never there as a whole."""
    tiles = () if graph.tiled is None else graph.tiled.blocks
    return [
        {"where": tile.where, "count": tile.count, "extent": tile.extent, "spared_bytes": tile.spared_bytes}
        for tile in tiles
    ]


if __name__ == "__main__":
    main()
