"""`torch.compile(model, backend="lowtide")` where steps differ: in shapes, and in graphs that run."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lowtide.aot.draw import Drawn
from lowtide.backend import _ours, _tell_of_skipped, plans_of
from lowtide.backend import lowtide as backend
from lowtide.backend.settled import settled
from lowtide.compat.patches import active
from lowtide.errors import InfeasibleBudget
from lowtide.ir.graph import Phase, Role
from lowtide.ir.schedule import Compute, Free, Schedule, straight
from lowtide.ir.simulate import simulate
from tests.helpers.handmade import Drawing
from tests.planner.test_ops import growth

WIDTH = 32
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def compiled(model: nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(model, backend=backend, options=options, dynamic=False)


def peak(model: Any, rows: torch.Tensor) -> int:
    """What a step holds of its own: the model, the batch, and what it makes."""
    model.zero_grad(set_to_none=True)
    there: int = rows.untyped_storage().nbytes() + sum(each.nbytes for each in model.parameters())
    grown: int = growth(lambda: model(rows).backward())
    return there + grown


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        for _ in range(count)
    )


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Branching(nn.Module):
    """What comes after the first blocks is up to `which`: nothing, or the one or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one, self.other = blocks(2), blocks(3), blocks(2)
        self.which = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def chosen(self) -> int:
        return self.which

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.first:
            x = x + block(x)
        which = self.chosen()
        if which == 0:
            return x.square().mean()
        return self.rest(x, self.one if which == 1 else self.other)

    def rest(self, x: torch.Tensor, rest: nn.ModuleList) -> torch.Tensor:
        for block in rest:
            x = x + block(x)
        return x.square().mean()


ROWS = torch.randn(256, WIDTH)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_the_budget_is_kept_for_more_shapes_than_dynamo_compiles_a_frame_for() -> None:
    model = Deep()
    counts = [256 - 4 * k for k in range(torch._dynamo.config.recompile_limit + 2)]
    budget = int(0.7 * peak(model, ROWS[: counts[0]]))
    assert peak(model, ROWS[: counts[-1]]) > budget
    options = {"budget": budget, "profile": False}
    planned = compiled(model, options)
    for count in counts:
        peaks = [peak(planned, ROWS[:count]) for _ in range(2)]
        assert max(peaks) <= budget
    assert len(plans_of(options)) == len(counts)
    del planned
    torch._dynamo.reset()
    gc.collect()
    assert active() == ()


def test_the_limit_of_recompilations_stays_for_other_backends() -> None:
    planned = compiled(Deep(), {"budget": "1GiB"})
    planned(ROWS)
    seen: list[int] = []

    def counting(module: Any, _: Any) -> Any:
        seen.append(1)
        return module.forward

    other = torch.compile(lambda x: x.exp().sum(), backend=counting, dynamic=False)
    limit = torch._dynamo.config.recompile_limit
    for count in range(limit + 3):
        other(ROWS[: 8 + count])
    assert len(seen) == limit


def test_paths_that_alternate_after_a_common_beginning_are_within_the_budget_and_planned_once_each() -> None:
    model = Branching()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"budget": 0, "profile": False}
    for model.which in (0, 1, 2):
        options["budget"] = max(options["budget"], int(0.6 * peak(model, ROWS)))
    planned = compiled(model, options)
    seen: dict[int, int] = {}
    for which in (1, 1, 2, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 2, 1, 1):
        model.which = plain.which = which
        measured = peak(planned, ROWS)
        peak(plain, ROWS)
        assert all(map(torch.equal, gradients(model), gradients(plain)))
        plain.zero_grad(set_to_none=True)
        seen[which] = measured
    plans = plans_of(options)
    assert len(plans) == 3
    assert max(seen.values()) <= options["budget"]


def test_a_budget_that_cannot_be_kept_is_lowtides_own_error_and_can_be_raised() -> None:
    options: dict[str, Any] = {"budget": "1KiB"}
    planned = compiled(Deep(), options)
    for _ in range(2):
        with pytest.raises(InfeasibleBudget, match=r"no plan of auto fits in 1\.0 KiB"):
            planned(ROWS)
    options["budget"] = "1GiB"
    for _ in range(2):
        planned(ROWS).backward()
    assert len(plans_of(options)) == 1


