"""Tables and pictures of the lecture's experiments, from their rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.lecture.fits import exponent, fitted
from benchmarks.lecture.pictures import COLOURS, Line, Panel, Segments, draw, draw_segments
from benchmarks.paper.report import heading, percent, table
from lowtide.text.documents import write_text

Json = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
GB: Final = 1e9
TITLES: Final = {"resnet": "ResNet", "lstm": "LSTM"}
ACROSS: Final = {"resnet": "layers", "lstm": "steps"}
RECOMPUTING: Final = ("√n", "recursive")
OURS: Final = ("ours, min", "ours, +30 % time")
MOST_PLANNING_SECONDS: Final = 30.0  # for the ResNet of 1,001 layers
COUNTED: Final = (
    "Estimates count feature maps and their gradients: what ops create in a step, less parameters' gradients "
    "and the sums on the way to them. Parameters and workspaces are not counted either, as in the paper. "
    "*nnvm* is what its planner takes (one piece of memory for each tag), in place and shared unless the "
    "scheme says otherwise; *arena* is lowtide's layout for the same schedule; *live* is the most that is "
    "alive at once, nothing written in place. GB are 10⁹ bytes. Extra time is of the ops that run again."
)

SCHEMES: Final = (
    "The ResNets are as published up to 200 layers; deeper ones have the proportions of that one. *√n* has "
    "as many segments as the root of the number of layers, or steps; *recursive* halves down to a block, or "
    "a step; *ours* is `auto` on the graph that is counted here: the lowest peak that it finds, and the "
    "lowest that takes no more than 30 % more time."
)


def report(documents: Sequence[Json], output: Path | None) -> None:
    """Write Markdown, and pictures beside it."""
    output = output or RESULTS / f"lecture-{documents[0]['machine']['date']}.md"
    rows = [row for document in documents for row in document["rows"]]
    networks = [network for network in TITLES if of(rows, "estimated", network)]
    lines = ["# How memory grows with depth and length, scheme by scheme", ""]
    for document in documents:
        lines += heading(document)
    lines += [COUNTED, "", SCHEMES, "", *claims(rows), *exponents(rows, networks)]
    for network in networks:
        lines += [*growth(rows, network), *details(rows, network), *runs(rows, network)]
        panels = [panel for panel in (estimates(rows, network), totals(rows, network)) if panel.lines]
        lines += drawn(panels, output, network)
    times = [panel for panel in (seconds(rows, network) for network in networks) if panel.lines]
    lines += drawn(times, output, "time") if times else []
    lines += segments(rows, output)
    write_text(output, "\n".join(lines).rstrip() + "\n")
    print(output)


def of(rows: Sequence[Json], kind: str, network: str, label: str | None = None) -> list[Json]:
    """The rows of a kind and network, and of a scheme; by size."""
    found = [row for row in rows if row["kind"] == kind and row["network"] == network]
    return sorted((row for row in found if label in (None, row["label"])), key=lambda row: int(row["size"]))


def schemes(rows: Sequence[Json], kind: str, network: str) -> list[str]:
    """The schemes that there are rows of, in the order of the legend."""
    return [scheme for scheme in COLOURS if of(rows, kind, network, scheme)]


def points(rows: Sequence[Json], field: str, unit: float = GB) -> list[tuple[int, float]]:
    """Size and field of the rows that have it."""
    return [(row["size"], row[field] / unit) for row in rows if row.get(field) is not None]


def gb(count: float | None) -> str:
    return "–" if count is None else f"{count / GB:,.3g}" if count < 100 * GB else f"{count / GB:,.0f}"


# What is claimed ------------------------------------------------------------------------------------------


def claims(rows: Sequence[Json]) -> Iterator[str]:
    """The paper's sentences, and what is found here at the largest size."""
    yield "## What the paper says, and what is found"
    yield ""
    yield from table(["", "paper", "found"], [*claimed(rows)])


