"""What people do without a method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan
from lowtide.errors import BadRequest
from lowtide.solvers.chains.moments import Moments
from lowtide.solvers.chains.worst import worst_moment
from lowtide.solvers.method import Method
from lowtide.solvers.solution import Answer, Status


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
        peak_bytes = worst_moment(chain, Plan()).peak_bytes
        if budget_bytes is not None and peak_bytes > budget_bytes:
            return None
        return Answer(Plan(), Status.OPTIMAL, peak_bytes)


@dataclass(frozen=True)
class EveryK(Method):
    """A checkpoint after every k layers; the last stretch is kept.

    Without a `k` every one is tried; n of them, the number of layers, keep everything.

    Raises:
        BadRequest: `k` is not a whole number of at least one.
    """

    k: int | None = None

    name: ClassVar[str] = "every-k"
    minimises: ClassVar[str] = "peak, among all k"
    complexity: ClassVar[str] = "O(n²)"
    reference: ClassVar[str] = "common practice"
    takes_budget: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.k is None:
            return
        if not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 1:
            raise BadRequest(
                f"every-k cannot place a checkpoint every {self.k!r} layers: give a whole number, 1 or more, "
                "or none to have every one tried."
            )

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer | None:
        """The plan of least peak of those tried; with a budget, the one of least time that fits."""
        n, moments = len(chain), Moments(chain)
        best: tuple[tuple[float, float], Plan, int] | None = None
        for k in range(1, n + 1) if self.k is None else (self.k,):
            plan = Plan.at(range(k, n, k))
            peak_bytes, seconds = moments.peak_of(plan.checkpoints), plan.extra_seconds(chain)
            if budget_bytes is not None and peak_bytes > budget_bytes:
                continue
            rank = (peak_bytes, seconds) if budget_bytes is None else (seconds, peak_bytes)
            if best is None or rank < best[0]:
                best = rank, plan, peak_bytes
        return None if best is None else Answer(best[1], Status.FEASIBLE, best[2])
