"""The README's table of where lowtide stands, from the newest committed run of the standing benchmark."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Json = dict[str, Any]
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

# What the benchmark calls each way to train, and what the README does.
WAYS: Mapping[str, str] = {
    "eager": "eager",
    "torch.compile": "`torch.compile`",
    "torch.compile, budget 0.5": "`torch.compile`, its memory budget at 0.5",
    "own checkpointing": "the library's own checkpointing",
    "own checkpointing, chunked loss": "… with a chunked loss, as in Liger",
    "torch.compile, own checkpointing, chunked loss": "… and `torch.compile`",
    "lowtide, nothing recomputed": "lowtide, nothing recomputed",
    "lowtide, within own checkpointing's peak": "lowtide, within that checkpointing's peak",
    "lowtide, lowest": "lowtide, lowest",
}
EARLIER = "† measured in an earlier run, in the same way."
FAILURES: Mapping[str, str] = {"InfeasibleBudget": "does not fit", "OutOfMemoryError": "out of memory"}


def newest() -> Path:
    """The newest run on a GPU."""
    found = [path for path in BENCHMARKS.rglob("standing-*.json") if "cpu" not in path.stem]
    return max(found, key=lambda path: path.stem)


def table(document: Json) -> str:
    """Peak and time of every way to train every model; the least of each column is bold."""
    rows = document["rows"]
    models = list(dict.fromkeys(row["subject"] for row in rows))
    columns = [_column([row for row in rows if row["subject"] == model]) for model in models]
    lines = [f"| MiB / ms | {' | '.join(models)} |", f"|---|{'--:|' * len(models)}"]
    for way, words in WAYS.items():
        lines.append(f"| {words} | {' | '.join(column.get(way, '–') for column in columns)} |")
    earlier = [EARLIER] if any(row.get("before") for row in rows) else []
    return "\n".join([*lines, "", _source(document["machine"]), *earlier])


def _column(rows: Sequence[Json]) -> dict[str, str]:
    """The cells of one model."""
    measured = [row for row in rows if "peak_bytes" in row]
    least = {key: min(row[key] for row in measured) for key in ("peak_bytes", "ms")}
    failed = [row for row in rows if "error" in row]
    return {row["label"]: _cell(row, least) for row in (*failed, *measured)}


def _cell(row: Json, least: Mapping[str, float]) -> str:
    if "error" in row:
        return FAILURES.get(row["failure"], "failed")
    figures = {"peak_bytes": f"{row['peak_bytes'] / 2**20:,.0f}", "ms": f"{row['ms']:,.0f}"}
    shown = (f"**{text}**" if row[key] == least[key] else text for key, text in figures.items())
    return " / ".join(shown) + _mark(row)


def _mark(row: Json) -> str:
    """† behind what is of an earlier run."""
    return " †" if row.get("before") else ""


def _source(machine: Json) -> str:
    path = newest().with_suffix(".md").relative_to(BENCHMARKS.parent)
    where = f"{machine['device']}, torch {machine['torch']}, {machine['date']}"
    return (
        f"One step: forward, loss, backward. {where};\n"
        f"[every row, what the ways are, and the command]({path})."
    )


def sentence(document: Json) -> str:
    """What one line of code did to a model of today."""
    rows = [row for row in document["rows"] if "peak_bytes" in row]
    found = {row["label"]: row for row in rows if row["subject"].startswith("convnext_base")}
    eager, own, same, lowest = (
        f"{found[way]['peak_bytes'] / 2**20:,.0f} MiB in {found[way]['ms']:.0f} ms{_mark(found[way])}"
        for way in (
            "eager",
            "own checkpointing",
            "lowtide, within own checkpointing's peak",
            "lowtide, lowest",
        )
    )
    return (
        f"On a ConvNeXt-Base with 96 images and bf16 autocast that line does this, measured on an\n"
        f"{document['machine']['device']}: {eager} as it is written; {same} within the peak of timm's own\n"
        f"checkpointing, which takes {own}; {lowest} at the lowest."
    )


def filled(what: str) -> str:
    """The table or the sentence of the newest run."""
    document = json.loads(newest().read_text(encoding="utf-8"))
    return {"table": table, "sentence": sentence}[what](document)
