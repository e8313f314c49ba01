"""`torch.compile(model, backend="lowtide")`: watched once, then within the budget."""

from __future__ import annotations

import copy
import gc
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from handmade import Drawing
from lowtide.backend import lowtide as backend
from lowtide.graph import Graph, Phase, Role
from lowtide.joining import joined
from lowtide.schedule import straight
from lowtide.simulation import simulate
from test_optimizing import IMAGES, LABELS, Net, assert_same, growth, small, trained


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def resident(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers(), IMAGES, LABELS))


def compiled(model: Net, **options: Any) -> Any:
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
        compiled(small(), **options)(IMAGES, LABELS)


def test_sizes_that_are_symbols_are_refused() -> None:
    planned = torch.compile(small(), backend=backend, options={"budget": "1GiB"}, dynamic=True)
    with pytest.raises(Exception, match=r"Compile with dynamic=False"):
        planned(IMAGES, LABELS)


def test_torch_finds_it_by_its_name() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    where = project["project"]["entry-points"]["torch_dynamo_backends"]["lowtide"]
    module, _, name = where.partition(":")
    assert getattr(import_module(module), name) is backend


# Joining ----------------------------------------------------------------------------------------------


def test_joined_parts_run_forwards_in_order_and_backwards_in_the_opposite_one() -> None:
    def part() -> Graph:
        """x (given) → y, and back: dy (given) → dx."""
        drawing = Drawing()
        x, dy = drawing.value("x", 10, Role.BATCH), drawing.value("dy", 10, Role.BATCH)
        y, dx = drawing.value("y", 10), drawing.value("dx", 10)
        drawing.op("aten.relu.default", [x], [y])
        drawing.op("aten.threshold_backward.default", [dy, y], [dx], phase=Phase.BACKWARD)
        return drawing.graph(outputs=[y, dx])

    whole = joined([part(), part()], {(1, 0): (0, 2), (0, 1): (1, 3)})
    assert [(op.section, op.phase) for op in whole.ops] == [
        (0, Phase.FORWARD), (1, Phase.FORWARD), (1, Phase.BACKWARD), (0, Phase.BACKWARD),
    ]  # fmt: skip
    assert len(whole.values) == 6
    assert whole.ops[1].reads == whole.ops[0].creates
    assert whole.ops[3].reads[0] == whole.ops[2].creates[0]
    assert simulate(whole, straight(whole)).peak_bytes == 60  # x, the last dy, and all that is made
