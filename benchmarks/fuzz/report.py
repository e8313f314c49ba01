"""What random modules showed: how many were right, what was refused and why, and everything that was bad."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.fuzz.trial import BAD, INFEASIBLE, NO_SUBJECT, OUTCOMES, REFUSED
from benchmarks.fuzz.ways import NO_ARENA, WAYS
from lowtide.text.documents import write_text

Row = Mapping[str, Any]
_LONGEST = 160
_EXAMPLES = 8  # seeds that are named of each reason


def line(row: Row) -> str:
    """One trial in a line."""
    where = f" at {row['where'][-1]}" if row.get("where") else ""
    how = f"{row['way']} {row['budget']}"
    why = f"{row['outcome']}: {_first(row.get('reason', ''))}{where}"
    return f"{row['seed']:6d} {how:16s} {why} [{row['recipe']}]"


def table(rows: Sequence[Row]) -> list[str]:
    """How often each way came out how."""
    counts = Counter((row["way"], row["outcome"]) for row in rows)
    lines = [f"| way | {' | '.join(OUTCOMES)} |", f"|---|{'---:|' * len(OUTCOMES)}"]
    for way in WAYS:
        if any(counts[way, outcome] for outcome in OUTCOMES):
            lines.append(f"| {way} | " + " | ".join(str(counts[way, outcome]) for outcome in OUTCOMES) + " |")
    total = (str(sum(row["outcome"] == outcome for row in rows)) for outcome in OUTCOMES)
    return [*lines, f"| all | {' | '.join(total)} |"]


def reasons(rows: Sequence[Row], outcome: str) -> dict[str, list[int]]:
    """Why, without names and numbers, and for which seeds; the most frequent first."""
    found: dict[str, list[int]] = {}
    for row in rows:
        if row["outcome"] == outcome:
            found.setdefault(_general(row), []).append(row["seed"])
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def report(document: Mapping[str, Any], path: Path) -> None:
    """A dated page."""
    rows, where = document["rows"], document["machine"]
    asked = [row for row in rows if row["outcome"] not in (NO_SUBJECT, INFEASIBLE)]
    refused = sum(row["outcome"] == REFUSED for row in asked)
    lines = [
        "# Does it hold for modules that nobody thought of?",
        "",
        f"{where['device']}, torch {where['torch']}, Python {where['python']}, {where['date']}, commit "
        f"{where['commit']}: `{where['command']}`",
        "",
        "Modules drawn at random, each trained for two steps, measured in a third and trained without its "
        "plan in a fourth, and held against plain training from the same state.",
        "",
        *table(rows),
        "",
        f"Refused: {refused} of {len(asked)}, {refused / max(1, len(asked)):.1%}.",
        "",
        *_without_arena(rows),
        *_listed(rows),
    ]
    write_text(path, "\n".join(lines).rstrip() + "\n")


def _without_arena(rows: Sequence[Row]) -> Iterator[str]:
    """How many steps have no arena: they are counted by what came of them without one."""
    found = sum(row.get("how") == NO_ARENA for row in rows)
    if found:
        of = sum(row["way"] == "arena" for row in rows)
        yield (
            f"Of the {of} steps for an arena {found} have none: what they do follows from a number that "
            "exists only when they run, and an arena runs one graph. `in_arena` refuses them and names ways "
            "without one: they were trained by their plan, and are counted by what came of that."
        )
        yield ""


def _listed(rows: Sequence[Row]) -> Iterator[str]:
    for outcome in (*sorted(BAD), REFUSED, NO_SUBJECT):
        found = reasons(rows, outcome)
        if found:
            yield from (f"## {outcome.capitalize()}", "")
            for reason, seeds in found.items():
                more = ", …" if len(seeds) > _EXAMPLES else ""
                yield f"- {len(seeds)} × {reason}: {', '.join(map(str, seeds[:_EXAMPLES]))}{more}"
            yield ""


def _general(row: Row) -> str:
    """The reason, where names and numbers do not tell one from another."""
    text = re.sub(r"'[^']*'|`[^`]*`|parts\.[\w.]+", "…", _first(row.get("reason", "")))
    return re.sub(r"\d[\d.,e+-]*", "N", text) + (f" ({row['way']})" if row["outcome"] in BAD else "")


def _first(text: str) -> str:
    return (text.strip().splitlines() or [""])[0][:_LONGEST]
