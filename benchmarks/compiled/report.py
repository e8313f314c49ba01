"""The rows of `compiled.py` as tables with their goals, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.compiled.goals import verdicts
from benchmarks.compiled.subjects import LARGE, TINY, Step
from benchmarks.paper.report import heading, table
from lowtide.planner.peer_ways import IN_ONE_PIECE
from lowtide.report.picture.peers import MeasuredPoint, name_peers, plot_peers, series_of
from lowtide.report.picture.plot import painted
from lowtide.text.documents import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = dict[str, Any]
_MIB = 2**20
_WORDS = {True: "met", False: "**missed**", None: "–"}
_ACROSS = 3


def report(document: Json, output: Path) -> None:
    """Write the Markdown, and a picture beside it."""
    rows = document["rows"]
    names = list(dict.fromkeys(row["subject"] for row in rows))
    picture = output.with_suffix(".png")
    lines = [
        "# Compiled training within budgets",
        "",
        *heading(document),
        "One training step: forward, loss, backward, gradients from None, no optimizer. MiB are the most "
        "that PyTorch's allocator held in the second step and later ones, weights and batch included. ms "
        "is the median of 7 steps that took turns with 7 eager ones; *of eager* is beside the median of "
        "those. The first step includes compiling; planning does not include the capture, which is made "
        "once for a step. *compile 0.5* is stock `torch.compile` with an `activation_memory_budget` of 0.5; "
        "*within* a way is within its peak. Goals are judged in eager steps, since clocks drift.",
        "",
        f"![MiB and ms of every way to train]({picture.name})",
        "",
        *overview(rows, names),
    ]
    for name in names:
        lines += section(name, [row for row in rows if row["subject"] == name])
    write_text(output, "\n".join(lines).rstrip() + "\n")
    if any("eager_ms" in row for row in rows):
        picture.write_bytes(draw(rows, names))
    print(output)


def step_of(rows: Sequence[Json]) -> Step:
    """What the rows are of: a large step, or the tiny one that stands for it."""
    key = rows[0]["step"]
    of_a_cpu = TINY[key].sample.name == rows[0]["subject"]
    return TINY[key] if of_a_cpu else LARGE[key]


def overview(rows: Sequence[Json], names: Sequence[str]) -> Iterator[str]:
    """MiB / ms of every way, a column for each step."""
    cells = {(row["subject"], row["label"]): cell(row) for row in rows if not is_whole(row)}
    labels = dict.fromkeys(row["label"] for row in rows if not is_whole(row))
    yield from table(
        ["MiB / ms", *names],
        [[label, *(cells.get((name, label), "–") for name in names)] for label in labels],
    )


def is_whole(row: Mapping[str, Any]) -> bool:
    """Whether it was to run in slices, and nothing of it does: it is what is told without tiles."""
    return row.get("error") == IN_ONE_PIECE


def cell(row: Json) -> str:
    if "peak_bytes" not in row:
        return "does not fit" if "no plan fits" in row["error"] else "failed"
    return f"{row['peak_bytes'] / _MIB:,.0f} / {row['ms']:,.0f}"


def section(name: str, rows: Sequence[Json]) -> Iterator[str]:
    """One step: whether its goals are met, every row, and what went wrong."""
    yield f"## {name}"
    yield ""
    library = next((row["library"] for row in rows if "library" in row), None)
    if library:
        yield f"The model is of {library}."
        yield ""
    judged = [(goal, found, _WORDS[met]) for goal, found, met in verdicts(step_of(rows), rows)]
    yield from table(["goal", "found", ""], judged)
    head = [
        "",
        "MiB",
        "ms",
        "of eager",
        "predicted MiB",
        "off by",
        "within budget",
        "ops again",
        "planning s",
        "first step s",
        "commit",
    ]
    measured = [cells(row) for row in rows if "peak_bytes" in row]
    if measured:
        yield from table(head, measured)
    yield from _remarks(rows)
    yield ""


def cells(row: Json) -> list[str]:
    predicted = row.get("predicted_bytes")
    return [
        row["label"] + (" (code may be from disk)" if row.get("from_cache") else ""),
        f"{row['peak_bytes'] / _MIB:,.0f}",
        f"{row['ms']:,.1f}",
        f"{row['ms'] / row['eager_ms']:.3f}" if "eager_ms" in row else "–",
        "–" if predicted is None else f"{predicted / _MIB:,.0f}",
        "–" if predicted is None else f"{100 * (predicted / row['peak_bytes'] - 1):+.2f} %",
        {True: "yes", False: "**no**", None: "–"}[row.get("within_budget")],
        str(row["recomputed_ops"]) if "recomputed_ops" in row else "–",
        f"{row['planning_seconds']:.1f}" if "planning_seconds" in row else "–",
        f"{row['first_seconds']:.1f}",
        row["commit"],
    ]


def _remarks(rows: Sequence[Json]) -> Iterator[str]:
    for row in rows:
        if "difference" in row:
            yield f"- {row['label']}: **it does not train as eager does**: {row['difference']}"
        if "error" in row and not is_whole(row):
            yield f"- {row['label']}: {' '.join(str(row['error']).split())}"
        if row.get("remark"):
            yield f"- {row['label']}: {row['remark']}"


def draw(rows: Sequence[Json], names: Sequence[str]) -> bytes:
    """A panel for each step: peak to the right, time upwards."""
    panels = {name: points(row for row in rows if row["subject"] == name) for name in names}
    panels = {name: found for name, found in panels.items() if found}
    across = min(_ACROSS, len(panels))
    down = -(-len(panels) // across)

    def paint(figure: Figure) -> None:
        found = figure.subplots(down, across, squeeze=False).flat
        drawn = list(zip(found, panels.items(), strict=False))
        for axes, (name, marks) in drawn:
            plot_peers(axes, marks, title=name, time="a step (times an eager one)")
        for axes in list(found)[len(panels) :]:
            axes.axis("off")
        for axes, (_, marks) in drawn:
            name_peers(figure, axes, marks)

    return painted("png", (6.0 * across, 4.4 * down), paint)


def points(rows: Iterator[Json]) -> list[MeasuredPoint]:
    """What was measured of one step, in eager steps; there are none where eager training has no room."""
    return [
        MeasuredPoint(
            row["label"],
            series_of(row["label"]) if row["kind"] == "planned" else "",
            row["peak_bytes"],
            row["ms"] / row["eager_ms"],
        )
        for row in rows
        if "peak_bytes" in row and "eager_ms" in row
    ]
