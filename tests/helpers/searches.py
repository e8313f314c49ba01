"""What was searched for: every graph that a method was asked to solve."""

from __future__ import annotations

from typing import Any

import pytest

from lowtide.ir.graph import Graph
from lowtide.solvers import refereed
from lowtide.solvers.solution import GraphSolution


def watched(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that are solved from now on, in order."""
    found: list[Graph] = []
    solve = refereed._scheduled

    def counted(graph: Graph, *args: Any) -> GraphSolution:
        found.append(graph)
        return solve(graph, *args)

    monkeypatch.setattr(refereed, "_scheduled", counted)
    return found