class Broken(nn.Module):
    """Two graphs, each of which alone is small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Deep(), Deep()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        self.note()
        second: torch.Tensor = first + self.second(x)
        return second


def test_a_budget_that_graphs_keep_alone_but_not_together_is_refused_until_it_is_raised() -> None:
    model = Broken()
    least = {"budget": "min"}
    planned = compiled(model, least)
    for _ in range(2):
        peak(planned, ROWS)
    (lowest,) = plans_of(least)
    torch._dynamo.reset()
    options: dict[str, Any] = {"budget": lowest.peak_bytes - 1024}
    planned = compiled(model, options)
    planned(ROWS).backward()
    for _ in range(2):
        with pytest.raises(InfeasibleBudget, match="the least it reaches"):
            planned(ROWS)
    options["budget"] = lowest.peak_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert peak(planned, ROWS) <= lowest.peak_bytes


def test_a_graph_that_is_refused_alone_names_a_least_that_is_not_taken_for_the_steps() -> None:
    least = {"budget": "min"}
    planned = compiled(Broken(), least)
    for _ in range(2):
        peak(planned, ROWS)
    (lowest,) = plans_of(least)
    torch._dynamo.reset()
    with pytest.raises(InfeasibleBudget, match=r"least of one graph; a step of several.*\"min\"") as refused:
        compiled(Broken(), {"budget": "1KiB"})(ROWS)
    assert refused.value.least_bytes < lowest.peak_bytes


class Uneven(nn.Module):
    """A deep graph, and one of which nothing is known yet when the deep one is compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = blocks(4), blocks(1)[0]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.first:
            x = x + block(x)
        self.note()
        second: torch.Tensor = self.second(x)
        return second.square().mean()


def test_a_first_step_that_may_have_held_more_than_the_budget_says_so_once() -> None:
    model = Uneven()
    least: dict[str, Any] = {"budget": "min", "profile": False}
    planned = compiled(model, least)
    first = peak(planned, ROWS)
    peak(planned, ROWS)
    (lowest,) = plans_of(least)
    assert first > lowest.peak_bytes
    torch._dynamo.reset()
    planned = compiled(model, {"budget": lowest.peak_bytes, "profile": False})
    peak(planned, ROWS)
    with pytest.warns(UserWarning, match="that step may have held up to") as caught:
        assert max(peak(planned, ROWS) for _ in range(3)) <= lowest.peak_bytes
    assert len([each for each in caught if "in the first step of a kind" in str(each.message)]) == 1


class Looping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(2))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def note(self) -> None:
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = x @ weight
            self.note()
        return x.sum()


def test_a_graph_that_ends_inside_of_a_loop_is_told_in_one_line() -> None:
    _ours.tell_of_skipped(_tell_of_skipped)  # a reset of Dynamo, in another test, has it forget
    planned = compiled(Looping(), {"budget": "1GiB"})
    with pytest.warns(UserWarning, match=r"inside of a loop, at test_kinds_of_steps.py:\d+, in forward"):
        planned(ROWS)


def test_a_graph_of_another_backend_that_ends_inside_of_a_loop_is_none_of_ours() -> None:
    _ours.tell_of_skipped(_tell_of_skipped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(Looping(), backend="eager")(ROWS)


# A graph that is settled ------------------------------------------------------------------------------


def drawing() -> Drawn:
    """x → a → y and back: dy, a → dx; `a` is run again in the backward, with half a workspace."""
    sketch = Drawing()
    x, dy = sketch.value("x", 10, Role.BATCH), sketch.value("dy", 10, Role.BATCH)
    a, y, dx = sketch.value("a", 30), sketch.value("y", 10), sketch.value("dx", 10)
    sketch.op("aten.relu.default", [x], [a])
    sketch.op("aten.sum.default", [a], [y])
    sketch.op("aten.threshold_backward.default", [dy, a], [dx], phase=Phase.BACKWARD)
    return Drawn(sketch.graph(outputs=[y, dx]), (x,), (y,), (dy,), (dx,))


KEPT = straight(drawing().graph)
AGAIN = Schedule((Compute(0), Compute(1), Free(2), Compute(0), Compute(2), Free(2)))


@pytest.mark.parametrize(("schedule", "between"), [(KEPT, 30), (AGAIN, 0)], ids=["kept", "run again"])
def test_a_settled_graph_holds_what_its_schedule_holds(schedule: Schedule, between: int) -> None:
    drawn = drawing()
    found = settled(drawn, schedule).graph
    now, before = simulate(found, straight(found)), simulate(drawn.graph, schedule)
    assert now.peak_bytes == before.peak_bytes
    assert [op.phase for op in found.ops] == [Phase.FORWARD, Phase.BACKWARD]
    assert int(now.live_bytes[0]) - found.ops[0].workspace_bytes == 20 + 10 + between
    assert found.values[-1].bytes == between
    assert int(now.live_bytes[-1]) == int(before.live_bytes[-1]) == 40
