"""The rows of `arena.py` as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowtide.text.documents import write_text

Row = dict[str, Any]
NOT_PREDICTED = ("naive", "pool", "static, recorded")


def report(document: dict[str, Any], output: Path | None) -> None:
    """Write the tables next to the rows' date, or print where they went."""
    machine, rows = document["machine"], document["rows"]
    path = output or Path(__file__).parent / "results" / f"arena-{machine['date']}.md"
    parts = [_head(machine)]
    for subject in dict.fromkeys(row["subject"] for row in rows):
        found = [row for row in rows if row["subject"] == subject]
        parts += [f"## {subject}", _held(found), _dynamic_and_static(found), _moves(found)]
    write_text(path, "\n\n".join(part for part in parts if part) + "\n")
    print(path)


def _head(machine: dict[str, str]) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if name not in ("command", "date"))
    return (
        f"# A step in planned memory, {machine['date']}\n\n{facts}\n\n`{machine['command']}`\n\n"
        "One step is forward, loss and backward, from gradients None, without an optimizer. *Held* is the "
        "most that was allocated (on the CPU: what a step allocates, and what is kept for it, beside what "
        "was there), *reserved* the most that the caching allocator took from the device, *grows* how much "
        "that rose over 7 steps after 3 to warm up, *allocations* how often the allocator was asked in one "
        "step. *Predicted* is resident + arena + extras for static memory, and the referee's peak otherwise. "
        "*Unequal* counts gradients that differ from an eager step's in any bit, less those that differ "
        "between two eager steps, which *unstable* counts. A recorded step's extras are in a pool of its "
        "own, which counts as reserved only."
    )


def _held(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if "error" in row:
            lines.append([row["label"], _reason(row), *[""] * 7])
            continue
        held = row.get("held_bytes", row.get("growth_bytes", 0) + row.get("kept_bytes", 0))
        predicted = row.get("predicted_bytes") if row["label"] not in NOT_PREDICTED else None
        if predicted is not None and "held_bytes" not in row:
            predicted -= row["predicted_resident_bytes"]
        error = "" if predicted is None else f"{100 * (predicted - held) / held:+.2f} %"
        differ = {name for name in row.get("unequal", ()) if name.endswith(".grad")}
        unstable = row.get("unstable", ())
        unequal = f"{len(differ - set(unstable))} ({len(unstable)})" if "unequal" in row else ""
        reserved = _mib(row["reserved_bytes"]) if "reserved_bytes" in row else ""
        grown = _mib(row["grown_bytes"]) if "grown_bytes" in row else ""
        lines.append(
            [
                row["label"],
                _mib(held),
                "" if predicted is None else _mib(predicted),
                error,
                reserved,
                grown,
                f"{row['allocations']:,.0f}",
                f"{row['ms']:,.1f}",
                unequal,
            ]
        )
    heads = (
        "way | held MiB | predicted | error | reserved MiB | grows | allocations | ms | unequal (unstable)"
    )
    return _table(heads.split(" | "), lines)


def _dynamic_and_static(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        if "tally" not in row or row["label"] not in ("naive", "pool", "static"):
            continue
        tally = row["tally"]
        lines.append(
            [
                row["label"],
                f"{tally['requests']:,}",
                f"{tally['allocations']:,}",
                f"{1e3 * tally['seconds']:.2f}",
                _mib(tally["wasted_bytes"]),
                _mib(tally["fragmented_bytes"]),
                f"{row['planning_seconds']:.1f}",
            ]
        )
    heads = "memory | requests | of the device | ms for both | wasted MiB | fragmented MiB | planned in s"
    return "Handing out memory, in one step:\n\n" + _table(heads.split(" | "), lines) if lines else ""


def _moves(rows: Sequence[Row]) -> str:
    static = next((row for row in rows if row["label"] == "static" and "moves" in row), None)
    if static is None:
        return ""
    lines = [
        [
            moves["way"],
            str(moves["computes"]),
            _mib(moves["bytes"]),
            ", ".join(name.removeprefix("aten.").removesuffix(".default") for name in moves["targets"]),
        ]
        for moves in static["moves"]
    ]
    ratio = static["arena_bytes"] / static["lower_bound_bytes"]
    made = (
        f"The arena has {_mib(static['arena_bytes'])} MiB, {ratio:.4f} of the largest live set; beside it "
        f"one op takes at most {_mib(static['extra_bytes'])} MiB."
    )
    return made + "\n\n" + _table(["results are", "ops", "MiB", "by"], lines)


def _reason(row: Row) -> str:
    return "does not fit" if row["failure"] == "InfeasibleBudget" else f"failed: {row['failure']}"


def _table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [heads, ["---", *["---:"] * (len(heads) - 1)], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
