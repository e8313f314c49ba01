"""A whole training replayed: what is born in the first step, and what lies where ever after."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lowtide.ir.cuda_allocator import cached
from lowtide.ir.graph import OPTIMIZER_STEP, Graph, Phase, Role
from lowtide.ir.schedule import straight
from lowtide.ir.training_reserve import AllocatedRun, training_reserve
from tests.helpers.handmade import Drawing, graphs, steps

MIB = 1 << 20


def training() -> AllocatedRun:
    """Weight, gradient and state of 20 MiB each, a batch of 4, hidden 40, and 40 for the update."""
    drawing = Drawing("cuda:0")
    weight = drawing.value("weight", 20 * MIB, Role.PARAMETER)
    batch = drawing.value("batch", 4 * MIB, Role.BATCH)
    old = drawing.value("weight.grad", 20 * MIB, Role.GRADIENT)
    state = drawing.value("weight.exp_avg", 20 * MIB, Role.OPTIMIZER_STATE)
    hidden, temporary = drawing.value("hidden", 40 * MIB), drawing.value("temporary", 40 * MIB)
    new = drawing.value("weight.grad", 20 * MIB, Role.GRADIENT)
    drawing.op("aten.mm.default", [weight, batch], [hidden])
    drawing.op("aten.mm.default", [batch, hidden], [new], phase=Phase.BACKWARD)
    drawing.op("aten.sqrt.default", [state], [temporary], phase=Phase.OPTIMIZER)
    drawing.op("aten.add_.Tensor", [temporary, new], [], [weight], phase=Phase.OPTIMIZER)
    graph = drawing.graph(outputs=[weight, state, new])
    return AllocatedRun(graph, steps(f"f{old}", 0, 1, f"f{hidden}", 2, 3, f"f{temporary}"))


def allocated(step: AllocatedRun, plain: AllocatedRun | None = None) -> dict[str, int]:
    return {stage.name: stage.allocated_bytes // MIB for stage in training_reserve(step, plain).stages}


def test_gradients_and_states_are_born_in_the_first_step_and_are_there_from_then_on() -> None:
    assert allocated(training()) == {
        "loading the model": 20,
        # the weight and its batch; hidden and gradient (84), or gradient, state and temporary (104)
        "the first step": 104,
        # two batches, the old gradient, state and weight until it is dropped; then as the first
        "the second step": 104,
        "the third step": 104,
        # weight, batch, gradient and state stay; the other batch and hidden come
        "a validation pass": 64 + 44,
        "a step after validation": 104,
        # two of batch, weight, gradient, state and temporary: a parameter's are as large as ever
        "a last, smaller batch": 2 + 20 + 20 + 20 + 20,
        "a second validation pass": 62 + 44,
        "the next epoch": 104,
        "and its second step": 104,
    }


def test_what_fails_is_named_and_what_came_before_is_told() -> None:
    step = training()
    found = training_reserve(step, expandable=True, device_bytes=104 * MIB)
    assert found.failed == "the first step"
    assert [stage.name for stage in found.stages] == ["loading the model", "the first step"]
    roomy = training_reserve(step, expandable=True)
    assert training_reserve(step, expandable=True, device_bytes=roomy.reserved_bytes) == roomy


def test_libraries_take_their_memory_at_the_first_product_of_either_thread() -> None:
    drawing = Drawing("cuda:0")
    weight = drawing.value("weight", 10 * MIB, Role.PARAMETER)
    early, late, new = (drawing.value(name, 20 * MIB) for name in ("early", "late", "new"))
    held = drawing.value("workspaces that libraries keep", 60 * MIB, Role.LIBRARY)
    drawing.op("aten.relu.default", [weight], [early])
    drawing.op("aten.mm.default", [early], [late])
    drawing.op("aten.mm.default", [late], [new], phase=Phase.BACKWARD)
    step = AllocatedRun(drawing.graph(), steps(0, 1, f"f{early}", 2, f"f{late}", f"f{new}"))
    assert step.born_late() == {1: [(held, 30 * MIB)], 2: [(~held, 30 * MIB)]}
    found = {stage.name: stage.allocated_bytes // MIB for stage in training_reserve(step).stages}
    assert found["loading the model"] == 10
    assert found["the first step"] == 10 + 60 + 20 + 20
    assert found["the second step"] == 10 + 60 + 20 + 20


def test_the_update_of_a_planned_step_is_that_of_the_plain_one() -> None:
    """A plan has one op for it, whose workspace is one block; what it takes really are several."""
    drawing = Drawing("cuda:0")
    weight = drawing.value("weight", 20 * MIB, Role.PARAMETER)
    drawing.value("weight.exp_avg", 20 * MIB, Role.OPTIMIZER_STATE)
    new = drawing.value("weight.grad", 20 * MIB, Role.GRADIENT)
    drawing.op("aten.mm.default", [weight], [new], phase=Phase.BACKWARD)
    drawing.op(OPTIMIZER_STEP, [], [], phase=Phase.OPTIMIZER, workspace=30 * MIB)
    planned = AllocatedRun(drawing.graph(outputs=[new]), steps(0, 1))
    assert allocated(planned)["the first step"] == 20 + 20 + 20 + 30
    assert allocated(planned, training())["the first step"] == 20 + 20 + 20 + 40


def test_gradients_that_no_plan_names_are_dropped_before_the_next_step() -> None:
    drawing = Drawing("cuda:0")
    weight, batch = drawing.value("weight", 20 * MIB, Role.PARAMETER), drawing.value("x", 6 * MIB, Role.BATCH)
    new = drawing.value("weight.grad", 20 * MIB, Role.GRADIENT)
    drawing.op("aten.mm.default", [weight, batch], [new], phase=Phase.BACKWARD)
    found = allocated(AllocatedRun(drawing.graph(outputs=[new]), steps(0)))
    assert found["the first step"] == 20 + 6 + 20
    assert found["the second step"] == 20 + 6 + 6 + 20  # the next batch is there before the gradient is gone
    assert found["a validation pass"] == 20 + 6 + 20 + 6


def test_gradients_so_far_are_those_of_the_step_before() -> None:
    drawing = Drawing("cuda:0")
    weight = drawing.value("weight", 20 * MIB, Role.PARAMETER)
    drawing.value("weight.grad so far", 20 * MIB, Role.GRADIENT)
    new = drawing.value("weight.grad", 20 * MIB, Role.GRADIENT)
    drawing.op("aten.mm.default", [weight], [new], phase=Phase.BACKWARD)
    found = allocated(AllocatedRun(drawing.graph(outputs=[new]), steps(0)))
    assert (found["the first step"], found["the second step"]) == (40, 60)


@given(graphs(), st.booleans())
def test_a_step_among_others_holds_what_the_referee_counts(graph: Graph, expandable: bool) -> None:
    schedule = straight(graph)
    found = training_reserve(AllocatedRun(graph, schedule), expandable=expandable)
    batches = [graph.counted_bytes(value) for value in AllocatedRun(graph, schedule).of_role(Role.BATCH)]
    third = found.stages[3].allocated_bytes
    counted = cached(graph, schedule, expandable=expandable).allocated_bytes
    assert counted <= third + 512 * len(graph.values)
    assert third <= counted + sum(-(-size // 512) * 512 for size in batches) + _gradients(graph)
    assert found.allocated_bytes <= found.reserved_bytes


def _gradients(graph: Graph) -> int:
    """What may still be there of the step before."""
    values = (value for value in graph.values if value.role is Role.GRADIENT)
    return sum(-(-value.bytes // 512) * 512 for value in values)
