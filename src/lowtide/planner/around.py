"""Plans around what cannot be run again: it is found out by trying, and left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan, Segment
from lowtide.chain.unroll import replay
from lowtide.errors import CannotApply
from lowtide.solvers.solution import Solution, Status

_MOST_NAMED = 3


@dataclass
class Around:
    """Confirms solutions for one chain, without the layers that were found not to run again.

    `left` are those layers (1 … n), and why.
    """

    confirmed: Callable[[Solution], Solution]
    left: dict[int, str] = field(default_factory=dict)

    def __call__(self, solution: Solution) -> Solution:
        """`solution`, confirmed; recomputing nothing that cannot be, with a remark that says so.

        Raises:
            CannotApply: the step cannot be run even with nothing recomputed.
        """
        planned = self._without_left(solution)
        while True:
            try:
                return replace(self.confirmed(planned), remark=self.remark(solution.chain))
            except CannotApply as refusal:
                whole = planned.plan.segments
                if not whole:
                    raise
                found = [layer for each in whole for layer in self._refused(planned, each.start, each.stop)]
                together = [layer for each in whole for layer in range(each.start + 1, each.stop + 1)]
                self.left |= dict.fromkeys(found or together, str(refusal).splitlines()[0])
                planned = self._without_left(planned)

    def remark(self, chain: Chain) -> str:
        """Which layers of `chain` are left alone, and why; empty where none is."""
        if not self.left:
            return ""
        named = [chain.layer(layer) for layer in sorted(self.left)]
        more = len(named) - _MOST_NAMED
        shown = ", ".join(named[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"not recomputed, for it cannot be run again: {shown}: {next(iter(self.left.values()))}"

    def _refused(self, solution: Solution, start: int, stop: int) -> Iterable[int]:
        """The layers from `start` to `stop` that cannot be run again: alone, or else together."""
        try:
            self.confirmed(_with_plan(solution, Plan((Segment(start, stop),))))
        except CannotApply:
            layers = range(start + 1, stop + 1)
            middle = (start + stop) // 2
            halves = ((start, middle), (middle, stop)) if len(layers) > 1 else ()
            return [layer for half in halves for layer in self._refused(solution, *half)] or layers
        return ()

    def _without_left(self, solution: Solution) -> Solution:
        plan = solution.plan.without(self.left)
        return solution if plan == solution.plan else _with_plan(solution, plan)


def _with_plan(solution: Solution, plan: Plan) -> Solution:
    """`solution` with another plan for its chain, replayed."""
    return replace(
        solution,
        plan=plan,
        status=Status.FEASIBLE,
        peak_bytes=replay(solution.chain, plan).peak_bytes,
        extra_seconds=plan.extra_seconds(solution.chain),
    )
