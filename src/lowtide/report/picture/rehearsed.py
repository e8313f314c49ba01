"""A rehearsal as a picture: what was held over a whole training, and the card."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from lowtide.ir.simulate import CATEGORIES
from lowtide.rehearsal.outcome import Act
from lowtide.report.picture.plot import COLOURS, painted, unit_of
from lowtide.text.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from lowtide.rehearsal.outcome import Rehearsed

_SHADES = {
    Act.SETUP: "0.93",
    Act.FIRST: "0.70",
    Act.TRAINING: "0.85",
    Act.VALIDATION: "0.60",
    Act.SAVING: "0.45",
}
_STRIP = 0.05
_LETTER = 0.0125  # width of a letter in the strip, as a part of the axes
_LABEL_BOX = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


def draw_rehearsed(found: Rehearsed, kind: str, *, title: str) -> bytes:
    """The picture of a rehearsal as a file of `kind` ('png' or 'svg'): each point stands for many events."""

    def paint(figure: Figure) -> None:
        axes = figure.add_subplot()
        unit = unit_of(max(found.allowed_bytes, found.peak_reserved_bytes))
        _draw_stack(axes, found, unit[1])
        _draw_acts(axes, found)
        _draw_card(axes, found, unit[1])
        axes.set_title(title, loc="left", pad=22, weight="bold")
        axes.set_xlabel("allocations, in order")
        axes.set_ylabel(f"held ({unit[0]})")
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)

    return painted(kind, (10, 5.4), paint)


def _draw_stack(axes: Axes, found: Rehearsed, scale: int) -> None:
    count = len(found.timeline)
    edges = np.arange(count + 1)
    stack = np.array([glimpse.stack for glimpse in found.timeline], dtype=float).reshape(count, -1) / scale
    reserved = np.array([glimpse.reserved_bytes for glimpse in found.timeline], dtype=float) / scale
    if not count:
        return
    floor = np.zeros(count + 1)
    for column, category in enumerate(CATEGORIES):
        top = floor + np.append(stack[:, column], stack[-1, column])
        if stack[:, column].any():
            style: dict[str, Any] = {"color": COLOURS[category], "linewidth": 0, "label": category.value}
            axes.fill_between(edges, floor, top, step="post", **style)
        floor = top
    axes.step(
        edges, np.append(reserved, reserved[-1]), where="post", color="0.3", linewidth=1, label="reserved"
    )
    axes.set_xlim(0, count)


def _draw_acts(axes: Axes, found: Rehearsed) -> None:
    """A strip above the axes that names the parts of the training."""
    place, start, named = axes.get_xaxis_transform(), 0, set()
    for act, glimpses in groupby(found.timeline, lambda glimpse: glimpse.act):
        length = len(list(glimpses))
        shade: dict[str, Any] = {"transform": place, "color": _SHADES[act], "linewidth": 0}
        fits_in = length > len(act) * _LETTER * len(found.timeline)
        label = "_" if fits_in or act in named else act.value
        axes.broken_barh([(start, length)], (1, _STRIP), **shade, clip_on=False, label=label)
        if fits_in:
            middle = (start + length / 2, 1 + _STRIP / 2)
            axes.text(*middle, act.value, transform=place, ha="center", va="center_baseline", size=9)
        named.add(act)
        start += length


def _draw_card(axes: Axes, found: Rehearsed, scale: int) -> None:
    height = found.allowed_bytes / scale
    axes.axhline(height, color="black", linestyle=(0, (6, 3)), linewidth=1.2)
    axes.annotate(
        f"allowed {format_bytes(found.allowed_bytes)}",
        (0, height),
        xycoords=("axes fraction", "data"),
        xytext=(6, 7),
        textcoords="offset points",
        size=9,
        bbox=_LABEL_BOX,
    )
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.12 * height))
