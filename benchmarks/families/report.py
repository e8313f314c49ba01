"""What a sweep showed: counts, what failed and why, and a line for every family."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.families.equality import TO_THE_BIT
from benchmarks.families.trial import LOWEST, PART
from lowtide.text.documents import write_text

Row = Mapping[str, Any]
_NEAR = 0.01  # of the peak
_LONGEST = 240  # characters of a message in a table
_NEAR_BYTES = 64 * 2**10  # what a small step holds besides, and a large one does not notice


def verdict(row: Row) -> str:
    """One family in a line."""
    if "not_built" in row:
        return f"not built: {row['not_built'][:150]}"
    parts = [f"{row.get('model', '')} {row.get('seconds', 0):.0f} s"]
    parts += [f"CRASHED while {row['stage']}: {row['crashed']}"] if "crashed" in row else []
    parts += [_dry_run(row["dry_run"])] if "dry_run" in row else []
    parts += [f"{part}: {_plan(row[part])}" for part in (PART, LOWEST) if part in row]
    return "; ".join(parts)


def _dry_run(found: Row) -> str:
    if "error" in found:
        return f"dry run: {found['error']}: {_first(found['message'])}"
    return f"dry run {_percent(found['predicted_bytes'], found['measured_bytes'])}"


def _plan(found: Row) -> str:
    if "error" in found:
        return f"{found['error']}: {_first(found['message'])}"
    if "how" not in found:
        return "–"
    kept = _percent(found["promised_bytes"], found.get("measured_bytes"))
    part = found["promised_bytes"] / found["plain_bytes"] if found["plain_bytes"] else 0
    said = f" ({_first(found['remark'])})" if found["remark"] else ""
    return f"{found['how']} {part:.0%} {found.get('same', 'not trained')}, promise {kept}{said}"


def _percent(promised: int, measured: int | None) -> str:
    return "not measured" if not measured else f"{promised / measured - 1:+.2%}"


def _first(text: str) -> str:
    """The first line of a message; of one that shows where the user's code raised, what that raised too."""
    first, *more = text.strip().splitlines() or [""]
    said = f"{first} {more[-1]}" if more and "Traceback" in text else first
    return said[:_LONGEST]


# Counting -------------------------------------------------------------------------------------------------


def is_near(promised: int, measured: int | None) -> bool:
    """Whether a peak is what was said, within a hundredth."""
    return measured is not None and abs(promised - measured) <= max(_NEAR * measured, _NEAR_BYTES)


def predicted(row: Row) -> bool:
    """Whether the dry run foretold the plain peak."""
    found = row.get("dry_run", {})
    return "measured_bytes" in found and is_near(found["predicted_bytes"], found["measured_bytes"])


def planned(row: Row) -> bool:
    """Whether a plan keeps 70 % of the plain peak, or reaches the lowest where that is higher."""
    return "how" in row.get(PART, {}) or (
        row.get(PART, {}).get("error") == "InfeasibleBudget" and "how" in row.get(LOWEST, {})
    )


def plans(row: Row) -> list[Row]:
    """The plans that there are."""
    return [row[part] for part in (PART, LOWEST) if "how" in row.get(part, {})]


def wrong(row: Row) -> bool:
    """Whether training under a plan was another than plain training."""
    return any(plan.get("same", "").startswith("wrong") for plan in plans(row))


def exact(row: Row) -> bool:
    """Whether it was the same to the bit, under every plan."""
    return all(plan.get("same") == TO_THE_BIT for plan in plans(row))


def kept(row: Row) -> bool:
    """Whether no plan took more than it promised."""
    return all(
        plan.get("measured_bytes") is not None
        and (
            plan["measured_bytes"] <= plan["promised_bytes"]
            or is_near(plan["promised_bytes"], plan["measured_bytes"])
        )
        for plan in plans(row)
    )


def crashed(row: Row) -> bool:
    """Whether its process ended early, or something was raised that lowtide does not raise on purpose."""
    found = [row.get(part, {}) for part in ("dry_run", PART, LOWEST)]
    return "crashed" in row or any(each.get("on_purpose") is False for each in found)


def as_it_should_be(row: Row) -> bool:
    """Whether nothing of it is to be mended."""
    return predicted(row) and planned(row) and exact(row) and kept(row) and not crashed(row)


