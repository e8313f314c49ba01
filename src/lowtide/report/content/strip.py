"""Layers in the order of the forward: what plain training holds of each, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from lowtide.chain.plan import Plan
from lowtide.ir.graph import Phase
from lowtide.report.content.stretches import stretches
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.solvers.summary import shares

_ROOT = "(outside of any module)"


@dataclass(frozen=True, slots=True)
class Piece:
    """One layer: a call of a module, or a layer of a chain.

    `kept_bytes` of it are held when the forward is over; `recomputed_bytes` plain training would hold there
    and the plan does not. `runs_again` counts ops, or whole layers of a chain.
    """

    name: str
    kept_bytes: int
    recomputed_bytes: int
    runs_again: int
    seconds_again: float


def strip_of(solution: Solution | GraphSolution) -> tuple[Piece, ...]:
    """The layers of a plan from the first to the last; those that hold nothing and run once are left out."""
    return _of_ops(solution) if isinstance(solution, GraphSolution) else _of_layers(solution)


def _of_ops(solution: GraphSolution) -> tuple[Piece, ...]:
    ops = solution.graph.ops
    place: dict[tuple[str, int], int] = {}
    for op in sorted(ops, key=lambda op: op.phase is not Phase.FORWARD):  # the forward tells the order
        place.setdefault((op.module, op.call), len(place))
    found = sorted(shares(solution), key=lambda share: place[share.module, share.call])
    return tuple(
        Piece(
            name=_named(share.module, share.call),
            kept_bytes=share.kept_bytes,
            recomputed_bytes=share.recomputed_bytes,
            runs_again=share.ops_again,
            seconds_again=share.seconds_again,
        )
        for share in found
    )


def _named(module: str, call: int) -> str:
    return f"{module or _ROOT}, call {call + 1}" if call else module or _ROOT


def _of_layers(solution: Solution) -> tuple[Piece, ...]:
    """Layer by layer: a recomputed stretch holds the one tensor that it starts from, in its first layer."""
    chain = solution.chain
    held = {stretch.first: stretch.held_bytes for stretch in stretches(chain, solution.plan) if stretch.again}
    runs_again = _runs_again(solution.plan, len(chain))
    return tuple(
        Piece(
            name=chain.names[layer - 1] if chain.names else f"layer {layer}",
            kept_bytes=held.get(layer, 0) if again else saved,
            recomputed_bytes=saved if again else 0,
            runs_again=again,
            seconds_again=again * chain.forward_seconds[layer - 1],
        )
        for layer, (again, saved) in enumerate(zip(runs_again, chain.saved_bytes, strict=True), start=1)
    )


def _runs_again(plan: Plan, layers: int) -> list[int]:
    """How often each layer runs again: once for each segment around it."""
    change = [0] * (layers + 1)
    for segment in plan.walk():
        change[segment.start] += 1
        change[segment.stop] -= 1
    return list(accumulate(change))[:layers]
