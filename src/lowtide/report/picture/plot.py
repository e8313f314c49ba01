"""Timelines as pictures: live bytes over the step, stacked by category."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lowtide.errors import BadFile, MissingExtra
from lowtide.ir.graph import Phase
from lowtide.ir.simulate import CATEGORIES, Category, Timeline
from lowtide.text.names import without_middle
from lowtide.text.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Steps = npt.NDArray[np.int64]

# Okabe and Ito's palette, which people with any kind of colour vision can tell apart.
COLOURS = {
    Category.PARAMETERS: "#0072B2",
    Category.BUFFERS: "#000000",
    Category.OPTIMIZER_STATE: "#56B4E9",
    Category.GRADIENTS: "#E69F00",
    Category.BATCH: "#F0E442",
    Category.ACTIVATIONS: "#009E73",
    Category.TEMPORARIES: "#CC79A7",
    Category.WORKSPACE: "#D55E00",
}
_SHADES = {Phase.FORWARD: "0.93", Phase.RECOMPUTE: "0.62", Phase.BACKWARD: "0.80", Phase.OPTIMIZER: "0.70"}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text: small, searchable
    "svg.hashsalt": "lowtide",  # the same picture gives the same file
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
_LABEL_BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
_MOST_POINTS = 800  # about what a screen can show; an SVG of any step stays small
_STRIP = 0.05  # height of the strip that names the phases, as a part of the axes
_LETTER = 0.0125  # width of a letter in it, likewise
_LONGEST_LABEL = 64
_STEPS = "step (an op runs, or a value is freed)"
_HEADROOM = 1.22  # above the peak, for its label
_FARTHEST_BUDGET = 3.0  # in peaks: a budget above that would press everything else to the ground


class PhaseSpan(NamedTuple):
    """Neighbouring steps of one phase: from `start` up to `stop`."""

    phase: Phase
    start: int
    stop: int


def require_matplotlib() -> None:
    """Raise MissingExtra unless pictures can be drawn."""
    if find_spec("matplotlib") is None:
        raise MissingExtra("matplotlib", "plot", "drawing a timeline")


def draw(timeline: Timeline, kind: str, *, title: str, budget_bytes: int | None = None) -> bytes:
    """The picture of a timeline as a file of `kind` ('png' or 'svg').

    Phases are shaded and named, the peak is marked with its op, the budget is a dashed line. Where steps
    are too many to be seen, each point stands for several: it shows the one that holds most.
    """

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        _draw_timeline(axes, timeline, budget_bytes, unit_of(timeline.peak_bytes))
        axes.set_title(title, loc="left", pad=22, weight="bold")
        axes.set_xlabel(_STEPS)
        _draw_legend(axes, axes)

    return painted(kind, (10, 5.4), paint)


def draw_plan(
    plain: Timeline, planned: Timeline, kind: str, *, title: str, method: str, budget_bytes: int | None = None
) -> bytes:
    """The step without and with a plan, one above the other and to the same scale."""

    def paint(figure: Figure) -> None:
        above, below = figure.subplots(2, sharey=True)
        unit = unit_of(plain.peak_bytes)
        for axes, timeline, name in ((above, plain, "plain"), (below, planned, f"planned by {method}")):
            _draw_timeline(axes, timeline, budget_bytes, unit)
            axes.set_title(name, loc="left", pad=22)
        below.set_xlabel(_STEPS)
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size="large")
        _draw_legend(above, below)  # recomputation is in the lower one only

    return painted(kind, (10, 8.6), paint)


def painted(kind: str, inches: tuple[float, float], paint: Callable[[Figure], None]) -> bytes:
    """What `paint` draws, in lowtide's style, as a file of `kind`."""
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        paint(figure)
        figure.savefig(buffer, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def write_picture(picture: bytes, path: Path) -> None:
    """Write what `draw` returned."""
    try:
        path.write_bytes(picture)
    except OSError as error:
        raise BadFile(path, f"{error.strerror}", doing="write") from None


def coarse(live_bytes: npt.NDArray[np.int64], most: int = _MOST_POINTS) -> tuple[Steps, Steps]:
    """At most `most` stretches of steps: where each begins (and the last ends), and its fullest step."""
    count = len(live_bytes)
    edges = np.linspace(0, count, min(most, count) + 1).astype(np.int64)
    fullest = [start + int(live_bytes[start:stop].argmax()) for start, stop in pairwise(edges)]
    return edges, np.asarray(fullest, dtype=np.int64)


def runs_of(phases: Sequence[Phase | None]) -> Iterator[PhaseSpan]:
    """The phases in order. A free belongs to the phase it happens in."""
    start, now = 0, next((phase for phase in phases if phase is not None), None)
    if now is None:
        return
    for step, phase in enumerate(phases):
        if phase is not None and phase is not now:
            yield PhaseSpan(now, start, step)
            start, now = step, phase
    yield PhaseSpan(now, start, len(phases))


def _draw_stack(axes: Axes, timeline: Timeline, unit: tuple[str, int]) -> None:
    edges, fullest = coarse(timeline.live_bytes)
    # A stretch lasts until the next one begins, so the last is drawn once more where it ends.
    stack = timeline.stack[np.append(fullest, fullest[-1])] / unit[1]
    floor = np.zeros(len(edges))
    for column, category in enumerate(CATEGORIES):
        if not timeline.stack[:, column].any():
            continue
        top = floor + stack[:, column]
        axes.fill_between(
            edges, floor, top, step="post", color=COLOURS[category], linewidth=0, label=category.value
        )
        floor = top


def _draw_phases(axes: Axes, timeline: Timeline) -> None:
    """A strip above the axes that names the phases, and their shades behind the stack."""
    place = axes.get_xaxis_transform()
    count = len(timeline.steps)
    runs = _runs_to_draw(timeline)
    for phase in Phase:
        spans = [(run.start, run.stop - run.start) for run in runs if run.phase is phase]
        if not spans:
            continue
        shade: dict[str, Any] = {"transform": place, "color": _SHADES[phase], "linewidth": 0}
        axes.broken_barh(spans, (0, 1), **shade, alpha=0.35, zorder=0)
        named = [(start, length) for start, length in spans if length > len(phase) * _LETTER * count]
        label = "_" if named else phase.value
        axes.broken_barh(spans, (1, _STRIP), **shade, clip_on=False, label=label)
        for start, length in named:
            middle = (start + length / 2, 1 + _STRIP / 2)
            axes.text(*middle, phase.value, transform=place, ha="center", va="center_baseline", size=9)


def _runs_to_draw(timeline: Timeline) -> list[PhaseSpan]:
    """The phases, no finer than the stack is drawn."""
    edges, _ = coarse(timeline.live_bytes)
    whole = [run.phase for run in runs_of(timeline.phases) for _ in range(run.start, run.stop)]
    seen = [whole[start] for start in edges[:-1]]
    return [PhaseSpan(run.phase, int(edges[run.start]), int(edges[run.stop])) for run in runs_of(seen)]


def _draw_budget(axes: Axes, timeline: Timeline, budget_bytes: int | None, unit: tuple[str, int]) -> None:
    """The budget as a line: where it is, or at the top of the axes if it is far above."""
    if budget_bytes is None:
        return
    far = budget_bytes > _FARTHEST_BUDGET * timeline.peak_bytes
    height = (_HEADROOM**2 * timeline.peak_bytes if far else budget_bytes) / unit[1]
    axes.axhline(height, color="black", linestyle=(0, (6, 3)), linewidth=1.2)
    right = _peak_is_left(timeline)  # where the peak's own label is not
    axes.annotate(
        f"budget {format_bytes(budget_bytes)}{' (far above, not to scale)' if far else ''}",
        (1 if right else 0, height),
        xycoords=("axes fraction", "data"),
        xytext=(-6 if right else 6, 7),
        textcoords="offset points",
        ha="right" if right else "left",
        size=9,
        bbox=_LABEL_BOX,
    )


def _draw_peak(axes: Axes, timeline: Timeline, budget_bytes: int | None, unit: tuple[str, int]) -> None:
    """An arrow to the peak, from its size and op: above it, and above the budget if that is close."""
    step, peak, op = timeline.peak_step or 0, timeline.peak_bytes, timeline.peak_op
    where = "before the first step" if op is None else without_middle(op.label, _LONGEST_LABEL)
    left = _peak_is_left(timeline)
    above = budget_bytes if budget_bytes is not None and peak < budget_bytes < _HEADROOM * peak else peak
    axes.annotate(
        f"peak {format_bytes(peak)}\n{where}",
        (step + 0.5, peak / unit[1]),
        xytext=(step / len(timeline.steps) + (0.03 if left else -0.03), above * 1.06 / unit[1]),
        textcoords=("axes fraction", "data"),
        ha="left" if left else "right",
        size=9,
        arrowprops={"arrowstyle": "-|>", "color": "black", "linewidth": 0.8, "shrinkB": 0},
        bbox=_LABEL_BOX,
        zorder=5,
    )
    top = axes.get_ylim()[1]
    axes.set_ylim(0, max(top, _HEADROOM * above / unit[1]))


def _draw_timeline(axes: Axes, timeline: Timeline, budget_bytes: int | None, unit: tuple[str, int]) -> None:
    _draw_phases(axes, timeline)
    _draw_stack(axes, timeline, unit)
    _draw_budget(axes, timeline, budget_bytes, unit)
    _draw_peak(axes, timeline, budget_bytes, unit)
    axes.set_xlim(0, len(timeline.steps))
    axes.set_ylabel(f"held ({unit[0]})")


def _draw_legend(beside: Axes, of: Axes) -> None:
    handles, labels = of.get_legend_handles_labels()
    # From top to bottom as in the stack.
    beside.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)


def _peak_is_left(timeline: Timeline) -> bool:
    return (timeline.peak_step or 0) < len(timeline.steps) / 2


def unit_of(peak_bytes: int) -> tuple[str, int]:
    """What an axis up to `peak_bytes` is counted in."""
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if peak_bytes >= 1024**power:
            return name, 1024**power
    return "B", 1
