"""Does lowtide hold for modules that nobody thought of? Random ones, trained plain and planned.

    python -m benchmarks.fuzz.fuzz --seeds 0:200 --rows out/fuzz.json --commit HASH [--jobs 4] [--all]
    python -m benchmarks.fuzz.fuzz --seeds 17 --shrink            the smallest module that fails alike

A seed stands for a module, a batch and a loss (`recipe`), and for one way to plan and one budget; with
`--all` for all of both. Each is trained for some steps without and with a plan, from equal states: loss,
outputs, gradients, buffers and the random streams must be the same, to the bit where plain training is, the
measured peak as promised, and the model without its plan as it was. What fails is printed, and all of it
written down.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.fuzz.processes import Task, rows_of
from benchmarks.fuzz.recipe import Recipe, recipe, smaller
from benchmarks.fuzz.report import line, report, table
from benchmarks.fuzz.trial import BAD, NO_SUBJECT, REFUSED, Row, tried
from benchmarks.fuzz.ways import BUDGETS, WAYS
from benchmarks.shared.machines import machine
from lowtide.text.documents import write_text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", default="0:200", help="from:to, or 3,17,20")
    parser.add_argument("--rows", type=Path, help="where they are written, and a page beside them")
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--way", help=f"one of {', '.join(WAYS)}")
    parser.add_argument("--budget", help=f"one of {', '.join(BUDGETS)}".replace("%", "%%"))
    parser.add_argument("--all", action="store_true", help="every way and budget for each seed")
    parser.add_argument("--seconds", type=float, default=180, help="that one trial may take")
    parser.add_argument("--shrink", action="store_true", help="make each that fails as small as can be")
    chosen = parser.parse_args()
    tasks = [task for seed in seeds_of(chosen.seeds) for task in tasks_of(seed, chosen)]
    if chosen.shrink:
        for task in tasks:
            print(line(shrunk(task)), flush=True)
        return
    rows: list[Row] = []
    for row in rows_of(tasks, chosen.jobs, chosen.seconds):
        rows.append(row)
        if row["outcome"] in BAD or row["outcome"] in (REFUSED, NO_SUBJECT):
            print(line(row), flush=True)
    print("\n".join(table(rows)))
    if chosen.rows is not None:
        written(sorted(rows, key=lambda row: row["seed"]), chosen)


def written(rows: list[Row], chosen: argparse.Namespace) -> None:
    """The rows, and a page of them."""
    document = {"machine": machine(chosen.commit), "rows": rows}
    chosen.rows.parent.mkdir(parents=True, exist_ok=True)
    write_text(chosen.rows, json.dumps(document, indent=1))
    report(document, chosen.rows.with_suffix(".md"))


def seeds_of(text: str) -> list[int]:
    """'0:200' is the seeds from 0 on, before 200."""
    first, colon, stop = text.partition(":")
    return [*range(int(first), int(stop))] if colon else [int(seed) for seed in text.split(",")]


def task_of(seed: int) -> Task:
    """The way and the budget of a seed: all of both in a row."""
    ways = list(WAYS)
    return seed, ways[seed % len(ways)], BUDGETS[seed // len(ways) % len(BUDGETS)]


def tasks_of(seed: int, chosen: argparse.Namespace) -> Iterator[Task]:
    """Those of a seed that were asked for."""
    _, way, budget = task_of(seed)
    ways = WAYS if chosen.all else [way]
    budgets = BUDGETS if chosen.all else [budget]
    for way in [chosen.way] if chosen.way else ways:
        for budget in [chosen.budget] if chosen.budget else budgets:
            yield seed, way, budget


# Smaller ------------------------------------------------------------------------------------------------


def shrunk(task: Task) -> Row:
    """The row of the smallest recipe that comes out as that of the seed does."""
    seed, way, budget = task
    there, row = recipe(seed), tried(recipe(seed), way, budget)
    found: tuple[Recipe, Row] | None = (there, row)
    while found is not None:
        there, row = found
        found = next(_alike(there, row, way, budget), None)
    return row


def _alike(there: Recipe, row: Row, way: str, budget: str) -> Iterator[tuple[Recipe, Row]]:
    for less in smaller(there):
        if less.ingredients and _kind(found := tried(less, way, budget)) == _kind(row):
            yield less, found


def _kind(row: Row) -> Any:
    return row["outcome"], str(row.get("reason", "")).partition(":")[0][:40]


if __name__ == "__main__":
    main()
