"""How close to what is live at once is the arena of a training step?

    python -m benchmarks.memory.layout -o layout-DATE.md --commit HASH [--only vgg,gpt]

The joint forward and backward of every model of the zoo, captured for a GPU and for a CPU without running
it, a ResNet of 1,001 layers, and random training steps of 10,000 values. Each is laid out in its straight
order, sizes rounded as the device rounds them. JSON is written beside the Markdown, after each graph; graphs
that are there for the same commit are not laid out again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.paper.report import heading, mib, table
from benchmarks.planner.training_graphs import drawn
from benchmarks.shared.machines import machine
from lowtide import zoo
from lowtide.aot.capture import capture
from lowtide.arena.buffers import alignment_of, buffers_of, largest_live_bytes
from lowtide.arena.in_place import take_overs
from lowtide.arena.layout import lay_out
from lowtide.arena.pack import pack
from lowtide.arena.tags import share
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.text.documents import write_text

BATCH = 8
DEEP = "preresnet1001"
RANDOM_LAYERS = 3_100  # of which a step makes a little over 10,000 values
SEEDS = range(3)
PACKED = ("by-size", "best-fit", "auto")
LIMIT = 1.05
HEAD = (
    *("graph", "ops", "values", "buffers", "lower bound MiB", "naive", "in place", "tags"),
    *("by size", "best fit", "auto", "pack s", "all s"),
)
Json = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    parser.add_argument("--only", help="these graphs, by words in their names: vgg,gpt")
    chosen = parser.parse_args()
    path = chosen.output.with_suffix(".json")
    document = json.loads(path.read_text()) if path.exists() else {}
    if document.get("machine", {}).get("commit") != chosen.commit:
        document = {}
    rows: dict[str, Json] = document.get("rows", {})
    for name, make in subjects():
        if name in rows or (chosen.only and not any(word in name for word in chosen.only.split(","))):
            continue
        rows[name] = laid_out(make())
        print(f"{name:24s} {rows[name]['ratio']:.4f} {rows[name]['packing_seconds']:6.2f} s", flush=True)
        document = {"machine": machine(chosen.commit), "rows": rows}
        write_text(path, json.dumps(document, indent=1))
        write_text(chosen.output, "\n".join(rendered(document)).rstrip() + "\n")


def subjects() -> Iterator[tuple[str, Callable[[], Graph]]]:
    """Every graph by its name, to be made when its turn comes."""
    for device in ("cuda", "cpu"):
        for name in (*zoo.names(), DEEP):
            yield f"{name}, {device}", partial(captured, name, device)
    for seed in SEEDS:
        yield f"random {seed}, cpu", partial(drawn, seed, RANDOM_LAYERS)


def captured(name: str, device: str) -> Graph:
    with torch.device("meta"):
        work = zoo.workload(name, zoo.Sizes(batch=BATCH))
    return capture(work.model, work.kwargs or work.args, work.loss, device=device, name=name)


# Laying out -----------------------------------------------------------------------------------------------


def laid_out(graph: Graph) -> Json:
    """Bytes by every way of sharing memory, and how long the best takes."""
    schedule, alignment = straight(graph), alignment_of(graph.device)
    overs = take_overs(graph, schedule)
    buffers = buffers_of(graph, schedule, overs, alignment)
    arenas = {f"{method}_bytes": pack(buffers, method).arena_bytes for method in PACKED}
    started = time.perf_counter()
    pack(buffers)
    packing_seconds = time.perf_counter() - started
    started = time.perf_counter()
    layout = lay_out(graph, schedule)
    layout_seconds = time.perf_counter() - started

    def shared(**ways: bool) -> int:
        return share(graph, schedule, alignment=alignment, **ways).total_bytes

    return {
        "ops": len(graph.ops),
        "values": sum(len(buffer.births) for buffer in buffers),
        "buffers": len(buffers),
        "naive_bytes": shared(in_place=False, sharing=False),
        "in_place_bytes": shared(sharing=False),
        "tags_bytes": shared(),
        **arenas,
        "lower_bound_bytes": layout.lower_bound_bytes,
        "lower_bound_not_in_place_bytes": largest_live_bytes(buffers_of(graph, schedule, (), alignment)),
        "ratio": layout.ratio,
        "proven": layout.proven,
        "packing_seconds": packing_seconds,
        "layout_seconds": layout_seconds,
    }


# Rendering ------------------------------------------------------------------------------------------------


def rendered(document: Json) -> list[str]:
    rows: dict[str, Json] = document["rows"]
    worst = max(rows, key=lambda name: rows[name]["ratio"])
    slowest = max(rows, key=lambda name: rows[name]["packing_seconds"])
    met = sum(row["ratio"] == 1 for row in rows.values())
    return [
        "# How close to what is live at once is the arena of a training step?",
        "",
        *heading(document),
        f"The straight order of forward and backward, batch {BATCH}; not run. Sizes are rounded to 512 B for "
        "CUDA and to 64 B for a CPU. The lower bound is the largest live set, results written over inputs "
        "counted once; the other columns are multiples of it. *naive*: memory of its own for every value; "
        "*in place*: results over inputs; *tags*: in place, and the lecture's sharing with nnvm's rule of "
        "sizes; then one arena, packed by size, by best fit over time, and by `auto`. *pack* is auto's "
        "placing alone, *all* everything from the graph to the refereed layout.",
        "",
        f"The lower bound is met {met} times of {len(rows)}. The farthest from it is {worst}: "
        f"{rows[worst]['ratio']:.4f} (the limit is {LIMIT}). The slowest to pack is {slowest}, of "
        f"{rows[slowest]['buffers']:,} buffers: {rows[slowest]['packing_seconds']:.2f} s.",
        "",
        *table(HEAD, [shown(name, row) for name, row in rows.items()]),
    ]


def shown(name: str, row: Json) -> list[str]:
    ways = ("naive", "in_place", "tags", *PACKED)
    multiples = [f"{row[f'{way}_bytes'] / row['lower_bound_bytes']:.4f}" for way in ways]
    counts = [f"{row[key]:,}" for key in ("ops", "values", "buffers")]
    seconds = [f"{row[key]:.2f}" for key in ("packing_seconds", "layout_seconds")]
    return [name, *counts, mib(row["lower_bound_bytes"]), *multiples, *seconds]


if __name__ == "__main__":
    main()
