"""Draws the pictures of the documentation: `python docs/draw.py` writes them into docs/pictures.

Every method is drawn on the same twelve layers, in the same way: which layers run again, and what the step
holds from moment to moment, before and after. Orange is always recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import front
from example import BUDGET, SIZES, WITHIN_A_BUDGET, Shown, shown, twelve_layers

import lowtide
from lowtide.autodiff.expression import exp, graph_of, var
from lowtide.chain.unroll import unrolled_graph
from lowtide.ir.graph import Graph, Phase
from lowtide.ir.schedule import Schedule
from lowtide.lesson.lesson import lesson_of
from lowtide.report.picture.drawing import draw_lesson
from lowtide.report.picture.plot import painted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = Path(__file__).parent / "pictures"
MIB = 1 << 20

_KEPT = "#009E73"
_AGAIN = ("#F6C667", "#E69F00", "#A86A00", "#6B4300")  # run again once, twice, …
_PLAIN = "0.55"
_PLANNED = "#0072B2"
_COLOURS = {Phase.FORWARD: _KEPT, Phase.BACKWARD: "#56B4E9"}


def pictures() -> Mapping[str, Callable[[], bytes]]:
    """Every picture by the name of its file, to be drawn when it is wanted."""
    names = [*lowtide.methods(), *lowtide.schedulers()]
    return {
        **{f"{name}.svg": partial(draw_method, name) for name in names},
        "methods.svg": partial(draw_all, names),
        "layout.svg": draw_layouts,
        "autodiff.svg": draw_autodiff,
        "front.svg": front.draw,
    }


def main() -> None:
    """Write them all."""
    PICTURES.mkdir(exist_ok=True)
    for name, draw in pictures().items():
        (PICTURES / name).write_bytes(draw())


# A method on the twelve layers ------------------------------------------------------------------------


def draw_method(name: str) -> bytes:
    """Which layers run again, and what the step holds over time, plainly and planned."""
    found = shown(name)

    def paint(figure: Figure) -> None:
        layers, curve = figure.subplots(2, height_ratios=(1, 1.7))
        _draw_layers(layers, found)
        _draw_curves(curve, shown("keep-all"), found)
        figure.suptitle(f"{name}: {found.words}", x=0.01, ha="left", weight="bold")

    return painted("svg", (8.6, 5.2), paint)


def _draw_layers(axes: Axes, found: Shown) -> None:
    """A bar for each layer, as high as what it saves."""
    for layer, (size, again) in enumerate(zip(SIZES[1:], found.again, strict=True), 1):
        axes.bar(layer, size, width=0.86, color=_AGAIN[again - 1] if again else _KEPT)
        if again:
            axes.text(layer, size, f"×{again + 1}", ha="center", va="bottom", size=9)
    for cut in _starts(found):
        axes.axvline(cut + 0.5, ymax=0.92, color="black", linewidth=1.3, linestyle=(0, (2, 1.5)))
    axes.set(xticks=range(1, len(SIZES)), ylabel="saved (MiB)", xlim=(0.4, 16.4), ylim=(0, 29))
    axes.set_xlabel("layer", x=0.38)
    counts = range(1, max(found.again) + 1)
    _legend(
        axes,
        [("kept", _KEPT), *((_times(count), _AGAIN[count - 1]) for count in counts)],
        dashed="runs again from here" if _starts(found) else "",
    )


def _times(count: int) -> str:
    return "run again" if count == 1 else f"run again {count} times"


def _starts(found: Shown) -> list[int]:
    """The tensors that segments are run again from; only plans of layers have segments."""
    if not isinstance(found.solution, lowtide.Solution):
        return []
    return sorted({segment.start for segment in found.solution.plan.walk()})


def _legend(axes: Axes, entries: Sequence[tuple[str, str]], dashed: str = "") -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = [Patch(color=colour, label=label) for label, colour in entries]
    if dashed:
        handles.append(Line2D([], [], color="black", linewidth=1.3, linestyle=(0, (2, 1.5)), label=dashed))
    axes.legend(handles=handles, loc="upper right", frameon=False, fontsize=9)


def _draw_curves(axes: Axes, plain: Shown, found: Shown) -> None:
    """Live bytes over time: the plain step as a shape, the planned one as a line."""
    axes.fill_between(*_curve(plain), color=_PLAIN, alpha=0.35, linewidth=0, label=_held("plain", plain))
    for start, stop in _recomputations(found):
        axes.axvspan(start, stop, color=_AGAIN[0], alpha=0.45, linewidth=0)
    if any(found.again):
        axes.plot(*_curve(found), color=_PLANNED, linewidth=1.8, label=_held("planned", found))
    if found.solution.budget_bytes is not None:
        budget = found.solution.budget_bytes / MIB
        axes.axhline(
            budget, color="black", linewidth=1, linestyle=(0, (6, 3)), label=f"budget {budget:g} MiB"
        )
    axes.set(xlabel="seconds; orange: recomputation", ylabel="held (MiB)", ylim=(0, 232), xlim=(0, 132))
    axes.legend(loc="upper right", frameon=False, fontsize=9)


def _held(name: str, found: Shown) -> str:
    return f"{name}: peak {found.solution.peak_bytes / MIB:g} MiB,\n{_seconds(found)[-1]:g} s"


def _curve(found: Shown) -> tuple[list[float], list[float]]:
    """The corners of the curve; what takes no time is a point of it."""
    times = _seconds(found)
    held = lowtide.simulate(found.graph, found.schedule).live_bytes / MIB
    across = [moment for step in range(len(held)) for moment in (times[step], times[step + 1])]
    return across, [float(bytes_) for bytes_ in held for _ in range(2)]


def _seconds(found: Shown) -> list[float]:
    """When each step begins, and when the last ends."""
    moments = [0.0]
    for step in found.schedule:
        lasts = found.graph.ops[step.op].seconds if isinstance(step, lowtide.Compute) else 0.0
        moments.append(moments[-1] + lasts)
    return moments


def _recomputations(found: Shown) -> Iterator[tuple[float, float]]:
    """From when to when something runs that has run before."""
    seen: set[int] = set()
    times = _seconds(found)
    for step, begin, end in zip(found.schedule, times, times[1:], strict=False):
        if isinstance(step, lowtide.Compute):
            if step.op in seen:
                yield begin, end
            seen.add(step.op)


# All methods ------------------------------------------------------------------------------------------


def draw_all(names: Sequence[str]) -> bytes:
    """What each method's plan holds, and what it adds to the step."""
    labels = [f"{name} *" if name in WITHIN_A_BUDGET else name for name in names]
    peaks = [shown(name).solution.peak_bytes / MIB for name in names]
    added = [shown(name).solution.extra_seconds for name in names]

    def paint(figure: Figure) -> None:
        held, again = figure.subplots(1, 2, sharey=True, width_ratios=(1.5, 1))
        held.bar_label(held.barh(labels, peaks, color=_PLANNED), fmt="%g", padding=4, size=9)
        again.bar_label(again.barh(labels, added, color=_AGAIN[1]), fmt="%g", padding=4, size=9)
        bound = twelve_layers().floor()[0] / MIB
        label = f"no plan peaks below {bound:g} MiB"
        held.axvline(bound, color="black", linestyle=(0, (2, 2)), linewidth=1.2, label=label)
        held.set(xlabel="peak (MiB)", xlim=(0, 235))
        again.set(xlabel="seconds added to a step of 60", xlim=(0, 41))
        held.invert_yaxis()
        held.legend(loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=9)
        again.set_title(f"* within {BUDGET} of the plain peak", loc="right", size=9)

    return painted("svg", (8.6, 5.2), paint)


