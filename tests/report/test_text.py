"""Reports: tables that add up as printed, pictures that keep the peak."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan
from lowtide.chain.unroll import replay
from lowtide.errors import BadFile, MissingExtra
from lowtide.ir.graph import Phase
from lowtide.ir.schedule import Compute, straight
from lowtide.ir.simulate import CATEGORIES, Timeline, simulate
from lowtide.planner.fit import Fit, fit
from lowtide.report.content.stretches import Stretch, stretches
from lowtide.report.picture.plot import PhaseSpan, coarse, draw, runs_of, write_picture
from lowtide.report.picture.trade import Rectangle, placed
from lowtide.report.text.terminal import headline, print_fit
from lowtide.solvers import methods, solve
from lowtide.text.names import listed, without_middle
from lowtide.text.rounding import Unit, apportioned, unit_for
from tests.helpers.chains import chains
from tests.helpers.handmade import chain

PNG = b"\x89PNG\r\n\x1a\n"


def predict(**options: Any) -> Fit:
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))
    return fit(model, (torch.ones(16, 4),), torch.sum, profile=False, name="two layers", **options)


# Numbers that add up ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "whole", "scale", "expected"),
    [
        ([1, 1, 1], 3, 10, [4, 3, 3]),  # thirds of ten: the first gets the tenth that is missing
        ([6, 3, 1], 10, 1, [1, 0, 0]),
        ([5], 10, 1, [1]),  # halves go up, as in the total
        ([4], 10, 1, [0]),
        ([0, 0], 1, 1000, [0, 0]),
        ([], 7, 10, []),
    ],
)
def test_a_total_is_apportioned_to_those_that_lost_most(
    counts: list[int], whole: int, scale: int, expected: list[int]
) -> None:
    assert apportioned(counts, whole, scale) == expected


@given(st.lists(st.integers(0, 1 << 45), min_size=1, max_size=12))
def test_what_is_printed_adds_up_to_the_total_that_is_printed(counts: list[int]) -> None:
    unit = unit_for(sum(counts))
    printed = [float(text.replace(",", "")) for text in unit.column(counts)]
    assert sum(printed) == pytest.approx(float(unit.text(sum(counts)).replace(",", "")), abs=1e-6)
    for number, count in zip(printed, counts, strict=True):
        assert abs(number - count / unit.bytes) < 1 / 10**unit.decimals + 1e-6


@pytest.mark.parametrize(
    ("total", "name", "text"),
    [
        (0, "B", "0"),
        ((1 << 20) - 1, "B", "1,048,575"),
        (1 << 20, "KiB", "1,024.0"),
        ((100 << 20) - 1, "KiB", "102,400.0"),
        (100 << 20, "MiB", "100.0"),
        (1 << 40, "GiB", "1,024.0"),
    ],
)
def test_a_table_is_counted_in_the_unit_that_reads_best(total: int, name: str, text: str) -> None:
    unit = unit_for(total)
    assert (unit.name, unit.text(total)) == (name, text)


def test_a_unit_writes_thousands_with_commas() -> None:
    assert Unit("MiB", 1 << 20, 1).column([1 << 30, 1 << 19]) == ["1,024.0", "0.5"]


# The table -------------------------------------------------------------------------------------------

GOLDEN = f"""\
two layers, batch 16, adam, on cpu
predicted peak: 2.5 KiB, in the backward at 1: aten.threshold_backward

held at the peak      B    share
parameters          192    7.5 %
optimizer state     392   15.2 %
gradients            64    2.5 %
batch               256    9.9 %
activations         648   25.2 %
temporaries       1,024   39.8 %
total             2,576  100.0 %

by module                            B    share
1                                1,024   39.8 %
2                                  900   34.9 %
0                                  388   15.1 %
(the model itself, batch, loss)    264   10.2 %
total                            2,576  100.0 %

