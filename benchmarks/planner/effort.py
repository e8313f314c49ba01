"""How much worse are the plans of a quick search, and how much faster is it?

    python -m benchmarks.planner.effort -o planner-effort-DATE.json

`auto` plans every graph twice, in full and quickly, at budgets that leave a part of what the plain step takes
beyond what is resident: the small graphs of training_graphs.py, made-up stacks of about a thousand ops, and
steps of the zoo for CUDA, captured on the spot. One search finds the schedules for all budgets: it is timed
once for each graph, in seconds of the processor, with the loops compiled before.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import lowtide
from benchmarks.planner.speed import gpt, lstm, searched_anew, sized
from benchmarks.planner.training_graphs import bank
from lowtide import zoo
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.solvers.method import Effort
from lowtide.solvers.ops.auto import Auto
from lowtide.solvers.refereed import extra_seconds
from lowtide.text.documents import write_text

PARTS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
CAPTURED = ("alexnet", "vgg19", "unet", "resnet18", "resnet50", "gpt", "inception_v3")


def subjects() -> Iterator[tuple[str, Graph]]:
    """Graphs, and of which kind each is."""
    for graph in bank():
        yield "small", graph
    for make in (lstm, gpt):
        yield "stacks", sized(make, 1_000)
    for name in CAPTURED:
        with torch.device("meta"):
            work = zoo.workload(name, zoo.Sizes(batch=8))
        plain = lowtide.plan(work.model, work.args, loss=work.loss, budget="100%", device="cuda", name=name)
        assert isinstance(plain, lowtide.GraphSolution)
        yield "zoo", searched_anew(plain.graph)


def row(kind: str, graph: Graph) -> dict[str, Any]:
    """How long both searches take, and the extra time of their plans, as a part of the plain step's."""
    plain = simulate(graph, straight(graph))
    seconds = sum(op.seconds for op in graph.ops)
    found: dict[str, Any] = {"graph": graph.name, "kind": kind, "ops": len(graph.ops)}
    for effort in Effort:
        method = Auto(effort)
        started = time.process_time()
        lowest = method.lowest(graph)
        found[effort] = {
            "search_seconds": time.process_time() - started,
            "lowest_bytes": simulate(graph, lowest.schedule).peak_bytes - plain.resident_bytes,
            "extra": {},
        }
        for part in PARTS:
            answer = method.within(graph, plain.resident_bytes + int(part * plain.growth_bytes))
            if answer is not None:
                found[effort]["extra"][part] = extra_seconds(graph, answer.schedule) / seconds
    return found


def summed_up(kind: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Over all graphs of a kind, and all budgets for which the full search found a plan."""
    pairs = [
        (row["full"]["extra"].get(part), row["quick"]["extra"].get(part)) for row in rows for part in PARTS
    ]
    more = sorted(quick - full for full, quick in pairs if full is not None and quick is not None)
    lowest = [row["quick"]["lowest_bytes"] / row["full"]["lowest_bytes"] for row in rows]
    times = {effort: sum(row[effort]["search_seconds"] for row in rows) for effort in Effort}
    return {
        "kind": kind,
        "graphs": len(rows),
        "plans": len(more),
        "missed": sum(full is not None and quick is None for full, quick in pairs),
        "as_fast": sum(each <= 1e-9 for each in more),
        "mean_more": statistics.mean(more),
        "tenth_more": more[len(more) * 9 // 10],
        "most_more": more[-1],
        "lowest_mean": statistics.mean(lowest),
        "lowest_most": max(lowest),
        "full_seconds": times[Effort.FULL],
        "quick_seconds": times[Effort.QUICK],
    }


def rendered(found: dict[str, Any]) -> str:
    lines = [
        "# What a quick search costs and saves",
        "",
        ", ".join(f"{key} {value}" for key, value in found["machine"].items())
        + ": `python -m benchmarks.planner.effort`. auto with effort quick against full. more: what its "
        "plans add beyond those of the full search, as a part of the plain step's time, on average, for nine "
        "in ten, and at most; missed: the full search found a plan and the quick one did not; lowest: the "
        "lowest peak beside what is resident, to that of the full search. Seconds of the processor, all "
        "graphs together.",
        "",
        "| graphs | | plans | as fast | missed | more | 9 in 10 | most | lowest | most | full | quick |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["summary"]:
        lines.append(
            f"| {row['kind']} | {row['graphs']} | {row['plans']} | {row['as_fast']} | {row['missed']} | "
            f"{row['mean_more']:.2%} | {row['tenth_more']:.2%} | {row['most_more']:.2%} | "
            f"{row['lowest_mean']:.3f} | {row['lowest_most']:.3f} | {row['full_seconds']:.2f} s | "
            f"{row['quick_seconds']:.2f} s |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    chosen = parser.parse_args()
    lowtide.solve(lstm(4), "auto")  # compiles
    rows: list[dict[str, Any]] = []
    for kind, graph in subjects():
        rows.append(row(kind, graph))
        times = [f"{effort} {rows[-1][effort]['search_seconds']:.2f} s" for effort in Effort]
        print(f"{graph.name:>24} {len(graph.ops):6} ops: {', '.join(times)}", flush=True)
    kinds = dict.fromkeys(row["kind"] for row in rows)
    found = {
        "machine": {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "commit": chosen.commit,
            "date": time.strftime("%Y-%m-%d"),
        },
        "summary": [summed_up(kind, [row for row in rows if row["kind"] == kind]) for kind in kinds],
        "rows": rows,
    }
    write_text(chosen.output, json.dumps(found, indent=1))
    write_text(chosen.output.with_suffix(".md"), rendered(found))
    print(rendered(found))


if __name__ == "__main__":
    main()
