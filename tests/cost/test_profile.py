"""Profiling: every distinct op run once, to the byte; what cannot be run is said; nothing is touched."""

from __future__ import annotations

import copy
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lowtide.aot.capture import capture
from lowtide.cost import cublas
from lowtide.cost.cache import Cost, CostCache, signature
from lowtide.cost.measure import growth, measure, record_cpu
from lowtide.cost.op_bench import Failure, OpCall, measure_calls, resolve
from lowtide.cost.profile import (
    Caps,
    _cuts,
    _extrapolated,
    _still_holds,
    call_of,
    environment,
    with_costs,
)
from lowtide.errors import BadFile, BadRequest, DeviceMissing
from lowtide.ir.graph import Arg, Graph, Op, Phase, Ref, Role, Symbol, Tensor
from lowtide.ir.simulate import simulate
from lowtide.ir.validate import validate
from lowtide.trace.dry_run import Trace, dry_run
from lowtide.trace.profile import profile
from tests.helpers.handmade import Drawing

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "costs.sqlite"


@pytest.fixture(autouse=True)
def _no_cache_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lowtide.cost.profile.default_cache_path", lambda: tmp_path / "home" / "costs.sqlite")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[OpCall]:
    """Every call that a profile has run, in order."""
    found: list[OpCall] = []

    def counted(calls: Sequence[OpCall], device: torch.device) -> Iterator[Cost | Failure]:
        found.extend(calls)
        return measure_calls(calls, device)

    monkeypatch.setattr("lowtide.cost.profile.measure_calls", counted)
    return found


