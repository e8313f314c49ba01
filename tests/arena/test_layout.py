"""Layouts: the referee first, then what `lay_out` makes of graphs by hand, at random, and of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.aot.capture import capture
from lowtide.arena.batch_norm import normalise_from_output
from lowtide.arena.buffers import Birth, buffers_of, largest_live_bytes
from lowtide.arena.in_place import take_overs
from lowtide.arena.layout import Layout, check, lay_out
from lowtide.arena.pack import METHODS
from lowtide.errors import ArenaTooSmall, BadRequest, IllegalLayout, IllegalSchedule, UnknownMethod
from lowtide.ir.graph import Graph, Role
from lowtide.ir.schedule import Schedule, straight
from lowtide.zoo import Sizes, workload
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, chain, steps, three_layers
from tests.helpers.layouts import stepped


def moved(layout: Layout, buffer: int, offset: int) -> Layout:
    offsets = [*layout.offsets[:buffer], offset, *layout.offsets[buffer + 1 :]]
    return replace(layout, offsets=tuple(offsets))


def with_buffer(layout: Layout, number: int, **fields: Any) -> Layout:
    buffers = list(layout.buffers)
    buffers[number] = replace(buffers[number], **fields)
    return replace(layout, buffers=tuple(buffers))


def merged(layout: Layout, first: int, second: int) -> Layout:
    """The second buffer's births written over those of the first, which comes to lie at 0."""
    one, other = layout.buffers[first], layout.buffers[second]
    joined = replace(one, births=one.births + other.births, stop=max(one.stop, other.stop))
    kept = [joined if b.id == first else b for b in layout.buffers if b.id != second]
    offsets = [o for number, o in enumerate(layout.offsets) if number != second]
    buffers = tuple(replace(buffer, id=number) for number, buffer in enumerate(kept))
    return replace(layout, buffers=buffers, offsets=tuple(offsets))


# The referee ----------------------------------------------------------------------------------------


def plain() -> tuple[Graph, Schedule, Layout]:
    """three_layers(): 0 wide 1000, 1 middle 400, 2 narrow 300, 3 loss 4, 4 and 5 gradients 300 and 50."""
    graph = three_layers()
    schedule = straight(graph)  # 0 1 2 3 4 f4 5 f2 f3 f6
    layout = lay_out(graph, schedule, alignment=1, method="by-size", in_place=False)
    assert layout.offsets == (0, 1000, 1400, 2000, 1700, 1400)
    return graph, schedule, layout


