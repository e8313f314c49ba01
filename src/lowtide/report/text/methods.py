"""The methods, as a table to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from lowtide.report.text.console import PAGE, console
from lowtide.solvers.method import About, Scheduler

_COLUMNS = ("minimises", "complexity", "budget")


def print_methods(sections: Mapping[str, Mapping[str, type[About]]]) -> None:
    """Print methods to stdout: what each does and takes, when it proves that, and where it is from.

    `sections` are methods by name, under a word for what they have in common.
    """
    page = console(PAGE)
    for number, (title, methods) in enumerate(sections.items()):
        if number:
            page.print()
        table = Table(box=None, pad_edge=False, header_style="underline")
        for name in (title, *_COLUMNS):
            table.add_column(name)
        for name, method in methods.items():
            table.add_row(Text(name, style="bold"), *_cells(method))
        page.print(table, soft_wrap=False)


def _cells(method: type[About]) -> tuple[str | Text, ...]:
    proven = f"\nproven {method.proves}" if method.proves else ""
    about = Text(method.minimises).append(f"{proven}\n{method.reference}", style="dim")
    return about, method.complexity, "yes" if method.takes_budget else "no"


def method_to_json(method: type[About]) -> dict[str, Any]:
    """What is known about a method, as JSON can hold it."""
    return {
        "name": method.name,
        "plans": "ops" if issubclass(method, Scheduler) else "layers",
        "minimises": method.minimises,
        "complexity": method.complexity,
        "takes_budget": method.takes_budget,
        "proves": method.proves or None,
        "reference": method.reference,
    }