def convolutions(batch: int = 4, extent: int = 12) -> tuple[nn.Module, torch.Tensor]:
    """Three convolutions, of which the last two are alike."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.Flatten()), torch.ones(batch, 3, extent, extent)


def step_of(model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        output = model(batch)
        (output[0] if isinstance(output, tuple) else output).sum().backward()

    return step


def traced(model: nn.Module, batch: torch.Tensor) -> Trace:
    return dry_run(step_of(model, batch), model=model)


def ops_called(graph: Graph, name: str) -> list[Op]:
    return [op for op in graph.ops if op.target.split(".")[1] == name]


def one_op(target: str, count: int = 64, **keywords: Any) -> Graph:
    drawing = Drawing()
    given, made = drawing.value("given", count, Role.BATCH), drawing.value("made", count)
    drawing.op(target, [given], [made], **keywords)
    return drawing.graph(outputs=[made])


# Workspaces, exact ----------------------------------------------------------------------------------


def peak_of(op: Op, graph: Graph) -> int:
    """What one run of an op holds at most, measured without the profiler under test."""
    described = (graph.tensors[ref.tensor] for ref in op.args if isinstance(ref, Ref))
    made = {one.id: torch.rand(10_000).as_strided(one.shape, one.stride) for one in described}
    args = [made[arg.tensor] if isinstance(arg, Ref) else arg for arg in op.args]
    resolve(op.target)(*args)
    return max(growth(record_cpu(lambda: resolve(op.target)(*args))[0]))


@pytest.mark.parametrize("name", ["convolution", "convolution_backward"])
def test_a_convolutions_workspace_is_what_it_holds_beyond_its_outputs(cache: Path, name: str) -> None:
    graph = profile(traced(*convolutions()).graph, cache=cache)
    for op in ops_called(graph, name):
        outputs = sum(graph.values[value].bytes for value in op.creates)
        assert op.workspace_bytes == peak_of(op, graph) - outputs > 0


def test_an_op_that_needs_nothing_beyond_its_output_has_no_workspace(cache: Path) -> None:
    graph = profile(one_op("aten.bitwise_not.default", 1000), cache=cache)
    assert graph.ops[0].workspace_bytes == 0
    assert graph.ops[0].seconds > 0
    assert graph.values[1].bytes == 1000


def test_a_workspace_that_is_known_by_hand(cache: Path) -> None:
    """The convolution of one sample that oneDNN does not take (float64) unfolds its input: 3×3×3 × 12×12."""
    model = nn.Conv2d(3, 8, 3, padding=1).double()
    graph = profile(traced(model, torch.ones(1, 3, 12, 12).double()).graph, cache=cache)
    assert ops_called(graph, "convolution")[0].workspace_bytes == (3 * 3 * 3) * (12 * 12) * 8


class Experts(nn.Module):
    """Rows in groups, each with weights of its own; where groups end is for the batch to say."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 24, 16).to(dtype))  # as nn.Linear has it: to be transposed
        self.second = nn.Parameter(torch.randn(4, 24, 16).to(dtype))

    def forward(self, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.grouped_mm(rows, self.first.transpose(1, 2), offs=ends)
        output = nn.functional.grouped_mm(hidden, self.second, offs=ends)
        return (output.float() * torch.ones(16)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_are_counted_as_if_one_of_them_had_all_the_rows(cache: Path, dtype: torch.dtype) -> None:
    model, rows = Experts(dtype), torch.randn(64, 16).to(dtype)

    def step(ends: torch.Tensor) -> None:
        model(rows, ends).backward()

    even, uneven = (torch.tensor(ends, dtype=torch.int32) for ends in ([16, 32, 48, 64], [0, 64, 64, 64]))
    predicted = profile(dry_run(lambda: step(even), model=model), cache=cache).timeline.growth_bytes
    found = []
    for ends in (even, uneven):
        model.zero_grad()
        found.append(measure(lambda ends=ends: step(ends), device="cpu").growth_bytes)  # type: ignore[misc]
    assert found[0] <= found[1] == predicted


def test_a_profiled_dry_run_predicts_the_measured_growth_to_the_byte(cache: Path) -> None:
    model, batch = convolutions()
    step = step_of(model, batch)
    predicted = profile(traced(model, batch), cache=cache).timeline.growth_bytes
    assert measure(step, device="cpu").growth_bytes == predicted


def test_outputs_are_corrected_where_the_fake_kernel_does_not_know_them(cache: Path) -> None:
    trace = traced(nn.LSTM(16, 32), torch.ones(10, 4, 16))
    graph = profile(trace, cache=cache).graph
    (layer,) = ops_called(graph, "mkldnn_rnn_layer")
    *_, reserve = layer.creates
    assert trace.graph.values[reserve].bytes == 0
    assert graph.values[reserve].bytes > 10 * 4 * 32 * 4  # at least a gate's activations at every step
    assert [graph.values[value].bytes for value in layer.creates[:-1]] == [
        trace.graph.values[value].bytes for value in layer.creates[:-1]
    ]
    assert ops_called(graph, "mkldnn_rnn_layer_backward")[0].workspace_bytes > 0
    assert graph.notes == ()
    validate(graph)


# Each distinct call, once ---------------------------------------------------------------------------


def test_every_distinct_call_is_run_once(cache: Path, runs: list[OpCall]) -> None:
    trace = traced(*convolutions())
    assert len(ops_called(trace.graph, "convolution")) == 3
    profile(trace, cache=cache)
    names = [call.target.split(".")[1] for call in runs]
    assert names.count("convolution") == 2
    # the last backward is handed an expanded gradient, the first has no gradient for its input
    assert names.count("convolution_backward") == 3
    wanted = {signature(op, trace.graph) for op in trace.graph.ops if op.creates or op.mutates}
    assert len(runs) == len(wanted) < len(trace.graph.ops)


def test_a_second_profile_runs_nothing_and_finds_the_same(cache: Path, runs: list[OpCall]) -> None:
    trace = traced(*convolutions())
    first = profile(trace, cache=cache)
    runs.clear()
    assert profile(trace, cache=cache) == first
    assert runs == []


def test_only_what_is_new_is_run(cache: Path, runs: list[OpCall]) -> None:
    profile(one_op("aten.bitwise_not.default"), cache=cache)
    drawing = Drawing()
    for name in "abc":
        drawing.value(name, 64)
    drawing.op("aten.bitwise_not.default", [0], [1])
    drawing.op("aten.clone.default", [1], [2])
    profile(drawing.graph(), cache=cache)
    assert [call.target for call in runs] == ["aten.bitwise_not.default", "aten.clone.default"]


def test_ops_of_one_signature_share_their_cost(cache: Path) -> None:
    graph = profile(traced(*convolutions()).graph, cache=cache)
    _, second, third = ops_called(graph, "convolution")
    assert (second.workspace_bytes, second.seconds) == (third.workspace_bytes, third.seconds)


def test_constants_and_ops_that_make_nothing_are_not_run(cache: Path, runs: list[OpCall]) -> None:
    drawing = Drawing()
    for name in "ab":
        drawing.value(name, 8)
    drawing.op("aten.lift_fresh.default", [0], [1])
    drawing.op("aten._local_scalar_dense.default", [1])
    drawing.op("aten.bitwise_not_.default", [1], mutates=[1])
    graph = profile(drawing.graph(), cache=cache)
    assert [call.target for call in runs] == ["aten.bitwise_not_.default"]
    assert graph.notes == ()


def test_more_calls_than_go_into_one_recording_are_all_run(
    cache: Path, runs: list[OpCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.cost.profile._CHUNK", 2)
    trace = traced(*convolutions())
    graph = profile(trace, cache=cache).graph
    assert len(runs) == len({signature(op, trace.graph) for op in trace.graph.ops})
    assert all(op.workspace_bytes > 0 for op in ops_called(graph, "convolution"))


def test_a_backward_is_run_on_what_its_own_forward_left(cache: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.MaxPool2d(2), nn.Flatten())
    graph = traced(model, torch.ones(2, 3, 8, 8)).graph
    (pool,) = ops_called(graph, "max_pool2d_with_indices")
    (back,) = ops_called(graph, "max_pool2d_with_indices_backward")
    call = call_of(back, graph)
    assert call.maker == call_of(pool, graph)
    assert call_of(pool, graph).maker is None
    args, _ = call.prepare(CPU)
    output, indices = call.maker._run(*call.maker.prepare(CPU)) if call.maker is not None else ()
    assert args[-1].shape == indices.shape
    assert args[-1].max() > 0  # real indices: made-up ones would all be zero
    assert output.shape == args[0].shape


# What a profile gives back --------------------------------------------------------------------------


def test_a_trace_gives_a_trace_whose_timeline_has_the_workspaces(cache: Path) -> None:
    trace = traced(*convolutions())
    before = trace.peak_bytes
    profiled = profile(trace, cache=cache)
    assert isinstance(profiled, Trace)
    assert profiled.schedule == trace.schedule
    assert profiled.peak_bytes > before
    assert profiled.peak_bytes == simulate(profiled.graph, profiled.schedule).peak_bytes
    assert (trace.peak_bytes, trace.graph.profiled_on) == (before, None)
    assert profiled.graph.profiled_on == "cpu"


def test_a_graph_gives_a_graph(cache: Path) -> None:
    graph = traced(*convolutions()).graph
    profiled = profile(graph, cache=cache)
    assert isinstance(profiled, Graph)
    costless = (replace(op, workspace_bytes=0, seconds=0.0) for op in profiled.ops)
    assert tuple(costless) == graph.ops
    assert (profiled.values, profiled.tensors, profiled.outputs) == (
        graph.values,
        graph.tensors,
        graph.outputs,
    )


def test_costs_are_put_on_the_ops_that_have_them_and_outputs_only_where_they_match() -> None:
    drawing = Drawing()
    for name, count in (("x", 10), ("a", 20), ("b", 30), ("c", 40)):
        drawing.value(name, count)
    drawing.op("aten.one.default", [0], [1, 2], workspace=1)
    drawing.op("aten.two.default", [0], [3], workspace=2)
    graph = drawing.graph()
    first, second = (signature(op, graph) for op in graph.ops)

    priced = with_costs(graph, {first: Cost(7, 0.5, (21, 29), extrapolated=True)}, profiled_on="there")
    assert [op.workspace_bytes for op in priced.ops] == [7, 2]
    assert [op.seconds for op in priced.ops] == [0.5, 0.0]
    assert [op.extrapolated for op in priced.ops] == [True, False]
    assert [value.bytes for value in priced.values] == [10, 21, 30, 40]  # a tensor reaches to the 30th byte
    assert priced.profiled_on == "there"

    strange = {first: Cost(7, 0.5, (21,)), second: Cost(8, 0.25, None)}
    kept = with_costs(graph, strange, profiled_on="there")
    assert [value.bytes for value in kept.values] == [10, 20, 30, 40]
    assert [op.workspace_bytes for op in kept.ops] == [7, 8]


def test_what_looks_at_a_part_may_have_copied_all_of_it_which_a_profile_has_not_seen() -> None:
    drawing = Drawing()
    for name, count in (("x", 10), ("a", 10)):
        drawing.value(name, count)
    drawing.op("aten.copy.default", [0], [1])
    graph = drawing.graph()
    part = replace(graph, tensors=(replace(graph.tensors[0], shape=(4,)), graph.tensors[1]))
    costs = {signature(op, part): Cost(7, 0.5, (4,)) for op in part.ops}
    assert with_costs(part, costs, profiled_on="there").values[1].bytes == 10


def test_what_libraries_hold_is_a_resident_value_and_is_counted_once() -> None:
    graph = one_op("aten.mm.default", 64)
    once = with_costs(graph, {}, profiled_on="there", library=4096)
    assert once.values[:2] == graph.values
    assert (once.values[2].role, once.values[2].bytes, once.values[2].device) == (Role.LIBRARY, 4096, "cpu")
    assert 2 in once.resident
    again = with_costs(once, {}, profiled_on="there", library=8192)
    assert [value.bytes for value in again.values] == [64, 64, 8192]
    assert with_costs(graph, {}, profiled_on="there").values == graph.values


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        ([], 0),
        ([Phase.FORWARD], 100),
        ([Phase.BACKWARD], 30),
        ([Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD], 130),
    ],
)
def test_libraries_are_asked_once_for_each_thread_and_only_on_a_card(
    monkeypatch: pytest.MonkeyPatch, phases: list[Phase], expected: int
) -> None:
    monkeypatch.setattr(cublas, "_cublas_bytes", lambda device: (100, 30, 7))
    drawing = Drawing()
    drawing.value("x", 8)
    for phase in phases:
        drawing.op("aten.mm.default", [0], [drawing.value("product", 8)], phase=phase)
    graph = drawing.graph()
    assert cublas.library_bytes(graph, torch.device("cuda", 0)) == expected
    assert cublas.library_bytes(graph, CPU) == 0


def test_a_profile_on_the_cpu_knows_of_no_libraries(cache: Path) -> None:
    graph = profile(traced(nn.Linear(4, 4), torch.ones(2, 4)), cache=cache).graph
    assert ops_called(graph, "addmm")
    assert not any(value.role is Role.LIBRARY for value in graph.values)


# What cannot be run ---------------------------------------------------------------------------------


def test_ops_that_cannot_be_run_are_named_and_do_not_stop_the_others(cache: Path) -> None:
    drawing = Drawing()
    for name in "abcde":
        drawing.value(name, 64)
    drawing.op("aten.nonsense.default", [0], [1])
    drawing.op("aten.relu.default", [1], [2], extra=[Symbol("object", "Generator")])
    drawing.op("aten.mm.default", [2], [3])
    drawing.op("aten.bitwise_not.default", [3], [4])
    graph = profile(drawing.graph(), cache=cache)
    said = "could not be profiled, counted without workspace: "
    assert len(graph.notes) == 3
    assert graph.notes[0].startswith(f"{said}aten.nonsense.default: ")
    assert graph.notes[1] == f"{said}aten.relu.default: an argument of type Generator cannot be made up"
    assert graph.notes[2].startswith(f"{said}aten.mm.default: ")
    assert all("\n" not in note for note in graph.notes)
    assert [op.seconds > 0 for op in graph.ops] == [False, False, False, True]
    assert [op.workspace_bytes for op in graph.ops] == [0, 0, 0, 0]


def test_notes_that_the_graph_had_are_kept_and_none_is_said_twice(cache: Path) -> None:
    graph = replace(one_op("aten.nonsense.default"), notes=("a number was read",))
    once = profile(graph, cache=cache)
    assert once.notes[0] == "a number was read"
    assert len(once.notes) == 2
    assert profile(once, cache=cache).notes == once.notes


def test_a_failure_is_not_remembered_as_a_cost(cache: Path, runs: list[OpCall]) -> None:
    graph = one_op("aten.nonsense.default")
    profile(graph, cache=cache)
    assert profile(graph, cache=cache).notes
    assert len(runs) == 2


# Caps -----------------------------------------------------------------------------------------------


def call_to(target: str, given: tuple[int, ...], made: tuple[int, ...], *extra: Any) -> OpCall:
    def dense(number: int, shape: tuple[int, ...]) -> Tensor:
        stride = tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
        return Tensor(number, number, shape, stride, 0, "float32")

    return OpCall(target, (Ref(0), *extra), (), {0: dense(0, given)}, (dense(1, made),))


def test_a_call_weighs_its_arguments_and_outputs_without_what_lies_before_them() -> None:
    call = call_to("aten.relu.default", (16, 8), (16, 8))
    assert call.bytes == 2 * 16 * 8 * 4
    moved = replace(call, tensors={0: replace(call.tensors[0], offset=10**9)}, outputs=(None, *call.outputs))
    assert moved.bytes == call.bytes


def sizes_cut(call: OpCall, most_bytes: int, op_bytes: int = 10**9) -> list[tuple[int, int, int]]:
    found = _cuts(call, most_bytes, Caps(op_bytes))
    return [(cut.size, cut.half, cut.quarter) for cut in found]


def test_a_call_is_made_smaller_along_its_batch_first() -> None:
    call = call_to("aten.relu.default", (64, 32), (64, 32))  # 16,384 bytes: 256 a row, 512 a column
    assert sizes_cut(call, 8192)[0] == (64, 16, 8)  # a quarter, or what most_bytes hold if that is less
    assert sizes_cut(call, 2560)[0] == (64, 10, 5)
    assert sizes_cut(call, 512) == [(64, 4, 2), (32, 4, 2), (64, 2, 1), (32, 2, 1)]  # to one only at last
    assert sizes_cut(call, 256) == [(64, 4, 2), (64, 2, 1), (32, 2, 1)]  # up to four times most_bytes
    assert sizes_cut(call, 255) == [(64, 2, 1)]
    assert sizes_cut(call, 127) == []
    assert sizes_cut(call_to("aten.relu.default", (2, 1), (2, 1)), 8) == []


def test_a_call_made_smaller_is_within_the_caps_and_smaller() -> None:
    call = call_to("aten.relu.default", (64, 32), (64, 32))
    assert sizes_cut(call, 2560, op_bytes=2560)[0] == (64, 10, 5)
    assert sizes_cut(call, 2560, op_bytes=2559) == [(64, 5, 2), (32, 4, 2), (64, 2, 1), (32, 2, 1)]
    assert all(cut.larger.bytes < call.bytes for cut in _cuts(call, 10**6, Caps(10**9)))
    expanded = replace(call, tensors={0: replace(call.tensors[0], stride=(0, 0))}, outputs=())
    assert sizes_cut(expanded, 10**6) == []  # as heavy whatever its extents


def test_an_extent_at_which_the_op_would_not_work_is_not_touched() -> None:
    assert sizes_cut(call_to("aten.view.default", (6, 4), (24,), (24,)), 150) == []
    assert sizes_cut(call_to("aten.view.default", (6, 4), (6, 2, 2), (6, 2, 2)), 150) == [
        (6, 4, 2),
        (6, 2, 1),
    ]


def test_a_batch_as_large_as_another_extent_is_cut_alone() -> None:
    model = nn.Conv2d(8, 8, 3, padding=1)
    graph = traced(nn.Sequential(model, nn.Flatten()), torch.ones(8, 8, 8, 8)).graph
    (forward,), (backward,) = ops_called(graph, "convolution"), ops_called(graph, "convolution_backward")
    call = call_of(forward, graph)
    first = next(_cuts(call, call.bytes // 2, Caps(10**9)))
    assert [tensor.shape for tensor in first.larger.tensors.values()] == [(4, 8, 8, 8), (8, 8, 3, 3), (8,)]
    assert [tensor.shape for tensor in first.smaller.made] == [(2, 8, 8, 8)]
    call = call_of(backward, graph)
    first = next(_cuts(call, call.bytes // 2, Caps(10**9)))
    assert [tensor.shape[0] for tensor in first.larger.tensors.values()] == [4, 4, 8]
    assert [tensor.shape for tensor in first.larger.made] == [(8, 8, 3, 3), (8,)]
    assert (8,) in first.larger.args  # the sizes of the bias


def test_what_belongs_to_the_model_is_cut_only_if_nothing_else_helps() -> None:
    table = nn.Embedding(1000, 16)
    indices = torch.zeros(4, dtype=torch.int64)
    graph = dry_run(lambda: table(indices).sum().backward(), model=table).graph
    call = call_of(ops_called(graph, "embedding")[0], graph)
    assert len(call.weights) == 1
    first = next(_cuts(call, call.bytes // 2, Caps(10**9)))
    assert [tensor.shape for tensor in first.larger.tensors.values()] == [(250, 16), (4,)]


def test_costs_are_extrapolated_along_a_line() -> None:
    larger, smaller = Cost(40, 0.5, (1,)), Cost(24, 0.25, (1,))
    found = _extrapolated(larger, smaller, size=16, half=4, quarter=2)
    assert found == Cost(40 + 12 * 8, 0.5 + 12 * 0.125, None, extrapolated=True)
    falling = _extrapolated(smaller, larger, size=16, half=4, quarter=2)
    assert (falling.workspace_bytes, falling.seconds) == (24, 0.25)  # more never takes less


def test_a_cut_call_keeps_the_order_of_strides_and_every_other_number() -> None:
    channels_last = Tensor(0, 0, (16, 3, 16, 8), (384, 1, 24, 3), 5, "float32")
    expanded = Tensor(1, 1, (16, 4), (0, 1), 0, "float32")
    weight = Tensor(2, 2, (16, 16), (1, 16), 0, "float32")
    call = OpCall(
        "aten.made_up.default",
        (Ref(0), 16, (8, 16, 16), (16, True), ((16,), Ref(1))),
        (("size", (16, 16)), ("other", 16)),
        {0: channels_last, 1: expanded, 2: weight},
        (None, expanded, weight),
        maker=call_to("aten.relu.default", (16,), (16,), (16,)),
        weights=frozenset({2}),
    )
    small = call.cut(16, 2, weights=False, lists=False)
    assert (small.args, small.kwargs) == (call.args, call.kwargs)
    assert small.tensors[0] == Tensor(0, 0, (2, 3, 16, 8), (384, 1, 24, 3), 0, "float32")
    assert small.tensors[1] == Tensor(1, 1, (2, 4), (0, 1), 0, "float32")
    assert small.tensors[2] == weight
    assert small.outputs == (None, small.tensors[1], weight)
    assert small.maker == call_to("aten.relu.default", (2,), (2,), (16,))

    small = call.cut(16, 2, weights=True, lists=True)
    assert small.args == (Ref(0), 16, (8, 2, 16), (16, True), ((2,), Ref(1)))
    assert small.kwargs == (("size", (2, 16)), ("other", 16))
    assert small.tensors[2] == Tensor(2, 2, (2, 16), (1, 2), 0, "float32")
    assert small.outputs == (None, small.tensors[1], small.tensors[2])
    assert small.maker == call_to("aten.relu.default", (2,), (2,), (2,))
    assert call.cut(3, 1, weights=True, lists=True).tensors[0].stride == (128, 1, 8, 1)
    assert call.cut(5, 1, weights=True, lists=True) == call


def capped(graph: Graph, share: float) -> Caps:
    """Caps that the convolutions exceed: a share of what the smallest of them takes."""
    calls = (call_of(op, graph) for op in graph.ops if "convolution" in op.target)
    return Caps(op_bytes=int(share * min(call.bytes for call in calls)))


@pytest.mark.parametrize("name", ["convolution", "convolution_backward"])
@pytest.mark.parametrize("batch", [16, 8, 32])  # 8 is also the number of channels, 32 the height and width
def test_an_extrapolated_workspace_is_that_of_the_full_convolution(
    tmp_path: Path, runs: list[OpCall], name: str, batch: int
) -> None:
    graph = traced(*convolutions(batch, extent=32)).graph
    for op in ops_called(graph, name):
        alone = replace(graph, ops=(replace(op, id=0),))
        caps = Caps(op_bytes=int(0.6 * call_of(op, graph).bytes))
        full = profile(alone, cache=tmp_path / "full.sqlite")
        runs.clear()
        small = profile(alone, cache=tmp_path / f"{op.id}.sqlite", caps=caps)
        assert max(call.bytes for call in runs) <= caps.op_bytes
        assert (full.ops[0].extrapolated, small.ops[0].extrapolated) == (False, True)
        assert small.ops[0].workspace_bytes == full.ops[0].workspace_bytes > 0
        assert small.values == graph.values  # what extrapolated ops make is not corrected
        assert small.notes == ()


def test_ops_within_the_caps_are_not_extrapolated_beside_those_that_are(cache: Path) -> None:
    graph = traced(*convolutions(batch=16)).graph
    small = profile(graph, cache=cache, caps=capped(graph, 0.5))
    assert all(op.extrapolated for op in small.ops if "convolution" in op.target)
    assert [op.extrapolated for op in ops_called(small, "ones_like")] == [False]


def test_an_op_that_would_take_too_long_is_extrapolated_too(
    tmp_path: Path, runs: list[OpCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = traced(*convolutions(batch=16, extent=32)).graph
    most = max(call_of(op, graph).bytes for op in ops_called(graph, "convolution"))
    monkeypatch.setattr("lowtide.cost.profile._SMALL_BYTES", most // 4)
    quick = profile(graph, cache=tmp_path / "quick.sqlite", caps=Caps(10**9, op_seconds=0.0))
    assert all(op.extrapolated for op in ops_called(quick, "convolution"))
    assert max(call.bytes for call in runs) < most
    runs.clear()
    patient = profile(graph, cache=tmp_path / "patient.sqlite", caps=Caps(10**9, op_seconds=1e9))
    assert not any(op.extrapolated for op in patient.ops)
    assert max(call.bytes for call in runs if "convolution" in call.target) >= most
    assert [op.workspace_bytes for op in ops_called(quick, "convolution")] == [
        op.workspace_bytes for op in ops_called(patient, "convolution")
    ]


class Writing(nn.Module):
    """Changes a part of a part of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.weight * x
        y[16:][8:40] = 0.0
        return y.sum()


def test_what_copies_the_whole_storage_of_a_part_is_as_large_as_that(cache: Path) -> None:
    graph = profile(capture(Writing(), (torch.randn(64, 64),)), cache=cache)
    written = [graph.values[op.creates[0]].bytes for op in ops_called(graph, "slice_scatter")]
    assert len(written) == 4
    assert set(written) == {64 * 64 * 4}


def test_seconds_that_other_processes_take_are_not_those_of_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = itertools.count(0.0, 60.0)
    clocks = SimpleNamespace(perf_counter=lambda: next(wall), process_time=time.process_time)
    monkeypatch.setattr("lowtide.cost.op_bench.time", clocks)
    (cost,) = measure_calls([call_to("aten.relu.default", (16, 8), (16, 8))], CPU)
    assert isinstance(cost, Cost)
    assert cost.seconds < 1


def test_an_extrapolated_cost_is_measured_again_once_the_caps_allow_it(
    cache: Path, runs: list[OpCall]
) -> None:
    graph = traced(*convolutions(batch=16)).graph
    caps = capped(graph, 0.5)
    small = profile(graph, cache=cache, caps=caps)
    assert any(op.extrapolated for op in small.ops)
    runs.clear()
    assert profile(graph, cache=cache, caps=caps) == small
    assert runs == []
    full = profile(graph, cache=cache, caps=Caps(10**9, op_seconds=1e9))
    assert not any(op.extrapolated for op in full.ops)
    extrapolated = {
        signature(op, graph) for op, guessed in zip(graph.ops, small.ops, strict=True) if guessed.extrapolated
    }
    assert len(runs) == len(extrapolated)
    runs.clear()
    assert profile(graph, cache=cache, caps=caps) == full  # better than the caps ask for
    assert runs == []


def test_an_extrapolated_cost_stands_as_long_as_one_of_the_caps_forbids_more() -> None:
    call = call_to("aten.relu.default", (16, 8), (16, 8))
    guessed = Cost(0, 2.0, None, extrapolated=True)
    assert _still_holds(guessed, call, Caps(1023, 5.0))
    assert _still_holds(guessed, call, Caps(1024, 1.0))
    assert not _still_holds(guessed, call, Caps(1024, 2.0))
    assert _still_holds(replace(guessed, extrapolated=False), call, Caps(1024, 2.0))


def test_an_op_too_large_for_the_caps_that_cannot_be_made_smaller_is_named(
    cache: Path, runs: list[OpCall]
) -> None:
    graph = profile(one_op("aten.bitwise_not.default", 2), cache=cache, caps=Caps(op_bytes=1))
    assert graph.notes == (
        "could not be profiled, counted without workspace: aten.bitwise_not.default: "
        "too large for this machine, and it cannot be made smaller",
    )
    assert runs == []


def test_an_op_that_is_large_but_allowed_is_run_in_full_if_it_cannot_be_made_smaller(
    cache: Path, runs: list[OpCall], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lowtide.cost.profile._SMALL_BYTES", 1)
    graph = profile(one_op("aten.bitwise_not.default", 2), cache=cache)
    assert (graph.notes, len(runs), graph.ops[0].extrapolated) == ((), 1, False)


def failing_at(monkeypatch: pytest.MonkeyPatch, refused: Callable[[OpCall], bool]) -> None:
    """Stand-in kernels that refuse some calls; others need a byte of workspace for each of their own."""

    def stand_in(calls: Sequence[OpCall], device: torch.device) -> Iterator[Cost | Failure]:
        return (
            Failure(f"{call.target}: no") if refused(call) else Cost(call.bytes, 1.0, None) for call in calls
        )

    monkeypatch.setattr("lowtide.cost.profile.measure_calls", stand_in)


def test_an_op_that_fails_when_made_smaller_is_tried_at_another_size(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(monkeypatch, lambda call: call.bytes < 150)
    graph = profile(one_op("aten.bitwise_not.default", 400), cache=cache, caps=Caps(op_bytes=300))
    assert (graph.notes, graph.ops[0].extrapolated, graph.ops[0].workspace_bytes) == ((), True, 800)


def test_an_op_that_fails_whenever_it_is_made_smaller_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_at(monkeypatch, lambda call: call.bytes < 800)
    graph = profile(one_op("aten.bitwise_not.default", 400), cache=cache, caps=Caps(op_bytes=300))
    assert graph.notes == ("could not be profiled, counted without workspace: aten.bitwise_not.default: no",)


# Kernels on made-up arguments -----------------------------------------------------------------------


def test_made_up_tensors_have_the_shapes_and_strides_asked_for_and_harmless_contents() -> None:
    tensors = {
        0: Tensor(0, 0, (2, 3), (1, 2), 7, "float32"),
        1: Tensor(1, 1, (4, 5), (0, 1), 0, "float64"),  # overlaps itself
        2: Tensor(2, 2, (6,), (1,), 0, "int64"),
        3: Tensor(3, 3, (0, 2), (2, 1), 0, "float32"),
        4: Tensor(4, 4, (3,), (1,), 0, "bool"),
    }
    args: tuple[Arg, ...] = (
        *(Ref(key) for key in tensors),
        Symbol("dtype", "float16"),
        (Symbol("device", "cuda:7"), Ref(2)),
    )
    call = OpCall(
        "aten.made_up.default",
        args,
        (("memory_format", Symbol("memory_format", "channels_last")),),
        tensors,
        (),
    )
    made, keywords = call.prepare(CPU)
    assert [tuple(one.shape) for one in made[:5]] == [(2, 3), (4, 5), (6,), (0, 2), (3,)]
    assert [one.stride() for one in made[:4]] == [(1, 2), (0, 1), (1,), (2, 1)]
    assert [one.dtype for one in made[:5]] == [
        torch.float32, torch.float64, torch.int64, torch.float32, torch.bool,
    ]  # fmt: skip
    assert all(0.1 <= number <= 1.0 for one in made[:2] for number in one.flatten().tolist())
    assert len(set(made[0].flatten().tolist())) > 1
    assert not made[2].any()
    assert not made[4].any()
    assert made[5:] == [torch.float16, [CPU, made[2]]]
    assert keywords == {"memory_format": torch.channels_last}
    assert not any(one.requires_grad for one in made[:5])


@pytest.mark.parametrize(
    ("call", "consistent"),
    [
        (call_to("aten.relu.default", (4, 3), (4, 3)), True),
        (call_to("aten.relu.default", (4, 3), (3, 4)), False),  # it works, and makes something else
        (call_to("aten.view.default", (4, 3), (7,), (7,)), False),  # it refuses
    ],
)
def test_a_call_is_consistent_if_it_makes_what_it_says(call: OpCall, consistent: bool) -> None:
    assert call.is_consistent() is consistent


def test_what_an_op_leaves_is_counted_by_storage_and_without_its_arguments() -> None:
    view = call_to("aten.view.default", (4, 3), (12,), (12,))
    in_place = call_to("aten.relu_.default", (4, 3), (4, 3))
    parts = OpCall("aten.split.Tensor", (Ref(0), 2), (), {0: Tensor(0, 0, (4, 3), (3, 1), 0, "float32")}, ())
    several = OpCall("aten.max.dim", (Ref(0), 0), (), dict(parts.tensors), ())
    found = list(measure_calls([view, in_place, parts, several], CPU))
    assert [cost.output_bytes for cost in found if isinstance(cost, Cost)] == [(), (), (), (3 * 4, 3 * 8)]


def test_calls_are_answered_in_order_with_failures_in_their_places() -> None:
    good, bad = call_to("aten.relu.default", (4,), (4,)), call_to("aten.mm.default", (4,), (4,))
    found = list(measure_calls([bad, good, bad, good], CPU))
    assert [isinstance(one, Failure) for one in found] == [True, False, True, False]
    assert str(found[0]).startswith("aten.mm.default: ")
    assert list(measure_calls([], CPU)) == []


# Nothing is touched ---------------------------------------------------------------------------------


def test_the_model_its_gradients_and_all_random_streams_are_left_as_they_were(cache: Path) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
    batch = torch.randn(4, 8)
    model(batch).sum().backward()
    state = copy.deepcopy(model.state_dict())
    gradients = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    trace = traced(model, batch)
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=True)
    profiled = profile(trace, cache=cache)
    assert any(op.random and op.seconds > 0 for op in profiled.graph.ops)  # numbers were drawn
    assert torch.equal(torch.get_rng_state(), streams[0])
    assert random.getstate() == streams[1]
    assert str(np.random.get_state(legacy=True)) == str(streams[2])
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert len(gradients) == 6
    for parameter, (gradient, saved) in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
        assert torch.equal(gradient, saved)
    assert model.training
    assert torch.is_grad_enabled()


# Progress -------------------------------------------------------------------------------------------


def test_progress_counts_up_to_the_number_of_distinct_ops(cache: Path) -> None:
    seen: list[tuple[int, int]] = []
    graph = traced(*convolutions()).graph
    total = len({signature(op, graph) for op in graph.ops})
    profile(graph, cache=cache, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_progress_begins_with_what_is_known_and_counts_failures_as_done(cache: Path) -> None:
    profile(one_op("aten.bitwise_not.default"), cache=cache)
    drawing = Drawing()
    for name in "abcd":
        drawing.value(name, 64)
    drawing.op("aten.bitwise_not.default", [0], [1])
    drawing.op("aten.nonsense.default", [1], [2])
    drawing.op("aten.clone.default", [2], [3])
    seen: list[tuple[int, int]] = []
    profile(drawing.graph(), cache=cache, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(2, 3), (3, 3)]


# The environment ------------------------------------------------------------------------------------


@pytest.fixture
def _settings() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(precision)  # now it has been set, and can be set back to this
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    torch.use_deterministic_algorithms(False)
    torch._C._set_mkldnn_enabled(True)
    torch.backends.cudnn.allow_tf32 = convolutions


@pytest.mark.usefixtures("_settings")
def test_the_environment_tells_settings_apart_that_choose_other_kernels() -> None:
    plain = environment(CPU)
    found = {plain}
    torch.set_num_threads(torch.get_num_threads() + 1)
    found.add(environment(CPU))
    torch.use_deterministic_algorithms(True)
    found.add(environment(CPU))
    torch.set_float32_matmul_precision("medium")
    found.add(environment(CPU))
    torch._C._set_mkldnn_enabled(False)
    found.add(environment(CPU))
    assert len(found) == 5
    facts = json.loads(plain)
    assert (facts["device"], facts["torch"]) == ("cpu", torch.__version__)
    assert facts["capability"] == torch.backends.cpu.get_cpu_capability()


def test_the_environment_can_be_told_where_precisions_were_set_the_new_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mixed() -> str:
        raise RuntimeError("you have used mix of the legacy and new APIs to set the matmul precision")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", mixed)
    assert environment(CPU) == environment(CPU)


def test_the_environment_is_the_same_when_nothing_has_changed() -> None:
    assert environment(CPU) == environment(torch.device("cpu", 0))


@pytest.mark.usefixtures("_settings")
def test_the_environment_of_a_card_names_it_and_its_libraries_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    card = torch.device("cuda", 0)
    plain = environment(card)
    found = {plain, environment(CPU), environment(torch.device("cuda", 1))}
    with torch.backends.cudnn.flags(enabled=False):
        found.add(environment(card))
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        found.add(environment(card))
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        found.add(environment(card))
    assert environment(card) == plain
    torch.set_float32_matmul_precision("high")
    found.add(environment(card))
    torch.backends.cudnn.allow_tf32 = False
    found.add(environment(card))
    assert len(found) == 8
    assert json.loads(plain)["device"] == "card 0"


@pytest.mark.usefixtures("_settings")
def test_costs_of_another_environment_are_not_used(cache: Path, runs: list[OpCall]) -> None:
    graph = one_op("aten.bitwise_not.default")
    profile(graph, cache=cache)
    torch.set_num_threads(torch.get_num_threads() + 1)
    profile(graph, cache=cache)
    assert len(runs) == 2


# The cache ------------------------------------------------------------------------------------------


def test_costs_are_kept_at_home_unless_told_otherwise(tmp_path: Path, runs: list[OpCall]) -> None:
    graph = one_op("aten.bitwise_not.default")
    profile(graph)
    assert (tmp_path / "home" / "costs.sqlite").exists()
    profile(graph)
    assert len(runs) == 1


def test_where_costs_cannot_be_kept_at_home_the_profile_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "costs.sqlite"
    monkeypatch.setattr("lowtide.cost.profile.default_cache_path", lambda: path)
    graph = profile(one_op("aten.bitwise_not.default"))
    assert graph.ops[0].seconds > 0
    (note,) = graph.notes
    assert note.startswith(f"costs are not kept for the next time: cannot keep costs in '{path}': ")


def test_a_user_without_a_home_is_told_that_costs_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.undo()  # the fixture's cache
    monkeypatch.setattr(Path, "home", nowhere)
    graph = profile(one_op("aten.bitwise_not.default"))
    assert graph.ops[0].seconds > 0
    assert graph.notes == (
        "costs are not kept for the next time: cannot keep costs in '~/.cache/lowtide/costs.sqlite': "
        "there is no home directory",
    )


def test_a_cache_that_was_asked_for_and_cannot_be_used_is_refused(tmp_path: Path, runs: list[OpCall]) -> None:
    with pytest.raises(BadFile) as refusal:
        profile(one_op("aten.bitwise_not.default"), cache=tmp_path)
    assert str(refusal.value) == f"cannot keep costs in '{tmp_path}': it is a directory"
    assert runs == []


def test_what_was_measured_is_not_lost_with_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: CostCache, costs: object) -> None:
        raise BadFile(self.path, "database or disk is full", doing="keep costs in")

    monkeypatch.setattr(CostCache, "put", full)
    monkeypatch.setattr("lowtide.cost.profile._CHUNK", 1)
    graph = profile(traced(*convolutions()).graph, cache=cache)
    assert all(op.seconds > 0 for op in graph.ops)
    assert graph.notes == (
        f"costs are not kept for the next time: cannot keep costs in '{cache}': database or disk is full",
    )


def test_a_damaged_cache_is_filled_again(cache: Path, runs: list[OpCall]) -> None:
    cache.write_bytes(b"this is no database" * 100)
    graph = one_op("aten.bitwise_not.default")
    assert profile(graph, cache=cache).notes == ()
    assert profile(graph, cache=cache).ops[0].seconds > 0
    assert len(runs) == 1


# Refusals -------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
@pytest.mark.parametrize(("home", "device"), [("cuda:0", None), ("cpu", "cuda:0")])
def test_profiling_on_a_card_that_is_not_there_is_refused_and_nothing_is_written(
    cache: Path, home: str, device: str | None
) -> None:
    graph = replace(one_op("aten.bitwise_not.default"), device=home)
    with pytest.raises(DeviceMissing) as refusal:
        profile(graph, cache=cache, device=device)
    assert str(refusal.value) == (
        "cannot profile on 'cuda:0': this machine has no such device. Do it on a machine that has one; "
        "predicting for it needs none (`lowtide fit --device cuda`)."
    )
    assert not cache.exists()


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("mps", "cannot profile on 'mps'; lowtide profiles on cpu and cuda"),
        ("banana", "'banana' is not a device. Try cpu, cuda or cuda:0."),
    ],
)
def test_a_device_that_cannot_be_profiled_on_is_refused(cache: Path, device: str, message: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        profile(one_op("aten.bitwise_not.default"), cache=cache, device=device)
    assert str(refusal.value) == message
