"""What pictures of graphs are painted with, in inches: boxes in colours of tags, badges, curves, words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from lowtide.arena.tags import How

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path

PAPER = "white"
INK = "#222222"
FAINT = "#9AA5B1"

# Light enough for black words on all of them; neighbours differ in brightness as well as in hue.
_COLOURS = (
    "#8ECAE6", "#FFB703", "#90BE6D", "#F4A3B4", "#CDB4DB", "#F9E07F",
    "#7FC8B8", "#E5A36F", "#B8C0FF", "#D9D9D9", "#C5E384", "#E0AAFF",
)  # fmt: skip
_FRAMES: Mapping[How, dict[str, Any]] = {
    How.NEW: {"linewidth": 0.8, "linestyle": "solid"},
    How.IN_PLACE: {"linewidth": 2.2, "linestyle": "solid"},
    How.SHARED: {"linewidth": 1.4, "linestyle": (0, (3, 1.5))},
}


class Stop(NamedTuple):
    """A place that a curve passes, and how it passes: the direction, as long as it is to be felt."""

    x: float
    y: float
    dx: float
    dy: float


class Brush:
    """Paints on axes whose coordinates are inches."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes

    def text(self, x: float, y: float, words: str, size: float, **style: Any) -> None:
        """Words that begin at x, or stand around it, at the height of y."""
        options: dict[str, Any] = {"ha": "left", "va": "center", "color": INK, "zorder": 5, **style}
        self.axes.text(x, y, words, size=size, **options)

    def box(
        self, x: float, y: float, width: float, height: float, tag: int | None = None, how: How = How.NEW
    ) -> None:
        """A box around a place, in the colour of its tag; white without one."""
        from matplotlib.patches import FancyBboxPatch

        self.axes.add_patch(
            FancyBboxPatch(
                (x - width / 2, y - height / 2),
                width,
                height,
                boxstyle=f"round,pad=0,rounding_size={min(height, width) / 4}",
                facecolor=PAPER if tag is None else _COLOURS[tag % len(_COLOURS)],
                edgecolor=INK,
                zorder=3,
                **_FRAMES[how],
            )
        )

    def tag(self, x: float, y: float, tag: int) -> None:
        """The number of a tag, in a circle."""
        from matplotlib.patches import Circle

        self.axes.add_patch(Circle((x, y), 0.115, facecolor=PAPER, edgecolor=INK, linewidth=0.7, zorder=4))
        self.text(x, y, str(tag), 7.5, ha="center", weight="bold")

    def counter(self, x: float, y: float, count: int) -> None:
        """A counter, white on black."""
        from matplotlib.patches import Rectangle

        corner = (x - 0.1, y - 0.09)
        badge = Rectangle(corner, 0.2, 0.18, facecolor=INK, edgecolor=PAPER, linewidth=0.8, zorder=4)
        self.axes.add_patch(badge)
        self.text(x, y, str(count), 7.5, ha="center", weight="bold", color=PAPER)

    def arrow(self, stops: Sequence[Stop], width: float, *, faint: bool, scale: float) -> None:
        """An arrow through all stops. Faint ones are dashed, and below everything."""
        from matplotlib.patches import FancyArrowPatch

        style: dict[str, Any] = {
            "color": FAINT if faint else INK,
            "linewidth": width,
            "zorder": 1 if faint else 2,
        }
        if faint:
            style["linestyle"] = (0, (4, 2))
        head: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 11 * scale, "shrinkA": 0, "shrinkB": 0}
        self.axes.add_patch(FancyArrowPatch(path=_curve(stops), **head, **style))


def _curve(stops: Sequence[Stop]) -> Path:
    """A smooth curve through all stops."""
    from matplotlib.path import Path

    points: list[tuple[float, float]] = [stops[0][:2]]
    for here, there in pairwise(stops):
        points += [(here.x + here.dx, here.y + here.dy), (there.x - there.dx, there.y - there.dy), there[:2]]
    return Path(points, [Path.MOVETO, *[Path.CURVE4] * (len(points) - 1)])