does not fit: 528 B too much (budget 2.0 KiB)
note: workspaces are not included: the step was not profiled, and kernels (convolutions above all) \
take memory of their own while they run
note: the sea is blue
predicted on cpu, dry run, torch {torch.__version__.partition("+")[0]}
"""


def test_the_whole_report_reads_as_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    print_fit(predict(optimizer="adam", budget="2KiB"), {"batch": 16}, ["the sea is blue"])
    assert capsys.readouterr().out == GOLDEN


def test_the_printed_rows_add_up_to_the_printed_totals(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(*(nn.Linear(257, 257) for _ in range(9)))
    found = fit(model, (torch.ones(999, 257),), torch.sum, optimizer="momentum", profile=False)
    print_fit(found, {})
    _, categories, modules, _ = capsys.readouterr().out.split("\n\n")
    for table in (categories, modules):
        rows = [line.rsplit(maxsplit=3) for line in table.splitlines()[1:]]
        numbers = [float(row[1].replace(",", "")) for row in rows]
        assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=1e-6)
        assert numbers[-1] == pytest.approx(found.peak_bytes / 1024, abs=0.05)
    assert len(modules.splitlines()) == 1 + 5 + 1 + 1  # a header, five modules, the others, the total
    assert "5 others" in modules


def test_what_a_card_holds_beside_the_peak_has_lines_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    found = predict(device="cuda", budget="1MiB")
    print_fit(replace(found, reserved_bytes=found.peak_bytes + 3072, context_bytes=512 << 20), {})
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("reserved by PyTorch beyond that: 3.0 KiB")
    assert lines[at + 1 : at + 3] == [
        "CUDA context: 512.0 MiB",
        "fits: 1,019.0 KiB to spare (budget 1.0 MiB)",
    ]


def test_the_peak_may_be_what_is_there_before_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = predict()
    timeline = replace(found.trace.timeline, peak_step=None, peak_op=None)
    resting = replace(found.trace)
    resting.__dict__["timeline"] = timeline  # where the cached property looks first
    print_fit(replace(found, trace=resting), {})
    assert "predicted peak: 448 B, before the step begins" in capsys.readouterr().out


def test_a_workspace_at_the_peak_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    graph, found = chain(), predict()
    greedy = replace(graph, ops=(*graph.ops[:-1], replace(graph.ops[-1], workspace_bytes=9000)))
    print_fit(replace(found, trace=replace(found.trace, graph=greedy, schedule=straight(greedy))), {})
    assert "in the backward at conv: aten.convolution_backward (workspace 8.8 KiB)" in capsys.readouterr().out


def test_brackets_in_names_are_not_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_fit(replace(predict(), model="[red]mine[/red].py:build"), {})
    assert capsys.readouterr().out.startswith("[red]mine[/red].py:build, on cpu\n")


def test_a_headline_says_what_was_asked() -> None:
    found = predict(optimizer="sgd", device="cuda")
    assert headline(found, {"batch": 64, "image": 32}) == "two layers, batch 64, image 32, sgd, on cuda:0"


# The picture -----------------------------------------------------------------------------------------


def test_few_steps_are_all_drawn() -> None:
    edges, fullest = coarse(np.array([3, 1, 2]), most=10)
    assert edges.tolist() == [0, 1, 2, 3]
    assert fullest.tolist() == [0, 1, 2]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=200), st.integers(1, 50))
def test_many_steps_become_few_without_losing_the_peak(live: list[int], most: int) -> None:
    held = np.array(live, dtype=np.int64)
    edges, fullest = coarse(held, most)
    assert len(fullest) == min(most, len(live))
    assert (edges[0], edges[-1]) == (0, len(live))
    assert held[fullest].max() == held.max()
    for (start, stop), step in zip(pairwise(edges), fullest, strict=True):
        assert start <= step < stop
        assert held[step] == held[start:stop].max()


def test_a_free_belongs_to_the_phase_it_happens_in() -> None:
    phases = [None, Phase.FORWARD, None, Phase.BACKWARD, Phase.RECOMPUTE, None, Phase.BACKWARD, None]
    assert list(runs_of(phases)) == [
        PhaseSpan(Phase.FORWARD, 0, 3),
        PhaseSpan(Phase.BACKWARD, 3, 4),
        PhaseSpan(Phase.RECOMPUTE, 4, 6),
        PhaseSpan(Phase.BACKWARD, 6, 8),
    ]
    assert list(runs_of([None, None])) == []


def svg(timeline: Timeline, budget_bytes: int | None = None) -> str:
    return draw(timeline, "svg", title="a chain", budget_bytes=budget_bytes).decode()


def test_a_picture_names_categories_phases_peak_and_budget() -> None:
    graph = chain()
    text = svg(simulate(graph, straight(graph)), budget_bytes=4000)
    for words in (
        "a chain",
        ">parameters<",
        ">gradients<",
        ">batch<",
        ">activations<",
        ">temporaries<",
        ">workspace<",
        ">forward<",
        ">backward<",
        "peak 3.4 KiB",
        "relu: aten.threshold_backward",
        "budget 3.9 KiB<",
        "held (KiB)",
    ):
        assert words in text
    assert ">optimizer state<" not in text  # there is none
    assert ">recompute<" not in text


def test_a_budget_far_above_does_not_press_the_rest_to_the_ground() -> None:
    graph = chain()
    timeline = simulate(graph, straight(graph))
    assert "(far above, not to scale)" in svg(timeline, budget_bytes=3 * timeline.peak_bytes + 1)
    assert "(far above, not to scale)" not in svg(timeline, budget_bytes=3 * timeline.peak_bytes)
    assert "budget" not in svg(timeline)


def many_steps(count: int) -> Timeline:
    """A made-up timeline: a hill with noise, and one step that towers over all."""
    hill = np.minimum(np.arange(count), np.arange(count)[::-1]) + np.arange(count) % 7
    stack = np.tile(hill[:, None], (1, len(CATEGORIES))).astype(np.int64) << 16
    stack[count // 3] *= 3
    half = count // 2
    phases = (Phase.FORWARD,) * half + (Phase.BACKWARD, Phase.RECOMPUTE) * ((count - half) // 2)
    return Timeline(
        stack=stack,
        steps=tuple(Compute(step) for step in range(count)),
        phases=phases,
        peak_step=count // 3,
        peak_op=chain().ops[0],
        holdings=(),
        resident_bytes=0,
    )


def test_a_picture_of_many_steps_stays_small() -> None:
    small, large = svg(many_steps(2_000)), svg(many_steps(20_000))
    assert len(large) < 1_500_000
    assert ">recompute<" in large  # too narrow to be named in place, so it is in the legend
    assert len(large) < 4 * len(small)


def test_a_picture_comes_as_png_too_and_always_the_same() -> None:
    graph = chain()
    timeline = simulate(graph, straight(graph))
    first, second = (draw(timeline, "png", title="a chain") for _ in range(2))
    assert first.startswith(PNG)
    assert first == second
    assert svg(timeline) == svg(timeline)


def test_a_long_label_loses_its_middle() -> None:
    timeline = many_steps(20)
    op = replace(chain().ops[0], module=".".join(["encoder"] * 20))
    text = svg(replace(timeline, peak_op=op))
    assert "encoder.encoder.encoder.encoder…" in text
    assert "aten.convolution<" in text


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        MissingExtra, match=r"drawing a timeline needs matplotlib: pip install 'lowtide\[plot\]'"
    ):
        draw(many_steps(4), "png", title="")


def test_a_picture_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"cannot write '.*/a.png': No such file or directory"):
        write_picture(PNG, tmp_path / "absent" / "a.png")
    write_picture(PNG, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == PNG


# Plans -----------------------------------------------------------------------------------------------

FIVE = Chain.from_sizes([1, 2, 4, 8, 16, 32], names=("a", "b … c", "d", "e … f", "g"))


def test_a_plan_is_told_as_stretches_of_layers() -> None:
    assert stretches(FIVE, Plan.read("[2-3][4-4]")) == (
        Stretch(1, 1, "a", 0, plain_bytes=2, held_bytes=2, extra_seconds=0.0),
        Stretch(2, 3, "b … d", 1, plain_bytes=4 + 8, held_bytes=0, extra_seconds=2.0),  # a saved its output
        Stretch(4, 4, "e … f", 1, plain_bytes=16, held_bytes=8, extra_seconds=1.0),
        Stretch(5, 5, "g", 0, plain_bytes=32, held_bytes=32 + 16, extra_seconds=0.0),
    )
    nested = stretches(FIVE, Plan.read("[1-4 [1-2 [1-1]]]"))
    assert [(part.first, part.last, part.again, part.held_bytes) for part in nested] == [
        (1, 4, 3, 0),  # from the batch
        (5, 5, 0, 48),
    ]


@given(chains(), st.sampled_from(["keep-all", "every-k", "chen-recursive", "chen-sqrt", "rotor"]))
def test_what_stretches_hold_adds_up_to_what_the_referee_counts_at_the_loss(
    problem: Chain, method: str
) -> None:
    plan = solve(problem, method).plan
    timeline = replay(problem, plan)
    at_the_loss = timeline.phases.index(Phase.BACKWARD)
    found = stretches(problem, plan)
    held = problem.base_bytes + problem.output_bytes[0] + problem.gradient_bytes[-1]
    assert int(timeline.live_bytes[at_the_loss]) == held + sum(part.held_bytes for part in found)
    assert [layer for part in found for layer in range(part.first, part.last + 1)] == [
        *range(1, len(problem) + 1)
    ]
    plain = stretches(problem, Plan())
    assert sum(part.plain_bytes for part in found) == sum(part.held_bytes for part in plain)
    assert sum(part.extra_seconds for part in found) == plan.extra_seconds(problem)


@pytest.mark.parametrize(
    ("numbers", "most", "text"),
    [
        ([], 9, ""),
        ([3, 6, 9], 7, "3, 6, 9"),
        ([3, 6, 9, 12], 11, "3, 6, 9, 12"),
        ([3, 6, 9, 12], 10, "… 12 (4)"),
        ([3, 6, 9, 12, 15], 14, "3, 6, … 15 (5)"),
    ],
)
def test_a_long_list_of_numbers_loses_its_middle(numbers: list[int], most: int, text: str) -> None:
    assert listed(numbers, most) == text


@given(st.lists(st.integers(0, 999), min_size=1, max_size=60), st.integers(14, 60))
def test_a_list_of_numbers_fits_where_it_has_to(numbers: list[int], most: int) -> None:
    assert len(listed(numbers, most)) <= most


def test_what_fits_is_not_shortened() -> None:
    assert without_middle("abcdefgh", 8) == "abcdefgh"
    assert without_middle("abcdefghi", 8) == "abc…ghi"


FRAME = Rectangle(0, 0, 600, 300)


@given(
    st.lists(st.tuples(st.floats(50, 400), st.floats(40, 260)), min_size=1, max_size=4, unique=True),
)
def test_labels_cover_neither_each_other_nor_the_points(points: list[tuple[float, float]]) -> None:
    labels = ["hong-linear"] * len(points)
    boxes: list[Rectangle] = []
    for (x, y), (dx, dy) in zip(points, placed(points, labels, FRAME), strict=True):
        box = Rectangle(x + dx, y + dy - 6, x + dx + 50, y + dy + 6)
        assert not any(box.overlaps(other) for other in boxes)
        assert not any(box.overlaps(Rectangle(x - 4, y - 4, x + 4, y + 4)) for x, y in points)
        boxes.append(box)


def test_a_label_is_beside_its_point_if_it_can_be_and_elsewhere_if_not() -> None:
    assert placed([(100, 100)], ["abc"], FRAME) == [(8.0, 0.0)]
    ((dx, dy),) = placed([(100, 100)], ["abc"], FRAME, [Rectangle(100, 99, 600, 101)])  # a line to the right
    assert dx < 0 or dy != 0
    ((dx, _),) = placed([(595, 100)], ["abc"], FRAME)
    assert dx < 0
    assert placed([(100, 100)], ["abc"], Rectangle(0, 0, 1, 1)) == [(8.0, 0.0)]  # no room anywhere


def test_the_table_of_methods_tells_of_each_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    from lowtide.report.text.methods import print_methods

    print_methods({"layer by layer": {"rotor": methods()["rotor"]}})
    header, first, *rest = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert header.split() == ["layer", "by", "layer", "minimises", "complexity", "budget"]
    assert first.split()[0] == "rotor"
    assert first.endswith("yes")
    assert [line.strip() for line in rest] == [
        f"proven {methods()['rotor'].proves}",
        methods()["rotor"].reference,
    ]
