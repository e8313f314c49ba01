"""How much slower than the best are the schedules of a planner?

    python -m benchmarks.planner.gap --method evict --method auto -o planner-gap-DATE.json

Every graph of the bank (training_graphs.py, up to 40 ops), at budgets that leave a part of what the plain
step takes beyond what is resident. `exact` says what can be reached: a ratio of total times, one for the
best schedule of its class. A planner may do better than that: the class is not all there is.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy

from benchmarks.planner.training_graphs import bank
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.solvers.ops.exact import Exact
from lowtide.solvers.refereed import extra_seconds
from lowtide.solvers.registry import schedulers
from lowtide.solvers.solution import ScheduleAnswer, Status
from lowtide.text.documents import write_text

PARTS = (0.9, 0.8, 0.7, 0.6)
GOALS = {0.9: 1.02, 0.8: 1.02, 0.7: 1.04, 0.6: 1.06}  # total time, on average


def asked(graph: Graph, methods: Sequence[str], time_limit: float) -> list[dict[str, Any]]:
    """One row for each budget."""
    plain = simulate(graph, straight(graph))
    seconds = sum(op.seconds for op in graph.ops)
    rows = []
    for part in PARTS:
        budget_bytes = plain.resident_bytes + int(part * plain.growth_bytes)
        started = time.perf_counter()
        best = Exact(time_limit).within(graph, budget_bytes)
        row: dict[str, Any] = {
            "graph": graph.name,
            "ops": len(graph.ops),
            "part": part,
            "budget_bytes": budget_bytes,
            "exact_planning_seconds": time.perf_counter() - started,
            "exact": None if best is None else 1 + extra_seconds(graph, best.schedule) / seconds,
            "bound": None if best is None else 1 + best.least_extra_seconds / seconds,
            "proved": best is not None and best.status is Status.OPTIMAL,
        }
        for method in methods:
            answer = schedulers()[method]().within(graph, budget_bytes)
            row[method] = None if answer is None else 1 + replayed(graph, answer, budget_bytes) / seconds
        rows.append(row)
    return rows


def replayed(graph: Graph, answer: ScheduleAnswer, budget_bytes: int) -> float:
    assert simulate(graph, answer.schedule).peak_bytes <= budget_bytes
    return extra_seconds(graph, answer.schedule)


def summed_up(rows: Sequence[dict[str, Any]], method: str, part: float) -> dict[str, Any]:
    """What the method's total times are, relative to exact's, over the graphs where both found a schedule."""
    here = [row for row in rows if row["part"] == part and row["exact"] is not None]
    ratios = {row["graph"]: row[method] / row["exact"] for row in here if row[method] is not None}
    worst = max(ratios, key=lambda name: ratios[name], default=None)
    average = sum(ratios.values()) / len(ratios) if ratios else None
    return {
        "method": method,
        "part": part,
        "feasible": len(here),
        "proved": sum(row["proved"] for row in here),
        "missed": sum(row[method] is None for row in here),
        "average": average,
        "worst": None if worst is None else ratios[worst],
        "worst_graph": worst,
        "equal": sum(ratio < 1 + 1e-6 for ratio in ratios.values()),
        "better": sum(ratio < 1 - 1e-6 for ratio in ratios.values()),
        "goal": GOALS[part],
        "reached": average is not None and average <= GOALS[part],
    }


def rendered(found: dict[str, Any]) -> str:
    sizes = [row["ops"] for row in found["rows"]]
    lines = [
        "# How far planners are from the best",
        "",
        ", ".join(f"{key} {value}" for key, value in found["machine"].items())
        + f": `python -m benchmarks.planner.gap`. {found['graphs']} graphs of {min(sizes)} to {max(sizes)} "
        "ops. A budget is a part of what the plain step takes beyond what is resident. Ratios are total time "
        "to exact's, over the graphs where both found a schedule; missed: exact found one and the method did "
        "not; better: outside of exact's class of schedules. A goal is for the average.",
        "",
        "| method | budget | feasible | proved | missed | as good | better | average | worst | goal | |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---|",
    ]
    for row in found["summary"]:
        average = "–" if row["average"] is None else f"{row['average']:.4f}"
        worst = "–" if row["worst"] is None else f"{row['worst']:.3f} {row['worst_graph']}"
        lines.append(
            f"| {row['method']} | {row['part']:.0%} | {row['feasible']} | {row['proved']} | "
            f"{row['missed']} | {row['equal']} | {row['better']} | {average} | {worst} | {row['goal']:.2f} | "
            f"{'reached' if row['reached'] else 'missed'} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    others = [name for name in schedulers() if name != Exact.name]
    parser.add_argument("--method", action="append", choices=others, help="all of them unless told")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each answer of exact")
    parser.add_argument("--only", default="", help="graphs whose name contains this")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    chosen = parser.parse_args()
    methods = chosen.method or others
    graphs = [graph for graph in bank() if chosen.only in graph.name]
    rows: list[dict[str, Any]] = []
    for graph in graphs:
        new = asked(graph, methods, chosen.time_limit)
        rows += new
        for row in new:
            told = "  ".join(f"{name} {_told(row, name)}" for name in ("exact", *methods))
            print(f"{graph.name:14s} {len(graph.ops)} ops  {row['part']:.0%}  {told}", flush=True)
    found = {
        "machine": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "scipy": scipy.__version__,
            "time_limit": chosen.time_limit,
            "commit": chosen.commit,
            "date": time.strftime("%Y-%m-%d"),
        },
        "graphs": len(graphs),
        "summary": [summed_up(rows, method, part) for method in methods for part in PARTS],
        "rows": rows,
    }
    write_text(chosen.output, json.dumps(found, indent=1))
    write_text(chosen.output.with_suffix(".md"), rendered(found))
    print(rendered(found))


def _told(row: dict[str, Any], name: str) -> str:
    mark = "?" if name == "exact" and row["exact"] is not None and not row["proved"] else ""
    return "–" if row[name] is None else f"{row[name]:.3f}{mark}"


if __name__ == "__main__":
    main()