REFUSED: dict[str, tuple[Callable[[Layout], Layout], str]] = {
    "two that overlap": (
        lambda layout: moved(layout, 1, 990),
        r"'middle' at 990 to 1390 and 'wide' at 0 to 1000 overlap by 10 bytes, and both are alive at step 1, "
        r"op 1 \(layers\.0: aten\.relu\)",
    ),
    "one inside another": (
        lambda layout: moved(layout, 3, 500),
        r"'loss' at 500 to 504 and 'wide' at 0 to 1000 overlap by 4 bytes, .* at step 3, op 3 \(aten\.sum\)",
    ),
    "one that begins below": (
        lambda layout: moved(layout, 5, 980),
        r"'weight\.grad' at 980 to 1030 and '(wide|middle)' at .* overlap by (20|30) bytes",
    ),
    "out of the arena": (
        lambda layout: replace(layout, arena_bytes=2003),
        r"'loss' is at 2000 to 2004, outside of the arena of 2003 bytes",
    ),
    "below zero": (
        lambda layout: moved(layout, 3, -4),
        r"'loss' is at -4 to 0, outside of the arena of 2004 bytes",
    ),
    "misaligned": (
        lambda layout: replace(layout, alignment=1000),
        r"'narrow' is at 1400, which is not a multiple of 1000",
    ),
    "too small": (
        lambda layout: with_buffer(layout, 2, bytes=299),
        r"'narrow' has 300 bytes, its buffer 299",
    ),
    "without a place": (
        lambda layout: with_buffer(layout, 3, births=()),
        r"'loss', made by op 3 \(aten\.sum\) at step 3, has no place",
    ),
    "with two places": (
        lambda layout: with_buffer(layout, 3, births=(Birth(5, 0), Birth(4, 0))),
        r"value 4 has two places for its birth 0|value 5 has two places",
    ),
    "for what is never made": (
        lambda layout: with_buffer(layout, 5, births=(Birth(7, 0), Birth(7, 1))),
        r"buffer 5 is for 'weight\.grad' \(made the 2\. time\), which is never made",
    ),
    "of another span": (
        lambda layout: with_buffer(layout, 2, stop=7),
        r"buffer 2 claims to be needed at steps 2 to 7; the replay finds 2 to 5",
    ),
    "with an id that is no position": (
        lambda layout: with_buffer(layout, 2, id=3),
        r"buffer 2 carries the id 3; ids are positions",
    ),
    "offsets left out": (
        lambda layout: replace(layout, offsets=layout.offsets[:-1]),
        r"there are 6 buffers and 5 offsets",
    ),
    "a lower bound too low": (
        lambda layout: replace(layout, lower_bound_bytes=2003),
        r"lower bound is given as 2003 bytes; the replay finds at most 2004 bytes live at once",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_referee_refuses_a_layout_and_says_what_is_wrong(case: str) -> None:
    graph, schedule, layout = plain()
    check(graph, schedule, layout)
    change, message = REFUSED[case]
    with pytest.raises(IllegalLayout, match=message):
        check(graph, schedule, change(layout))


def working(*sizes: int, targets: str = "neg exp mul", outputs: tuple[int, ...] = (4,)) -> Graph:
    """x → a → b, and c of a and b, if these are the targets: values 0 x, 1 a, 2 b, 3 c; d of c."""
    drawing = Drawing()
    counts = sizes or (64, 64, 64, 64)
    drawing.value("x", 64, Role.BATCH)
    for name, count in zip("abcd", counts, strict=True):
        drawing.value(name, count)
    first, second, third = (f"aten.{t}.{'Tensor' if t == 'mul' else 'default'}" for t in targets.split())
    drawing.op(first, [0], [1])
    drawing.op(second, [1], [2])
    drawing.op(third, [1, 2], [3])
    drawing.op("aten.relu.default", [3], [4])
    return drawing.graph(outputs=outputs)


def claimed(graph: Graph, first: int, second: int) -> Layout:
    """A layout in which the buffer of one value takes the other's births as well."""
    layout = lay_out(graph, in_place=False)
    return merged(layout, layout.buffer_of[Birth(first, 0)], layout.buffer_of[Birth(second, 0)])


def test_results_may_be_written_over_inputs_that_nobody_reads_again() -> None:
    graph = working()
    schedule = straight(graph)  # 0 1 2 f1 f2 3 f3
    layout = lay_out(graph, schedule)
    assert [[birth.value for birth in buffer.births] for buffer in layout.buffers] == [[1, 3, 4], [2]]
    assert (layout.arena_bytes, layout.lower_bound_bytes, layout.ratio, layout.proven) == (
        128,
        128,
        1.0,
        True,
    )
    assert layout.offset_of(Birth(4, 0)) == layout.offset_of(Birth(1, 0))
    assert lay_out(graph, schedule, in_place=False).arena_bytes == 192


@pytest.mark.parametrize(
    ("graph", "over", "message"),
    [
        (
            working(),
            (1, 2),
            r"op 1 \(aten\.exp\) at step 1 writes 'b' over 'a', which op 2 \(aten\.mul\) reads later, "
            r"at step 2 \(64 bytes\)",
        ),
        (
            working(targets="neg exp mm"),
            (2, 3),
            r"op 2 \(aten\.mm\) at step 2 writes 'c' over 'b', which it cannot: it must read each element",
        ),
        (working(64, 64, 60, 64), (2, 3), r"which it cannot: .* equal size \(64 and 60 bytes\) and shape"),
        (working(outputs=(2, 4)), (2, 3), r"writes 'c' over 'b', which outlives the step \(64 bytes\)"),
        (working(), (1, 4), r"op 3 \(aten\.relu\) at step 5 writes 'd' over 'a', which is not alive then"),
    ],
)
def test_the_referee_refuses_a_wrong_claim_to_work_in_place(
    graph: Graph, over: tuple[int, int], message: str
) -> None:
    layout = claimed(graph, *over)
    with pytest.raises(IllegalLayout, match=message):
        check(graph, straight(graph), replace(layout, arena_bytes=layout.arena_bytes + 64))


def test_only_the_first_output_may_be_written_over_an_input() -> None:
    drawing = Drawing()
    x, source, first, second = (drawing.value(name, 64) for name in ("x", "source", "first", "second"))
    drawing.op("aten.neg.default", [x], [source])
    drawing.op("aten.native_batch_norm.default", [source], [first, second])
    graph = drawing.graph(outputs=[first, second])
    assert [len(buffer.births) for buffer in lay_out(graph).buffers] == [2, 1]
    with pytest.raises(
        IllegalLayout, match="writes 'second' over 'source', but only its first output may be"
    ):
        check(graph, straight(graph), claimed(graph, source, second))


# By hand --------------------------------------------------------------------------------------------


def test_offsets_and_sizes_follow_the_device() -> None:
    sizes = {device: lay_out(chain(device)) for device in ("cpu", "cuda:0")}
    assert [sizes[device].alignment for device in sizes] == [64, 512]
    for layout in sizes.values():
        assert all(offset % layout.alignment == 0 for offset in layout.offsets)
        assert all(buffer.bytes % layout.alignment == 0 for buffer in layout.buffers)
    assert lay_out(chain(), alignment=8).alignment == 8


def test_a_value_that_is_computed_again_may_lie_elsewhere() -> None:
    schedule = steps(0, 1, "f2", 2, 3, 4, "f4", 0, 5, "f2", "f3", "f6")
    layout = lay_out(three_layers(), schedule, alignment=1)
    assert {birth.time for birth in layout.buffer_of if birth.value == 2} == {0, 1}
    assert layout.lower_bound_bytes == layout.arena_bytes == 1754  # without recomputation 2004


def test_an_empty_graph_needs_no_arena() -> None:
    layout = lay_out(Drawing().graph())
    assert (layout.arena_bytes, layout.ratio, layout.proven) == (0, 1.0, True)


def test_a_batch_norm_in_place_saves_what_it_was_given() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 4, 3)
    )
    graph = capture(model, (torch.randn(2, 3, 8, 8),), lambda out: out.sum())
    before, after = (lay_out(found).lower_bound_bytes for found in (graph, normalise_from_output(graph)))
    assert before - after == 4 * 2 * 8 * 8 * 8  # what the first convolution made


# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(stepped(), st.sampled_from(METHODS), st.booleans())
def test_every_method_passes_the_referee_whatever_is_recomputed(
    case: tuple[Graph, Schedule], method: str, in_place: bool
) -> None:
    graph, schedule = case
    layout = lay_out(graph, schedule, method=method, in_place=in_place)  # refereed
    overs = take_overs(graph, schedule) if in_place else ()
    buffers = buffers_of(graph, schedule, overs, layout.alignment)
    assert layout.buffers == buffers
    assert layout.lower_bound_bytes == largest_live_bytes(buffers) <= layout.arena_bytes
    assert layout.proven or layout.arena_bytes > layout.lower_bound_bytes


@settings(max_examples=examples(200))
@given(stepped(), st.data())
def test_the_referee_refuses_any_two_that_are_put_on_each_other(
    case: tuple[Graph, Schedule], data: st.DataObject
) -> None:
    graph, schedule = case
    layout = lay_out(graph, schedule)
    together = [
        (a, b)
        for a in layout.buffers
        for b in layout.buffers
        if a.id != b.id and a.bytes and b.bytes and a.first < b.stop and b.first < a.stop
    ]
    if not together:
        return
    mine, other = data.draw(st.sampled_from(together))
    with pytest.raises(IllegalLayout, match=r"overlap by|outside of the arena"):
        check(graph, schedule, moved(layout, mine.id, layout.offsets[other.id]))


# The zoo --------------------------------------------------------------------------------------------

SMALL: dict[str, dict[str, int]] = {
    "alexnet": {"image": 96},
    "vgg11": {"image": 64},
    "vgg11_bn": {"image": 64},
    "resnet18": {"image": 64},
    "unet": {"image": 64},
    "gpt": {"layers": 2, "width": 64, "heads": 4, "tokens": 32, "vocab": 100},
    "vit": {"layers": 2, "width": 64, "heads": 4, "image": 64},
    "lstm": {"tokens": 5},
    "mlp": {},
    "preresnet20": {},
}


@pytest.mark.parametrize("name", SMALL)
def test_the_arena_of_a_step_is_within_a_twentieth_of_the_lower_bound(name: str) -> None:
    with torch.device("meta"):
        work = workload(name, Sizes(batch=2, **SMALL[name]))
    graph = capture(work.model, work.args, work.loss, name=name)
    for alignment in (64, 512):
        layout = lay_out(graph, alignment=alignment)
        assert layout.lower_bound_bytes < sum(buffer.bytes for buffer in layout.buffers)
        assert layout.ratio <= 1.05


# Refusals -------------------------------------------------------------------------------------------


def test_an_arena_that_is_too_small_is_refused_with_what_would_do() -> None:
    graph = three_layers()
    ask: dict[str, Any] = {"alignment": 1, "method": "by-size", "in_place": False}
    assert lay_out(graph, arena_bytes=2004, **ask).arena_bytes == 2004
    with pytest.raises(ArenaTooSmall) as found:
        lay_out(graph, arena_bytes=1999, **ask)
    assert str(found.value) == (
        "no layout of by-size fits in an arena of 1999 bytes: it needs 2004, and no layout less than 2004, "
        "which is live at once at op 4 (layers.1: aten.mul). The first value to stick out is 'loss' "
        "(4 bytes). Recompute more, shrink the batch, or give a larger arena."
    )
    error = found.value
    assert (error.asked_bytes, error.needed_bytes, error.lower_bound_bytes) == (1999, 2004, 2004)


def test_an_arena_between_the_lower_bound_and_what_a_method_needs_asks_for_another_method() -> None:
    graph = working(100, 1, 1, 1700, targets="mm mm mm")
    # c and d are live at once: 1701. But the tags of a (100) and b (1) are too small to be d's.
    with pytest.raises(
        ArenaTooSmall, match=r"it needs 1802, and no layout less than 1701, .* or try another"
    ):
        lay_out(graph, method="tags", alignment=1, in_place=False, arena_bytes=1701)


def test_nonsense_is_refused() -> None:
    with pytest.raises(UnknownMethod, match="Did you mean exact"):
        lay_out(chain(), method="exakt")
    with pytest.raises(BadRequest, match="an alignment of 0 bytes makes no sense; give 1 or more"):
        lay_out(chain(), alignment=0)
    with pytest.raises(IllegalSchedule, match="which does not exist yet"):
        lay_out(chain(), steps(1))
