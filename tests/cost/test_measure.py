"""Measuring: exact bytes of steps written by hand, nothing disturbed, and what is refused."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.cost.measure import Allocation, Reading, cpu_blocks, growth, measure, record_cpu
from lowtide.errors import BadRequest, DeviceMissing


@pytest.fixture(autouse=True, scope="module")
def _everything_older_is_out_of_the_way() -> Iterator[None]:
    """Measuring collects garbage first, and torch alone leaves a million objects to look through."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def block_of(count: int) -> torch.Tensor:
    """One allocation of exactly `count` bytes."""
    return torch.empty(count, dtype=torch.uint8)


def held(reading: Reading) -> list[int]:
    """The timeline, counted from what was resident."""
    return [live - reading.resident_bytes for live in reading.timeline]


def training(model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(batch).square().mean().backward()

    return step


# Steps written by hand ------------------------------------------------------------------------------


def test_a_hand_written_step_is_measured_to_the_byte() -> None:
    def step() -> None:
        a = block_of(1000)
        b = block_of(500)
        del a
        c = block_of(200)
        del b, c

    reading = measure(step, device="cpu")
    assert held(reading) == [0, 1000, 1500, 500, 700, 200, 0]
    assert reading.growth_bytes == 1500
    assert reading.peak_bytes == reading.resident_bytes + 1500 == max(reading.timeline)
    assert (reading.device, reading.reserved_bytes) == ("cpu", None)


def test_what_the_step_returns_is_still_held_at_its_end() -> None:
    def step() -> torch.Tensor:
        scratch, kept = block_of(64), block_of(300)
        del scratch
        return kept

    assert held(measure(step, device="cpu")) == [0, 64, 364, 300]


def test_a_step_that_allocates_nothing_holds_nothing() -> None:
    reading = measure(lambda: torch.empty(0), device="cpu")
    assert held(reading) == [0]
    assert reading.growth_bytes == 0


def test_a_view_and_an_in_place_op_take_nothing() -> None:
    block = torch.zeros(100)
    assert held(measure(lambda: block.view(10, 10).t().neg_(), device="cpu")) == [0]


def test_a_linear_layer_forward_and_backward_by_hand() -> None:
    weight = torch.ones(16, 8, requires_grad=True)
    batch = torch.ones(32, 8)

    def step() -> None:
        weight.grad = None
        (batch @ weight.t()).sum().backward()

    # The product (32×16) and the loss; the product is not needed once it is summed. Then the loss's
    # gradient, weight.grad (16×8), and while that is computed a dense copy of the expanded gradient.
    expected = [0, 2048, 2052, 4, 8, 8 + 512, 8 + 512 + 2048, 520, 516, 512]
    assert held(measure(step, device="cpu")) == expected


# The window -----------------------------------------------------------------------------------------


def test_a_block_from_before_the_window_is_not_counted_when_it_is_freed() -> None:
    kept = [block_of(5000)]

    def step() -> None:
        mine = block_of(100)
        kept.clear()
        del mine

    assert held(measure(step, device="cpu")) == [0, 100, 0]


def test_a_block_from_an_earlier_measured_window_is_not_counted_when_it_is_freed() -> None:
    kept: list[torch.Tensor] = []
    assert held(measure(lambda: kept.append(block_of(5000)), device="cpu")) == [0, 5000]

    def step() -> None:
        mine = block_of(100)
        kept.clear()
        del mine

    blocks, _ = record_cpu(step)
    assert [block.bytes for block in blocks] == [100, -5000, -100]  # the allocator does report it
    assert list(growth(blocks)) == [0, 100, 0]


def test_an_address_that_is_used_again_is_counted_again() -> None:
    blocks = [
        Allocation(1, 7, 10),
        Allocation(2, 7, -10),
        Allocation(3, 7, 30),
        Allocation(4, 7, -30),
        Allocation(5, 7, -30),
    ]
    assert list(growth(blocks)) == [0, 10, 0, 30, 0]


def test_an_event_of_no_bytes_is_neither_an_allocation_nor_a_free() -> None:
    assert list(growth([Allocation(1, 7, 0), Allocation(2, 7, -10), Allocation(3, 8, 5)])) == [0, 5]


def test_events_are_put_in_order_and_those_of_other_devices_left_out() -> None:
    def event(kind: Any, when: int, size: int, device: str = "cpu", children: tuple[Any, ...] = ()) -> Any:
        fields = SimpleNamespace(ptr=size, alloc_size=size, device=SimpleNamespace(type=device))
        return SimpleNamespace(tag=kind, start_time_ns=when, children=children, extra_fields=fields)

    inside = event(_EventType.Allocation, 2, 20)
    tree = [
        event(_EventType.Allocation, 3, 30),
        event(_EventType.TorchOp, 1, 99, children=(inside, event(_EventType.Allocation, 4, 40, "cuda"))),
    ]
    assert cpu_blocks(tree) == [Allocation(2, 20, 20), Allocation(3, 30, 30)]


def addresses_and_sizes() -> st.SearchStrategy[list[tuple[int, int]]]:
    return st.lists(st.tuples(st.integers(1, 4), st.integers(1, 1000)), max_size=40)


@given(addresses_and_sizes(), st.dictionaries(st.integers(1, 4), st.integers(1, 1000)))
def test_growth_is_the_sum_of_the_blocks_that_the_window_itself_allocated(
    touches: list[tuple[int, int]], before: dict[int, int]
) -> None:
    live, mine = dict(before), dict[int, int]()
    blocks, expected = list[Allocation](), [0]
    for when, (address, size) in enumerate(touches):  # touching a live address frees it, another allocates
        if address in live:
            blocks.append(Allocation(when, address, -live.pop(address)))
            if mine.pop(address, None) is None:
                continue
        else:
            live[address] = mine[address] = size
            blocks.append(Allocation(when, address, size))
        expected.append(sum(mine.values()))
    assert list(growth(blocks)) == expected


# It agrees with itself, and disturbs nothing --------------------------------------------------------


def test_measuring_again_gives_the_same_timeline() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    step = training(model, torch.ones(2, 3, 16, 16))
    model.zero_grad(set_to_none=True)
    first = measure(step, device="cpu")
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        again = measure(step, device="cpu")
        assert again.timeline == first.timeline


def test_a_measured_step_computes_what_a_plain_one_does() -> None:
    def gradients(run: Callable[[Callable[[], None]], object]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        run(training(model, torch.randn(4, 8)))
        found = [p.grad for p in model.parameters() if p.grad is not None]
        return [*found, torch.rand(3), torch.tensor(random.random())]

    plain = gradients(lambda step: step())
    measured = gradients(lambda step: measure(step, device="cpu"))
    assert len(plain) == 4 + 2
    assert all(torch.equal(one, other) for one, other in zip(plain, measured, strict=True))


def test_gradients_that_exist_are_accumulated_once() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.sum().backward()
    measure(lambda: weight.sum().backward(), device="cpu")
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_an_exception_comes_through_and_the_next_measurement_works() -> None:
    def fails() -> None:
        block_of(100)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(fails, device="cpu")
    assert held(measure(lambda: block_of(10), device="cpu")) == [0, 10]


# How often it runs, and which seconds count ---------------------------------------------------------


def test_the_step_runs_once_and_timed_further_times_on_request() -> None:
    runs: list[int] = []
    measure(lambda: runs.append(1), device="cpu")
    assert len(runs) == 1
    measure(lambda: runs.append(1), device="cpu", timed=2)
    assert len(runs) == 1 + 3


def test_seconds_are_the_median_of_the_timed_runs_or_else_those_of_the_recorded_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reading(timed: int, *durations: float) -> Reading:
        ticks = (tick for duration in durations for tick in (10.0, 10.0 + duration))
        monkeypatch.setattr("lowtide.cost.measure.time", SimpleNamespace(perf_counter=lambda: next(ticks)))
        return measure(lambda: block_of(10), device="cpu", timed=timed)

    assert reading(0, 100.0).seconds == 100.0
    timed = reading(3, 100.0, 9.0, 1.0, 4.0)
    assert timed.seconds == 4.0
    assert held(timed) == [0, 10]


# What is resident -----------------------------------------------------------------------------------


def resident() -> int:
    return measure(lambda: None, device="cpu").resident_bytes


def test_resident_is_what_the_process_holds_in_tensors_when_the_step_begins() -> None:
    before = resident()
    kept = [block_of(1234), nn.Parameter(torch.ones(10))]
    reading = measure(lambda: block_of(7), device="cpu")
    assert reading.resident_bytes - before == 1234 + 40
    assert reading.timeline == (before + 1274, before + 1281)
    kept.clear()
    assert resident() == before


def test_each_storage_is_resident_once_however_many_tensors_look_at_it() -> None:
    before = resident()
    base = torch.zeros(100)
    looks = [base[10:20], base.view(10, 10), base.t(), base.detach(), nn.Parameter(base)]
    tied = nn.Linear(4, 4, bias=False)
    other = nn.Linear(4, 4, bias=False)
    other.weight = tied.weight
    assert resident() - before == 400 + 64
    del base
    del looks[1:]
    assert resident() - before == 400 + 64  # a small view holds all of its storage


def test_what_only_a_dead_cycle_holds_is_not_resident() -> None:
    before = resident()
    cycle: list[Any] = [block_of(4096)]
    cycle.append(cycle)
    del cycle
    assert resident() == before


def test_a_tensor_that_is_left_of_a_vmap_is_resident_by_what_is_in_it() -> None:
    before = resident()
    left = []

    def batched(row: torch.Tensor) -> torch.Tensor:
        left.append(row.sin())
        return row

    base = torch.zeros(3, 10)
    torch.func.vmap(batched)(base)
    assert resident() - before == 120 + 120
    left.clear()
    assert resident() - before == 120


def test_tensors_without_bytes_on_the_cpu_are_not_resident() -> None:
    before = resident()
    with FakeTensorMode():
        fake = torch.empty(1000)
    strange = [torch.empty(1000, device="meta"), torch.empty(1000, layout=torch.sparse_coo), fake]
    assert resident() == before
    del strange


# On CUDA, with a card that is made up ---------------------------------------------------------------


class Card:
    """Counts like the CUDA caching allocator: blocks live, their peak, and a trace while it is asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.live, self.peak, self.synchronized = 0, 10**6, 0
        self.trace: list[dict[str, Any]] = []
        self.recording: str | None = None
        stand_ins = {
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "synchronize": self._synchronize,
            "reset_peak_memory_stats": self._reset,
            "memory_allocated": lambda _: self.live,
            "max_memory_allocated": lambda _: self.peak,
            "max_memory_reserved": lambda _: 2 << 20,
        }
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self._record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda _: {"device_traces": [list(self.trace)]})

    def take(self, size: int) -> None:
        self.live += size
        self.peak = max(self.peak, self.live)
        self._note("segment_alloc", 2 << 20)
        self._note("alloc", size)

    def give(self, size: int) -> None:
        self.live -= size
        self._note("free_requested", size)
        self._note("free_completed", size)

    def _note(self, action: str, size: int) -> None:
        if self.recording is not None:
            self.trace.append({"action": action, "size": size})

    def _synchronize(self, _: object) -> None:
        self.synchronized += 1

    def _reset(self, _: object) -> None:
        self.peak = self.live

    def _record(self, enabled: str | None, **_: object) -> None:
        self.recording = enabled


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[Card]:
    card = Card(monkeypatch)
    yield card
    assert card.recording is None, "the allocator was left recording"


def test_on_cuda_the_peak_is_the_allocators_own_and_the_timeline_its_trace(card: Card) -> None:
    card.take(5120)
    card.give(1024)

    def step() -> None:
        card.take(1024)
        card.give(512)  # of a block from before: it counts as a release here
        card.take(2048)
        card.give(1024)

    reading = measure(step, device="cuda")
    assert reading.timeline == (4096, 5120, 4608, 6656, 5632)
    assert (reading.resident_bytes, reading.peak_bytes, reading.growth_bytes) == (4096, 6656, 2560)
    assert (reading.device, reading.reserved_bytes) == ("cuda", 2 << 20)
    assert card.synchronized == 3  # before the statistics are read, and around the clock


def test_on_cuda_what_only_a_dead_cycle_holds_is_not_resident(card: Card) -> None:
    class Holder:
        def __init__(self) -> None:
            self.myself = self
            card.take(4096)

        def __del__(self) -> None:
            card.give(4096)

    Holder()
    assert measure(lambda: None, device="cuda").resident_bytes == 0


def test_without_being_told_it_measures_on_the_card_if_that_is_in_use(
    card: Card, monkeypatch: pytest.MonkeyPatch
) -> None:
    for available, in_use, expected in ((True, True, "cuda"), (True, False, "cpu"), (False, True, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda in_use=in_use: in_use)
        assert measure(lambda: None).device == expected


def test_on_cuda_an_exception_ends_the_recording(card: Card) -> None:
    def fails() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        measure(fails, device="cuda:0")


# Refusals -------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card here")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 3)])
def test_measuring_on_a_card_that_is_not_there_is_refused(device: str | torch.device) -> None:
    runs: list[int] = []
    with pytest.raises(DeviceMissing) as refusal:
        measure(lambda: runs.append(1), device=device)
    assert str(refusal.value) == (
        f"cannot measure on '{device}': this machine has no such device. Do it on a machine that has one; "
        "predicting for it needs none (`lowtide fit --device cuda`)."
    )
    assert refusal.value.device == str(device)
    assert not runs


def test_a_card_beyond_the_last_one_is_refused_where_there_are_cards(card: Card) -> None:
    assert measure(lambda: None, device="cuda:0").device == "cuda:0"
    with pytest.raises(DeviceMissing, match="cannot measure on 'cuda:1'"):
        measure(lambda: None, device="cuda:1")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("mps", "cannot measure on 'mps'; lowtide measures on cpu and cuda"),
        ("meta", "cannot measure on 'meta'; lowtide measures on cpu and cuda"),
        ("banana", "'banana' is not a device. Try cpu, cuda or cuda:0."),
    ],
)
def test_a_device_that_cannot_be_measured_on_is_refused(device: str, message: str) -> None:
    with pytest.raises(BadRequest) as refusal:
        measure(lambda: None, device=device)
    assert str(refusal.value) == message
    assert not isinstance(refusal.value, DeviceMissing)


def test_a_negative_number_of_timed_runs_is_refused_before_anything_runs() -> None:
    runs: list[int] = []
    with pytest.raises(BadRequest, match="the step cannot be timed -1 times; give 0 or more"):
        measure(lambda: runs.append(1), device="cpu", timed=-1)
    assert not runs


def test_a_recording_that_holds_nothing_is_an_error_and_not_a_step_without_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Empty:
        profiler = None

        def __init__(self, **_: object) -> None: ...
        def __enter__(self) -> Empty:
            return self

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr("lowtide.cost.measure.profile", Empty)
    with pytest.raises(BadRequest, match="recorded nothing: is another profiler running"):
        record_cpu(lambda: None)
