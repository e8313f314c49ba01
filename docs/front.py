"""The picture of the front page: a step that runs out of memory, and the same step under a plan.

`python docs/front.py` plans that step for a GPU that need not be here and writes what both hold over time to
docs/front.json, in half a minute. `python docs/draw.py` draws it from there.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lowtide
from lowtide.report.picture.plot import painted
from lowtide.zoo.sources.specs import load

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FILE = Path(__file__).parent / "front.json"
MODEL, SIZES, OPTIMIZER = "hf:gpt2", {"batch": 16, "tokens": 1024}, "adamw"
CARD_GIB, BUDGET = (
    24,
    "22GiB",
)  # the CUDA context, and what PyTorch reserves beyond, need room on the card too
TITLE = "A training step of GPT-2: AdamW, 16 texts of 1,024 tokens, on a card of 24 GiB"

_PLAIN, _OVER, _PLANNED = "0.72", "#D55E00", "#0072B2"

SHORTEST_MS = 1.0  # of what can be told apart in the picture

Curve = list[tuple[float, float]]  # how long an op takes, in ms, and what is held meanwhile, in MiB


def main() -> None:
    """Plan the step, and write both curves."""
    setup = load(MODEL, SIZES)
    solution = lowtide.plan(
        setup.model, setup.example, loss=setup.loss, optimizer=OPTIMIZER, budget=BUDGET, device="cuda"
    )
    assert isinstance(solution, lowtide.GraphSolution)
    graph = solution.graph
    found = {
        "torch": solution.torch_version,
        "plain_peak_bytes": solution.plain_peak_bytes,
        "planned_peak_bytes": solution.peak_bytes,
        "extra_seconds_ratio": solution.extra_seconds_ratio,
        "plain": curve(graph, lowtide.straight(graph)),
        "planned": curve(graph, solution.schedule),
    }
    FILE.write_text(json.dumps(found), encoding="utf-8")


def curve(graph: lowtide.Graph, schedule: lowtide.Schedule) -> Curve:
    """An entry for each op that runs, in its order."""
    held = lowtide.simulate(graph, schedule).live_bytes
    return [
        (round(1e3 * graph.ops[step.op].seconds, 3), round(int(live) / 2**20, 1))
        for step, live in zip(schedule, held, strict=True)
        if isinstance(step, lowtide.Compute)
    ]


# The picture ------------------------------------------------------------------------------------------


def draw() -> bytes:
    """Memory over the step, plain and planned, against what the card has."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))

    def paint(figure: Figure) -> None:
        axes = figure.subplots()
        _draw_plain(axes, *corners(found["plain"]), peak=found["plain_peak_bytes"])
        _draw_planned(axes, *corners(found["planned"]), found)
        axes.set(xlabel="ms, estimated for an H200", ylabel="held (GiB)", ylim=(0, 34), xlim=(0, 382))
        axes.set_yticks(range(0, 33, 8))
        figure.suptitle(TITLE, x=0.01, ha="left", weight="bold", size=11)

    return painted("svg", (8.6, 3.8), paint)


def merged(entries: Curve) -> Curve:
    """The same curve with fewer corners: a stretch of short ops holds what its fullest op does."""
    found: Curve = [entries[0]]
    for lasts, held in entries[1:]:
        before, most = found[-1]
        if before < SHORTEST_MS:
            found[-1] = (before + lasts, max(most, held))
        else:
            found.append((lasts, held))
    return found


def corners(entries: Curve) -> tuple[list[float], list[float]]:
    """Milliseconds and GiB of a curve that steps from op to op."""
    entries = merged(entries)
    ends = list(accumulate(lasts for lasts, _ in entries))
    across = [moment for begin, end in zip([0.0, *ends], ends, strict=False) for moment in (begin, end)]
    return across, [held / 1024 for _, held in entries for _ in range(2)]


def _draw_plain(axes: Axes, across: list[float], held: list[float], peak: int) -> None:
    over = [value > CARD_GIB for value in held]
    axes.fill_between(across, held, color=_PLAIN, linewidth=0)
    axes.fill_between(across, held, CARD_GIB, where=over, color=_OVER, linewidth=0)
    axes.axhline(CARD_GIB, color="black", linewidth=1.2, linestyle=(0, (6, 3)))
    axes.text(1, CARD_GIB + 0.5, "the card", size=9)
    first = across[over.index(True)]
    axes.annotate(
        f"CUDA out of memory\nas it is written: {peak / 2**30:.1f} GiB",
        (first, CARD_GIB + 0.6),
        (first - 12, CARD_GIB + 3.6),
        color=_OVER,
        weight="bold",
        ha="right",
        arrowprops={"arrowstyle": "-", "color": _OVER},
    )


def _draw_planned(axes: Axes, across: list[float], held: list[float], found: dict[str, Any]) -> None:
    axes.fill_between(across, held, color=_PLANNED, alpha=0.25, linewidth=0)
    axes.plot(across, held, color=_PLANNED, linewidth=1.4)
    peak, extra = found["planned_peak_bytes"] / 2**30, found["extra_seconds_ratio"]
    words = f'budget="{BUDGET}": {peak:.1f} GiB,\n{100 * extra:+.1f} % time, the same gradients'
    axes.text(380, 27, words, color=_PLANNED, weight="bold", ha="right")


if __name__ == "__main__":
    main()
