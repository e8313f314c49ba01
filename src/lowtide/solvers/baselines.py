"""What people do without a method."""

from __future__ import annotations

from typing import ClassVar

from lowtide.chain import Chain
from lowtide.plans import Plan
from lowtide.solution import Answer, Status
from lowtide.solvers.method import Method
from lowtide.unrolling import replay


class KeepAll(Method):
    """Plain training: every layer saves, nothing is recomputed."""

    name: ClassVar[str] = "keep-all"
    minimises: ClassVar[str] = "time"
    complexity: ClassVar[str] = "O(1)"
    reference: ClassVar[str] = "plain training"
    proves: ClassVar[str] = "always: nothing is recomputed"
    takes_budget: ClassVar[bool] = True

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer | None:
        """The empty plan, if it fits."""
        peak_bytes = replay(chain, Plan()).peak_bytes
        if budget_bytes is not None and peak_bytes > budget_bytes:
            return None
        return Answer(Plan(), Status.OPTIMAL, peak_bytes)
