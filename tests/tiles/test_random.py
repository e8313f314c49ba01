"""Regions of graphs drawn at random: whatever is cut, the numbers stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowtide.errors import BadRequest
from lowtide.execute.memory import Memory
from lowtide.ir.graph import Graph
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import simulate
from lowtide.tiles.blocks import contracted
from lowtide.tiles.early import early
from lowtide.tiles.region import Region, grown, largest
from lowtide.tiles.sliced import Cut
from lowtide.tiles.tile import cut
from tests.helpers.drawn import drawn_results, drawn_training
from tests.helpers.effort import examples
from tests.helpers.sliced import assert_same, results_of

SHAPES = [(2, 6, 4), (6, 4), (4, 6), (4,), (2, 1, 4)]
Change = Callable[[list[Tensor]], Tensor]


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """What makes one tensor more of those that are there."""
    first, second = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    dim, kind, number = draw(st.integers(0, 2)), draw(st.sampled_from(KINDS)), draw(st.integers(1, 3))

    def change(there: list[Tensor]) -> Tensor:
        x, y = there[-1 - first % len(there)], there[-1 - second % len(there)]
        return kind(x, y, dim % x.dim(), number) if x.dim() else x.sin()

    return change


def together(x: Tensor, y: Tensor, dim: int, number: int) -> Tensor:
    try:
        torch.broadcast_shapes(x.shape, y.shape)
    except RuntimeError:
        return x.tanh()
    return x + y if number > 1 else x * y


def product(x: Tensor, y: Tensor, dim: int, number: int) -> Tensor:
    if x.dim() > 1 and y.dim() == 2 and x.shape[-1] == y.shape[0]:
        return x @ y
    return x @ x.transpose(-1, -2) if x.dim() > 1 else x.dot(x)


def joined(x: Tensor, y: Tensor, dim: int, number: int) -> Tensor:
    return torch.cat([x, x.exp()], dim)


KINDS: list[Callable[[Tensor, Tensor, int, int], Tensor]] = [
    together,
    together,
    product,
    product,
    joined,
    lambda x, y, dim, number: x.cos(),
    lambda x, y, dim, number: x.clamp(-number, number).exp(),
    lambda x, y, dim, number: x.softmax(dim),
    lambda x, y, dim, number: x.cumsum(dim),
    lambda x, y, dim, number: x.sum(dim, keepdim=number > 1),
    lambda x, y, dim, number: x / (1 + x.square().sum()),
    lambda x, y, dim, number: x.amax(dim, keepdim=number > 1),
    lambda x, y, dim, number: x.transpose(0, dim),
    lambda x, y, dim, number: x.flatten(0, dim),
    lambda x, y, dim, number: x.reshape(x.shape[-1], -1),
    lambda x, y, dim, number: x.unsqueeze(dim),
    lambda x, y, dim, number: x.narrow(dim, 0, max(x.shape[dim] - number, 1)),
    lambda x, y, dim, number: x.transpose(0, dim).contiguous(),
    lambda x, y, dim, number: torch.layer_norm(x, x.shape[-1:]),
    lambda x, y, dim, number: torch.native_dropout(x, number / 4, True)[0],
]


INPUTS = [
    torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)
    for shape in SHAPES
]
PROGRAMS = st.lists(changes(), min_size=2, max_size=8)


def last(program: list[Change], given: Sequence[Tensor]) -> list[Tensor]:
    there = list(given)
    for change in program:
        there.append(change(there))
    return [there[-1], there[-2]]


def drawn_region(data: st.DataObject, graph: Graph, taken: frozenset[int]) -> Region | str:
    """A region around any op, along any dimensions."""
    seed = data.draw(st.sampled_from(graph.ops))
    shape = graph.tensors[largest(graph, seed)[1]].shape
    dims = sorted(data.draw(st.sets(st.sampled_from(range(len(shape))), min_size=1))) if shape else []
    small = data.draw(st.sampled_from([0.0, 0.4, 1.0]))
    return grown(graph, seed.id, dims, small, frozenset(range(len(graph.ops))) - taken)


def assert_nothing_changes_but_memory(graph: Graph, known: Mapping[str, Tensor], cuts: list[Cut]) -> None:
    """The numbers stay, and no schedule of blocks holds more than was counted; or it is refused."""
    try:
        tiled = cut(graph, cuts)
    except BadRequest as refusal:
        event("refused: " + str(refusal).partition(" cannot be cut ")[1])
        return
    event(f"cut {'ahead' if any(each.ahead for each in cuts) else 'in place'}")
    torch.manual_seed(0)
    expected = results_of(graph, known)
    for memory in (Memory.DIRECT, Memory.STATIC):
        torch.manual_seed(0)
        assert_same(results_of(tiled, known, memory), expected)
    whole = contracted(tiled)
    schedule = straight(whole.graph)
    once = simulate(tiled, whole.expanded(schedule)).peak_bytes
    assert once <= simulate(whole.graph, schedule).peak_bytes


@settings(max_examples=examples(300))
@given(PROGRAMS, st.data())
def test_any_two_regions_in_any_number_of_slices_make_what_the_graph_made(
    program: list[Change], data: st.DataObject
) -> None:
    graph, known = drawn_results(lambda *given: last(program, given), INPUTS)
    cuts: list[Cut] = []
    for _ in range(2 if graph.ops else 0):
        region = drawn_region(data, graph, frozenset(op for each in cuts for op in each.region.ops))
        if isinstance(region, Region):
            cuts.append(Cut(region, data.draw(st.integers(2, 5))))
    if cuts:
        assert_nothing_changes_but_memory(graph, known, cuts)


LOSSES: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.sum(),
    lambda x: x.mean(),
    lambda x: x.square().mean(),
    lambda x: F.cross_entropy(x.reshape(-1, x.shape[-1]), torch.zeros(x.numel() // x.shape[-1]).long()),
    lambda x: (x.logsumexp(-1).square() + x.detach().sum(-1)).sum(),
]


@settings(max_examples=examples(300))
@given(PROGRAMS, st.sampled_from(LOSSES), st.data())
def test_any_region_of_a_training_step_may_run_ahead_if_it_is_said_that_it_may(
    program: list[Change], loss: Callable[[Tensor], Tensor], data: st.DataObject
) -> None:
    def run(*given: Tensor) -> Tensor:
        found = last(program, given)[0]
        return loss(found.unsqueeze(0) if not found.dim() else found)

    graph, known = drawn_training(run, [each / 2 for each in INPUTS])
    region = drawn_region(data, graph, frozenset())
    if isinstance(region, Region):
        count = data.draw(st.integers(2, 5))
        assert_nothing_changes_but_memory(graph, known, [Cut(region, count)])
        if ahead := early(graph, region):
            assert_nothing_changes_but_memory(graph, known, [Cut(region, count, ahead)])
