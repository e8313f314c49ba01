"""From the eager graph of a dry run to the chain view: where a model can be cut.

A place between two forward ops is a *cut* if one value carries everything that training depends on from
before to after: then what comes after can be run again from that value alone. Values that no parameter
has a part in (masks, positions) do not count; they are small, and held throughout.

Only cuts at which a call of a module begins or ends are used, because there segments can be opened and
closed around the user's own modules. `sizing` tells what the layers between cuts take.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise

from lowtide.errors import BadRequest
from lowtide.ir.graph import Call, Graph, Op, Phase, Role, short_name
from lowtide.ir.schedule import Schedule

HEAVY = frozenset(
    {
        "convolution",
        "convolution_overrideable",
        "cudnn_convolution",
        "mkldnn_convolution",
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "linear",
        "_grouped_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_attention_math",
        "_cudnn_rnn",
        "mkldnn_rnn_layer",
    }
)


class Granularity(StrEnum):
    """How finely a model is cut."""

    FINE = "fine"  # at every cut
    LAYER = "layer"  # where a layer with weights or a pooling begins, as the literature counts layers
    BLOCK = "block"  # around modules with modules inside, such as residual blocks


@dataclass(frozen=True)
class RecordedStep:
    """A dry run as cutting sees it: its parts are those of `lowtide.trace.dry_run.Trace`."""

    graph: Graph
    schedule: Schedule
    calls: Sequence[Call]
    forward_ops: Mapping[int, int]
    closed: Collection[tuple[str, int]] = ()

    @cached_property
    def forward_end(self) -> int:
        """How many ops there are before the first one of the backward."""
        return next((op.id for op in self.graph.ops if op.phase is Phase.BACKWARD), len(self.graph.ops))

    @cached_property
    def root(self) -> Call:
        """The one call of the model."""
        found = [call for call in self.calls if call.module == ""]
        if len(found) != 1:
            raise BadRequest(
                f"the step calls the model {len(found)} times; a chain is made of a step that calls it once."
            )
        return found[0]

    @cached_property
    def inner_calls(self) -> tuple[Call, ...]:
        """The calls inside the model's that ran ops, outer ones first where they begin together."""
        root = self.root
        found = [
            call for call in self.calls if call.module and root.first <= call.first < call.stop <= root.stop
        ]
        return tuple(sorted(found, key=lambda call: (call.first, -call.stop, call.module.count("."))))

    @cached_property
    def open_calls(self) -> tuple[Call, ...]:
        """Those of the inner calls at which segments can begin and end."""
        return tuple(call for call in self.inner_calls if (call.module, call.call) not in self.closed)


class Cuts:
    """What crosses each place between two forward ops. Place p is before op p."""

    def __init__(self, step: RecordedStep) -> None:
        self.graph = step.graph
        self.end = step.forward_end
        ops = step.graph.ops[: self.end]
        self.last_use: dict[int, int] = {}
        self.last_change: dict[int, int] = {}
        for op in ops:
            for value in (*op.reads, *op.mutates):
                self.last_use[value] = op.id
            for value in op.mutates:
                self.last_change[value] = op.id
        self.trained = self._trained(ops)
        self.carrier = self._carriers(ops)

    def _trained(self, ops: Sequence[Op]) -> set[int]:
        """The values made by the forward that some parameter has a part in."""
        values = self.graph.values
        trained: set[int] = set()
        for op in ops:
            if any(value in trained or values[value].role is Role.PARAMETER for value in op.reads):
                trained.update(value for value in (*op.creates, *op.mutates) if self._is_made(value))
        return trained

    def _is_made(self, value: int) -> bool:
        return value in self.graph.creator

    def _carriers(self, ops: Sequence[Op]) -> dict[int, int]:
        """For each cut the value that carries everything across."""
        carrier: dict[int, int] = {}
        crossing: set[int] = set()
        for op in ops:
            place = op.id + 1
            crossing.update(value for value in op.creates if value in self.trained)
            crossing = {value for value in crossing if self.last_use.get(value, -1) >= place}
            if len(crossing) == 1:
                (value,) = crossing
                if self.last_change.get(value, -1) < place:
                    carrier[place] = value
        return carrier


