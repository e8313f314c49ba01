"""The README's table of compiled training, from the newest committed run of that benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

# What a column is called, and the rows of the benchmark that it may be: the one with the lowest peak is told.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "eager": ("eager",),
    "checkpointing": ("checkpointing",),
    "`torch.compile`": ("compile 1",),
    "… its lowest budget": ("compile 0.5", "compile 0.2", "compile 0"),
    "… and checkpointing": ("compile + checkpointing",),
    "lowtide, lowest": ("lowtide, lowest", "lowtide tiles, lowest"),
    "lowtide, generated kernels, all kept": ("lowtide inductor, all kept",),
    "… lowest": ("lowtide inductor, lowest", "lowtide inductor tiles, lowest"),
}


def newest() -> Path | None:
    """The newest run on a GPU, if there is one."""
    found = [path for path in BENCHMARKS.rglob("compiled-*.json") if "cpu" not in path.stem]
    return max(found, key=lambda path: path.stem, default=None)


def table(document: Json, page: str) -> str:
    """Peak and time of every way to train every model, and where all rows are."""
    rows = [row for row in document["rows"] if "peak_bytes" in row]
    models = list(dict.fromkeys(row["subject"] for row in document["rows"]))
    lines = [f"| MiB, ms a step | {' | '.join(COLUMNS)} |", f"|---|{'--:|' * len(COLUMNS)}"]
    for model in models:
        own = [row for row in rows if row["subject"] == model]
        lines.append(f"| {model} | {' | '.join(_cell(own, labels) for labels in COLUMNS.values())} |")
    machine = document["machine"]
    where = f"{machine['device']}, torch {machine['torch']}, {machine['date']}"
    return "\n".join([*lines, "", f"{where}, all in one run; [every row and whether goals are met]({page})."])


def _cell(rows: Sequence[Json], labels: tuple[str, ...]) -> str:
    found = [row for row in rows if row["label"] in labels]
    if not found:
        return "–"
    lowest = min(found, key=lambda row: int(row["peak_bytes"]))
    return f"{lowest['peak_bytes'] / 2**20:,.0f}, {lowest['ms']:,.0f}"


def filled(_: str) -> str:
    """The table of the newest run; nothing where there is none."""
    path = newest()
    if path is None:
        return ""
    page = str(path.with_suffix(".md").relative_to(BENCHMARKS.parent))
    return table(json.loads(path.read_text(encoding="utf-8")), page)
