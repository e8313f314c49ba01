"""A comparison as a picture: what each method's plan holds against what it adds to the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from lowtide.report.picture.plot import painted, unit_of
from lowtide.text.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lowtide.planner.compare import Comparison

_POINT = "#0072B2"
_MEASURED = "#D55E00"
_TEXT = 9.0  # points
_LETTER = 0.56 * _TEXT  # about the width of one
_LINE = 1.35 * _TEXT
_FAR = 1.5  # a budget above so many plain peaks would press everything else to the ground
# Where a label may be, in points from its point: beside it first, then around it, then farther off.
_OFFSETS = [
    (side * away, up)
    for away in (8.0, 22.0, 40.0, 60.0)
    for up in (0.0, 9.0, -9.0, 18.0, -18.0, 30.0, -30.0, 44.0, -44.0)
    for side in (1, -1)
]


class TradePoint(NamedTuple):
    """Methods whose plans hold and cost the same; `x` is per cent of the step's time, or a count of ops."""

    label: str
    x: float
    peak_bytes: int


class Rectangle(NamedTuple):
    """A rectangle in points."""

    left: float
    bottom: float
    right: float
    top: float

    def overlaps(self, other: Rectangle) -> bool:
        """Whether they share more than an edge."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.bottom < other.top
            and other.bottom < self.top
        )


def draw_trade(comparison: Comparison, kind: str, *, title: str) -> bytes:
    """The picture as a file of `kind` ('png' or 'svg'). What was measured is drawn beside what is predicted.

    Where no times are known, ops that run again stand for them.
    """

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        points = predicted_points(comparison)
        unit = unit_of(max(point.peak_bytes for point in points))
        axes.scatter(
            [point.x for point in points],
            [point.peak_bytes / unit[1] for point in points],
            color=_POINT,
            label="predicted",
            zorder=3,
        )
        crosses = _draw_measured(axes, comparison, unit)
        bounds = _draw_bounds(axes, comparison, unit)
        axes.set_title(title, loc="left", weight="bold")
        axes.set_xlabel(
            "extra time of a step (%)" if comparison.timed else "ops run again (no times are known)"
        )
        axes.set_ylabel(f"peak ({unit[0]})")
        axes.margins(0.12, 0.12)
        _draw_labels(figure, axes, points, crosses, bounds, unit)

    return painted(kind, (10, 5.8), paint)


def predicted_points(comparison: Comparison) -> list[TradePoint]:
    """One point for each place where methods are, with the names of all of them."""
    names: dict[tuple[float, int], list[str]] = {}
    for row in comparison.rows:
        added = row.extra_seconds_ratio if comparison.timed else row.recomputed_ops
        if added is not None and row.predicted_peak_bytes is not None:
            x = 100.0 * added if comparison.timed else float(added)
            names.setdefault((x, row.predicted_peak_bytes), []).append(row.method)
    return [TradePoint(", ".join(methods), *place) for place, methods in names.items()]


def placed(
    points: Sequence[tuple[float, float]],
    labels: Sequence[str],
    frame: Rectangle,
    occupied: Sequence[Rectangle] = (),
) -> list[tuple[float, float]]:
    """Where the left end of each label is, from its point, so that none covers a point or what else is there.

    All in points. Where there is no room at all a label stays beside its point.
    """
    taken = [*occupied, *(_around(x, y) for x, y in points)]
    chosen = []
    for (x, y), label in zip(points, labels, strict=True):
        width = _LETTER * len(label)
        candidates = [(dx if dx > 0 else dx - width, dy) for dx, dy in _OFFSETS]
        boxes = [
            Rectangle(x + dx, y + dy - _LINE / 2, x + dx + width, y + dy + _LINE / 2) for dx, dy in candidates
        ]
        free = [
            place
            for place, box in enumerate(boxes)
            if _inside(box, frame) and not any(box.overlaps(other) for other in taken)
        ]
        best = free[0] if free else 0
        taken.append(boxes[best])
        chosen.append(candidates[best])
    return chosen


def _around(x: float, y: float) -> Rectangle:
    return Rectangle(x - 4, y - 4, x + 4, y + 4)


def _inside(box: Rectangle, frame: Rectangle) -> bool:
    return (
        frame.left <= box.left
        and box.right <= frame.right
        and frame.bottom <= box.bottom
        and box.top <= frame.top
    )


def _draw_labels(
    figure: Figure,
    axes: Axes,
    points: Sequence[TradePoint],
    crosses: Sequence[tuple[float, float]],
    bounds: Sequence[tuple[float, str]],
    unit: tuple[str, int],
) -> None:
    figure.draw_without_rendering()  # only then is it settled where the axes are
    scale = 72 / figure.get_dpi()

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = axes.transData.transform((x, y)) * scale
        return float(across), float(up)

    extent = axes.get_window_extent()
    frame = Rectangle(*(edge * scale for edge in (extent.x0, extent.y0, extent.x1, extent.y1)))
    occupied = [_around(*place(*cross)) for cross in crosses]
    for height, text in bounds:
        line = place(0, height)[1]
        occupied.append(Rectangle(frame.left, line - 1, frame.right, line + 1))
        occupied.append(Rectangle(frame.right - 4 - _LETTER * len(text), line - 3 - _LINE, frame.right, line))
    places = [place(point.x, point.peak_bytes / unit[1]) for point in points]
    offsets = placed(places, [point.label for point in points], frame, occupied)
    for point, offset in zip(points, offsets, strict=True):
        end = (0, 0.5) if offset[0] > 0 else (1, 0.5)  # of the label, where the line to its point begins
        axes.annotate(
            point.label,
            (point.x, point.peak_bytes / unit[1]),
            xytext=offset,
            textcoords="offset points",
            va="center",
            size=_TEXT,
            arrowprops={"arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkB": 4, "relpos": end},
        )


def _draw_measured(axes: Axes, comparison: Comparison, unit: tuple[str, int]) -> list[tuple[float, float]]:
    """A cross for each plan, level with the point that it belongs to or nearly; where they are."""
    found = {
        (100 * (row.measured_seconds_ratio - 1), row.measured_peak_bytes / unit[1])
        for row in comparison.rows
        if row.measured_seconds_ratio is not None and row.measured_peak_bytes is not None
    }
    if not found or not comparison.timed:
        return []
    axes.scatter(*zip(*sorted(found), strict=True), marker="x", color=_MEASURED, label="measured", zorder=4)
    axes.legend(loc="upper right", frameon=False)
    return sorted(found)


def _draw_bounds(axes: Axes, comparison: Comparison, unit: tuple[str, int]) -> list[tuple[float, str]]:
    """Lines that are named at their right end; the height and the name of each."""
    drawn = []
    plain = comparison.rows[0].predicted_peak_bytes or 0
    lines = [("lower bound", comparison.lower_bound_bytes, "0.5", (0, (2, 2)))]
    if comparison.budget_bytes is not None:
        lines.append(("budget", comparison.budget_bytes, "black", (0, (6, 3))))
    for name, count, colour, dashes in lines:
        far = count > _FAR * plain
        height = (1.02 * plain if far else count) / unit[1]
        axes.axhline(height, color=colour, linestyle=dashes, linewidth=1.2, zorder=1)
        text = f"{name} {format_bytes(count)}{' (far above, not to scale)' if far else ''}"
        axes.annotate(
            text,
            (1, height),
            xycoords=("axes fraction", "data"),
            xytext=(-4, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            size=_TEXT,
            color=colour,
        )
        drawn.append((height, text))
    return drawn