def claimed(rows: Sequence[Json]) -> Iterator[list[str]]:
    for network, title in TITLES.items():
        last = {row["label"]: row for row in of(rows, "estimated", network)}  # of each the largest
        if not {"no optimisation", "in-place", "sharing", "√n"} <= last.keys():
            continue
        name = f"{title} {last['√n']['size']}"
        plain, in_place, shared, root = (
            last[label]["feature_bytes"] for label in ("no optimisation", "in-place", "sharing", "√n")
        )
        factors = f"{plain / in_place:.1f} × and {plain / shared:.1f} ×"
        yield [f"{name}: in-place, and with sharing", "2–3 × less, still linear", factors]
        told = {"resnet": "48 GB → less than 7 GB", "lstm": "more than 4 × below sharing"}[network]
        arena = last["√n"]["arena_bytes"]
        found = f"{gb(shared)} GB → {gb(root)} GB, {shared / root:.1f} × (arena: {gb(arena)} GB)"
        yield [f"{name}: sharing → √n", told, found]
        yield [f"{name}: time for √n", "about +30 %", f"{percent(last['√n']['extra_time'])} (estimated)"]
        planning = [row["share_seconds"] + (row["layout_seconds"] or 0.0) for row in last.values()]
        goal = f" (goal: {MOST_PLANNING_SECONDS:.0f})" if network == "resnet" else ""
        yield [f"{name}: planning memory, s", "–", f"at most {max(planning):.1f}{goal}"]


def exponents(rows: Sequence[Json], networks: Sequence[str]) -> Iterator[str]:
    yield "## Growth: the slope on log-log axes"
    yield ""
    yield "Over all sizes, and over the upper half of them, where what is always there matters less."
    yield ""
    head = [
        f"{TITLES[n]}, {how}" for n in networks for how in ("nnvm", "arena", "nnvm, upper", "arena, upper")
    ]
    labels = [label for label in COLOURS if any(of(rows, "estimated", n, label) for n in networks)]
    yield from table(
        ["", *head],
        [[label, *(cell for n in networks for cell in slopes(rows, n, label))] for label in labels],
    )


