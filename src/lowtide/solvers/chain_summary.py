"""A plan of layers in words: what it saves and costs, and which layers it recomputes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowtide.chain.plan import Plan
from lowtide.solvers.chains.worst import worst_moment
from lowtide.text.rounding import unit_for
from lowtide.text.table import lined_up
from lowtide.text.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from lowtide.solvers.solution import Solution


def explained_chain(solution: Solution) -> str:
    """The summary of a plan, as plain text; its peaks are those of the dry run, where there was one."""
    chain, tried = solution.chain, solution.confirmation
    plain = worst_moment(chain, Plan()).peak_bytes if tried is None else tried.plain_peak_bytes
    planned = solution.peak_bytes if tried is None else tried.peak_bytes
    extra = solution.extra_seconds if tried is None else tried.extra_seconds
    unit = unit_for(plain)
    facts = [
        ("plain peak", f"{unit.text(plain)} {unit.name}", ""),
        ("planned peak", f"{unit.text(planned)} {unit.name}", ""),
        ("extra time", format_seconds(extra) if chain.timed else "unknown", ""),
        (
            "recomputed",
            "",
            f"{solution.plan} of {len(chain)} layers" if solution.plan.segments else "nothing",
        ),
        ("method", "", f"{solution.method}, in {format_seconds(solution.planning_seconds)}"),
    ]
    if solution.budget_bytes is not None:
        facts.insert(2, ("budget", format_bytes(solution.budget_bytes), ""))
    text = f"{chain.name}, layer by layer\n{lined_up(facts, frozenset([1]))}"
    return f"{text}\n\n{solution.remark}" if solution.remark else text
