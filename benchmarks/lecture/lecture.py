"""The lecture's two experiments: what training takes as a ResNet gets deeper and an LSTM longer.

    python -m benchmarks.lecture.lecture --rows FILE.json --cache DIR            estimates, on any machine
    python -m benchmarks.lecture.lecture --rows FILE.json --cache DIR --curves   memory by number of segments
    python -m benchmarks.lecture.lecture --rows FILE.json --cache DIR --measure --device cuda [--plan]
    python -m benchmarks.lecture.lecture --report FILE.json [FILE.json …] -o lecture-DATE.md

After Chen, Xu, Zhang and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174):
a pre-activation ResNet at batch 32 and 224 x 224 pixels, and an LSTM of four layers of 1,024 at batch 64. A
row is written as soon as it is there, and one that is there for the same commit is not made again. Captured
graphs, and schedules that take long to find, are kept in the cache.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

import lowtide
from benchmarks.frontier.frontier import Rows
from benchmarks.lecture.graphs import NETWORKS, ROOFLINE, by_roofline, captured, features_only
from benchmarks.lecture.report import report
from benchmarks.lecture.runs import eager, measured
from benchmarks.lecture.schemes import LSTM, RESNET, SCHEMES, Json, Scheme, cost_curve, estimated, planned
from benchmarks.planner.training_graphs import Layer, joined
from lowtide.execute.memory import Memory
from lowtide.ir.graph import Graph

DEPTHS = (50, 101, 152, 200, 302, 500, 1001)
LENGTHS = (64, 128, 256, 512, 1000)
SMALL_DEPTHS, SMALL_LENGTHS = (14, 26, 50, 101), (8, 16, 32, 64)
MOST_SEGMENTS = 200
EAGER = "PyTorch, eager"
CHAIN = 1000  # equal layers


def main() -> None:
    chosen = arguments()
    if chosen.report:
        report([json.loads(path.read_text()) for path in chosen.report], chosen.output)
        return
    rows = Rows(chosen.rows, chosen.commit)
    torch.manual_seed(0)
    if chosen.curves:
        draw_curves(rows, chosen)
    elif chosen.measure or chosen.plan:
        measure_all(rows, chosen)
    else:
        estimate_all(rows, chosen)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, help="where rows are written")
    parser.add_argument("--cache", type=Path, default=Path("lecture-cache"), help="graphs and schedules")
    parser.add_argument("--commit", default="unknown", help="of the code, to be written down")
    parser.add_argument("--only", choices=(RESNET, LSTM))
    parser.add_argument("--depths", type=numbers, help="of the ResNet: 50,101")
    parser.add_argument("--lengths", type=numbers, help="of the LSTM: 64,128")
    parser.add_argument("--schemes", help="these, by words in their names: sharing,√n,ours")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--curves", action="store_true", help="memory against the number of segments")
    parser.add_argument("--measure", action="store_true", help="run the steps")
    parser.add_argument("--plan", action="store_true", help="only plan what --measure would run")
    parser.add_argument("--device", default="cpu", help="where to measure")
    parser.add_argument("--profile", action="store_true", help="time each op where it is measured")
    parser.add_argument("--report", type=Path, nargs="+", metavar="ROWS", help="Markdown and pictures")
    parser.add_argument("-o", "--output", type=Path, help="benchmarks/lecture/results/lecture-DATE.md")
    chosen = parser.parse_args()
    if not chosen.report and chosen.rows is None:
        parser.error("give --rows, or --report")
    return chosen


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def subjects(chosen: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """The networks and sizes that were asked for; the small ones of each first."""
    depths = chosen.depths or (SMALL_DEPTHS if chosen.small else DEPTHS)
    lengths = chosen.lengths or (SMALL_LENGTHS if chosen.small else LENGTHS)
    for network, sizes in ((RESNET, depths), (LSTM, lengths)):
        if chosen.only in (None, network):
            yield from ((network, size) for size in sizes)


def schemes(chosen: argparse.Namespace, network: str) -> list[Scheme]:
    words = chosen.schemes.split(",") if chosen.schemes else [""]
    return [
        scheme
        for scheme in SCHEMES
        if network in scheme.networks and any(word in scheme.name for word in words)
    ]


def graph_of(chosen: argparse.Namespace, network: str, size: int, device: str) -> Graph:
    made = f"small {network}" if chosen.small else network
    return captured(made, size, chosen.cache, device)


def kept(chosen: argparse.Namespace, kind: str, graph: Graph, scheme: Scheme) -> Path:
    words = ["small"] if chosen.small else []
    words += [
        *graph.name.split(),
        graph.device.replace(":", "-"),
        scheme.slug,
        "profiled" if chosen.profile else "",
        kind,
    ]
    path: Path = chosen.cache / f"{'-'.join(filter(None, words))}.json"
    return path


# Estimates ------------------------------------------------------------------------------------------------


def estimate_all(rows: Rows, chosen: argparse.Namespace) -> None:
    """Each scheme on each network: for feature maps alone, as in the paper."""
    for network, size in subjects(chosen):
        wanted = [one for one in schemes(chosen, network) if not rows.find(f"{network} {size}", one.name)]
        if not wanted:
            continue
        graph = by_roofline(graph_of(chosen, network, size, "cuda"))
        bare = features_only(graph)
        for scheme in wanted:
            plan = planned(scheme, bare, network, size, kept(chosen, "features", graph, scheme))
            row = estimated(scheme, graph, plan)
            put(rows, "estimated", network, size, scheme.name, {**row, "seconds_from": ROOFLINE})


def put(rows: Rows, kind: str, network: str, size: int, label: str, row: Json) -> None:
    told = {
        key: value for key, value in row.items() if key.endswith(("_bytes", "time", "seconds", "skipped"))
    }
    print(f"{network} {size}, {label}: {told}", flush=True)
    subject = f"{network} {size}"
    rows.put({"subject": subject, "label": label, "kind": kind, "network": network, "size": size, **row})


# Curves ---------------------------------------------------------------------------------------------------


def draw_curves(rows: Rows, chosen: argparse.Namespace) -> None:
    """The peak for 1 to 200 segments: of equal layers, and of the largest networks that were asked for."""
    if chosen.only is None:
        put_curve(rows, "chain", CHAIN, equal_layers(CHAIN))
    for network, size in dict(subjects(chosen)).items():  # the last of each
        put_curve(rows, network, size, graph_of(chosen, network, size, "cuda"))


def put_curve(rows: Rows, network: str, size: int, graph: Graph) -> None:
    if rows.find(f"{network} {size}", "segments"):
        return
    counts = {*segment_counts(min(size, MOST_SEGMENTS)), round(math.sqrt(size))}
    points = [[count, live_bytes] for count, live_bytes in cost_curve(graph, sorted(counts))]
    put(rows, "curve", network, size, "segments", {"points": points})


def segment_counts(most: int) -> list[int]:
    """From 1 to `most`, as far apart on a log axis as whole numbers can be."""
    return sorted({round(count) for count in np.geomspace(1, most, 48)})


def equal_layers(count: int) -> Graph:
    """Layers alike, each of which saves its input: 1 MB of activations each."""
    layers = [Layer((number - 1,), 10**6, 1e-3, saves_inputs=True) for number in range(count)]
    return joined(f"{count} equal layers", layers, 10**6)


# Measurements ---------------------------------------------------------------------------------------------


def measure_all(rows: Rows, chosen: argparse.Namespace) -> None:
    """Each scheme on each network, for real; and PyTorch as it is."""
    for network, size in subjects(chosen):
        subject = f"{network} {size}"
        wanted = [one for one in schemes(chosen, network) if not rows.find(subject, one.name)]
        if rows.find(subject, EAGER) and not wanted:
            continue
        graph = graph_of(chosen, network, size, chosen.device)
        graph = lowtide.profile(graph) if chosen.profile else by_roofline(graph)
        plans = [planned(one, graph, network, size, kept(chosen, "step", graph, one)) for one in wanted]
        if chosen.plan:
            continue
        with torch.device(chosen.device):
            made = NETWORKS[f"small {network}" if chosen.small else network](size)
        if not rows.find(subject, EAGER):
            put(rows, "measured", network, size, EAGER, eager(made, graph))
        for scheme, plan in zip(wanted, plans, strict=True):
            row = measured(made, graph, plan.schedule, *memory_of(scheme))
            put(rows, "measured", network, size, scheme.name, {**row, "planning_seconds": plan.seconds})


def memory_of(scheme: Scheme) -> tuple[Memory, str]:
    """How the executor gets memory for it, and how an arena is laid out."""
    if scheme.sharing:
        return Memory.STATIC, "auto"
    return (Memory.STATIC, "apart") if scheme.in_place else (Memory.NAIVE, "")


if __name__ == "__main__":
    main()
