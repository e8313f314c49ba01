"""Where in the model a plan's segments begin and end.

A chain is cut between ops; a model is entered through the calls of its modules. A *unit* is the largest
call that no segment's end lies inside of: it is run, and run again, as a whole. Segments begin and end
when a unit does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan
from lowtide.errors import BadRequest
from lowtide.ir.graph import Call

Unit = tuple[str, int]  # a module, and the how-maniest call of it within one call of the model


@dataclass(frozen=True, slots=True)
class Edge:
    """The moment when the call of a unit begins, or when it ends."""

    unit: Unit
    ends: bool


@dataclass(frozen=True)
class SegmentPlacement:
    """The units of a model, and what happens at their edges: segments close, then others open.

    `opens` counts the segments that open there. The model's own call is the unit ("", 0).
    """

    units: frozenset[Unit]
    opens: dict[Edge, int] = field(default_factory=dict)
    closes: dict[Edge, int] = field(default_factory=dict)

    @cached_property
    def edges(self) -> frozenset[Edge]:
        """The edges at which something happens."""
        return frozenset({*self.opens, *self.closes})


def place(chain: Chain, plan: Plan) -> SegmentPlacement:
    """Where the segments of `plan` begin and end in the model that `chain` was made of.

    A segment that reaches the end of the chain ends with the model's call: the loss is not the model's.

    Raises:
        BadRequest: the chain was made from sizes, not from a model.
    """
    if not chain.calls:
        raise BadRequest(
            f"{chain.name} was made from sizes and knows no modules, so its plans cannot be applied. "
            "Make a plan for a model with lowtide.plan."
        )
    root, inner = chain.calls[0], chain.calls[1:]
    used = sorted({chain.places[end] for segment in plan.walk() for end in (segment.start, segment.stop)})
    stop = root.stop
    inside = [position for position in used if root.first < position < stop]
    units = list(_units(inner, inside))
    edges = _edges(root, inner, units)
    opens: dict[Edge, int] = {}
    closes: dict[Edge, int] = {}
    for segment in plan.walk():
        opening = edges[chain.places[segment.start]]
        closing = edges[min(chain.places[segment.stop], stop)]
        opens[opening] = opens.get(opening, 0) + 1
        closes[closing] = closes.get(closing, 0) + 1
    names = frozenset({(unit.module, unit.call) for unit in units})
    return SegmentPlacement(names, opens, closes)


def _units(calls: tuple[Call, ...], inside: list[int]) -> Iterator[Call]:
    """The largest calls with none of `inside` within them; `calls` come outer ones first."""
    reached = 0
    for call in calls:
        if call.first >= reached and not any(call.first < position < call.stop for position in inside):
            yield call
            reached = call.stop


def _edges(root: Call, calls: tuple[Call, ...], units: list[Call]) -> dict[int, Edge]:
    """The edge at each place in the order of ops.

    Where there is a choice, that of a unit, and the end of one rather than the beginning of the next.
    The call of a module that is entered in parts has edges too: its last part may be no unit's.
    """
    edges: dict[int, Edge] = {}
    for group in (calls, units):
        for call in group:
            edges[call.first] = Edge((call.module, call.call), ends=False)
        for call in group:
            edges[call.stop] = Edge((call.module, call.call), ends=True)
    edges[root.first] = Edge(("", 0), ends=False)
    edges[root.stop] = Edge(("", 0), ends=True)
    return edges
