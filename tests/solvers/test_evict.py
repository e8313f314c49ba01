"""evict: the referee agrees, numbers one can check by hand, properties, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide
from lowtide.errors import BadRequest, InfeasibleBudget
from lowtide.ir.bounds import least_peak_bytes
from lowtide.ir.graph import Graph, Origin, Phase, Role
from lowtide.ir.recomputable import repeatable
from lowtide.ir.schedule import Compute, Schedule, straight
from lowtide.ir.simulate import simulate
from lowtide.solvers.ops.evict import Evict
from lowtide.solvers.ops.search.encode import change_to, codes_in, pairs_of, schedule_of, slots_of, work_of
from lowtide.solvers.ops.search.memory import highest
from lowtide.solvers.refereed import extra_seconds
from lowtide.solvers.registry import solve
from lowtide.solvers.solution import Status
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, graphs

SECONDS = st.sampled_from([0.0, 1.0, 2.0, 10.0])


def peak(graph: Graph, schedule: Schedule) -> int:
    return simulate(graph, schedule).peak_bytes


def runs(schedule: Schedule) -> Counter[int]:
    return Counter(step.op for step in schedule if isinstance(step, Compute))


def ladder(layers: int = 3) -> Graph:
    """`layers` products of 100 bytes that take 10 s, an activation of 60 bytes and 1 s after each, and back.

    The backward of a product reads its input, that of an activation its result. Gradients take 10 bytes.
    """
    drawing = Drawing()
    x = drawing.value("x", 100, Role.BATCH)
    results: list[tuple[int, int]] = []
    last = x
    for _ in range(layers):
        product = drawing.value("product", 100)
        drawing.op("aten.mm.default", [last], [product], seconds=10.0)
        active = drawing.value("active", 60)
        drawing.op("aten.relu.default", [product], [active], seconds=1.0)
        results.append((last, active))
        last = active
    gradient = drawing.value("gradient", 10)
    drawing.op("aten.sum.default", [last], [gradient], phase=Phase.BACKWARD, seconds=1.0)
    for read, active in reversed(results):
        for saved in (active, read):
            previous, gradient = gradient, drawing.value("gradient", 10)
            drawing.op("aten.mm.default", [previous, saved], [gradient], phase=Phase.BACKWARD, seconds=5.0)
    return drawing.graph(outputs=[gradient], name="ladder")


# The referee ----------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(graph=graphs(max_ops=8, seconds=SECONDS), data=st.data())
def test_slots_hold_what_the_referee_counts_whatever_runs_again(graph: Graph, data: st.DataObject) -> None:
    work = work_of(graph)
    slots = slots_of(work)
    possible = [
        (op, slot)
        for op in sorted(repeatable(graph))
        for slot in range(op + 1, len(graph.ops))
        if graph.ops[slot].section == graph.ops[op].section
    ]
    resident = simulate(graph, straight(graph)).resident_bytes
    for _ in range(3):
        pairs = data.draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []
        change_to(work, slots, np.array([op * len(graph.ops) + slot for op, slot in pairs], np.int64))
        timeline = simulate(graph, schedule_of(graph, pairs))
        assert pairs_of(codes_in(slots), len(graph.ops)) == sorted(pairs)
        if timeline.peak_step is not None:
            assert resident + highest(work, slots) == timeline.peak_bytes


@settings(max_examples=examples(80))
@given(graph=graphs(max_ops=10, seconds=SECONDS), part=st.floats(0.0, 1.1))
def test_a_schedule_passes_the_referee_and_holds_its_budget(graph: Graph, part: float) -> None:
    plain = simulate(graph, straight(graph))
    budget = plain.resident_bytes + int(part * plain.growth_bytes)
    answer = Evict().within(graph, budget)
    if answer is not None:
        assert peak(graph, answer.schedule) <= budget
        assert answer.least_extra_seconds <= extra_seconds(graph, answer.schedule)
    elif part >= 1:
        pytest.fail("everything fits, and nothing was found")


# By hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "order", "peak_bytes", "seconds"),
    [
        # x, two activations, a product and its activation: 100 + 60 + 60 + 100 + 60
        (380, [*range(13)], 380, 0.0),
        # the first activation is made again when its backward asks for it
        (379, [*range(10), 0, 1, 10, 11, 12], 320, 11.0),
        (320, [*range(10), 0, 1, 10, 11, 12], 320, 11.0),
        # the second as well; the first, made again for it, has to go once more before op 10 asks for it
        (319, [*range(8), 0, 1, 2, 3, 8, 9, 0, 1, 10, 11, 12], 270, 33.0),
        (270, [*range(8), 0, 1, 2, 3, 8, 9, 0, 1, 10, 11, 12], 270, 33.0),
    ],
)
def test_the_cheapest_is_given_up_first(
    budget: int, order: list[int], peak_bytes: int, seconds: float
) -> None:
    graph = ladder()
    answer = Evict().within(graph, budget)
    assert answer is not None
    assert [step.op for step in answer.schedule if isinstance(step, Compute)] == order
    assert peak(graph, answer.schedule) == peak_bytes
    assert extra_seconds(graph, answer.schedule) == seconds


def test_the_lowest_peak_is_where_an_op_with_its_results_and_a_gradient_is_all_there_is() -> None:
    lowest = Evict().lowest(ladder())
    assert peak(ladder(), lowest.schedule) == 100 + 100 + 60 + 10
    assert Evict().within(ladder(), 269) is None


def test_holding_everything_is_proved_and_anything_else_is_not() -> None:
    graph = ladder()
    plain = Evict().within(graph, 380)
    less = Evict().within(graph, 379)
    assert plain is not None
    assert less is not None
    assert plain.schedule == straight(graph)
    assert (plain.status, less.status) == (Status.OPTIMAL, Status.FEASIBLE)
    assert 0.0 < less.least_extra_seconds <= 11.0


def test_where_nothing_was_timed_bytes_stand_in_for_seconds() -> None:
    timed = ladder()
    graph = replace(timed, ops=tuple(replace(op, seconds=0.0) for op in timed.ops))
    solution = solve(graph, "evict", 320)
    assert solution.recomputed == {0: 1, 1: 1}
    assert (solution.extra_seconds, solution.least_extra_seconds) == (0.0, 0.0)


def test_what_draws_random_numbers_is_held() -> None:
    timed = ladder()
    graph = replace(timed, ops=tuple(replace(op, random=op.id == 1) for op in timed.ops))
    assert 1 not in solve(graph, "evict").recomputed


def test_an_op_runs_again_only_in_its_own_section() -> None:
    timed = ladder(4)
    parts = (
        [0] * 4 + [1] * 9 + [0] * 4
    )  # two captured graphs, each of two layers; backwards the second is first
    graph = replace(
        timed, ops=tuple(replace(op, section=part) for op, part in zip(timed.ops, parts, strict=True))
    )
    again = _again(Evict().lowest(graph).schedule)
    assert again
    assert all(parts[op] == parts[before] for op, before in again)


def _again(schedule: Schedule) -> list[tuple[int, int]]:
    """What runs again, and the op before which it does."""
    found: list[tuple[int, int]] = []
    waiting: list[int] = []
    done: set[int] = set()
    for step in schedule:
        if isinstance(step, Compute) and step.op in done:
            waiting.append(step.op)
        elif isinstance(step, Compute):
            found.extend((op, step.op) for op in waiting)
            waiting.clear()
            done.add(step.op)
    return found


# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(graph=graphs(max_ops=12, seconds=SECONDS))
def test_more_budget_never_costs_more_time_and_never_fits_less(graph: Graph) -> None:
    plain = simulate(graph, straight(graph))
    before: float | None = None
    for step in range(21):
        budget = plain.resident_bytes + plain.growth_bytes * step // 20
        answer = Evict().within(graph, budget)
        assert answer is not None or before is None
        if answer is not None:
            seconds = extra_seconds(graph, answer.schedule)
            assert before is None or seconds <= before
            before = seconds
    assert before == 0.0


@settings(max_examples=examples(60))
@given(graph=graphs(max_ops=12, seconds=SECONDS))
def test_the_lowest_is_no_higher_than_the_plain_peak_nor_lower_than_can_be(graph: Graph) -> None:
    lowest = Evict().lowest(graph).schedule
    plain = straight(graph)
    assert peak(graph, lowest) <= peak(graph, plain)
    assert peak(graph, lowest) >= least_peak_bytes(graph)[0]
    again = {op for op, count in runs(lowest).items() if count > 1}
    assert again <= repeatable(graph)


def test_a_second_search_finds_the_same() -> None:
    graph = ladder(5)
    other = replace(graph, name="the same under another name")
    assert Evict().lowest(graph).schedule == Evict().lowest(other).schedule


WITHOUT_LLVM = """
import importlib.metadata
def version(name):
    raise importlib.metadata.PackageNotFoundError(name)
