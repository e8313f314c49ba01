"""Tables and figures of the paper's experiment, from its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def render(documents: Sequence[dict[str, Any]], output: Path) -> None:
    """Write the tables to `output`, and the figures beside it."""
    raise NotImplementedError