# Layouts ----------------------------------------------------------------------------------------------


def draw_layouts() -> bytes:
    """The same step in four arenas: time to the right, addresses upwards."""
    chain = twelve_layers()
    graph = unrolled_graph(chain)
    schedule = lowtide.straight(graph)

    def paint(figure: Figure) -> None:
        panels = figure.subplots(2, 2, sharex=True, sharey=True).flat
        for axes, method in zip(panels, ("apart", "tags", "best-fit", "exact"), strict=True):
            _draw_arena(axes, graph, schedule, method)
        figure.supxlabel("step", size=10)
        figure.supylabel("address in the arena (MiB)", size=10)

    return painted("svg", (8.6, 6.0), paint)


def _draw_arena(axes: Axes, graph: Graph, schedule: Schedule, method: str) -> None:
    layout = lowtide.lay_out(graph, schedule, method=method)
    for phase, colour in _COLOURS.items():
        placed = [
            (offset, buffer)
            for offset, buffer in zip(layout.offsets, layout.buffers, strict=True)
            if buffer.bytes and graph.ops[graph.creator[buffer.births[0].value]].phase is phase
        ]
        axes.barh(
            [offset / MIB for offset, _ in placed],
            [buffer.stop - buffer.first for _, buffer in placed],
            height=[buffer.bytes / MIB for _, buffer in placed],
            left=[buffer.first for _, buffer in placed],
            align="edge",
            color=colour,
            edgecolor="white",
            linewidth=0.7,
        )
    bound = layout.lower_bound_bytes / MIB
    axes.axhline(bound, color="black", linewidth=1, linestyle=(0, (2, 1.5)))
    axes.set_title(f"{method}: {layout.arena_bytes / MIB:g} MiB", loc="left", size=10, weight="bold")


def draw_autodiff() -> bytes:
    """The lecture's example, extended by its own backward, and who shares memory with whom."""
    a, b = var("a"), var("b")
    graph = lowtide.gradient(graph_of(exp(a * b + 3)), "v3", ["a", "b"]).graph
    return draw_lesson(lesson_of(graph), "svg", title="exp(a·b + 3) and its backward")


if __name__ == "__main__":
    main()