found, importlib.metadata.version = importlib.metadata.version, version
from lowtide.solvers.jit import is_compiling
assert not is_compiling()
importlib.metadata.version = found
from lowtide.solvers.ops.evict import Evict
from tests.solvers.test_evict import ladder
print(Evict().lowest(ladder()).schedule)
"""


def test_loops_that_are_not_compiled_find_the_same() -> None:
    here = Path(__file__).parents[2]
    path = os.pathsep.join([str(here), str(Path(lowtide.__file__).parents[1])])
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_LLVM],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout.strip()) == (0, str(Evict().lowest(ladder()).schedule)), (
        result.stderr
    )
    assert result.stderr.count("llvmlite is not installed") == 1


# Many runs --------------------------------------------------------------------------------------------


def test_what_runs_again_can_change_altogether_where_there_is_no_room_for_both() -> None:
    drawing = Drawing()
    seeds = [drawing.value(f"seed {number}", 10) for number in range(2)]
    for seed in seeds:
        drawing.op("aten.make.default", creates=[seed])
    for number in range(60):
        drawing.op("aten.use.default", reads=seeds, creates=[drawing.value(f"use {number}", 10)])
    graph = drawing.graph()
    work = work_of(graph)
    slots = slots_of(work)
    late, early = (
        np.array(
            [op * len(graph.ops) + slot for op in range(2) for slot in range(first, first + 20)], np.int64
        )
        for first in (40, 10)
    )
    change_to(work, slots, late)
    change_to(work, slots, early)  # an op has a place for 24 runs, and these two are 40
    assert codes_in(slots).tolist() == early.tolist()


# Refusals -------------------------------------------------------------------------------------------


def test_a_budget_below_the_lowest_names_the_lowest() -> None:
    with pytest.raises(InfeasibleBudget) as caught:
        solve(ladder(), "evict", 200)
    assert (caught.value.budget_bytes, caught.value.least_bytes) == (200, 270)


def test_what_a_step_did_cannot_be_rearranged() -> None:
    with pytest.raises(BadRequest, match="cannot be rearranged"):
        solve(replace(ladder(), origin=Origin.EAGER), "evict")
