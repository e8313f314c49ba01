"""The exact scheduler: against the referee, by hand, and against a search that tries everything."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks.planner import training_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import BadRequest, InfeasibleBudget, MissingExtra
from lowtide.ir.bounds import least_peak_bytes
from lowtide.ir.graph import Graph, Op, Phase, Ref
from lowtide.ir.keep import forward_values, keep_only
from lowtide.ir.recomputable import repeatable
from lowtide.ir.schedule import Compute, Free, Schedule, straight
from lowtide.ir.simulate import allocator_of, simulate
from lowtide.solvers import solve
from lowtide.solvers.ops import exact
from lowtide.solvers.ops.exact import Exact
from lowtide.solvers.refereed import extra_seconds
from lowtide.solvers.solution import Status
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, graphs, three_layers

QUICK = [
    training_graphs.perceptron(4),
    training_graphs.unet(2),
    training_graphs.gru(2),
    training_graphs.residual(2),
    *(training_graphs.drawn(seed, 8) for seed in range(4)),
]
"""Steps of some 20 ops; HiGHS takes a tenth of a second for each."""


def plain_peak_bytes(graph: Graph) -> int:
    return simulate(graph, straight(graph)).peak_bytes


def order(schedule: Schedule) -> list[int]:
    return [step.op for step in schedule if isinstance(step, Compute)]


# Everything tried -----------------------------------------------------------------------------------

State = tuple[int, int, tuple[int, ...]]
Cost = Callable[[float, Op, int, bool], float]


class Search:
    """The best of all schedules of a tiny graph that run the ops in graph order: Dijkstra's algorithm.

    A state is how many ops have had their first run, the last op that ran again since (-1: none), and what
    is alive. A step frees a value, or runs the next op, or an earlier one again: any that may run again in
    that place, or, with `in_stages`, only one that comes after the last.
    """

    def __init__(self, graph: Graph, *, in_stages: bool) -> None:
        self.graph = graph
        self.in_stages = in_stages
        self.may_repeat = sorted(repeatable(graph))
        allocator = allocator_of(graph.device)
        self.held = {value.id: allocator.held(graph.counted_bytes(value.id)) for value in graph.values}
        self.resident_bytes = sum(self.held[value] for value in graph.resident)

    def lowest_peak(self) -> int:
        return int(self.best(float(self.resident_bytes), lambda peak, _, live, __: max(peak, live)))

    def least_seconds(self, budget_bytes: int) -> float:
        """Infinite if nothing fits."""
        if self.resident_bytes > budget_bytes:
            return math.inf
        return self.best(
            0.0, lambda sum_, op, live, again: sum_ + again * op.seconds if live <= budget_bytes else math.inf
        )

    def best(self, start: float, cost: Cost) -> float:
        queue: list[tuple[float, State]] = [(start, (0, -1, ()))]
        seen: set[State] = set()
        while queue:
            spent, state = heapq.heappop(queue)
            if state[0] == len(self.graph.ops):
                return spent
            if state not in seen:
                seen.add(state)
                for after in self.steps(spent, state, cost):
                    if after[0] < math.inf:
                        heapq.heappush(queue, after)
        return math.inf

    def steps(self, spent: float, state: State, cost: Cost) -> Iterator[tuple[float, State]]:
        done, last, alive = state
        for value in set(alive) - self.graph.outputs:
            yield spent, (done, last, tuple(other for other in alive if other != value))
        following = self.graph.ops[done]
        for number in [*(op for op in self.may_repeat if op < done), done]:
            op = self.graph.ops[number]
            again = number < done
            if again and (op.section != following.section or (self.in_stages and number <= last)):
                continue
            needed = {value for value in (*op.reads, *op.mutates) if value in self.graph.creator}
            if not needed <= {*alive, *op.creates} or not set(alive).isdisjoint(op.creates):
                continue
            there = tuple(sorted((*alive, *op.creates)))
            live = self.resident_bytes + sum(self.held[value] for value in there) + op.workspace_bytes
            now = cost(spent, op, live, again)
            yield now, ((done, number if self.in_stages else -1, there) if again else (done + 1, -1, there))


# The referee ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", QUICK, ids=lambda graph: graph.name)
def test_what_it_answers_is_replayed(graph: Graph) -> None:
    lowest = solve(graph, "exact")
    plain = plain_peak_bytes(graph)
    assert lowest.status is Status.OPTIMAL
    assert lowest.lower_bound_bytes <= lowest.peak_bytes <= plain
    for budget_bytes in (lowest.peak_bytes, (lowest.peak_bytes + plain) // 2):
        solution = solve(graph, "exact", budget_bytes)
        assert solution.status is Status.OPTIMAL
        assert solution.peak_bytes <= budget_bytes
        assert solution.extra_seconds == pytest.approx(extra_seconds(graph, solution.schedule))
        assert solution.least_extra_seconds == pytest.approx(solution.extra_seconds, rel=1e-5)
        assert solution.extra_seconds <= lowest.extra_seconds + 1e-12


@pytest.mark.parametrize("graph", QUICK, ids=lambda graph: graph.name)
def test_the_plain_peak_costs_nothing(graph: Graph) -> None:
    answer = Exact().within(graph, plain_peak_bytes(graph))
    assert answer is not None
    assert (answer.schedule, answer.status, answer.least_extra_seconds) == (
        straight(graph),
        Status.OPTIMAL,
        0.0,
    )


# By hand --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget_bytes", "peak_bytes", "seconds", "runs"),
    [
        (2154, 2154, 0.0, [0, 1, 2, 3, 4, 5]),
        (2153, 1911, 1.0, [0, 1, 2, 3, 4, 0, 5]),  # wide is the cheapest to make again, and large enough
        (1911, 1911, 1.0, [0, 1, 2, 3, 4, 0, 5]),
    ],
)
def test_three_layers_within_a_budget(
    budget_bytes: int, peak_bytes: int, seconds: float, runs: list[int]
) -> None:
    solution = solve(three_layers(), "exact", budget_bytes)
    assert (solution.peak_bytes, solution.extra_seconds) == (peak_bytes, seconds)
    assert order(solution.schedule) == runs
    assert solution.least_extra_seconds == pytest.approx(seconds)


def test_three_layers_cannot_do_with_less_than_their_last_op_needs() -> None:
    assert Exact().within(three_layers(), 1910) is None
    assert solve(three_layers(), "exact").peak_bytes == 1911


def bridge(
    *, random: bool = False, workspace: int = 0, section: int = 0, device: str = "cpu", beside: int = 0
) -> Drawing:
    """A value that waits while another, as large, comes and goes. Values, ops, bytes, seconds:

    resident   0 image 10
    op 0  (image) → 1 wide 100, and 5 beside if asked for     1 s
    op 1  (wide) → 2 narrow 20                                2 s
    op 2  (narrow) → 3 large 100                              4 s
    op 3  (large, beside) → 4 small 20                        8 s, backward
    op 4  (small, wide) → 6 result 20                         8 s, backward

    Keeping all peaks at 230, at ops 2 and 3; with wide made again before op 4 the peak is 150, at op 4.
    """
    drawing = Drawing(device)
    image, wide, narrow = (drawing.value(*of) for of in [("image", 10), ("wide", 100), ("narrow", 20)])
    large, small = drawing.value("large", 100), drawing.value("small", 20)
    extra = [drawing.value("beside", beside)] if beside else []
    result = drawing.value("result", 20)
    drawing.op("aten.a.default", [image], [wide, *extra], random=random, workspace=workspace, seconds=1.0)
    drawing.op("aten.b.default", [wide], [narrow], seconds=2.0)
    drawing.op("aten.c.default", [narrow], [large], seconds=4.0)
    drawing.op("aten.d.default", [large, *extra], [small], phase=Phase.BACKWARD, seconds=8.0)
    drawing.op("aten.e.default", [small, wide], [result], phase=Phase.BACKWARD, seconds=8.0)
    drawing.ops[-1] = replace(drawing.ops[-1], section=section)
    return drawing


def lowest(graph: Graph) -> tuple[int, float]:
    answer = Exact().lowest(graph)
    assert answer.status is Status.OPTIMAL
    return simulate(graph, answer.schedule).peak_bytes, extra_seconds(graph, answer.schedule)


def last_of(drawing: Drawing) -> list[int]:
    return [len(drawing.values) - 1]


def test_a_value_that_waits_is_made_again_right_before_its_use() -> None:
    drawing = bridge()
    answer = Exact().lowest(drawing.graph(last_of(drawing)))
    wide, narrow, large, small = range(1, 5)
    assert answer.schedule.steps == (
        Compute(0),
        Compute(1),
        Free(wide),
        Compute(2),
        Free(narrow),
        Compute(3),
        Free(large),
        Compute(0),
        Compute(4),
        Free(wide),
        Free(small),
    )


@pytest.mark.parametrize(
    ("drawing", "peak_bytes", "seconds"),
    [
        (bridge(), 150, 1.0),
        (bridge(random=True), 230, 0.0),  # wide can be drawn only once
        (bridge(section=1), 230, 0.0),  # wide passes to another captured graph
        (bridge(workspace=60), 190, 1.0),  # the second run of op 0: small, wide and 60
        (bridge(workspace=200), 310, 0.0),  # the first run of op 0 is the peak, whatever is kept
        (bridge(beside=5), 150, 1.0),  # made again with wide, and no use
        (bridge(beside=40), 170, 1.0),  # at ops 2 and 3, and 170 again at the second run of op 0
        (bridge(device="cuda:0"), 4 * 512, 0.0),  # every value takes 512
    ],
    ids=["plain", "random", "section", "workspace", "large workspace", "beside", "larger beside", "rounded"],
)
def test_the_lowest_peak_of_a_bridge(drawing: Drawing, peak_bytes: int, seconds: float) -> None:
    graph = drawing.graph(last_of(drawing))
    assert lowest(graph) == (peak_bytes, seconds)
    assert Exact().within(graph, peak_bytes - 1) is None


def test_what_outlives_the_step_stays() -> None:
    drawing = bridge()
    assert lowest(drawing.graph([1, *last_of(drawing)])) == (230, 0.0)


def test_an_op_runs_again_without_what_it_updates() -> None:
    drawing = bridge()
    mean = drawing.value("mean", 1)
    first = drawing.ops[0]
    drawing.ops[0] = replace(first, args=(*first.args, Ref(mean)), updates=(mean,))
    assert lowest(drawing.graph([5])) == (151, 1.0)


def test_an_op_that_reads_what_is_changed_later_does_not_run_again() -> None:
    drawing = bridge()
    drawing.op("aten.add_.default", [], [], [0], phase=Phase.BACKWARD)
    assert lowest(drawing.graph([5])) == (230, 0.0)


@pytest.mark.parametrize(
    ("section", "peak_bytes", "runs"), [(0, 320, [0, 1, 2, 1, 3, 4]), (1, 410, range(5))]
)
def test_an_op_runs_again_before_its_use_if_it_is_of_the_section_there(
    section: int, peak_bytes: int, runs: Sequence[int]
) -> None:
    """While there is room, and what it reads is there; in another section's stage it may not. Bytes:

    resident   0 image 10
    op 0 (image) → 1 seed 10, random     op 1 (seed) → 2 wide 100, workspace 100     op 2 () → 3 storm 300
    op 3 () → 4 large 200, random, of `section`     op 4 (wide, large) → 5 result 1
    """
    drawing = Drawing()
    image, seed, wide, storm, large, result = (
        drawing.value(name, count)
        for name, count in [
            ("image", 10), ("seed", 10), ("wide", 100), ("storm", 300), ("large", 200), ("result", 1),
        ]
    )  # fmt: skip
    drawing.op("aten.a.default", [image], [seed], random=True, seconds=1.0)
    drawing.op("aten.b.default", [seed], [wide], workspace=100, seconds=1.0)
    drawing.op("aten.c.default", [], [storm], seconds=1.0)
    drawing.op("aten.d.default", [], [large], random=True, seconds=1.0)
    drawing.ops[-1] = replace(drawing.ops[-1], section=section)
    drawing.op("aten.e.default", [wide, large], [result], seconds=1.0)
    graph = drawing.graph([result])
    answer = Exact().lowest(graph)
    assert simulate(graph, answer.schedule).peak_bytes == peak_bytes
    assert order(answer.schedule) == list(runs)


def test_runs_that_nobody_asked_for_are_left_out() -> None:
    """As in what HiGHS finds on its way: here ops 0 and 1 run before op 4, which reads what op 0 makes."""
    drawing = bridge()
    graph = drawing.graph(last_of(drawing))
    program = exact._program(graph)
    chosen = np.zeros(program.variables)
    chosen[[moment.run for moment in program.moments if moment.stage == moment.op]] = 1.0
    chosen[[moment.run for moment in program.moments if moment.stage == 4 and moment.op < 2]] = 1.0
    schedule = exact._decoded(graph, program, chosen)
    assert order(schedule) == [0, 1, 2, 3, 0, 4]
    assert simulate(graph, schedule).peak_bytes == 150


def test_without_times_it_runs_as_few_ops_again_as_it_can() -> None:
    drawing = bridge()
    drawing.ops = [replace(op, seconds=0.0) for op in drawing.ops]
    answer = Exact().within(drawing.graph([5]), 229)
    assert answer is not None
    assert order(answer.schedule) == [0, 1, 2, 3, 0, 4]
    assert answer.least_extra_seconds == 0.0


def test_its_class_of_schedules_is_not_all_there_is() -> None:
    """Made again in graph order, y is there when x needs its workspace; the other way round it is not.

    resident   0 image 5
    op 0 (image) → 1 t 10     op 1 (t) → 2 y 100     op 2 (t) → 3 x 10, workspace 100
    op 3 () → 4 storm 130     op 4 (x, y) → 5 result 10
    """
    drawing = Drawing()
    image, t, y, x, storm, result = (
        drawing.value(name, count)
        for name, count in [("image", 5), ("t", 10), ("y", 100), ("x", 10), ("storm", 130), ("result", 10)]
    )
    drawing.op("aten.a.default", [image], [t], seconds=1.0)
    drawing.op("aten.b.default", [t], [y], seconds=1.0)
    drawing.op("aten.c.default", [t], [x], workspace=100, seconds=1.0)
    drawing.op("aten.d.default", [], [storm], seconds=1.0)
    drawing.op("aten.e.default", [x, y], [result], phase=Phase.BACKWARD, seconds=1.0)
    graph = drawing.graph([result])
    assert lowest(graph) == (145, 2.0)  # x stays
    assert Search(graph, in_stages=True).lowest_peak() == 145
    assert Search(graph, in_stages=False).lowest_peak() == 135


def test_bytes_too_few_for_highs_to_see_still_count() -> None:
    """HiGHS lets pass a schedule of some petabytes that is a byte too large; it is not answered."""
    drawing = bridge(workspace=60 * 10**13)
    drawing.values = [replace(value, bytes=value.bytes * 10**13 + value.id) for value in drawing.values]
    graph = drawing.graph(last_of(drawing))
    peak_bytes, seconds = lowest(graph)
    assert (peak_bytes, seconds) == (190 * 10**13 + 1 + 4, 1.0)
    assert Exact().within(graph, peak_bytes - 1) is None


@pytest.mark.parametrize(
    ("drawing", "outputs", "bound_bytes", "needed_by"),
    [
        (bridge(), [6], 150, 4),
        (bridge(random=True), [6], 230, 2),  # wide stays
        (bridge(), [1, 6], 230, 2),
        (bridge(), [2, 6], 170, 4),  # narrow stays
        (bridge(), [3, 6], 250, 4),
        (bridge(workspace=60), [6], 170, 0),  # less than can be reached: it knows no second runs
    ],
)
def test_a_bound_counts_what_cannot_be_made_again(
    drawing: Drawing, outputs: list[int], bound_bytes: int, needed_by: int
) -> None:
    outputs = [*outputs[:-1], *last_of(drawing)]
    found, op = least_peak_bytes(drawing.graph(outputs))
    assert op is not None
    assert (found, op.id) == (bound_bytes, needed_by)


def test_an_empty_graph_has_nothing_to_schedule() -> None:
    drawing = Drawing()
    drawing.value("image", 10)
    graph = drawing.graph()
    assert least_peak_bytes(graph) == (10, None)
    assert Exact().lowest(graph).schedule == Schedule(())
    assert Exact().within(graph, 9) is None


# Properties -----------------------------------------------------------------------------------------


@st.composite
def captured(draw: st.DrawFn) -> Graph:
    """A tiny graph in which values wait: a forward chain, and a backward that reads it again in reverse.

    Now and then an op draws random numbers, makes two values, changes one, takes workspace, updates what is
    resident, or is of another section.
    """
    drawing = Drawing(draw(st.sampled_from(["cpu", "cpu", "cuda:0"])))
    made = [drawing.value("image", 10)]
    rarely = st.integers(0, 15).map(lambda number: number == 15)
    count = draw(st.integers(5, 7))
    for number in range(count):
        is_backward = 2 * number >= count
        old = [made[count - number - 1]] if is_backward else []
        old += [draw(st.sampled_from(made))] if draw(rarely) else []
        sizes = [draw(st.sampled_from([100, 200, 300, 600])) for _ in range(1 + draw(rarely))]
        new = [drawing.value(f"{number}.{size}", size) for size in sizes]
        drawing.op(
            "aten.a.default",
            list({*old, made[-1]}),
            new,
            [draw(st.sampled_from([*made, *new]))] if draw(rarely) else [],
            updates=[drawing.value("mean", 1)] if draw(rarely) else [],
            phase=Phase.BACKWARD if is_backward else Phase.FORWARD,
            random=draw(rarely),
            workspace=draw(st.sampled_from([0, 0, 0, 0, 50, 400])),
            seconds=draw(st.sampled_from([0.0, 1.0, 2.0, 5.0])),
        )
        drawing.ops[-1] = replace(drawing.ops[-1], section=draw(st.sampled_from([0] * 30 + [1, -1])))
        made += new
    return drawing.graph([made[-1], *([draw(st.sampled_from(made))] if draw(rarely) else [])])


TRAINED = st.builds(training_graphs.drawn, st.integers(0, 10**6), st.integers(2, 4))
TINY = captured() | captured() | TRAINED | graphs()


@settings(max_examples=examples(300))
@given(TINY)
def test_the_lowest_peak_is_that_of_trying_everything(graph: Graph) -> None:
    answer = Exact().lowest(graph)
    assert answer.status is Status.OPTIMAL
    peak_bytes = simulate(graph, answer.schedule).peak_bytes
    assert peak_bytes == Search(graph, in_stages=True).lowest_peak()
    assert least_peak_bytes(graph)[0] <= Search(graph, in_stages=False).lowest_peak() <= peak_bytes
    assert Exact().within(graph, peak_bytes - 1) is None


@settings(max_examples=examples(300))
@given(TINY, st.floats(0, 1))
def test_the_least_time_is_that_of_trying_everything(graph: Graph, part: float) -> None:
    in_stages, anywhere = Search(graph, in_stages=True), Search(graph, in_stages=False)
    least_bytes = in_stages.lowest_peak()
    budget_bytes = least_bytes + int(part * (plain_peak_bytes(graph) - least_bytes))
    answer = Exact().within(graph, budget_bytes)
    assert answer is not None
    assert answer.status is Status.OPTIMAL
    assert simulate(graph, answer.schedule).peak_bytes <= budget_bytes
    seconds = extra_seconds(graph, answer.schedule)
    assert seconds == pytest.approx(in_stages.least_seconds(budget_bytes), rel=1e-6, abs=1e-9)
    assert seconds >= anywhere.least_seconds(budget_bytes) - 1e-9
    assert answer.least_extra_seconds == pytest.approx(seconds, rel=1e-5, abs=1e-9)


@given(TINY)
def test_a_value_is_freed_right_after_an_op_that_touches_it(graph: Graph) -> None:
    schedule = Exact().lowest(graph).schedule
    running = graph.ops[0] if graph.ops else None
    for step in schedule:
        if isinstance(step, Compute):
            running = graph.ops[step.op]
        else:
            assert isinstance(step, Free)
            assert running is not None
            assert step.value in (*running.reads, *running.mutates, *running.creates)


@given(captured(), st.data())
def test_the_bound_binds_keep_only(graph: Graph, data: st.DataObject) -> None:
    values = sorted(forward_values(graph))
    kept = data.draw(st.sets(st.sampled_from(values))) if values else set()
    assert simulate(graph, keep_only(graph, kept)).peak_bytes >= least_peak_bytes(graph)[0]


@pytest.mark.parametrize("graph", QUICK[-2:], ids=lambda graph: graph.name)
def test_more_room_never_costs_more_time(graph: Graph) -> None:
    least, plain = lowest(graph)[0], plain_peak_bytes(graph)
    seconds = [
        extra_seconds(graph, answer.schedule)
        for part in range(6)
        if (answer := Exact().within(graph, least + part * (plain - least) // 5))
    ]
    assert len(seconds) == 6
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] == 0.0


# Refusals -------------------------------------------------------------------------------------------


def test_a_graph_that_is_too_large_is_refused() -> None:
    graph = training_graphs.perceptron(30)
    with pytest.raises(
        BadRequest, match=r"perceptron 30 has 149 ops; it takes at most 120\. Use evict, which takes a graph"
    ):
        solve(graph, "exact", "60%")
    with pytest.raises(BadRequest, match="it takes at most 120"):
        solve(graph, "exact")


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"the method exact needs scipy: pip install 'lowtide\[exact\]'"):
        solve(three_layers(), "exact")


def test_a_budget_that_nothing_fits_in_is_refused_with_the_least_that_would() -> None:
    with pytest.raises(InfeasibleBudget, match=r"no plan of exact fits in .*1911 bytes") as refused:
        solve(three_layers(), "exact", 1900)
    assert refused.value.least_bytes == 1911


@pytest.mark.parametrize("unfinished", [1, 2])
def test_what_is_not_proved_is_not_claimed(unfinished: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thing that HiGHS is asked for is the peak, the second the time."""
    asked = 0
    minimised = exact._minimised

    def interrupted(*question: Any) -> Any:
        nonlocal asked
        asked += 1
        found = minimised(*question)
        found.status = int(asked == unfinished)  # 1: out of time
        return found

    monkeypatch.setattr(exact, "_minimised", interrupted)
    answer = Exact().lowest(three_layers())
    assert (asked, answer.status) == (2, Status.FEASIBLE)
    assert extra_seconds(three_layers(), answer.schedule) == 1.0


def test_without_time_it_claims_nothing() -> None:
    graph = training_graphs.perceptron(6)
    assert Exact(time_limit=0.0).within(graph, plain_peak_bytes(graph) - 1) is None
    answer = Exact(time_limit=0.0).lowest(graph)
    assert (answer.schedule, answer.status) == (straight(graph), Status.FEASIBLE)
