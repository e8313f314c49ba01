"""Pictures of the lecture's experiments. A scheme has the same colour in all of them. Memory is in GB."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.lecture.fits import Curve, Points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, and a grey.
COLOURS: Final = {
    "no optimisation": "#000000",
    "in-place": "#56B4E9",
    "sharing": "#0072B2",
    "drop bn-relu": "#009E73",
    "√n": "#E69F00",
    "recursive": "#CC79A7",
    "ours, min": "#D55E00",
    "ours, +30 % time": "#8C3B00",
    "PyTorch, eager": "#888888",
}
LABEL_GAP: Final = 0.048  # between labels at the ends of lines, as a part of the axes' height


@dataclass(frozen=True)
class Line:
    """What a scheme takes at each size. `dashed`, if there, is the same counted in another way."""

    scheme: str
    points: Points
    dashed: Points = ()


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    across: str
    up: str
    lines: Sequence[Line] = field(default=())


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Lines on log axes, each labelled at its end."""
    pyplot = _pyplot()
    figure, row = pyplot.subplots(
        1, len(panels), figsize=(6.4 * len(panels), 4.8), layout="constrained", squeeze=False
    )
    for axes, panel in zip(row[0], panels, strict=True):
        _draw_lines(axes, panel)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_lines(axes: Axes, panel: Panel) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for line in panel.lines:
        style: dict[str, Any] = {"color": COLOURS[line.scheme], "linewidth": 1.6}
        axes.plot(*_columns(line.points), "o-", markersize=4, **style)
        if line.dashed:
            axes.plot(*_columns(line.dashed), "--", **{**style, "linewidth": 1.0})
    sizes = sorted({size for line in panel.lines for size, _ in line.points})
    axes.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    axes.minorticks_off()
    axes.set_yticks(*_decades(axes))
    axes.grid(axis="y", color="0.92")
    _label(axes, panel.lines)
    _dress(axes, panel.title, panel.across, panel.up)


def _label(axes: Axes, lines: Sequence[Line]) -> None:
    """Name each line at its right end, moved where names would lie on each other or stick out at the top."""
    axes.figure.draw_without_rendering()  # type: ignore[union-attr]
    low, high = (math.log(limit) for limit in axes.get_ylim())
    ordered = sorted(lines, key=lambda line: line.points[-1][1])
    places = [(math.log(line.points[-1][1]) - low) / (high - low) for line in ordered]
    for number in range(1, len(places)):
        places[number] = max(places[number], places[number - 1] + LABEL_GAP)
    ceiling = 1.0
    for number in reversed(range(len(places))):
        places[number] = min(places[number], ceiling)
        ceiling = places[number] - LABEL_GAP
    for line, place in zip(ordered, places, strict=True):
        axes.annotate(
            line.scheme,
            line.points[-1],
            (1.02, place),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=COLOURS[line.scheme],
        )


def _decades(axes: Axes) -> tuple[list[float], list[str]]:
    low, high = axes.get_ylim()
    found = [
        digit * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digit in (1, 2, 5)
    ]
    inside = [value for value in found if low <= value <= high]
    return inside, [f"{value:g}" for value in inside]


# Segments -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Segments:
    """The peak against the number of segments, of something with `size` layers or steps."""

    title: str
    size: int
    points: Points
    curve: Curve


def draw_segments(found: Sequence[Segments], path: Path) -> None:
    """Points, the fitted law, its two terms, the least of the points, and √n."""
    pyplot = _pyplot()
    figure, row = pyplot.subplots(
        1, len(found), figsize=(4.9 * len(found), 4.4), layout="constrained", squeeze=False
    )
    for axes, one in zip(row[0], found, strict=True):
        _draw_segments(axes, one)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _draw_segments(axes: Axes, one: Segments) -> None:
    counts, peaks = _columns(one.points)
    best, least = min(one.points, key=lambda point: point[1])
    root = math.sqrt(one.size)
    curve = one.curve
    axes.set_xscale("log")
    axes.set_yscale("log")
    grey: dict[str, Any] = {"color": "0.55", "linewidth": 1.2}
    axes.plot(counts, [curve.values / count for count in counts], ":", **grey, label="a/k, one segment")
    axes.plot(counts, [curve.crossings * count for count in counts], "-.", **grey, label="b·k, crossings")
    axes.plot(counts, [*map(curve.at, counts)], color="0.25", linewidth=1.2, label="a/k + b·k + c, fitted")
    axes.axvline(root, color=COLOURS["sharing"], linewidth=1.2, label=f"√n = {root:.0f}")
    axes.plot(counts, peaks, "o", markersize=4, color=COLOURS["√n"], label="the schedule's peak")
    star: dict[str, Any] = {
        "markersize": 14,
        "color": COLOURS["ours, min"],
        "label": f"least, {least:.3g} GB at {best:.0f}",
    }
    axes.plot([best], [least], "*", **star)
    axes.set_ylim(0.5 * least, 1.6 * max(peaks))
    axes.set_xticks([1, 2, 5, 10, 20, 50, 100, 200], ["1", "2", "5", "10", "20", "50", "100", "200"])
    axes.minorticks_off()
    axes.set_yticks(*_decades(axes))
    axes.legend(frameon=False, fontsize=8)
    _dress(axes, one.title, "number of segments k", "feature maps live at once, GB")


def _columns(points: Points) -> tuple[list[float], list[float]]:
    return [across for across, _ in points], [up for _, up in points]


def _dress(axes: Axes, title: str, across: str, up: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel(across)
    axes.set_ylabel(up)
    axes.spines[["top", "right"]].set_visible(False)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
