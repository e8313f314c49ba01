"""What a plan says of slices: what is told adds up to what is in the graph."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.solvers.summary import explained, summary
from lowtide.solvers.tiled_summary import RegionFamily, counted, families, family_table, signed_seconds
from tests.helpers.handmade import solved
from tests.helpers.slices import in_slices, two_layers

# The referee -----------------------------------------------------------------------------------------


def timed(graph: Graph) -> Graph:
    """Another time for each op, that no sums of others make."""
    return replace(graph, ops=tuple(replace(op, seconds=2.0**op.id) for op in graph.ops))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_extra_seconds_add_up_to_those_of_the_graph(count: int, ahead: bool) -> None:
    graph = timed(in_slices(two_layers(), count, ahead))
    assert graph.tiled is not None
    same = [number for number in graph.tiled.origin if number >= 0]  # in the plain graph, a second each
    before = 12.0 - len(same)
    after = sum(op.seconds for op in graph.ops if graph.tiled.origin[op.id] < 0)
    assert sum(family.extra_seconds or 0.0 for family in families(graph)) == after - before


# By hand ---------------------------------------------------------------------------------------------


def test_regions_that_differ_in_a_number_alone_are_one_family() -> None:
    """The products and exponentials of two layers are made again in the backward: four seconds."""
    assert families(in_slices(two_layers())) == (
        RegionFamily(("layers.0", "layers.1"), 8, 4, 4, spared_bytes=8 * 64 * 4, extra_seconds=4.0),
    )


def test_what_spares_most_comes_first_and_the_largest_tensor_counts() -> None:
    graph = in_slices(two_layers())
    assert graph.tiled is not None
    first, second, third, fourth = graph.tiled.blocks
    blocks = (
        replace(first, where="a", spared_bytes=1),
        replace(second, where="b", spared_bytes=5),
        replace(third, where="b", spared_bytes=7, count=2),
        replace(fourth, where="a", spared_bytes=6),
    )
    found = families(replace(graph, tiled=replace(graph.tiled, blocks=blocks)))
    assert [(family.regions, family.count, family.spared_bytes) for family in found] == [
        (("b",), 2, 7), (("a",), 4, 6), (("b",), 4, 5),
    ]  # fmt: skip


def test_a_backward_that_runs_with_its_forward_is_no_stretch_of_its_own() -> None:
    (family,) = families(in_slices(two_layers(), ahead=True))
    assert (family.stretches, family.extra_seconds) == (2, 0.0)


def test_what_scales_results_that_were_made_ahead_belongs_to_its_family() -> None:
    graph = in_slices(two_layers(), ahead=True)
    (scaling,) = (op for op in graph.ops if op.id > 48 and 13 in op.creates)
    slower = replace(scaling, seconds=0.5)
    (family,) = families(replace(graph, ops=(*graph.ops[: slower.id], slower, *graph.ops[slower.id + 1 :])))
    assert family.extra_seconds == 0.5


def test_what_is_scaled_into_its_place_belongs_to_the_family_that_made_it() -> None:
    graph = in_slices(two_layers(), ahead=True)
    assert graph.tiled is not None
    first, second = graph.tiled.blocks
    apart = replace(graph.tiled, blocks=(replace(first, where="a"), replace(second, where="b")))
    scaled = [op for op in graph.ops if op.id > 48 and op.creates]
    into = {op.id: replace(op, creates=(), mutates=op.creates, seconds=2.0**n) for n, op in enumerate(scaled)}
    ops = tuple(into.get(op.id, op) for op in graph.ops)
    extra = {family.name: family.extra_seconds for family in families(replace(graph, ops=ops, tiled=apart))}
    made = {op.creates[0]: 2.0**n for n, op in enumerate(scaled)}
    assert extra == {"a": made[14], "b": made[13]}


def test_a_graph_that_was_not_timed_says_that_nobody_knows() -> None:
    plain = two_layers()
    untimed = replace(plain, ops=tuple(replace(op, seconds=0.0) for op in plain.ops))
    graph = in_slices(untimed)
    assert [family.extra_seconds for family in families(graph)] == [None]
    fact = next(fact for fact in summary(solved(graph, straight(graph))) if fact.what == "slices")
    assert (fact.figure, fact.remark) == ("unknown", "2 regions in 4 stretches")
    assert "unknown" in str(family_table(families(graph)))


def test_a_graph_without_slices_says_nothing_of_them() -> None:
    graph = two_layers()
    assert families(graph) == ()
    assert "slices" not in explained(solved(graph, straight(graph)))


TEXT = """\
two layers, on cpu
plain peak     7,240 B  with everything kept
planned peak   3,144 B  at layers.0: aten.exp
saved          4,096 B  56.6 %
extra time        0 µs  0.0 % of the step; 0 ops run again
slices          4.00 s  33.3 % of the plain step; 2 regions in 4 stretches
lower bound    3,144 B  any schedule holds that at layers.0: aten.mul
status        feasible  not proven to be the best
method                  by hand, in 1.5 ms

in slices     regions  length  slices  stretches  largest spared B  extra time
layers.{0–1}        2       8       4          4             2,048      4.00 s

"""


def test_a_solution_tells_of_slices_before_it_tells_of_modules() -> None:
    graph = in_slices(two_layers())
    assert str(solved(graph, straight(graph))).startswith(TEXT)


def test_one_region_in_one_stretch_is_told_in_the_singular() -> None:
    (family,) = families(in_slices(two_layers()))
    assert counted([replace(family, regions=("head",), stretches=1)]) == "1 region in 1 stretch"


@pytest.mark.parametrize(
    ("seconds", "text"), [(-2.0, "-2.00 s"), (2.0, "2.00 s"), (0.0, "0 µs"), (-1e-9, "0 µs")]
)
def test_slices_may_be_faster_than_what_they_are_slices_of(seconds: float, text: str) -> None:
    assert signed_seconds(seconds) == text
