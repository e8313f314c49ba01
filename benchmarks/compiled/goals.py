"""What is asked of plans beside stock compile, and whether the rows of a step meet it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks.compiled.subjects import Step
from lowtide.planner.peer_ways import EAGER, KEPT, PARTS, compiled_label
from lowtide.report.picture.peers import series_of

Json = dict[str, Any]

GENERATED = "lowtide inductor"
PLANNED = "lowtide"
MOST_SLOWER = 1.03  # than stock compile, with nothing recomputed
LOWEST_PART = 0.8  # of the lowest peak of stock compile
MOST_OFF = {False: 0.01, True: 0.03}  # of the measured peak, where kernels are generated
MOST_COMPILING = 1.5  # times as long as stock compile
_ALIKE = 1.005  # peaks that are closer are not higher
_MIB = 2**20


class Verdict(NamedTuple):
    """A goal, what was found, and whether that meets it; None: nothing was measured that could tell."""

    goal: str
    found: str
    met: bool | None


def verdicts(step: Step, rows: Sequence[Json]) -> Iterator[Verdict]:
    """Every goal of one step."""
    measured = {row["label"]: row for row in rows if "peak_bytes" in row}
    yield _nothing_recomputed(measured, GENERATED, compiled_label(1.0))
    yield _nothing_recomputed(measured, PLANNED, EAGER, step.most_eager_ms)
    for part in PARTS:
        yield _at_the_peak_of(measured, compiled_label(part))
    yield _monotone(measured)
    yield _lowest(measured)
    for target in step.targets:
        yield _target(measured, target.within_mib, target.most_ms, target.series)
    yield _predicted(measured, generated=False)
    yield _predicted(measured, generated=True)
    yield _kept(measured)
    yield _compiling(measured)


def _nothing_recomputed(
    measured: dict[str, Json], series: str, rival: str, most_ms: float | None = None
) -> Verdict:
    mine, other = measured.get(f"{series}, {KEPT}"), measured.get(rival)
    limit = f"{most_ms:g} ms" if most_ms is not None else f"{MOST_SLOWER}× {rival}"
    goal = f"{series}, {KEPT}: ≤ {limit}"
    if mine is None or (other is None and most_ms is None):
        return _unknown(goal)
    most = most_ms if most_ms is not None else MOST_SLOWER * _beside(mine, other)
    return Verdict(goal, f"{mine['ms']:,.1f} ms, at most {most:,.1f}", mine["ms"] <= most)


def _beside(mine: Json, other: Json | None) -> float:
    """The time of another way, in steps as fast as those beside which `mine` was measured."""
    assert other is not None
    if "eager_ms" not in mine or "eager_ms" not in other:
        return float(other["ms"])
    return float(other["ms"] * mine["eager_ms"] / other["eager_ms"])


def _at_the_peak_of(measured: dict[str, Json], rival: str) -> Verdict:
    goal, other = f"{GENERATED}: no slower at the peak of {rival}", measured.get(rival)
    within = [row for row in _of(measured, GENERATED) if other and row["peak_bytes"] <= other["peak_bytes"]]
    if other is None or not _of(measured, GENERATED):
        return _unknown(goal)
    if not within:
        return Verdict(goal, "no plan is within it", False)
    best = min(within, key=lambda row: float(row["ms"]))
    most = _beside(best, other)
    return Verdict(goal, f"{best['ms']:,.1f} ms, at most {most:,.1f}", best["ms"] <= most)


def _monotone(measured: dict[str, Json]) -> Verdict:
    """A lower budget is never a higher peak."""
    goal = f"{GENERATED}: a lower budget is a lower peak"
    series = [row for row in _of(measured, GENERATED, alone=True) if "budget_bytes" in row]
    if len(series) < 2:
        return _unknown(goal)
    peaks = [row["peak_bytes"] for row in sorted(series, key=lambda row: int(row["budget_bytes"]))]
    higher = [later for one, later in pairwise(peaks) if one > _ALIKE * later]
    found = ", ".join(f"{peak / _MIB:,.0f}" for peak in reversed(peaks))
    return Verdict(goal, f"{found} MiB", not higher)


def _lowest(measured: dict[str, Json]) -> Verdict:
    goal = f"{GENERATED}: lowest ≤ {LOWEST_PART}× the lowest of stock compile"
    stock = [measured[label]["peak_bytes"] for label in map(compiled_label, PARTS) if label in measured]
    mine = [row["peak_bytes"] for row in _of(measured, GENERATED)]
    if not stock or not mine:
        return _unknown(goal)
    most = LOWEST_PART * min(stock)
    return Verdict(goal, f"{min(mine) / _MIB:,.0f} MiB, at most {most / _MIB:,.0f}", min(mine) <= most)


def _target(measured: dict[str, Json], within_mib: float, most_ms: float, series: str) -> Verdict:
    goal = f"{series or 'any plan'}: {within_mib:,.0f} MiB in ≤ {most_ms:g} ms"
    plans = [row for row in _of(measured, PLANNED) if not series or series_of(row["label"]) == series]
    if not plans:
        return _unknown(goal)
    within = [row for row in plans if row["peak_bytes"] <= within_mib * _MIB]
    if not within:
        least = min(row["peak_bytes"] for row in plans)
        return Verdict(goal, f"the lowest is {least / _MIB:,.0f} MiB", False)
    best = min(row["ms"] for row in within)
    return Verdict(goal, f"{best:,.1f} ms", best <= most_ms)


def _predicted(measured: dict[str, Json], generated: bool) -> Verdict:
    """What was said before the first step."""
    series = GENERATED if generated else PLANNED
    goal = f"{series}: predicted within {100 * MOST_OFF[generated]:g} %"
    off = {
        row["label"]: row["predicted_bytes"] / row["peak_bytes"] - 1
        for row in _of(measured, series)
        if "predicted_bytes" in row and row["label"].startswith(GENERATED) is generated
    }
    if not off:
        return _unknown(goal)
    worst = max(off, key=lambda label: abs(off[label]))
    return Verdict(goal, f"{100 * off[worst]:+.2f} % for {worst}", abs(off[worst]) <= MOST_OFF[generated])


def _kept(measured: dict[str, Json]) -> Verdict:
    goal = "every budget is kept"
    asked = [row for row in _of(measured, PLANNED) if "within_budget" in row]
    if not asked:
        return _unknown(goal)
    broken = [row["label"] for row in asked if not row["within_budget"]]
    return Verdict(goal, f"{len(asked) - len(broken)} of {len(asked)}", not broken)


def _compiling(measured: dict[str, Json]) -> Verdict:
    """From nothing to the end of the first step."""
    goal = f"{GENERATED}: the first step ≤ {MOST_COMPILING}× that of stock compile"
    stock = measured.get(compiled_label(1.0))
    mine = [row["first_seconds"] + row.get("planning_seconds", 0) for row in _of(measured, GENERATED)]
    if stock is None or not mine:
        return _unknown(goal)
    most = MOST_COMPILING * stock["first_seconds"]
    return Verdict(goal, f"{max(mine):,.1f} s, at most {most:,.1f}", max(mine) <= most)


def _of(measured: dict[str, Json], series: str, alone: bool = False) -> list[Json]:
    """Rows of plans of a series, and of those whose name begins with its; of it `alone`, if that is asked."""
    return [
        row
        for label, row in measured.items()
        if (series_of(label) == series if alone else series_of(label).startswith(series))
    ]


def _unknown(goal: str) -> Verdict:
    return Verdict(goal, "not measured", None)
