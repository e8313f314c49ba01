"""The methods, as a table to choose from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from lowtide.report.console import PAGE, console
from lowtide.solvers.method import Method


def print_methods(methods: Mapping[str, type[Method]]) -> None:
    """Print the methods to stdout: what each does and takes, when it proves that, and where it is from."""
    page = console(PAGE)
    table = Table(box=None, pad_edge=False, header_style="underline")
    for name in ("method", "minimises", "complexity", "budget"):
        table.add_column(name)
    for name, method in methods.items():
        proven = f"\nproven {method.proves}" if method.proves else ""
        about = Text(method.minimises).append(f"{proven}\n{method.reference}", style="dim")
        table.add_row(
            Text(name, style="bold"), about, method.complexity, "yes" if method.takes_budget else "no"
        )
    page.print(table, soft_wrap=False)


def method_to_json(method: type[Method]) -> dict[str, Any]:
    """What is known about a method, as JSON can hold it."""
    return {
        "name": method.name,
        "minimises": method.minimises,
        "complexity": method.complexity,
        "takes_budget": method.takes_budget,
        "proves": method.proves or None,
        "reference": method.reference,
    }
