"""Where reports are printed, and text made to fit there."""

from __future__ import annotations

import sys

from rich.console import Console

PAGE = 100  # columns of a page: what tables are made to fit in


def console(piped_width: int) -> Console:
    """Stdout: as wide as the terminal, or `piped_width` where there is none to ask."""
    found = Console(file=sys.stdout, highlight=False, soft_wrap=True)
    if not found.is_terminal:
        found.width = piped_width
    return found


def per_cent(part: float, signed: bool = False) -> str:
    """'12.3 %', or '+12.3 %'."""
    return f"{100 * part:{'+' if signed else ''}.1f} %"
