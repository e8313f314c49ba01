"""The referee, refereed: `simulate` against a second opinion that shares no code with it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import IllegalSchedule
from lowtide.ir.graph import Graph, Phase, Role
from lowtide.ir.schedule import Compute, Free, Schedule, Step, straight
from lowtide.ir.simulate import CATEGORIES, CUDA, EXACT, Allocator, Category, allocator_of, simulate
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, chain, graphs, statistics, steps

# The second opinion ---------------------------------------------------------------------------------
#
# Legality by meaning, not by bookkeeping: run the schedule on symbols and see whether every op saw what
# it sees when the graph is run plainly, and whether the outputs came out the same.

Outcome = tuple[dict[int, set[Hashable]], dict[int, Hashable]]


def run_on_symbols(graph: Graph, plan: Sequence[Step], names: dict[Hashable, str]) -> Outcome | None:
    """What every op saw, and what the outputs hold at the end; None where a step cannot be taken.

    `names` has a short name for each content met, lest they grow without end.
    """
    contents: dict[int, Hashable] = {v.id: v.id for v in graph.values if v.id not in graph.creator}
    seen: dict[int, set[Hashable]] = {}
    try:
        for step in plan:
            if isinstance(step, Free):
                del contents[step.value]
                continue
            assert isinstance(step, Compute)
            op = graph.ops[step.op]
            inputs = tuple(contents[v] for v in sorted({*op.reads, *op.mutates} - set(op.creates)))
            draw = len(seen.get(op.id, ())) if op.random else 0
            if step.op < 0 or contents.keys() & set(op.creates) or (op.random and draw):
                return None
            seen.setdefault(op.id, set()).add((inputs, draw))
            for v in {*op.creates, *op.mutates}:
                contents[v] = names.setdefault((op.id, v, inputs, draw), f"content {len(names)}")
        return seen, {v: contents[v] for v in graph.outputs}
    except LookupError:
        return None


def is_legal(graph: Graph, plan: Sequence[Step]) -> bool:
    names: dict[Hashable, str] = {}
    plain = run_on_symbols(graph, [Compute(op.id) for op in graph.ops], names)
    return plain is not None and plain == run_on_symbols(graph, plan, names)


# Bytes by lifetimes, not by a running sum: each life of a value is an interval of steps.


def lives(graph: Graph, plan: Sequence[Step]) -> list[tuple[int, int, int]]:
    """(value, first step, step after the last) for every life; residents live from -1."""
    found = []
    for v in graph.values:
        makes = [i for i, s in enumerate(plan) if isinstance(s, Compute) and v.id in graph.ops[s.op].creates]
        frees = [i for i, s in enumerate(plan) if s == Free(v.id)]
        starts = makes if v.id in graph.creator else [-1]
        found += [(v.id, start, min((f for f in frees if f > start), default=len(plan))) for start in starts]
    return found


def category_of(graph: Graph, plan: Sequence[Step], value: int, start: int, end: int) -> Category:
    role = graph.values[value].role
    if role is Role.LIBRARY:
        return Category.WORKSPACE
    if role is not Role.INTERMEDIATE:
        return {
            Role.PARAMETER: Category.PARAMETERS,
            Role.BUFFER: Category.BUFFERS,
            Role.BATCH: Category.BATCH,
            Role.GRADIENT: Category.GRADIENTS,
            Role.OPTIMIZER_STATE: Category.OPTIMIZER_STATE,
        }[role]
    if start < 0:
        return Category.TEMPORARIES
    phases = [graph.ops[s.op].phase for s in plan[start:end] if isinstance(s, Compute)]
    from_forward = phases[0] in {Phase.FORWARD, Phase.RECOMPUTE}
    held_for_backward = Phase.BACKWARD in phases[1:]
    return Category.ACTIVATIONS if from_forward and held_for_backward else Category.TEMPORARIES


def rounded(graph: Graph, value: int, grain: int) -> int:
    found = graph.values[value]
    return math.ceil(found.bytes / grain) * grain if found.device == graph.device else 0


def recount(graph: Graph, plan: Sequence[Step], grain: int, i: int) -> tuple[Counter[Category], Counter[str]]:
    """Bytes held while step `i` runs, by category and by module. Step -1 is before the first."""
    categories: Counter[Category] = Counter()
    modules: Counter[str] = Counter()
    for value, start, end in lives(graph, plan):
        if start <= i < end:
            categories[category_of(graph, plan, value, start, end)] += rounded(graph, value, grain)
            modules[graph.values[value].module] += rounded(graph, value, grain)
    step = plan[i] if i >= 0 else None
    if isinstance(step, Compute):
        categories[Category.WORKSPACE] += graph.ops[step.op].workspace_bytes
        modules[graph.ops[step.op].module] += graph.ops[step.op].workspace_bytes
    return categories, modules


# Random schedules: the plain order, edited again and again where the edit stays legal.


@st.composite
def schedules(draw: st.DrawFn, graph: Graph, recompute: bool = True, free_residents: bool = True) -> Schedule:
    plan: list[Step] = [Compute(op.id) for op in graph.ops]
    freeable = [v.id for v in graph.values if free_residents or v.id in graph.creator]
    for _ in range(draw(st.integers(0, 8))):
        early, late = sorted(draw(st.tuples(*[st.integers(0, len(plan))] * 2)))
        done = sorted({step.op for step in plan[:early] if isinstance(step, Compute)})
        if recompute and done and draw(st.booleans()):
            edited = evicted(graph, plan, draw(st.sampled_from(done)), early, late)
        elif freeable:
            edited = [*plan[:late], Free(draw(st.sampled_from(freeable))), *plan[late:]]
        else:
            continue
        if is_legal(graph, edited):
            plan = edited
    return Schedule(tuple(plan))


def evicted(graph: Graph, plan: list[Step], op: int, early: int, late: int) -> list[Step]:
    """What `op` made is freed at `early`; at `late` it is computed again, and what then changed it too."""
    made = set(graph.ops[op].creates)
    alive = {v for v, start, end in lives(graph, plan) if start < early <= end}
    before = [step.op for step in plan[:late] if isinstance(step, Compute)]
    changers = [other for other in dict.fromkeys(before) if made & set(graph.ops[other].mutates)]
    again = dict.fromkeys([op, *changers])
    frees, computes = map(Free, sorted(made & alive)), map(Compute, again)
    return [*plan[:early], *frees, *plan[early:late], *computes, *plan[late:]]


cases = graphs().flatmap(lambda graph: st.tuples(st.just(graph), schedules(graph)))
allocators = st.sampled_from([EXACT, CUDA, Allocator("odd", 3)])


@settings(deadline=None, max_examples=examples(300))
@given(cases, allocators)
def test_every_byte_of_every_step_agrees_with_a_count_from_scratch(
    case: tuple[Graph, Schedule], allocator: Allocator
) -> None:
    graph, schedule = case
    timeline = simulate(graph, schedule, allocator)
    grain = allocator.granularity_bytes
    for i in range(len(schedule)):
        by_category, _ = recount(graph, schedule.steps, grain, i)
        assert [by_category[category] for category in CATEGORIES] == timeline.stack[i].tolist()
        assert by_category.total() == timeline.live_bytes[i]


@settings(deadline=None, max_examples=examples(200))
@given(cases, allocators)
def test_the_peak_and_its_breakdown_agree_with_a_count_from_scratch(
    case: tuple[Graph, Schedule], allocator: Allocator
) -> None:
    graph, schedule = case
    plan, grain = schedule.steps, allocator.granularity_bytes
    timeline = simulate(graph, schedule, allocator)
    before = recount(graph, plan, grain, -1)[0].total()
    computes = [i for i, step in enumerate(plan) if isinstance(step, Compute)]
    at = {i: recount(graph, plan, grain, i)[0].total() for i in computes}
    peak = max([before, *at.values()])
    peak_step = next((i for i in computes if at[i] == peak), None)
    by_category, by_module = recount(graph, plan, grain, -1 if peak_step is None else peak_step)

    assert (timeline.resident_bytes, timeline.peak_bytes, timeline.peak_step) == (before, peak, peak_step)
    assert timeline.growth_bytes == peak - before
    peak_compute = None if timeline.peak_op is None else Compute(timeline.peak_op.id)
    assert peak_compute == (None if peak_step is None else plan[peak_step])
    assert dict(timeline.categories) == {category: by_category[category] for category in CATEGORIES}
    assert dict(timeline.modules) == {name: count for name, count in by_module.items() if count}
    assert sum(timeline.categories.values()) == sum(timeline.modules.values()) == peak


def is_accepted(graph: Graph, plan: Sequence[Step]) -> bool:
    try:
        simulate(graph, Schedule(tuple(plan)))
    except IllegalSchedule:
        return False
    return True


@settings(deadline=None, max_examples=examples(500))
@given(cases, st.data())
def test_a_schedule_is_accepted_exactly_when_it_computes_what_the_graph_computes(
    case: tuple[Graph, Schedule], data: st.DataObject
) -> None:
    graph, schedule = case
    plan = list(schedule.steps)
    assert is_accepted(graph, plan)
    ids = st.integers(0, max(len(graph.ops), len(graph.values)))
    strange = st.one_of(st.builds(Compute, ids), st.builds(Free, ids))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(plan)))
        removed = data.draw(st.integers(0, 2))
        plan[place : place + removed] = data.draw(st.lists(strange, max_size=2))
        assert is_accepted(graph, plan) == is_legal(graph, plan)


@settings(deadline=None, max_examples=examples(300))
@given(cases.filter(lambda case: bool(case[0].ops)), st.data())
def test_a_recomputation_is_accepted_exactly_where_it_gives_the_same_again(
    case: tuple[Graph, Schedule], data: st.DataObject
) -> None:
    graph, schedule = case
    plan = list(schedule.steps)
    op = data.draw(st.sampled_from(range(len(graph.ops))))
    done = plan.index(Compute(op)) + 1
    early, late = sorted(data.draw(st.tuples(*[st.integers(done, len(plan))] * 2)))
    edited = evicted(graph, plan, op, early, late)
    assert is_accepted(graph, edited) == is_legal(graph, edited)
    if extra := len(edited) - len(plan):
        forgetful = [*edited[: late + extra - 1], *edited[late + extra :]]  # less the last step put in
        assert is_accepted(graph, forgetful) == is_legal(graph, forgetful)


# By hand --------------------------------------------------------------------------------------------


def test_the_chain_run_straight_holds_these_bytes() -> None:
    graph = chain()
    schedule = straight(graph)
    assert schedule == steps(0, 1, 2, 3, 4, "f2", "f4", 5, "f5")
    timeline = simulate(graph, schedule)
    assert timeline.live_bytes.tolist() == [1800, 1500, 1504, 2504, 3504, 2504, 1504, 2504, 904]
    assert timeline.resident_bytes == 500
    assert timeline.peak_bytes == 3504
    assert timeline.growth_bytes == 3004
    assert timeline.peak_step == 4
    assert timeline.peak_op == graph.ops[4]
    assert timeline.steps == schedule.steps
    backward = Phase.BACKWARD
    assert timeline.phases == (*[Phase.FORWARD] * 3, backward, backward, None, None, backward, None)


def test_the_chain_at_its_peak_breaks_down_into_categories_and_modules() -> None:
    timeline = simulate(chain(), straight(chain()))
    assert timeline.categories == {
        Category.PARAMETERS: 400,
        Category.BUFFERS: 0,
        Category.OPTIMIZER_STATE: 0,
        Category.GRADIENTS: 0,
        Category.BATCH: 100,
        Category.ACTIVATIONS: 1004,  # hidden, and the loss
        Category.TEMPORARIES: 2000,
        Category.WORKSPACE: 0,
    }
    assert list(timeline.modules.items()) == [("conv", 2400), ("relu", 1000), ("", 104)]
    assert [holding.value for holding in timeline.holdings] == [2, 4, 5, 0, 1, 3]
    assert [holding.bytes for holding in timeline.holdings] == [1000, 1000, 1000, 400, 100, 4]
    assert [str(holding.category) for holding in timeline.holdings] == [
        "activations",
        "temporaries",
        "temporaries",
        "parameters",
        "batch",
        "activations",
    ]
    assert timeline.holdings[1].module == "relu"


def test_a_workspace_can_be_the_peak_and_belongs_to_its_op() -> None:
    graph = chain()
    busy = replace(graph.ops[5], workspace_bytes=5000)
    timeline = simulate(replace(graph, ops=(*graph.ops[:5], busy)), straight(graph))
    assert timeline.peak_bytes == 6904
    assert timeline.peak_step == 7
    assert timeline.categories[Category.WORKSPACE] == 5000
    assert timeline.categories[Category.GRADIENTS] == 400
    assert timeline.modules == {"conv": 6800, "": 104}


def test_recomputing_the_hidden_layer_takes_it_out_of_the_loss_and_puts_it_back() -> None:
    schedule = steps(0, 1, 2, "f2", 3, 0, 1, 4, "f2", "f4", 5, "f5")
    timeline = simulate(chain(), schedule)
    assert timeline.live_bytes.tolist() == [
        1800,
        1500,
        1504,
        504,
        1504,
        2804,
        2504,
        3504,
        2504,
        1504,
        2504,
        904,
    ]
    activations = timeline.stack[:, CATEGORIES.index(Category.ACTIVATIONS)]
    temporaries = timeline.stack[:, CATEGORIES.index(Category.TEMPORARIES)]
    # In its first life hidden is gone before the backward begins; in its second it is held for op 4.
    assert activations.tolist() == [0, 0, 4, 4, 4, 1004, 1004, 1004, 4, 4, 4, 4]
    assert temporaries.tolist() == [1000, 1000, 1000, 0, 1000, 1000, 1000, 2000, 2000, 1000, 1000, 0]


@pytest.mark.parametrize(
    ("maker", "user", "category"),
    [
        (Phase.FORWARD, Phase.BACKWARD, Category.ACTIVATIONS),
        (Phase.RECOMPUTE, Phase.BACKWARD, Category.ACTIVATIONS),
        (Phase.FORWARD, Phase.FORWARD, Category.TEMPORARIES),
        (Phase.RECOMPUTE, Phase.RECOMPUTE, Category.TEMPORARIES),
        (Phase.BACKWARD, Phase.BACKWARD, Category.TEMPORARIES),
        (Phase.FORWARD, Phase.OPTIMIZER, Category.TEMPORARIES),
        (Phase.OPTIMIZER, Phase.BACKWARD, Category.TEMPORARIES),
    ],
)
@pytest.mark.parametrize("freed", [True, False], ids=["freed", "kept to the end"])
def test_an_activation_is_made_by_the_forward_and_held_when_the_backward_runs(
    maker: Phase, user: Phase, category: Category, freed: bool
) -> None:
    drawing = Drawing()
    made = drawing.value("made", 10)
    drawing.op("aten.ones.default", creates=[made], phase=maker)
    drawing.op("aten.sum.default", [made], phase=user)
    timeline = simulate(drawing.graph(), steps(0, 1, "f0") if freed else steps(0, 1))
    assert timeline.categories[category] == timeline.peak_bytes == 10


@pytest.mark.parametrize(
    ("role", "category"),
    [
        (Role.PARAMETER, Category.PARAMETERS),
        (Role.BUFFER, Category.BUFFERS),
        (Role.OPTIMIZER_STATE, Category.OPTIMIZER_STATE),
        (Role.GRADIENT, Category.GRADIENTS),
        (Role.BATCH, Category.BATCH),
        (Role.LIBRARY, Category.WORKSPACE),
        (Role.INTERMEDIATE, Category.TEMPORARIES),
    ],
)
def test_what_is_resident_counts_by_its_role(role: Role, category: Category) -> None:
    drawing = Drawing()
    drawing.value("x", 12, role, module="layer")
    timeline = simulate(drawing.graph(), steps())
    assert {name: count for name, count in timeline.categories.items() if count} == {category: 12}
    assert timeline.modules == {"layer": 12}
    assert timeline.peak_bytes == timeline.resident_bytes == 12
    assert (timeline.growth_bytes, timeline.peak_step, timeline.peak_op) == (0, None, None)
    assert timeline.live_bytes.tolist() == []


def test_an_empty_graph_holds_nothing() -> None:
    timeline = simulate(Drawing().graph(), straight(Drawing().graph()))
    assert timeline.peak_bytes == timeline.resident_bytes == 0
    assert (timeline.steps, timeline.phases, timeline.holdings) == ((), (), ())
    assert timeline.modules == {}
    assert set(timeline.categories.values()) == {0}


def test_what_is_freed_before_the_first_op_was_still_there_before() -> None:
    drawing = Drawing()
    drawing.value("old gradient", 100, Role.GRADIENT, module="layer")
    made = drawing.value("made", 10)
    drawing.op("aten.ones.default", creates=[made])
    timeline = simulate(drawing.graph(), steps("f0", 0))
    assert timeline.live_bytes.tolist() == [0, 10]
    assert timeline.peak_bytes == timeline.resident_bytes == 100
    assert (timeline.peak_step, timeline.peak_op) == (None, None)
    assert timeline.categories[Category.GRADIENTS] == 100
    assert timeline.modules == {"layer": 100}


def test_the_first_of_equal_peaks_is_the_peak() -> None:
    drawing = Drawing()
    drawing.value("x", 7, Role.BATCH)
    drawing.op("aten.relu_.default", [0], mutates=[0])
    drawing.op("aten.relu_.default", [0], mutates=[0])
    timeline = simulate(drawing.graph(), steps(0, 1))
    assert (timeline.peak_bytes, timeline.peak_step) == (7, 0)


@pytest.mark.parametrize(
    ("requested", "exact", "cuda"),
    [(0, 0, 0), (1, 1, 512), (511, 511, 512), (512, 512, 512), (513, 513, 1024), (1024, 1024, 1024)],
)
def test_an_allocator_rounds_up_to_its_grain(requested: int, exact: int, cuda: int) -> None:
    assert EXACT.held(requested) == exact
    assert CUDA.held(requested) == cuda


@pytest.mark.parametrize(
    ("device", "allocator"),
    [
        ("cpu", EXACT),
        ("cuda", CUDA),
        ("cuda:0", CUDA),
        ("cuda:11", CUDA),
        ("cudalike", EXACT),
        ("xpu", EXACT),
    ],
)
def test_cuda_devices_round_and_others_do_not(device: str, allocator: Allocator) -> None:
    assert allocator_of(device) is allocator


def test_on_cuda_every_value_is_rounded_and_workspaces_are_taken_as_measured() -> None:
    graph = chain("cuda:0")
    timeline = simulate(graph, straight(graph))
    # 512 + 512 resident; 1000 → 1024, 400 → 512, 4 → 512
    assert timeline.live_bytes.tolist() == [2348, 2048, 2560, 3584, 4608, 3584, 2560, 3672, 2048]
    assert simulate(graph, straight(graph), EXACT).peak_bytes == 3504


def test_values_on_another_device_weigh_nothing() -> None:
    graph = chain()
    away = replace(graph.values[2], device="cuda:0")
    graph = replace(graph, values=(*graph.values[:2], away, *graph.values[3:]))
    timeline = simulate(graph, straight(graph))
    assert timeline.live_bytes.tolist() == [800, 500, 504, 1504, 2504, 2504, 1504, 2504, 904]
    assert 2 not in [holding.value for holding in timeline.holdings]


def test_a_value_that_an_op_creates_and_fills_at_once_may_be_recomputed() -> None:
    drawing = Drawing()
    made, loss = drawing.value("made", 10), drawing.value("loss", 4)
    drawing.op("aten.normal.out", creates=[made], mutates=[made])
    drawing.op("aten.sum.default", [made], [loss])
    assert simulate(drawing.graph([loss]), steps(0, "f0", 0, 1)).live_bytes.tolist() == [10, 0, 10, 14]


def test_a_resident_value_may_be_freed_after_its_last_use() -> None:
    timeline = simulate(chain(), steps(0, 1, 2, 3, 4, 5, "f0", "f1"))
    assert timeline.live_bytes.tolist()[-3:] == [4504, 3504, 3404]


# Properties -----------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=examples(200))
@given(cases, st.data())
def test_freeing_earlier_never_raises_the_peak(case: tuple[Graph, Schedule], data: st.DataObject) -> None:
    graph, schedule = case
    frees = [i for i, step in enumerate(schedule) if isinstance(step, Free)]
    if not frees:
        return
    late = data.draw(st.sampled_from(frees))
    early = data.draw(st.integers(0, late))
    plan = list(schedule.steps)
    plan.insert(early, plan.pop(late))
    if is_legal(graph, plan):
        assert simulate(graph, Schedule(tuple(plan))).peak_bytes <= simulate(graph, schedule).peak_bytes


@settings(deadline=None, max_examples=examples(150))
@given(cases.filter(lambda case: bool(case[0].ops)), st.integers(1, 5000), st.data())
def test_more_workspace_raises_the_peak_by_no_more_than_itself(
    case: tuple[Graph, Schedule], extra: int, data: st.DataObject
) -> None:
    graph, schedule = case
    op = data.draw(st.sampled_from(graph.ops))
    fuller = replace(op, workspace_bytes=op.workspace_bytes + extra)
    before = simulate(graph, schedule).peak_bytes
    after = simulate(
        replace(graph, ops=(*graph.ops[: op.id], fuller, *graph.ops[op.id + 1 :])), schedule
    ).peak_bytes
    assert before <= after <= before + extra


@settings(deadline=None, max_examples=examples(150))
@given(graphs(), st.data())
def test_straight_is_legal_and_holds_the_least_that_graph_order_allows(
    graph: Graph, data: st.DataObject
) -> None:
    assert is_legal(graph, straight(graph).steps)
    least = simulate(graph, straight(graph))
    other = simulate(graph, data.draw(schedules(graph, recompute=False, free_residents=False)))

    def while_computing(plan: Sequence[Step], live: Sequence[int]) -> list[int]:
        return [count for step, count in zip(plan, live, strict=True) if isinstance(step, Compute)]

    lower = while_computing(least.steps, least.live_bytes.tolist())
    upper = while_computing(other.steps, other.live_bytes.tolist())
    assert all(a <= b for a, b in zip(lower, upper, strict=True))
    assert least.peak_bytes <= other.peak_bytes
    left = {value for value, _, end in lives(graph, least.steps) if end == len(least.steps)}
    assert left == graph.outputs | set(graph.resident)


# Refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (
            steps(0, 1, 2, "f2", 3, 4),
            "step 5, op 4 (relu: aten.threshold_backward), reads value 2 ('hidden'), which was freed",
        ),
        (steps(1), "step 0, op 1 (relu: aten.relu_), reads value 2 ('hidden'), which does not exist yet"),
        (steps("f1", 0), "step 1, op 0 (conv: aten.convolution), reads value 1 ('image'), which was freed"),
        (steps(0, 1, 2, "f2", "f2"), "step 4 frees value 2 ('hidden'), already freed"),
        (steps("f0", "f0"), "step 1 frees value 0 ('conv.weight'), already freed"),
        (steps(0, "f4"), "step 1 frees value 4 ('hidden.grad'), not yet created"),
        (steps(0, 0), "step 1, op 0 (conv: aten.convolution), creates value 2 ('hidden'), which is alive"),
        (steps(0, 1, 2, 3, 4), "op 5 (conv: aten.convolution_backward) is never computed"),
        (steps(), "op 0 (conv: aten.convolution) is never computed"),
        (steps(0, 6), "step 1 computes op 6, which is not in the graph"),
        (steps(-1), "step 0 computes op -1, which is not in the graph"),
        (steps("f7"), "step 0 frees value 7, which is not in the graph"),
        (steps("f-1"), "step 0 frees value -1, which is not in the graph"),
        (steps(0, 1, 2, 3, 4, 5, "f3"), "value 3 ('loss') must outlive the step but is freed"),
        (
            steps(0, 1, 1),
            "step 2, op 1 (relu: aten.relu_), reads value 2 ('hidden') after it was changed 1 times; "
            "in graph order it was changed 0 times",
        ),
        (
            steps(0, 1, 2, "f2", 0, 3, 4),
            "step 6, op 4 (relu: aten.threshold_backward), reads value 2 ('hidden') after it was changed "
            "0 times; in graph order it was changed 1 times",
        ),
    ],
)
def test_a_schedule_that_cannot_be_run_is_refused_by_name(schedule: Schedule, message: str) -> None:
    with pytest.raises(IllegalSchedule) as refusal:
        simulate(chain(), schedule)
    assert str(refusal.value) == message


def test_drawing_random_numbers_twice_is_refused() -> None:
    with pytest.raises(IllegalSchedule) as refusal:
        simulate(statistics(random=True), steps(0, "f2", 0, 1))
    assert str(refusal.value) == (
        "step 2, op 0 (bn: aten.batch_norm), draws random numbers and is computed a second time"
    )


def test_updating_running_statistics_twice_is_refused() -> None:
    with pytest.raises(IllegalSchedule) as refusal:
        simulate(statistics(), steps(0, "f2", 0, 1))
    assert str(refusal.value) == (
        "step 2, op 0 (bn: aten.batch_norm), reads value 0 ('running_mean') after it was changed 1 times; "
        "in graph order it was changed 0 times"
    )


def test_recomputing_from_a_value_overwritten_since_is_refused() -> None:
    drawing = Drawing()
    x = drawing.value("x", 8, Role.BATCH)
    y, loss = drawing.value("y", 8), drawing.value("loss", 4)
    drawing.op("aten.exp.default", [x], [y])
    drawing.op("aten.zero_.default", mutates=[x])
    drawing.op("aten.sum.default", [y], [loss])
    graph = drawing.graph([loss])
    assert simulate(graph, steps(0, "f1", 0, 1, 2)).peak_bytes == 20
    with pytest.raises(IllegalSchedule) as refusal:
        simulate(graph, steps(0, "f1", 1, 0, 2))
    assert str(refusal.value) == (
        "step 3, op 0 (aten.exp), reads value 0 ('x') after it was changed 1 times; "
        "in graph order it was changed 0 times"
    )


def test_an_output_that_was_recomputed_but_not_changed_again_is_refused() -> None:
    drawing = Drawing()
    y = drawing.value("y", 8)
    drawing.op("aten.ones.default", creates=[y])
    drawing.op("aten.relu_.default", [y], mutates=[y])
    graph = drawing.graph([y])
    assert simulate(graph, steps(0, 1, "f0", 0, 1)).peak_bytes == 8
    with pytest.raises(IllegalSchedule) as refusal:
        simulate(graph, steps(0, 1, "f0", 0))
    assert str(refusal.value) == (
        "value 0 ('y') must outlive the step but ends it changed 0 times; "
        "in graph order it is changed 1 times"
    )


# What is updated once -------------------------------------------------------------------------------


def with_statistics() -> Graph:
    """0 mean (resident), 1 batch (resident), op 0 normalises into 2 and updates the mean, op 1 reads both."""
    drawing = Drawing()
    mean, batch = drawing.value("mean", 8, Role.BUFFER), drawing.value("batch", 4, Role.BATCH)
    normed, result = drawing.value("normed", 100), drawing.value("result", 10)
    drawing.op("aten.native_batch_norm.default", [batch], [normed], updates=[mean])
    drawing.op("aten.mul.Tensor", [normed, mean], [result])
    return drawing.graph(outputs=[mean, result])


def test_an_op_that_runs_again_does_not_update_again() -> None:
    graph = with_statistics()
    again = Schedule((Compute(0), Free(2), Compute(0), Compute(1), Free(2)))
    assert simulate(graph, again).growth_bytes == 110  # op 1 finds the mean changed once, as in graph order
