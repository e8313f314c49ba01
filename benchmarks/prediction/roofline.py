"""How well are steps timed for a GPU that is not there? Estimates against the steps that were measured on it.

    python -m benchmarks.prediction.roofline prediction-DATE-h200.json -o roofline-DATE.md

The rows are those of `prediction.py measure`. Here each is run on fake tensors for CUDA, and timed by rule.
The rates in `lowtide.cost.roofline` were fitted to the rows that are not held out, and rounded; what the fit
gives without rounding is written down as well.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import least_squares

from benchmarks.paper.report import heading, percent, table
from benchmarks.prediction.prediction import traced
from benchmarks.shared.machines import machine
from benchmarks.shared.rows import ROWS
from lowtide.cost.flops import flops_of
from lowtide.cost.roofline import LAUNCH_SECONDS, RATES, Pace, estimated_seconds, kind_of, moved_bytes
from lowtide.ir.graph import Graph
from lowtide.text.documents import write_text

Json = dict[str, Any]
Floats = NDArray[np.float64]
# What a card can reach at most: beyond that a fit explains noise. TFLOP/s, TB/s, µs.
MOST_FLOPS = {
    Pace.CONVOLUTION: 400,
    Pace.MATRIX: 60,
    Pace.MATRIX_HALF: 800,
    Pace.ATTENTION: 60,
    Pace.ATTENTION_HALF: 700,
}
MOST_BYTES, MOST_LAUNCH = 4.6, 30
PULL = 0.02  # towards what is rounded, for rates that no row tells of


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    chosen = parser.parse_args()
    measured = {row["name"]: row["step_seconds"] for row in json.loads(chosen.measured.read_text())["rows"]}
    works = [work_of(row.name, row.held_out, graph(row.build), measured[row.name]) for row in ROWS]
    document = {
        "machine": machine(chosen.commit),
        "rows": [
            {
                "name": work.name,
                "held_out": work.held_out,
                "ops": len(work.kinds),
                "measured_seconds": work.measured_seconds,
                "estimated_seconds": work.estimated_seconds,
            }
            for work in works
        ],
        "rounded": dict(zip(names(), np.exp(rounded()).tolist(), strict=True)),
        "fitted": fitted([work for work in works if not work.held_out]),
    }
    write_text(chosen.output.with_suffix(".json"), json.dumps(document, indent=1))
    write_text(chosen.output, "\n".join(rendered(document)).rstrip() + "\n")


def graph(build: Callable[[], Any]) -> Graph:
    with torch.device("meta"):
        made = build()
    return traced(made, device="cuda").graph


@dataclass(frozen=True)
class Work:
    """A step: what each of its ops computes and moves, and how long it took in all."""

    name: str
    held_out: bool
    kinds: NDArray[np.intp]
    flops: Floats
    bytes: Floats
    estimated_seconds: float
    measured_seconds: float

    def seconds(self, logarithms: Floats) -> float:
        """By other rates than lowtide's."""
        rates = np.exp(logarithms)
        flops, moved = rates[: len(RATES)], rates[len(RATES) : -1]
        pace = np.maximum(self.flops / flops[self.kinds], self.bytes / moved[self.kinds])
        return float(np.maximum(pace, rates[-1]).sum())


def work_of(name: str, held_out: bool, step: Graph, measured_seconds: float) -> Work:
    order = {kind: position for position, kind in enumerate(RATES)}
    return Work(
        name,
        held_out,
        np.array([order[kind_of(op, step)] for op in step.ops]),
        np.array([flops_of(step, op) for op in step.ops], dtype=float),
        np.array([moved_bytes(op, step) for op in step.ops], dtype=float),
        sum(estimated_seconds(op, step) for op in step.ops),
        measured_seconds,
    )


# The fit ------------------------------------------------------------------------------------------------


def names() -> list[str]:
    return [
        *(f"{kind}: FLOP/s" for kind in RATES),
        *(f"{kind}: bytes/s" for kind in RATES),
        "launch: seconds",
    ]


def rounded() -> Floats:
    """The logarithms of lowtide's rates."""
    flops = [
        min(rate.flops, 1e15) for rate in RATES.values()
    ]  # where there is nothing to compute, any will do
    return np.log([*flops, *(rate.bytes for rate in RATES.values()), LAUNCH_SECONDS])


def fitted(works: Sequence[Work]) -> Mapping[str, float]:
    """The rates with which these steps are timed best, within what the card can reach."""
    start = rounded()
    most = np.log(
        [
            *(1e12 * MOST_FLOPS.get(kind, 1001) for kind in RATES),
            *[1e12 * MOST_BYTES] * len(RATES),
            1e-6 * MOST_LAUNCH,
        ]
    )

    def off(logarithms: Floats) -> Floats:
        apart = [math.log(work.seconds(logarithms) / work.measured_seconds) for work in works]
        return np.array([*apart, *(PULL * (logarithms - start))])

    least = start - math.log(10)
    found = least_squares(off, np.clip(start, least, most - 1e-3), bounds=(least, most))
    return dict(zip(names(), np.exp(found.x).tolist(), strict=True))


# The report -------------------------------------------------------------------------------------------------


def rendered(document: Json) -> Iterator[str]:
    rows = document["rows"]
    yield "# Steps timed for an H200 that is not there"
    yield ""
    yield from heading(document)
    yield "Measured on an NVIDIA H200 (rows of `prediction.py`); estimated here, without a GPU."
    yield ""
    for title, some in (
        ("fitted", [row for row in rows if not row["held_out"]]),
        ("held out", [row for row in rows if row["held_out"]]),
    ):
        offs = [off(row) for row in some]
        middle = float(np.median(np.abs(offs)))
        span = f"{percent(min(offs))} to {percent(max(offs))}"
        yield f"- {title}: {len(some)} steps, off by {span}, {percent(middle, '')} in the median"
    yield ""
    yield from table(
        ["step", "ops", "estimated ms", "measured ms", "off", "held out"],
        [
            [
                row["name"],
                f"{row['ops']:,}",
                f"{1e3 * row['estimated_seconds']:.1f}",
                f"{1e3 * row['measured_seconds']:.1f}",
                percent(off(row)),
                "yes" if row["held_out"] else "",
            ]
            for row in rows
        ],
    )
    yield "Rates, as they are used and as fitted; where there is nothing to compute, no rate counts."
    yield ""
    yield from table(
        ["rate", "used", "fitted"],
        [
            [name, f"{value:.3g}", f"{document['fitted'][name]:.3g}"]
            for name, value in document["rounded"].items()
        ],
    )


def off(row: Json) -> float:
    return float(row["estimated_seconds"] / row["measured_seconds"] - 1)


if __name__ == "__main__":
    main()
