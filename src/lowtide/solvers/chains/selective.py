"""Recompute what is cheap: keep the results of convolutions and matrix products, drop the rest."""

from __future__ import annotations

from typing import ClassVar

from lowtide.chain.chain import Chain, Kind
from lowtide.chain.plan import Plan, Segment
from lowtide.errors import BadRequest
from lowtide.solvers.method import Method
from lowtide.solvers.solution import Answer, Status


class Selective(Method):
    """Normalisation, activation and pooling are recomputed, convolutions and matrix products are not.

    After Chen et al., Sec. 4.2. A segment is a run of light layers and the heavy one right after it. That
    one is in it because what it saves is its input: left outside, it would hold on to what the run was to
    drop. Nor is it run again, for checkpointing stops recomputing at the last thing that the backward
    asks for, which is that input. A chain's numbers do not know this: the time that they give for the
    plan includes the heavy layer, which a dry run of the model does not.
    """

    name: ClassVar[str] = "selective"
    minimises: ClassVar[str] = "nothing: drops what is cheap to recompute"
    complexity: ClassVar[str] = "O(n)"
    reference: ClassVar[str] = "Chen et al., arXiv 1604.06174, Sec. 4.2"

    def choose(self, chain: Chain, budget_bytes: int | None) -> Answer:
        """A segment for each run of light layers.

        Raises:
            BadRequest: the chain does not say of what kind its layers are.
        """
        if not chain.kinds:
            raise BadRequest(
                f"selective cannot choose for {chain.name}: it goes by the kind of each layer, and this "
                "chain has only sizes and seconds. Give it a chain that comes from a model, or use another "
                "method."
            )
        return Answer(Plan(_light_runs(chain.kinds)), Status.FEASIBLE)


def _light_runs(kinds: tuple[Kind, ...]) -> tuple[Segment, ...]:
    last = len(kinds) - 1  # the last layer is never recomputed: the backward begins there
    segments = []
    start = 0
    while start < last:
        stop = start
        while stop < last and kinds[stop] is Kind.LIGHT:
            stop += 1
        if stop == start:
            start += 1
            continue
        if stop < last and kinds[stop] is Kind.HEAVY:
            stop += 1
        segments.append(Segment(start, stop))
        start = stop
    return tuple(segments)
