"""A prediction as text: plain where it is piped, with colours on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from lowtide.report.text.console import console
from lowtide.text.rounding import unit_for
from lowtide.text.units import format_bytes

if TYPE_CHECKING:
    from lowtide.planner.fit import Fit
    from lowtide.planner.on_card import CardUse

_PIPED_WIDTH = 110  # where there is no terminal to ask: room for module paths
_MODULES_SHOWN = 5
_ROOT = "(the model itself, batch, loss)"  # what no submodule owns


def print_fit(fit: Fit, sizes: Mapping[str, int], notes: Sequence[str] = ()) -> None:
    """Print a prediction to stdout: the peak, what it is made of, where it is, and whether it fits."""
    page = console(_PIPED_WIDTH)
    page.print(Text(headline(fit, sizes), style="bold"))
    page.print(_peak(fit))
    page.print()
    page.print(_categories(fit))
    page.print()
    page.print(_modules(fit))
    page.print()
    if fit.use is not None:
        page.print(_taken(fit, fit.use))
        page.print()
    beside = _card(fit) if fit.use is None else []
    for line in [*beside, *_verdict(fit)]:
        page.print(line)
    for note in (*fit.notes, *notes):
        page.print(Text(f"note: {note}", style="dim"))
    page.print(Text(f"predicted on {fit.predicted_on}", style="dim"))


def headline(fit: Fit, sizes: Mapping[str, int]) -> str:
    """What was asked, in one line: 'vgg19, batch 64, adamw, on cpu'."""
    return asked(fit.model, sizes, fit.optimizer, fit.device)


def asked(model: str, sizes: Mapping[str, int], optimizer: str | None, device: str) -> str:
    """A step of training in one line."""
    given = [f"{size} {value}" for size, value in sizes.items()]
    return ", ".join([model, *given, *filter(None, [optimizer]), f"on {device}"])


def _peak(fit: Fit) -> Text:
    size = Text("predicted peak: ").append(format_bytes(fit.peak_bytes), style="bold")
    op = fit.peak_op
    if op is None:
        return size.append(", before the step begins")
    size.append(f", in the {op.phase.value} at {op.label}")
    if op.workspace_bytes:
        size.append(f" (workspace {format_bytes(op.workspace_bytes)})")
    return size


def _categories(fit: Fit) -> Table:
    held = {category.value: count for category, count in fit.categories.items() if count}
    return _summed("held at the peak", held, fit.peak_bytes)


def _modules(fit: Fit) -> Table:
    largest = {module or _ROOT: count for module, count in list(fit.modules.items())[:_MODULES_SHOWN]}
    others = len(fit.modules) - len(largest)
    rest = {f"{others} others": fit.peak_bytes - sum(largest.values())} if others else {}
    return _summed("by module", {**largest, **rest}, fit.peak_bytes)


def _summed(title: str, rows: Mapping[str, int], total: int) -> Table:
    """A table whose printed rows add up to its printed total."""
    unit = unit_for(total)
    table = Table(box=None, pad_edge=False, show_footer=True, header_style="underline", footer_style="bold")
    table.add_column(title, "total")
    table.add_column(unit.name, unit.text(total), justify="right")
    table.add_column("share", "100.0 %", justify="right")
    for (name, count), size in zip(rows.items(), unit.column(list(rows.values())), strict=True):
        table.add_row(Text(name, overflow="fold"), size, f"{count / total:.1%}".replace("%", " %"))
    return table


def _card(fit: Fit) -> list[Text]:
    """What a card must hold beside the peak, where it is known."""
    lines = []
    if fit.reserved_bytes is not None:
        beyond = format_bytes(fit.reserved_bytes - fit.peak_bytes)
        lines.append(Text(f"reserved by PyTorch beyond that: {beyond}"))
    if fit.context_bytes is not None:
        lines.append(Text(f"CUDA context: {format_bytes(fit.context_bytes)}"))
    return lines


def _taken(fit: Fit, use: CardUse) -> Table:
    """What is taken from the card, down to what others hold of it."""
    held = {category.value: count for category, count in fit.categories.items() if count}
    rows = {
        **held,
        "reserved beyond that": use.reserved_bytes - fit.peak_bytes,
        "CUDA context and libraries": use.beside.context_bytes,
        "NCCL": use.beside.nccl_bytes,
        "held by others": use.card.reserve_bytes,
    }
    return _summed(
        "taken from the card", {name: count for name, count in rows.items() if count}, use.taken_bytes
    )


def _verdict(fit: Fit) -> list[Text]:
    if fit.margin_bytes is None:
        return []
    budget = f" ({fit.use.card})" if fit.use else f" (budget {format_bytes(fit.budget_bytes or 0)})"
    if fit.use is not None and fit.use.failed is not None:
        budget = f", out of memory in {fit.use.failed}{budget}"
    if fit.fits:
        answer = Text(f"fits: {format_bytes(fit.margin_bytes)} to spare", style="bold green")
    else:
        answer = Text(f"does not fit: {format_bytes(-fit.margin_bytes)} too much", style="bold red")
    return [answer.append(budget, style="not bold default")]
