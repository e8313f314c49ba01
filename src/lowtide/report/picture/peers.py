"""Ways to train a step as a picture: peak to the right, time upwards; plans of one kind are joined.

Times are told as multiples of those of the eager steps that took turns with them, where all have such.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from lowtide.report.picture.plot import painted, unit_of
from lowtide.report.picture.trade import Rectangle, placed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lowtide.planner.peer_ways import PeerRow
    from lowtide.planner.peers import PeerComparison

_PEER = "#555555"
_PLANS = ("#0072B2", "#56B4E9", "#D55E00", "#E69F00")  # Okabe and Ito's: with and without slices of a hue
_MARKS = ("o", "s", "o", "s")
_TEXT = 8.5
_ROOM = 1.15  # beyond what is farthest
_HALF = 6  # of what a mark takes, in points


class MeasuredPoint(NamedTuple):
    """A way to train: `series` is what plans of one kind share, and empty for what others do.

    `time` is in milliseconds, or in eager steps.
    """

    label: str
    series: str
    peak_bytes: int
    time: float


def draw_peers(comparison: PeerComparison, kind: str, *, title: str) -> bytes:
    """The picture as a file of `kind` ('png' or 'svg')."""
    points = list(measured_points(comparison.rows))

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        plot_peers(axes, points, title=title, time=time_axis(comparison.rows))
        name_peers(figure, axes, points)

    return painted(kind, (10, 5.8), paint)


def measured_points(rows: Sequence[PeerRow]) -> Iterator[MeasuredPoint]:
    """What was measured, in the order of the rows."""
    in_eager_steps = _in_eager_steps(rows)
    for row in rows:
        if row.reading is None:
            continue
        reading = row.reading
        unit = reading.eager_seconds if in_eager_steps and reading.eager_seconds else 1e-3
        series = series_of(row.label) if row.kind.value == "planned" else ""
        yield MeasuredPoint(row.label, series, reading.peak_bytes, reading.seconds / unit)


def time_axis(rows: Sequence[PeerRow]) -> str:
    """What times are counted in."""
    return "a step (times an eager one)" if _in_eager_steps(rows) else "a step (ms)"


def _in_eager_steps(rows: Sequence[PeerRow]) -> bool:
    return all(row.reading.eager_seconds is not None for row in rows if row.reading is not None)


def series_of(label: str) -> str:
    """'lowtide tiles' of 'lowtide tiles within compile 0.5' and of 'lowtide tiles, lowest'."""
    return label.partition(" within ")[0].partition(",")[0]


def plot_peers(axes: Axes, points: Sequence[MeasuredPoint], *, title: str, time: str) -> None:
    """The points on `axes`: what others do hollow, plans filled, joined, and named in the legend."""
    unit = _unit(points)
    peers = [point for point in points if not point.series]
    axes.set_title(title, loc="left", weight="bold")
    axes.scatter(
        [point.peak_bytes / unit[1] for point in peers],
        [point.time for point in peers],
        facecolors="white",
        edgecolors=_PEER,
        linewidths=1.4,
        zorder=3,
    )
    for number, series in enumerate(dict.fromkeys(point.series for point in points if point.series)):
        own = sorted((point.peak_bytes, point.time) for point in points if point.series == series)
        axes.plot(
            [peak / unit[1] for peak, _ in own],
            [height for _, height in own],
            color=_PLANS[number % len(_PLANS)],
            marker=_MARKS[number % len(_MARKS)],
            markersize=5,
            linewidth=1.2,
            label=series,
            zorder=4,
        )
    axes.set_xlabel(f"peak ({unit[0]})")
    axes.set_ylabel(time)
    axes.set_xlim(0, _ROOM * max((point.peak_bytes / unit[1] for point in points), default=1))
    axes.set_ylim(0, _ROOM * max((point.time for point in points), default=1))
    if any(point.series for point in points):
        axes.legend(loc="lower left", frameon=False)


def name_peers(figure: Figure, axes: Axes, points: Sequence[MeasuredPoint]) -> None:
    """Write the names of what others do where they cover nothing; all else on the figure is there already."""
    unit = _unit(points)
    peers = [point for point in points if not point.series]
    figure.draw_without_rendering()  # only then is it settled where the axes are
    scale = 72 / figure.get_dpi()

    def place(point: MeasuredPoint) -> tuple[float, float]:
        across, up = axes.transData.transform((point.peak_bytes / unit[1], point.time)) * scale
        return float(across), float(up)

    extent = axes.get_window_extent()
    frame = Rectangle(*(edge * scale for edge in (extent.x0, extent.y0, extent.x1, extent.y1)))
    marks = [place(point) for point in points if point.series]
    taken = [Rectangle(x - _HALF, y - _HALF, x + _HALF, y + _HALF) for x, y in marks]
    offsets = placed([place(point) for point in peers], [point.label for point in peers], frame, taken)
    for point, offset in zip(peers, offsets, strict=True):
        end = (0, 0.5) if offset[0] > 0 else (1, 0.5)  # of the label, where the line to its point begins
        axes.annotate(
            point.label,
            (point.peak_bytes / unit[1], point.time),
            xytext=offset,
            textcoords="offset points",
            va="center",
            size=_TEXT,
            color=_PEER,
            arrowprops={"arrowstyle": "-", "color": "0.75", "linewidth": 0.6, "shrinkB": 4, "relpos": end},
        )


def _unit(points: Sequence[MeasuredPoint]) -> tuple[str, int]:
    return unit_of(max((point.peak_bytes for point in points), default=0))
