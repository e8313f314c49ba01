"""Tables and figures of the paper's experiment, from its JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lowtide.text.documents import write_text

Json = dict[str, Any]
MIB = 2**20
SHOWN = (
    "keep-all",
    "every-k",
    "selective",
    "chen-sqrt",
    "chen-greedy",
    "chen-recursive",
    "feng-huang",
    "hong-cubic",
    "hong-linear",
    "hong-quadratic",
    "rotor",
)
DRAWN = ("chen-sqrt", "feng-huang", "hong-quadratic", "rotor")


def render(documents: Sequence[Json], output: Path) -> None:
    """Write the tables to `output`, and the figures beside it."""
    measured = [document for document in documents if "rows" in document]
    lines = ["# Which layers to recompute: every method, predicted and measured", ""]
    for document in measured:
        lines += [*heading(document), *summary(document["rows"]), *budgets(document["rows"])]
        lines += [*library(document["rows"]), *timelines(document["rows"])]
        for row in document["rows"]:
            lines += list(details(row))
    for document in documents:
        if "runs" in document:
            lines += [*heading(document), *epochs(document["runs"]["epochs"])]
            lines += [*steps(document["runs"]["batches"], "Batches of varying size under one budget")]
            lines += [*steps(document["runs"]["paths"], "A model whose graph changes from step to step")]
    write_text(output, "\n".join(lines).rstrip() + "\n")
    if measured:
        draw_peaks(measured[0]["rows"], output.with_suffix(".png"))
        draw_timelines(measured[0]["rows"], output.with_name(f"{output.stem}-timelines.png"))


def heading(document: Json) -> Iterator[str]:
    machine = document["machine"]
    yield (
        f"{machine['device']}, torch {machine['torch']}, Python {machine['python']}, commit "
        f"{machine['commit']}, {machine['date']}: `{machine['command']}`"
    )
    yield ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'|'.join(['---', *['---:'] * (len(head) - 1)])}|"
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield ""


def mib(count: int | None) -> str:
    return "–" if count is None else f"{count / MIB:,.1f}"


def percent(part: float | None, sign: str = "+") -> str:
    return "–" if part is None else f"{100 * part:{sign}.1f} %"


def first(row: Json) -> Json:
    """The comparison at the granularity of the paper."""
    found: Json = next(iter(row["comparisons"].values()))
    return found


def by_method(comparison: Json) -> dict[str, Json]:
    return {found["method"]: found for found in comparison["rows"] if found["measured_peak_bytes"]}


# Tables ---------------------------------------------------------------------------------------------------


def summary(rows: Sequence[Json]) -> Iterator[str]:
    yield "## Measured peaks, and how far the optimum is below √n and ACG"
    yield ""
    yield (
        "MiB, whole step; in brackets the optimum's distance without what is resident (weights, buffers, "
        "batch), as Feng and Huang count. *optimum*: the least peak of one level (hong-quadratic); *nested*: "
        "rotor. Layers as the paper cuts them."
    )
    yield ""
    head = ["network", "layers", "keep-all", "√n", "ACG", "optimum", "below √n", "below ACG", "nested"]
    yield from table(head, [summarised(row) for row in rows])
    errors = [
        abs(found["predicted_peak_bytes"] - found["measured_peak_bytes"])
        / (found["measured_peak_bytes"] - row["resident_bytes"])
        for row in rows
        for comparison in [*row["comparisons"].values(), *row["budgets"].values()]
        for found in by_method(comparison).values()
    ]
    yield (
        f"Predicted against measured, over {len(errors)} measured plans: the largest error is "
        f"{100 * max(errors):.2f} % of the part that is not resident, the median "
        f"{100 * sorted(errors)[len(errors) // 2]:.2f} %."
    )
    yield ""


def summarised(row: Json) -> list[str]:
    found = by_method(first(row))
    peaks = {method: found[method]["measured_peak_bytes"] for method in ("keep-all", *DRAWN)}
    resident = row["resident_bytes"]

    def below(method: str) -> str:
        whole = 1 - peaks["hong-quadratic"] / peaks[method]
        part = 1 - (peaks["hong-quadratic"] - resident) / (peaks[method] - resident)
        return f"{percent(whole, '')} ({percent(part, '')})"

    sizes = [mib(peaks[method]) for method in ("keep-all", "chen-sqrt", "feng-huang", "hong-quadratic")]
    return [
        row["name"],
        str(first(row)["layers"]),
        *sizes,
        below("chen-sqrt"),
        below("feng-huang"),
        mib(peaks["rotor"]),
    ]


def budgets(rows: Sequence[Json]) -> Iterator[str]:
    yield "## Within a budget: one level against nested"
    yield ""
    yield (
        "The budget leaves this part of what rotor can save at all unsaved. Peaks are measured; times are "
        "those of a step, as predicted and as measured, beyond keep-all's."
    )
    yield ""
    head = [
        "network, part",
        "budget",
        "one level: peak",
        "extra",
        "measured",
        "rotor: peak",
        "extra",
        "measured",
    ]
    yield from table(head, [found for row in rows for found in budgeted(row)])


def budgeted(row: Json) -> Iterator[list[str]]:
    for part, comparison in row["budgets"].items():
        found = by_method(comparison)
        cells = [f"{row['name']}, {part}", mib(comparison["budget_bytes"])]
        for method in ("hong-linear", "rotor"):
            cells += timed(found[method]) if method in found else ["none fits", "–", "–"]
        yield cells


def timed(found: Json) -> list[str]:
    return [
        mib(found["measured_peak_bytes"]),
        percent(found["extra_seconds_ratio"]),
        percent(found["measured_seconds_ratio"] - 1),
    ]


def library(rows: Sequence[Json]) -> Iterator[str]:
    own = [row for row in rows if row["library_checkpointing"]]
    if not own:
        return
    yield "## Transformers: against the library's own checkpointing of every block"
    yield ""
    head = ["network", "library: peak", "measured time"]
    head += ["hong-quadratic by block", "time", "by layer", "time", "rotor by layer", "time"]
    lines = []
    for row in own:
        cells = [
            row["name"],
            mib(row["library_checkpointing"]["measured_peak_bytes"]),
            percent(row["library_checkpointing"]["measured_seconds_ratio"] - 1),
        ]
        for granularity, method in (
            ("block", "hong-quadratic"),
            ("layer", "hong-quadratic"),
            ("layer", "rotor"),
        ):
            found = by_method(row["comparisons"][granularity])[method]
            cells += [mib(found["measured_peak_bytes"]), percent(found["measured_seconds_ratio"] - 1)]
        lines.append(cells)
    yield from table(head, lines)


def timelines(rows: Sequence[Json]) -> Iterator[str]:
    drawn = [(row["name"], line) for row in rows for line in row["timelines"]]
    if not drawn:
        return
    yield "## Timelines: the chain, the dry run, and PyTorch's own record"
    yield ""
    head = ["network, plan", "chain's peak", "dry run's peak", "recorded peak"]
    peaks = ("chain_peak_bytes", "predicted_peak_bytes", "recorded_peak_bytes")
    yield from table(
        head, [[f"{name}, {line['plan']}", *[mib(line[peak]) for peak in peaks]] for name, line in drawn]
    )


def details(row: Json) -> Iterator[str]:
    for granularity, comparison in row["comparisons"].items():
        yield f"## {row['name']}, by {granularity} ({comparison['layers']} layers)"
        yield ""
        yield (
            f"Resident {mib(row['resident_bytes'])} MiB; no plan can peak below "
            f"{mib(comparison['lower_bound_bytes'])} MiB."
        )
        yield ""
        head = [
            "method",
            "predicted",
            "measured",
            "without resident",
            "ratio",
            "extra",
            "measured",
            "step ms",
        ]
        yield from table(
            [*head, "status", "planning ms", "plan"],
            [detailed(found, row) for found in comparison["rows"] if found["method"] in SHOWN],
        )


def detailed(found: Json, row: Json) -> list[str]:
    if found["measured_peak_bytes"] is None:
        return [found["method"], *["–"] * 7, found["problem"] or "", "–", "–"]
    return [
        found["method"],
        mib(found["predicted_peak_bytes"]),
        mib(found["measured_peak_bytes"]),
        mib(found["measured_peak_bytes"] - row["resident_bytes"]),
        f"{found['measured_ratio']:.3f}",
        percent(found["extra_seconds_ratio"]),
        percent(found["measured_seconds_ratio"] - 1),
        f"{1e3 * found['measured_seconds']:.1f}",
        found["status"],
        f"{1e3 * found['planning_seconds']:.1f}",
        shortened(found["plan"]),
    ]


def shortened(plan: str) -> str:
    return plan if len(plan) <= 48 else f"{plan[:46]} …"


def epochs(found: Json) -> Iterator[str]:
    yield f"## {found['steps']} training steps, batch {found['batch']}, {found['image']}²"
    yield ""
    head = ["run", "equal losses", "largest difference", "first and last loss", "seconds", "ratio"]
    yield from table(
        head,
        [
            [
                f"{name}, {label}",
                "yes" if run["equal_losses"] else "no",
                f"{run['largest_difference']:.1e}",
                f"{run['losses'][0]:.4f}, {run['losses'][1]:.4f}",
                f"{run['seconds']:.2f}",
                f"{run['seconds_ratio']:.2f}",
            ]
            for name, model in found.items()
            if isinstance(model, dict)
            for label, run in model.items()
        ],
    )


def steps(found: Json, title: str) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield (
        f"Plain peak of the first step {mib(found['plain_bytes'])} MiB, budget "
        f"{mib(found['budget_bytes'])} MiB. The first step of its kind is planned for when it is met."
    )
    yield ""
    yield from table(
        ["step", "measured peak", "within the budget", "seconds, with planning"],
        [
            [step["step"], "refused", "no plan fits", "–"]
            if "refused" in step
            else [
                step["step"],
                mib(step["peak_bytes"]),
                "yes" if step["peak_bytes"] <= found["budget_bytes"] else "no",
                f"{step['seconds_with_planning']:.2f}",
            ]
            for step in found["steps"]
        ],
    )


# Figures --------------------------------------------------------------------------------------------------

COLOURS = {"chen-sqrt": "#b0b7bf", "feng-huang": "#7fa7c9", "hong-quadratic": "#1f6fb2", "rotor": "#d1603d"}
LABELS = {
    "chen-sqrt": "√n (Chen)",
    "feng-huang": "ACG (Feng–Huang)",
    "hong-quadratic": "optimum of one level (Hong)",
    "rotor": "nested (rotor)",
}


def draw_peaks(rows: Sequence[Json], path: Path) -> None:
    """Measured peaks as parts of plain training's, with the time each adds written on the bar."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(11, 4.6), layout="constrained")
    width = 0.8 / len(DRAWN)
    for place, method in enumerate(DRAWN):
        for number, row in enumerate(rows):
            found = by_method(first(row))[method]
            left = number - 0.4 + (place + 0.5) * width
            axes.bar(
                left,
                found["measured_ratio"],
                width * 0.92,
                color=COLOURS[method],
                label=LABELS[method] if number == 0 else None,
            )
            extra = f"{100 * (found['measured_seconds_ratio'] - 1):+.0f} %"
            axes.annotate(
                extra,
                (left, found["measured_ratio"]),
                (0, 3),
                textcoords="offset points",
                ha="center",
                va="bottom",
                rotation=90,
                fontsize=8,
                color="#444444",
            )
    axes.axhline(1, color="#888888", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row["name"].replace(", ", "\n", 1) for row in rows], fontsize=9)
    axes.set_ylabel("measured peak, as a part of plain training's")
    axes.set_ylim(0, 1.22)
    axes.set_title("Peak of a training step by method; on each bar the time it adds to the step", fontsize=11)
    axes.legend(ncols=4, fontsize=9, loc="upper center", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_timelines(rows: Sequence[Json], path: Path) -> None:
    """Live bytes over the step, predicted over PyTorch's own record."""
    import matplotlib.pyplot as plt

    drawn = [(row["name"], line) for row in rows for line in row["timelines"]]
    if not drawn:
        return
    size = (3.1 * len(drawn), 3.2)
    figure, grid = plt.subplots(1, len(drawn), figsize=size, layout="constrained", squeeze=False)
    for axes, (name, line) in zip(grid[0], drawn, strict=True):
        recorded, predicted = line["recorded"], line["predicted"]
        axes.plot([value / MIB for value in recorded], color="#c9ced4", linewidth=4.0, label="recorded")
        axes.plot(
            aligned(predicted, recorded),
            [value / MIB for value in predicted],
            color="#1f6fb2",
            linewidth=1.1,
            label="predicted",
        )
        axes.set_title(f"{name}\n{line['plan']}", fontsize=9)
        axes.set_xlabel("the allocator's events", fontsize=8)
        axes.set_xticks([])
        axes.tick_params(labelsize=8)
        axes.set_ylim(0)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("MiB beyond what is resident", fontsize=9)
    grid[0][0].legend(fontsize=8, frameon=False, loc="upper left")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def aligned(predicted: Sequence[int], recorded: Sequence[int]) -> list[int]:
    """For each predicted moment the recorded event that it is, in order: by dynamic time warping.

    The dry run counts a kernel's workspace with the kernel; the allocator has an event for taking it and
    one for giving it back. So there are more of these, and the two cannot share an axis as they are.
    """
    distance = np.abs(np.subtract.outer(np.asarray(predicted), np.asarray(recorded))).astype(float)
    cost = np.full((len(predicted) + 1, len(recorded) + 1), np.inf)
    cost[0, 0] = 0.0
    for i in range(1, len(predicted) + 1):
        for j in range(1, len(recorded) + 1):
            cost[i, j] = distance[i - 1, j - 1] + min(cost[i - 1, j], cost[i, j - 1], cost[i - 1, j - 1])
    i, j = len(predicted), len(recorded)
    places = [0] * len(predicted)
    while i > 0 and j > 0:
        places[i - 1] = j - 1
        i, j = min([(i - 1, j - 1), (i - 1, j), (i, j - 1)], key=lambda step: cost[step])
    return places