COUNTS: Mapping[str, Callable[[Row], bool]] = {
    "the dry run predicts the plain peak within 1 %": predicted,
    "a plan keeps 70 % of the plain peak, or reaches the lowest": planned,
    "planned op by op": lambda row: any(plan["how"] == "ops" for plan in plans(row)),
    "planned in part op by op, or layer by layer": lambda row: any(
        plan["how"] != "ops" for plan in plans(row)
    ),
    "trained to the bit as without a plan": lambda row: bool(plans(row)) and exact(row),
    "the measured peak is what was promised, or less": lambda row: bool(plans(row)) and kept(row),
    "wrong results": wrong,
    "crashes and hangs": crashed,
}


def counted(rows: Sequence[Row]) -> dict[str, int]:
    """How many families of each kind there are; those that could not be built are no part of it."""
    built = [row for row in rows if "not_built" not in row]
    return {"families": len(built), **{words: sum(map(test, built)) for words, test in COUNTS.items()}}


def causes(rows: Sequence[Row]) -> dict[str, list[str]]:
    """What went wrong, without names and numbers, and with whom; the most frequent first."""
    found: dict[str, list[str]] = {}
    for row in rows:
        for cause in dict.fromkeys(_causes(row)):
            found.setdefault(cause, []).append(row["family"])
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _causes(row: Row) -> list[str]:
    found = [f"{row['crashed']} while {row['stage']}"] if "crashed" in row else []
    dry = row.get("dry_run", {})
    if "error" not in dry and "measured_bytes" in dry and not predicted(row):
        found.append("the dry run is off by more than 1 %")
    for part in ("dry_run", PART, LOWEST):
        plan = row.get(part, {})
        if "error" in plan and plan["error"] != "InfeasibleBudget":
            found.append(f"{part}: {plan['error']}: {_general(plan['message'])}")
        if plan.get("remark"):
            found.append(f"{part}, {plan['how']}: {_general(plan['remark'])}")
        if "same" in plan and plan["same"] != TO_THE_BIT:
            found.append(f"{part}, {plan['how']}: {_general(plan['same'].partition(':')[0])}")
        if "how" in plan and not is_near(plan["promised_bytes"], plan.get("measured_bytes")):
            found.append(f"{part}, {plan['how']}: measured is not what was promised")
    return found


def _general(text: str) -> str:
    return re.sub(r"\d[\d.,]*", "N", _first(text))


# The table ------------------------------------------------------------------------------------------------


def report(document: Mapping[str, Any], path: Path) -> None:
    """A dated table of every family, the counts and the causes first."""
    rows = sorted(document["rows"].values(), key=lambda row: row["family"])
    where = document["machine"]
    commits = ", ".join(
        f"{commit} ({count})" for commit, count in Counter(row["commit"] for row in rows).items()
    )
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "timm", "torchvision"))
    lines = [
        "# Does it work with the models that people have?",
        "",
        f"{where['device']}, {versions}, {where['date']}, commits {commits}: `{where['command']}`",
        "",
        "A small member of each family, with random weights and a random batch: forward, loss, backward.",
        "",
        "## In short",
        "",
        *(f"- {words}: {count}" for words, count in counted(rows).items()),
        f"- not built, and no part of the counts: {sum('not_built' in row for row in rows)}",
        "",
        "## What was not as it should be",
        "",
        *(f"- {len(who)} × {what}: {', '.join(who)}" for what, who in causes(rows).items()),
        "",
        "## Every family",
        "",
        "| family | plain MiB | dry run | within 70 % | lowest | s |",
        "|---|---:|---:|---|---|---:|",
        *(_line(row) for row in rows if "not_built" not in row),
        "",
        "## Not built",
        "",
        *(f"- {row['family']}: {_first(row['not_built'])}" for row in rows if "not_built" in row),
    ]
    write_text(path, "\n".join([*lines, ""]))
    print("\n".join(f"{words}: {count}" for words, count in counted(rows).items()))


def _line(row: Row) -> str:
    dry = row.get("dry_run", {})
    plain = f"{dry['measured_bytes'] / 2**20:,.1f}" if "measured_bytes" in dry else "–"
    cells = [row["family"], plain, _dry_run(dry).removeprefix("dry run ") if dry else row.get("crashed", "–")]
    cells += [_plan(row[part]) if part in row else row.get("crashed", "–") for part in (PART, LOWEST)]
    return (
        "| "
        + " | ".join(cell.replace("|", "\\|") for cell in (*cells, f"{row.get('seconds', 0):.0f}"))
        + " |"
    )
