"""The rows of `tiles.py` as tables, and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper.report import heading, table
from lowtide.text.documents import write_text

Json = dict[str, Any]
_MIB = 2**20
_WORDS = {True: "met", False: "**missed**", None: "–"}


def report(document: Json, output: Path) -> None:
    """Write the Markdown, and a picture beside it."""
    rows = document["rows"]
    names = list(dict.fromkeys(row["subject"] for row in rows))
    lines = [
        "# Below one op: tiles",
        "",
        *heading(document),
        "One training step: forward, loss, backward, gradients from None, no optimizer. MiB are the most "
        "that PyTorch's allocator held, weights and batch included; ms the median of 7 steps after 3. "
        "PyTorch's own kernels throughout, but for torch.compile. *Predicted* is what the plan said before "
        "it ran. *Planning* does not count the capture, which is made once for a step.",
        "",
        f"![MiB and ms of every way to train]({output.with_suffix('.png').name})",
        "",
    ]
    for name in names:
        lines += section(name, [row for row in rows if row["subject"] == name])
    write_text(output, "\n".join(lines).rstrip() + "\n")
    draw(rows, names, output.with_suffix(".png"))
    print(output)


def section(name: str, rows: Sequence[Json]) -> Iterator[str]:
    """One step: a table, what is cut, and what went wrong."""
    eager = next((row for row in rows if row["label"] == "eager" and "ms" in row), None)
    yield f"## {name}"
    yield ""
    head = [
        "",
        "MiB",
        "ms",
        "goal",
        "",
        "predicted MiB",
        "off by",
        "within budget",
        "ops again",
        "planning s",
    ]
    yield from table(head, [cells(row, eager) for row in rows if "peak_bytes" in row])
    for row in rows:
        if row.get("tiles"):
            yield f"- {row['label']}: {cut(row['tiles'])}"
        if "error" in row:
            yield f"- {row['label']}: {' '.join(str(row['error']).split())}"
    yield ""


def cells(row: Json, eager: Json | None) -> list[str]:
    label = row["label"] if row["kind"] == "peer" else f"lowtide, {row['label']}"
    measured = [label, f"{row['peak_bytes'] / _MIB:,.0f}", f"{row['ms']:,.1f}"]
    if row["kind"] == "peer":
        return [*measured, *[""] * 7]
    goal, met = verdict(row, eager)
    off = row["predicted_bytes"] / row["peak_bytes"] - 1
    return [
        *measured,
        goal,
        _WORDS[met],
        f"{row['predicted_bytes'] / _MIB:,.0f}",
        f"{100 * off:+.2f} %",
        {True: "yes", False: "**no**", None: "–"}[row["kept_within_budget"]],
        str(row["recomputed_ops"]),
        f"{row['planning_seconds']:.1f}",
    ]


def verdict(row: Json, eager: Json | None) -> tuple[str, bool | None]:
    """What was to be reached, and whether it was."""
    goals: list[str] = []
    met: list[bool] = []
    if row.get("most_mib") is not None:
        goals.append(f"≤ {row['most_mib']:,.0f} MiB")
        met.append(row["peak_bytes"] <= row["most_mib"] * _MIB)
    if row.get("most_ms") is not None:
        goals.append(f"≤ {row['most_ms']:,.0f} ms")
        met.append(row["ms"] <= row["most_ms"])
    if row.get("most_times") is not None and eager is not None:
        goals.append(f"≤ {row['most_times']}× eager")
        met.append(row["ms"] <= row["most_times"] * eager["ms"])
    return ", ".join(goals), all(met) if met else None


def cut(tiles: Sequence[Json]) -> str:
    """What runs in slices, alike ones together."""
    found: dict[tuple[int, int, int], list[str]] = {}
    for tile in tiles:
        found.setdefault((tile["extent"], tile["count"], tile["spared_bytes"]), []).append(tile["where"])
    parts = []
    for (extent, count, spared), places in found.items():
        distinct = list(dict.fromkeys(places))
        where = distinct[0] if len(distinct) == 1 else f"{distinct[0]} and {len(distinct) - 1} more"
        parts.append(f"`{where}`: {extent:,} in {count} slices, {spared / _MIB:,.0f} MiB never there at once")
    return "; ".join(parts)


def draw(rows: Sequence[Json], names: Sequence[str], path: Path) -> None:
    """MiB to the right, ms upwards: each step a panel, peers hollow, lowtide filled."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    across = min(3, len(names))
    down = -(-len(names) // across)
    figure, panels = pyplot.subplots(down, across, figsize=(5.4 * across, 3.8 * down), squeeze=False)
    for panel in panels.flat[len(names) :]:
        panel.axis("off")
    for panel, name in zip(panels.flat, names, strict=False):
        found = [row for row in rows if row["subject"] == name and "peak_bytes" in row]
        widest = max(row["peak_bytes"] for row in found) / 2**30
        for row in found:
            is_peer = row["kind"] == "peer"
            colour = "#777777" if is_peer else "#0b6e99"
            place = row["peak_bytes"] / 2**30, row["ms"]
            panel.plot(*place, "o", color=colour, mfc="none" if is_peer else colour)
            label = row["label"] if is_peer else f"lowtide, {row['label']}"
            is_right = place[0] > 0.6 * widest
            panel.annotate(
                label,
                place,
                xytext=(-6 if is_right else 6, 5 if is_peer else -11),
                textcoords="offset points",
                ha="right" if is_right else "left",
                fontsize=7.5,
                color=colour,
            )
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("GiB")
        panel.set_ylabel("ms")
        panel.set_xlim(0, 1.1 * widest)
        panel.set_ylim(0, 1.15 * max(row["ms"] for row in found))
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
