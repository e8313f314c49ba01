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
SAME_PEAK = "lowtide, within own checkpointing's peak"
EARLIER = "† of an earlier run, in the same way, at commit 69bf53f."
FAILURES: Mapping[str, str] = {"InfeasibleBudget": "does not fit", "OutOfMemoryError": "out of memory"}


def newest() -> Path:
    """The newest run on a GPU."""
    found = [path for path in BENCHMARKS.rglob("standing-*.json") if "cpu" not in path.stem]
    return max(found, key=lambda path: path.stem)


def table(document: Json) -> str:
    """Peak and time of every way to train every model; the least of each column is bold."""
    rows, earlier = document["rows"], document.get("earlier", [])
    models = list(dict.fromkeys(row["subject"] for row in rows))
    columns = [_column(_of(rows, model), _of(earlier, model)) for model in models]
    lines = [f"| MiB / ms | {' | '.join(models)} |", f"|---|{'--:|' * len(models)}"]
    for way, words in WAYS.items():
        lines.append(f"| {words} | {' | '.join(column.get(way, '–') for column in columns)} |")
    return "\n".join([*lines, "", _source(document["machine"]), *([EARLIER] if earlier else [])])


def _of(rows: Sequence[Json], model: str) -> list[Json]:
    return [row for row in rows if row["subject"] == model]


def _column(rows: Sequence[Json], earlier: Sequence[Json]) -> dict[str, str]:
    """The cells of one model: the later figure of a way measured twice, a † behind one of an earlier run."""
    shown = {row["label"]: row for row in (*rows, *earlier)}
    figures = [row for row in shown.values() if "peak_bytes" in row]
    least = {key: min(row[key] for row in figures) for key in ("peak_bytes", "ms")}
    marked = {row["label"] for row in earlier}
    return {way: _cell(row, least) + (" †" if way in marked else "") for way, row in shown.items()}


def _cell(row: Json, least: Mapping[str, float]) -> str:
    if "error" in row:
        return FAILURES.get(row["failure"], "failed")
    figures = {"peak_bytes": f"{row['peak_bytes'] / 2**20:,.0f}", "ms": f"{row['ms']:,.0f}"}
    shown = (f"**{text}**" if row[key] == least[key] else text for key, text in figures.items())
    return " / ".join(shown)


def _source(machine: Json) -> str:
    path = newest().with_suffix(".md").relative_to(BENCHMARKS.parent)
    where = f"{machine['device']}, torch {machine['torch']}, {machine['date']}"
    return (
        f"One step: forward, loss, backward. {where};\n"
        f"[every row, what the ways are, and the command]({path})."
    )


def sentence(document: Json) -> str:
    """What one line of code did to a model of today."""
    rows = [row for row in (*document["rows"], *document.get("earlier", [])) if "peak_bytes" in row]
    found: dict[str, list[Json]] = {}
    for row in rows:
        if row["subject"].startswith("convnext_base"):
            found.setdefault(row["label"], []).append(row)
    own = found["own checkpointing"]
    lowest = _figures(found["lowtide, lowest"])
    return (
        "On a ConvNeXt-Base with 96 images and bf16 autocast that line does this, measured on an\n"
        f"{document['machine']['device']}: {_figures(found['eager'])} as it is written; "
        f"{_figures(found[SAME_PEAK])} within the peak\n"
        f"of timm's own checkpointing, which takes {_figures(own)}; {lowest} at the lowest."
    )


def _figures(rows: Sequence[Json]) -> str:
    """'3,081 MiB in 116 to 132 ms', if it was measured more than once; † if a row is of an earlier run."""
    times = sorted({round(row["ms"]) for row in rows})
    ms = f"{times[0]} to {times[-1]}" if len(times) > 1 else str(times[0])
    mark = "" if all("first_seconds" in row for row in rows) else " †"
    return f"{rows[-1]['peak_bytes'] / 2**20:,.0f} MiB in {ms} ms{mark}"


def filled(what: str) -> str:
    """The table or the sentence of the newest run."""
    document = json.loads(newest().read_text(encoding="utf-8"))
    return {"table": table, "sentence": sentence}[what](document)