def slopes(rows: Sequence[Json], network: str, label: str) -> Iterator[str]:
    mine = of(rows, "estimated", network, label)
    for upper in (False, True):
        for field in ("feature_bytes", "arena_bytes"):
            found = points(mine, field)
            found = found[len(found) // 2 :] if upper else found
            yield f"{exponent(found):.2f}" if len(found) > 1 else "–"


# Each network ---------------------------------------------------------------------------------------------


def growth(rows: Sequence[Json], network: str) -> Iterator[str]:
    """A line for each scheme, a column for each size."""
    yield f"## {TITLES[network]}"
    yield ""
    yield f"GB for feature maps as nnvm would plan it / in lowtide's arena, by number of {ACROSS[network]}."
    yield ""
    sizes = sorted({row["size"] for row in of(rows, "estimated", network)})
    body = []
    for label in schemes(rows, "estimated", network):
        by_size = {row["size"]: row for row in of(rows, "estimated", network, label)}
        body.append([label, *(both(by_size.get(size)) for size in sizes)])
    yield from table(["", *map(str, sizes)], body)


def both(row: Json | None) -> str:
    if row is None:
        return "–"
    return gb(row["feature_bytes"]) + (f" / {gb(row['arena_bytes'])}" if row["arena_bytes"] else "")


def details(rows: Sequence[Json], network: str) -> Iterator[str]:
    """Everything that is known of the largest."""
    all_rows = of(rows, "estimated", network)
    size = all_rows[-1]["size"]
    largest = [row for row in all_rows if row["size"] == size]
    ops, gradients = largest[0]["ops"], largest[0]["gradient_bytes"]
    yield f"### {size} {ACROSS[network]}: {ops:,} ops"
    yield ""
    yield (
        f"Without any optimisation, parameters' gradients and the sums on the way to them would take another "
        f"{gb(gradients)} GB."
    )
    yield ""
    head = ["", "nnvm GB", "arena GB", "live GB", "with gradients GB", "extra time", "ops again"]
    body = [
        [
            row["label"],
            gb(row["feature_bytes"]),
            gb(row["arena_bytes"]),
            gb(row["live_bytes"]),
            gb(row["growth_bytes"]),
            percent(row["extra_time"]),
            f"{row['ops_again']:,}",
            *(f"{row[name]:.1f}" if row[name] is not None else "–" for name in PLANNING),
        ]
        for row in sorted(largest, key=lambda row: [*COLOURS].index(row["label"]))
    ]
    yield from table([*head, "planning s", "nnvm s", "layout s"], body)
    yield f"Times are estimates, {largest[0]['seconds_from']}."
    yield ""


PLANNING = ("planning_seconds", "share_seconds", "layout_seconds")


def runs(rows: Sequence[Json], network: str) -> Iterator[str]:
    """What was measured."""
    found = of(rows, "measured", network)
    if not found:
        return
    yield f"### {TITLES[network]}, measured"
    yield ""
    yield (
        "All that PyTorch's allocator held: parameters, their gradients and the batch as well. Planned is "
        "what is resident and the arena; beside that, an op takes its workspace and results to be moved. "
        "Seconds are the median of three steps. Steps of many small kernels wait for the processor that "
        "launches them, so times vary."
    )
    yield ""
    head = [ACROSS[network], "scheme", "memory", "planned GB", "peak GB", "reserved GB", "s a step", ""]
    body = [
        [
            str(row["size"]),
            row["label"],
            row.get("memory", "–"),
            gb(row.get("predicted_bytes")),
            gb(row.get("peak_bytes")),
            gb(row.get("reserved_bytes")),
            f"{row['seconds']:.3f}" if "seconds" in row else "–",
            row.get("skipped", ""),
        ]
        for row in found
    ]
    yield from table(head, body)


# Pictures -------------------------------------------------------------------------------------------------


def drawn(panels: Sequence[Panel], output: Path, what: str) -> list[str]:
    """Draw them side by side; the line that shows them."""
    path = output.with_name(f"{output.stem}-{what}.png")
    draw(panels, path)
    return [f"![{'; '.join(panel.title for panel in panels)}]({path.name})", ""]


def estimates(rows: Sequence[Json], network: str) -> Panel:
    """Feature maps. Ours is laid out by lowtide; for the paper's recomputing schemes that is dashed."""
    lines = []
    for label in schemes(rows, "estimated", network):
        mine = of(rows, "estimated", network, label)
        arena = points(mine, "arena_bytes")
        if label in OURS:
            lines.append(Line(label, arena))
        else:
            nnvm = points(mine, "feature_bytes")
            lines.append(Line(label, nnvm, arena if label in RECOMPUTING else ()))
    title = f"(a) {TITLES[network]}: feature maps, estimated"
    return Panel(title, f"{ACROSS[network]} (dashed: the same schedule, laid out by lowtide)", "GB", lines)


def totals(rows: Sequence[Json], network: str) -> Panel:
    """All that was held, measured."""
    found = [
        Line(label, points(of(rows, "measured", network, label), "peak_bytes"))
        for label in schemes(rows, "measured", network)
    ]
    lines = [line for line in found if line.points]
    return Panel(f"(b) {TITLES[network]}: everything, measured", ACROSS[network], "GB", lines)


def seconds(rows: Sequence[Json], network: str) -> Panel:
    """How long a step takes, measured."""
    found = [
        Line(label, points(of(rows, "measured", network, label), "seconds", unit=1.0))
        for label in schemes(rows, "measured", network)
    ]
    lines = [line for line in found if line.points]
    return Panel(f"{TITLES[network]}: a training step", ACROSS[network], "seconds", lines)


def segments(rows: Sequence[Json], output: Path) -> Iterator[str]:
    """The peak against the number of segments."""
    found = [curve(row) for row in rows if row["kind"] == "curve"]
    if not found:
        return
    path = output.with_name(f"{output.stem}-segments.png")
    draw_segments(found, path)
    yield "## How many segments"
    yield ""
    yield (
        "What crosses the cuts between k segments is kept, each segment is computed again: O(n/k) + O(k). "
        "The points are peaks of schedules, replayed op by op; a, b and c are fitted."
    )
    yield ""
    head = ["", "√n", "at √n, GB", "least, GB", "at k =", "fitted: a GB", "b MB", "c GB", "lowest at k ="]
    yield from table(head, [[*curve_cells(one)] for one in found])
    yield f"![memory by number of segments]({path.name})"
    yield ""


def curve(row: Json) -> Segments:
    found = [(count, live_bytes / GB) for count, live_bytes in row["points"]]
    name = TITLES.get(row["network"])
    title = f"{name}, {row['size']} {ACROSS[row['network']]}" if name else f"{row['size']:,} equal layers"
    return Segments(title, row["size"], found, fitted(found))


def curve_cells(one: Segments) -> Iterator[str]:
    root = math.sqrt(one.size)
    near = min(one.points, key=lambda point: abs(math.log(point[0] / root)))
    best, least = min(one.points, key=lambda point: point[1])
    yield from (one.title, f"{root:.0f}", f"{near[1]:.3g}", f"{least:.3g}", f"{best:.0f}")
    yield from (f"{one.curve.values:.3g}", f"{1e3 * one.curve.crossings:.3g}", f"{one.curve.always:.3g}")
    yield f"{one.curve.lowest:.0f}"
