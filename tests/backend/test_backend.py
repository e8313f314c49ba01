"""`torch.compile(model, backend="lowtide")`: watched once, then within the budget."""

from __future__ import annotations

import copy
import gc
import itertools
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.aot.join import joined
from lowtide.aot.mark import Mark
from lowtide.aot.planned_graph import PlannedGraph
from lowtide.backend import lowtide as backend
from lowtide.backend import plans_of
from lowtide.backend.graph import StepGraph
from lowtide.ir.graph import Graph, Phase, Role
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from tests.helpers.handmade import Drawing
from tests.planner.test_ops import IMAGES, LABELS, assert_same, growth, small, trained


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def resident(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), IMAGES, LABELS))


def compiled(model: nn.Module, **options: Any) -> Any:
    return compiled_with(model, options)


def compiled_with(model: nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(model, backend=backend, options=options, dynamic=False)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
@pytest.mark.parametrize("broken", [False, True])
def test_the_first_step_is_the_lowest_and_the_next_are_within_the_budget(broken: bool) -> None:
    model, plain = small(broken=broken, depth=5), small(broken=broken, depth=5)
    whole = growth(trained(copy.deepcopy(plain), IMAGES, LABELS))
    budget = resident(model) + int(0.75 * whole)
    planned = compiled(model, budget=budget)
    trained(plain, IMAGES, LABELS)()
    peaks = []
    for _ in range(3):
        model.load_state_dict(small(broken=broken, depth=5).state_dict())
        peaks.append(growth(trained(planned, IMAGES, LABELS)))
        assert_same(model, plain)
    assert max(peaks) <= budget - resident(model)
    assert peaks[0] < peaks[1] == peaks[2]


class Stages(nn.Module):
    """Graphs one after another; `kept` is what somebody holds of what passes from one to the next."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(5)
        )
        self.kept: list[torch.Tensor] | None = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def pass_on(self, x: torch.Tensor) -> None:
        if self.kept is not None:
            self.kept.append(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.stages[0](x)
        self.pass_on(x)
        x = x + self.stages[1](x)
        self.pass_on(x)
        x = x + self.stages[2](x)
        self.pass_on(x)
        x = x + self.stages[3](x)
        self.pass_on(x)
        x = x + self.stages[4](x)
        self.pass_on(x)
        return x.square().mean()


ROWS = torch.randn(512, 64)


def staged(budget: str | int, *, holding: bool) -> tuple[Any, list[int], int]:
    """A plan, what three steps grew by, and what was there before each."""
    torch.manual_seed(0)
    model = Stages()
    options: dict[str, Any] = {"budget": budget}
    planned = compiled_with(model, options)
    growths = []
    for _ in range(3):
        model.kept = [] if holding else None
        growths.append(growth(trained(planned, ROWS)))
    (plan,) = plans_of(options)
    return plan, growths, sum(tensor.nbytes for tensor in (*model.parameters(), ROWS))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("holding", [False, True])
def test_what_passes_between_graphs_is_counted_for_as_long_as_somebody_holds_it(holding: bool) -> None:
    plan, growths, there = staged("min", holding=holding)
    assert plan.timeline.resident_bytes - 4 == there
    assert growths[1:] == [plan.timeline.growth_bytes] * 2


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_first_of_many_graphs_leave_room_for_the_others() -> None:
    lowest, _, there = staged("min", holding=False)
    budget = lowest.peak_bytes + lowest.timeline.growth_bytes // 10
    plan, growths, _ = staged(budget, holding=False)
    assert plan.budget_bytes == budget
    assert all(there + grown <= budget for grown in growths)


def test_a_forward_without_a_backward_does_not_keep_steps_from_being_planned() -> None:
    model, options = small(), {"budget": "1GiB"}
    planned = compiled_with(model, options)
    planned(IMAGES, LABELS)
    for _ in range(2):
        trained(planned, IMAGES, LABELS)()
    assert len(plans_of(options)) == 1


def test_there_are_no_plans_before_the_second_step() -> None:
    model, options = small(), {"budget": "1GiB"}
    assert plans_of(options) == ()
    planned = compiled_with(model, options)
    trained(planned, IMAGES, LABELS)()
    assert plans_of(options) == ()
    trained(planned, IMAGES, LABELS)()
    (plan,) = plans_of(options)
    assert plan.peak_bytes <= 2**30


def test_another_batch_is_watched_and_planned_too() -> None:
    model, plain = small(), small()
    planned = compiled(model, budget="1GiB")
    for count in (8, 8, 6, 6, 8):
        trained(planned, IMAGES[:count], LABELS[:count])()
        trained(plain, IMAGES[:count], LABELS[:count])()
        assert_same(model, plain)


def test_evaluation_runs_as_it_is() -> None:
    model, plain = small().eval(), small().eval()
    planned = compiled(model, budget="1GiB")
    with torch.no_grad():
        assert torch.equal(planned(IMAGES), plain(IMAGES))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"needs a budget"),
        ({"budget": "60%"}, r"does not know the plain peak, of which 60% is to be a part"),
        ({"budget": "1GiB", "colour": "blue"}, r"no option 'colour'; it has budget, method, profile"),
        ({"budget": "1GiB", "method": "rotor"}, r"rotor plans layers; the backend plans op by op"),
        ({"budget": "1KiB"}, r"no plan of auto fits in 1\.0 KiB: the least it reaches"),
    ],
)
def test_refusals_reach_the_user(options: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=message):
        compiled(nn.Linear(24, 8), **options)(IMAGES)


def test_sizes_that_are_symbols_are_refused() -> None:
    planned = torch.compile(nn.Linear(24, 8), backend=backend, options={"budget": "1GiB"}, dynamic=True)
    with pytest.raises(Exception, match=r"Compile with dynamic=False"):
        planned(IMAGES)


def test_torch_finds_it_by_its_name() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    where = project["project"]["entry-points"]["torch_dynamo_backends"]["lowtide"]
    module, _, name = where.partition(":")
    assert getattr(import_module(module), name) is backend


# Joining ----------------------------------------------------------------------------------------------


def part() -> Graph:
    """x (given) → y, and back: dy (given) → dx."""
    drawing = Drawing()
    x, dy = drawing.value("x", 10, Role.BATCH), drawing.value("dy", 10, Role.BATCH)
    y, dx = drawing.value("y", 10), drawing.value("dx", 10)
    drawing.op("aten.relu.default", [x], [y])
    drawing.op("aten.threshold_backward.default", [dy, y], [dx], phase=Phase.BACKWARD)
    return drawing.graph(outputs=[y, dx])


CHAIN = {
    (1, 0): (0, 2),
    (0, 1): (1, 3),
}  # y of the first is x of the second, dx of the second dy of the first


def test_joined_parts_run_forwards_in_order_and_backwards_in_the_opposite_one() -> None:
    whole = joined([part(), part()], CHAIN)
    assert [(op.section, op.phase) for op in whole.ops] == [
        (0, Phase.FORWARD), (1, Phase.FORWARD), (1, Phase.BACKWARD), (0, Phase.BACKWARD),
    ]  # fmt: skip
    assert len(whole.values) == 6
    assert whole.ops[1].reads == whole.ops[0].creates
    assert whole.ops[3].reads[0] == whole.ops[2].creates[0]
    assert simulate(whole, straight(whole)).peak_bytes == 60  # x, the last dy, and all that is made


def test_what_passes_goes_after_its_last_use_but_not_before_its_half_is_over() -> None:
    whole = joined([part(), part()], CHAIN, {(0, 2), (1, 3)})
    assert [(op.target, op.section) for op in whole.ops] == [
        ("aten.relu.default", 0),
        ("aten.relu.default", 1),
        ("lowtide.handed_on", -1),  # y of the first, at the end of the forwards
        ("aten.threshold_backward.default", 1),
        ("lowtide.handed_on", -1),  # dx of the second
        ("aten.threshold_backward.default", 0),
    ]
    timeline = simulate(whole, straight(whole))
    assert timeline.peak_bytes == 60  # y of the first is read by its own backward, where all are there
    assert int(timeline.live_bytes[-1]) == 40  # x, the last dy, y of the second, and dx of the first


def test_what_nobody_reads_again_is_held_until_the_forwards_are_over() -> None:
    def unread() -> Graph:
        """x (given) → y, and back, without either: dy (given) → dx."""
        drawing = Drawing()
        x, dy = drawing.value("x", 10, Role.BATCH), drawing.value("dy", 10, Role.BATCH)
        y, dx = drawing.value("y", 10), drawing.value("dx", 10)
        drawing.op("aten.neg.default", [x], [y])
        drawing.op("aten.neg.default", [dy], [dx], phase=Phase.BACKWARD)
        return drawing.graph(outputs=[y, dx])

    whole = joined([unread(), unread()], CHAIN, {(0, 2), (1, 3)})
    live = [int(bytes_) for bytes_ in simulate(whole, straight(whole)).live_bytes]
    # made: y, y; y of the first freed; made: dx, dx; dx of the second freed
    assert live == [30, 40, 40, 30, 40, 40, 50, 40]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's own
@pytest.mark.parametrize(
    ("kind", "failing", "error"),
    [
        pytest.param(PlannedGraph, 0, torch.OutOfMemoryError, id="in the last graph"),
        pytest.param(StepGraph, 1, KeyboardInterrupt, id="between two graphs"),
        pytest.param(PlannedGraph, 2, KeyboardInterrupt, id="in the first graph", marks=pytest.mark.long),
    ],
)
def test_a_step_that_fails_while_it_is_watched_is_watched_again(
    kind: type[PlannedGraph], failing: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = small(broken=True, depth=5), small(broken=True, depth=5)
    whole = growth(trained(copy.deepcopy(plain), IMAGES, LABELS))
    budget = resident(model) + int(0.75 * whole)
    options = {"budget": budget}
    planned = compiled_with(model, options)
    trained(plain, IMAGES, LABELS)()
    with monkeypatch.context() as patch:
        patch.setattr(kind, "run_backward", failing_at(failing, error, kind.run_backward))
        with pytest.raises(error, match="on purpose"):
            trained(planned, IMAGES, LABELS)()
    peaks = []
    for _ in range(4):
        model.load_state_dict(small(broken=True, depth=5).state_dict())
        peaks.append(growth(trained(planned, IMAGES, LABELS)))
        assert_same(model, plain)
    assert max(peaks) <= budget - resident(model)
    assert peaks[-2] == peaks[-1]
    (plan,) = plans_of(options)
    assert {op.section for op in plan.graph.ops} >= {0, 1}


def failing_at(number: int, error: type[BaseException], run: Callable[..., Any]) -> Callable[..., Any]:
    """What runs a graph's backward and fails at a moment: before the first, 0, after it, 1, and so on."""
    moments = itertools.count()

    def fail() -> None:
        if next(moments) == number:
            raise error("on purpose")

    def run_backward(graph: PlannedGraph, mark: Mark, args: list[Any]) -> Any:
        fail()
        found = run(graph, mark, args)
        fail()
        return found

    return run_backward
