"""Where in the model a plan's segments begin and end.

A chain is cut between ops; a model is entered through the calls of its modules. A *unit* is the largest
call that no segment's end lies inside of: it is run, and run again, as a whole. Segments begin and end
when a unit does.

A model may take another path than the one that was planned, and skip units. So a segment has no edge of its
own: it begins at the first moment that is not before its start, and ends at the first that is not before its
stop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan
from lowtide.errors import BadRequest
from lowtide.ir.graph import Call

Unit = tuple[str, int]  # a module, and the how-maniest call of it within one call of the model


@dataclass(frozen=True, slots=True)
class Span:
    """The ops from `first` up to, not including, `stop`."""

    first: int
    stop: int


@dataclass(frozen=True)
class SegmentPlacement:
    """The units of a model, and the segments of a plan, as ops of the step that was planned.

    `entered` are the calls that are no units and hold some: their parts are run one by one. `called` are all
    modules that the step called. `segments` come
    in the order in which they begin, outer ones first. `carried_bytes` says for places at which segments
    begin how large the tensor is that they begin with.
    """

    units: Mapping[Unit, Span]
    entered: Mapping[Unit, Span]
    called: frozenset[str]
    model: Span
    segments: tuple[Span, ...]
    carried_bytes: Mapping[int, int]

    def span(self, call: Unit) -> Span | None:
        """The ops of a call that was planned, unless it is within a unit."""
        return self.units.get(call) or self.entered.get(call)


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
    segments = tuple(
        Span(chain.places[segment.start], min(chain.places[segment.stop], root.stop))
        for segment in plan.walk()
    )
    ends = sorted({end for segment in segments for end in (segment.first, segment.stop)})
    units = list(_units(inner, [end for end in ends if root.first < end < root.stop]))
    inside = set(units)
    return SegmentPlacement(
        units=_spans(units),
        entered=_spans(call for call in inner if call not in inside and not _is_in_one(call, units)),
        called=frozenset(call.module for call in inner),
        model=Span(root.first, root.stop),
        segments=segments,
        carried_bytes=dict(zip(chain.places, chain.output_bytes, strict=True)),
    )


def _units(calls: tuple[Call, ...], inside: list[int]) -> Iterator[Call]:
    """The largest calls with none of `inside` within them; `calls` come outer ones first."""
    reached = 0
    for call in calls:
        if call.first >= reached and not any(call.first < position < call.stop for position in inside):
            yield call
            reached = call.stop


def _is_in_one(call: Call, units: list[Call]) -> bool:
    return any(unit.first <= call.first and call.stop <= unit.stop for unit in units)


def _spans(calls: Iterable[Call]) -> dict[Unit, Span]:
    return {(call.module, call.call): Span(call.first, call.stop) for call in calls}
