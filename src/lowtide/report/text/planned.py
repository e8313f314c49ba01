"""A plan as text: what it saves, what it costs, how good it is, and which layers it recomputes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from lowtide.cost.cache import BY_RULE
from lowtide.report.content.stretches import Stretch, stretches
from lowtide.report.text.console import PAGE, console, per_cent
from lowtide.solvers import methods
from lowtide.solvers.solution import Confirmation, Solution, Status
from lowtide.text.card import Card
from lowtide.text.names import without_middle
from lowtide.text.rounding import Unit, unit_for
from lowtide.text.units import format_bytes, format_seconds

_LONGEST_NAME = 46
_MOST_STRETCHES = 40  # of more, those in the middle are not shown
_TIMES = {0: "keep", 1: "recompute"}
NO_WORKSPACES = "not profiled: what kernels take while they run is not in these peaks"
NO_TIMES = "no op was run, so how long recomputation takes is not known; plans count bytes touched as time"
ESTIMATED_TIMES = "no op was run: times are estimates for an H200, which were off by up to a quarter"

TIMES_OF_CARD = (
    "no op was run: times are estimates for {name}, which is taken to reach the same part of its nominal "
    "rates as an H200 was measured to"
)


def print_plan(title: str, solution: Solution, notes: Sequence[str] = ()) -> None:
    """Print a plan that has been tried out to stdout."""
    page = console(PAGE)
    page.print(Text(title, style="bold"))
    page.print(_summary(solution))
    page.print()
    page.print(_layers(solution))
    for note in notes:
        page.print(Text(f"note: {note}", style="dim"))


def what_is_unknown(timed: bool, profiled_on: str | None, card: Card | None = None) -> list[str]:
    """Notes on a prediction that was made without running every op, for a card if it is one."""
    if profiled_on == BY_RULE and card is not None and card.known is not None:
        return [TIMES_OF_CARD.format(name=card.known.name)]
    if profiled_on == BY_RULE:
        return [ESTIMATED_TIMES]
    return [*([] if profiled_on is not None else [NO_WORKSPACES]), *([] if timed else [NO_TIMES])]


def proof(solution: Solution) -> str:
    """For what a plan is known to be the best, in words."""
    method = methods().get(solution.method)
    if method is None:
        return "by a method of your own"
    aim = method.minimises if solution.budget_bytes is None else "time within the budget"
    if solution.status is not Status.OPTIMAL:
        return f"minimising {aim}; not proven to be the best"
    return f"minimising {aim}; proven {method.proves}"


def _summary(solution: Solution) -> Table:
    tried = solution.confirmation
    assert tried is not None, "a rehearsal confirms what it solves"
    saved = tried.plain_peak_bytes - tried.peak_bytes
    unit = unit_for(tried.plain_peak_bytes)
    rows = [
        ("plain peak", _exact(tried.plain_peak_bytes, unit), ""),
        ("planned peak", _exact(tried.peak_bytes, unit), "in a dry run of the model under the plan"),
        ("saved", _exact(saved, unit), per_cent(saved / tried.plain_peak_bytes)),
        _extra_time(solution, tried),
    ]
    if solution.budget_bytes is not None:
        spare = solution.budget_bytes - tried.peak_bytes
        rows.append(("budget", _exact(solution.budget_bytes, unit), f"{format_bytes(spare)} to spare"))
    rows += [
        ("lower bound", _exact(solution.lower_bound_bytes, unit), "no plan for these layers peaks lower"),
        ("status", solution.status.value, proof(solution)),
        ("method", "", f"{solution.method}, in {format_seconds(solution.planning_seconds)}"),
    ]
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for what, value, remark in rows:
        style = "bold" if what == "planned peak" else ""
        table.add_row(what, Text(value, style=style), Text(remark, style="dim", overflow="fold"))
    return table


def _exact(count: int, unit: Unit) -> str:
    """In the same unit as its neighbours, so that small differences between large peaks show."""
    return f"{unit.text(count)} {unit.name}"


def _extra_time(solution: Solution, tried: Confirmation) -> tuple[str, str, str]:
    ops = f"{tried.recomputed_ops} ops run again"
    if not solution.chain.timed:
        return "extra time", "unknown", ops
    part = tried.extra_seconds / tried.plain_seconds
    return "extra time", format_seconds(tried.extra_seconds), f"{per_cent(part)} of the step; {ops}"


def _layers(solution: Solution) -> Table:
    """A row for each stretch of layers; the printed bytes add up to the printed totals."""
    found = stretches(solution.chain, solution.plan)
    unit = unit_for(sum(stretch.plain_bytes for stretch in found))
    plain = unit.column([stretch.plain_bytes for stretch in found])
    held = unit.column([stretch.held_bytes for stretch in found])
    table = Table(box=None, pad_edge=False, show_footer=True, header_style="underline", footer_style="bold")
    table.add_column("plan", "in all")
    table.add_column("layers", f"{len(solution.chain)}", justify="right")
    table.add_column("modules", "held when the backward begins", no_wrap=True)
    table.add_column(f"plain {unit.name}", unit.text(sum(s.plain_bytes for s in found)), justify="right")
    table.add_column(f"planned {unit.name}", unit.text(sum(s.held_bytes for s in found)), justify="right")
    rows = [_cells(*row) for row in zip(found, plain, held, strict=True)]
    for cells in _without_the_middle(rows):
        table.add_row(*cells)
    return table


def _cells(stretch: Stretch, plain: str, held: str) -> tuple[str | Text, ...]:
    done = Text(
        _TIMES.get(stretch.again, f"recompute ≤{stretch.again}×"), style="cyan" if stretch.again else ""
    )
    layers = f"{stretch.first}" if stretch.first == stretch.last else f"{stretch.first}–{stretch.last}"
    return done, layers, Text(without_middle(stretch.modules, _LONGEST_NAME)), plain, held


def _without_the_middle(rows: list[tuple[str | Text, ...]]) -> list[tuple[str | Text, ...]]:
    if len(rows) <= _MOST_STRETCHES:
        return rows
    half = _MOST_STRETCHES // 2
    return [*rows[:half], ("…", "", f"{len(rows) - 2 * half} more stretches", "", ""), *rows[-half:]]