def chosen_places(
    step: RecordedStep, cuts: Cuts, granularity: Granularity, modules: Collection[str] | None
) -> list[int]:
    """Where to cut, in order: around `modules` if any are named, else as finely as `granularity` says.

    Raises:
        BadRequest: a named module is not called, or not a place where the model can be cut.
    """
    return _chosen(step, cuts, granularity) if modules is None else _named(step, cuts, modules)


def _edges(calls: Sequence[Call]) -> set[int]:
    return {place for call in calls for place in (call.first, call.stop)}


def _usable(step: RecordedStep, cuts: Cuts) -> list[int]:
    """The cuts at which a call begins or ends, one for each carrier: the first."""
    root = step.root
    places = sorted(
        place for place in _edges(step.open_calls) if place in cuts.carrier and root.first < place < root.stop
    )
    first: dict[int, int] = {}
    for place in places:
        first.setdefault(cuts.carrier[place], place)
    return sorted(first.values())


def _chosen(step: RecordedStep, cuts: Cuts, granularity: Granularity) -> list[int]:
    usable = _usable(step, cuts)
    if granularity is Granularity.FINE:
        return usable
    if granularity is Granularity.LAYER:
        return _layers(step, cuts, usable)
    return _blocks(step, cuts, usable)


def _layers(step: RecordedStep, cuts: Cuts, usable: list[int]) -> list[int]:
    """Without the cuts after which nothing begins: what follows is an activation, a normalisation, …"""
    graph, kept = step.graph, []
    for place, stop in pairwise([*usable, step.forward_end]):
        heavy = any(is_heavy(op) for op in graph.ops[place:stop])
        before = graph.counted_bytes(cuts.carrier[place])
        after = graph.counted_bytes(cuts.carrier[stop]) if stop in cuts.carrier else before
        if heavy or after < before:
            kept.append(place)
    return kept


def _blocks(step: RecordedStep, cuts: Cuts, usable: list[int]) -> list[int]:
    """Around the smallest calls that have calls inside and begin and end at a cut.

    Numbered ones, elements of a list of modules, come first: what repeats is what people call a block,
    even if there are smaller modules within it at which one could cut.
    """
    calls, root = step.open_calls, step.root
    is_place = {root.first, root.stop, *cuts.carrier}
    candidates = [
        call
        for call in calls
        if call.first in is_place and call.stop in is_place and any(_within(other, call) for other in calls)
    ]
    numbered = _innermost([call for call in candidates if call.module.rpartition(".")[2].isdigit()])
    others = [call for call in candidates if not any(_overlap(call, block) for block in numbered)]
    blocks = [*numbered, *_innermost(others)]
    carriers = {cuts.carrier[place] for place in _edges(blocks) if place in cuts.carrier}
    return [place for place in usable if cuts.carrier[place] in carriers]


def _innermost(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if not any(_within(other, call) for other in calls)]


def _overlap(one: Call, other: Call) -> bool:
    return one.first < other.stop and other.first < one.stop


def _within(inner: Call, outer: Call) -> bool:
    prefix = outer.module + "."
    return inner.module.startswith(prefix) and outer.first <= inner.first and inner.stop <= outer.stop


def _named(step: RecordedStep, cuts: Cuts, modules: Collection[str]) -> list[int]:
    """The cuts around the calls of the named modules."""
    if not modules:
        raise BadRequest("no module is named to cut around. Name some, or leave `modules` out.")
    usable = _usable(step, cuts)
    of_carrier = {cuts.carrier[place]: place for place in usable}
    called = {call.module for call in step.inner_calls}
    places: set[int] = set()
    for module in modules:
        if module not in called:
            raise BadRequest(f"the step calls no module '{module}', or nothing is computed in it.")
        edges = _edges([call for call in step.open_calls if call.module == module])
        inside = {place for place in edges if step.root.first < place < step.root.stop}
        # An activation that works in place on the result of the module changes it: the cut is after that.
        places |= {
            of_carrier[cuts.carrier[place]] for place in inside if cuts.carrier.get(place) in of_carrier
        }
    if not places:
        raise BadRequest(
            f"the model cannot be cut around {', '.join(modules)}: more than one value goes past each of "
            "these modules. Name modules that hand on everything, such as whole blocks."
        )
    return sorted(places)


def is_heavy(op: Op) -> bool:
    return short_name(op.target) in HEAVY
