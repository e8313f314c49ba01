"""Lifetimes: which births there are, which buffer they are in, and when it is needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from lowtide.arena.buffers import Birth, aligned, alignment_of, buffers_of, largest_live_bytes, live_bytes
from lowtide.arena.in_place import TakeOver, take_overs
from lowtide.ir.graph import Graph, Role
from lowtide.ir.schedule import Compute, Free, Schedule, straight
from lowtide.ir.simulate import simulate
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, chain, steps, three_layers
from tests.helpers.layouts import stepped

Row = tuple[int, int, int, tuple[tuple[int, int], ...]]


def rows(graph: Graph, schedule: Schedule, overs: tuple[TakeOver, ...] = (), alignment: int = 1) -> list[Row]:
    """Bytes, first, stop and births of every buffer."""
    found = buffers_of(graph, schedule, overs, alignment)
    assert [buffer.id for buffer in found] == list(range(len(found)))
    return [(b.bytes, b.first, b.stop, tuple((x.value, x.time) for x in b.births)) for b in found]


# By hand --------------------------------------------------------------------------------------------


def test_a_value_lives_from_its_compute_to_its_free_and_an_output_to_the_end() -> None:
    graph = chain()
    schedule = steps(0, 1, 2, 3, 4, "f4", "f2", 5, "f5")
    assert rows(graph, schedule) == [
        (1000, 0, 6, ((2, 0),)),
        (4, 2, 9, ((3, 0),)),
        (1000, 3, 5, ((4, 0),)),
        (1000, 4, 8, ((5, 0),)),
        (400, 7, 9, ((6, 0),)),
    ]


def test_a_value_that_is_computed_again_is_born_again() -> None:
    schedule = steps(0, 1, "f2", 2, 3, 4, "f4", 0, 5, "f2", "f3", "f6")
    assert rows(three_layers(), schedule) == [
        (1000, 0, 2, ((2, 0),)),
        (400, 1, 10, ((3, 0),)),
        (300, 3, 6, ((4, 0),)),
        (4, 4, 12, ((5, 0),)),
        (300, 5, 11, ((6, 0),)),
        (1000, 7, 9, ((2, 1),)),
        (50, 8, 12, ((7, 0),)),
    ]


def test_a_result_that_takes_over_lives_on_in_the_buffer_of_its_input() -> None:
    drawing = Drawing()
    x = drawing.value("x", 8, Role.BATCH)
    made = [drawing.value(name, 8) for name in "abc"]
    for source, target in zip([x, *made], made, strict=False):
        drawing.op("aten.relu.default", [source], [target])
    graph = drawing.graph(outputs=[made[-1]])
    schedule = straight(graph)  # 0 1 fa 2 fb
    overs = (TakeOver(1, 2, 1), TakeOver(3, 3, 2))
    assert rows(graph, schedule, overs) == [(8, 0, 5, ((1, 0), (2, 0), (3, 0)))]
    assert rows(graph, schedule, overs[1:]) == [(8, 0, 2, ((1, 0),)), (8, 1, 5, ((2, 0), (3, 0)))]


def test_resident_values_and_other_devices_are_not_in_the_arena() -> None:
    drawing = Drawing("cuda:0")
    x = drawing.value("x", 8, Role.BATCH)
    away, here = drawing.value("away", 8, device="cpu"), drawing.value("here", 8)
    drawing.op("aten.relu.default", [x], [away])
    drawing.op("aten.relu.default", [away], [here])
    graph = drawing.graph(outputs=[here])
    assert rows(graph, straight(graph)) == [(8, 1, 3, ((here, 0),))]


def test_sizes_are_rounded_up_to_the_alignment() -> None:
    assert [aligned(count, 512) for count in (0, 1, 512, 513)] == [0, 512, 512, 1024]
    assert [alignment_of(device) for device in ("cpu", "cuda", "cuda:1")] == [64, 512, 512]
    sizes = [row[0] for row in rows(three_layers(), straight(three_layers()), alignment=64)]
    assert sizes == [1024, 448, 320, 64, 320, 64]


def test_live_bytes_count_inputs_and_outputs_of_a_step_together() -> None:
    graph = three_layers()
    schedule = straight(graph)  # 0 1 2 3 4 f4 5 f2 f3 f6
    buffers = buffers_of(graph, schedule)
    assert live_bytes(buffers).tolist() == [1000, 1400, 1700, 1704, 2004, 1704, 1754, 754, 354, 54]
    assert largest_live_bytes(buffers) == 2004
    assert largest_live_bytes(()) == 0


# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(150))
@given(stepped())
def test_every_birth_is_in_one_buffer_and_live_while_the_schedule_says_so(
    case: tuple[Graph, Schedule],
) -> None:
    graph, schedule = case
    buffers = buffers_of(graph, schedule)
    alive: dict[int, int] = {}
    times: dict[int, int] = {}
    for position, step in enumerate(schedule):
        if isinstance(step, Free):
            alive.pop(step.value, None)
        else:
            assert isinstance(step, Compute)
            for value in graph.ops[step.op].creates:
                if graph.values[value].device == graph.device:
                    alive[value] = times[value] = times.get(value, -1) + 1
        held = [b.births for b in buffers if b.first <= position < b.stop]
        assert sorted(held) == sorted((Birth(value, time),) for value, time in alive.items())


@settings(max_examples=examples(150))
@given(stepped())
def test_the_referee_of_schedules_counts_the_same_live_bytes(case: tuple[Graph, Schedule]) -> None:
    graph, schedule = case
    timeline = simulate(graph, schedule)
    alignment = 512 if graph.device.startswith("cuda") else 1
    live = live_bytes(buffers_of(graph, schedule, (), alignment)).tolist()
    computes = [i for i, step in enumerate(schedule) if isinstance(step, Compute)]
    for i in computes:
        counted = timeline.live_bytes[i] - timeline.resident_bytes
        assert (live[i] if i < len(live) else 0) == counted


@settings(max_examples=examples(150))
@given(stepped())
def test_taking_over_merges_buffers_and_loses_no_birth(case: tuple[Graph, Schedule]) -> None:
    graph, schedule = case
    overs = take_overs(graph, schedule)
    apart, merged = buffers_of(graph, schedule), buffers_of(graph, schedule, overs)
    assert len(merged) == len(apart) - len(overs)
    assert sorted(birth for b in merged for birth in b.births) == sorted(b.births[0] for b in apart)
    span = {b.births[0]: (b.first, b.stop) for b in apart}
    for b in merged:
        assert (b.first, b.stop) == (span[b.births[0]][0], span[b.births[-1]][1])
        assert len({graph.values[birth.value].bytes for birth in b.births}) == 1
    assert largest_live_bytes(merged) <= largest_live_bytes(apart)


@pytest.mark.parametrize("alignment", [1, 64, 512])
def test_an_empty_schedule_needs_nothing(alignment: int) -> None:
    assert buffers_of(Drawing().graph(), Schedule(()), (), alignment) == ()
