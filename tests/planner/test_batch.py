"""The largest batch: the same that trying every batch finds, whether the step scales along a line or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.cost.cuda_rules import price
from lowtide.cost.roofline import estimated_seconds
from lowtide.errors import BadRequest, DeviceMissing, InfeasibleBudget
from lowtide.ir.graph import Graph
from lowtide.planner.batch import LargestBatch, largest_batch, measure_reached
from lowtide.planner.batch_search import Reached
from lowtide.planner.batch_steps import MOST, Batch
from lowtide.planner.ops import StepBudget
from lowtide.trace.spec import StepSpec
from tests.helpers.heads import LOGITS_BYTES, Head
from tests.helpers.heads import batch as tokens

WIDTH = 16


class Tower(nn.Module):
    """Four layers; what the forward does may depend on the batch."""

    def __init__(self, twist: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        layers = (part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
        self.layers = nn.Sequential(*layers)
        self.twist = twist

    def forward(self, x: Tensor) -> Tensor:
        return self.twist(self.layers(x)).sum()


def rows(batch: int) -> Tensor:
    return torch.empty(batch, WIDTH, device="meta")


def ask(model: nn.Module, memory: str | int, **more: object) -> LargestBatch:
    return largest_batch(model, rows, memory=memory, **{"profile": False, "device": "cpu", **more})  # type: ignore[arg-type]


def step_of(model: nn.Module, batch: int, **more: object) -> StepBudget:
    return StepBudget(StepSpec(model, rows(batch), **{"profile": False, "device": "cpu", **more}))  # type: ignore[arg-type]


def fits_planned(model: nn.Module, batch: int, memory_bytes: int, **more: object) -> bool:
    try:
        step_of(model, batch, **more).solve("auto", memory_bytes)
    except InfeasibleBudget:
        return False
    return True


def assert_largest(answer: LargestBatch, model: nn.Module, **more: object) -> None:
    """What every batch up to the next says without a plan, and the two that matter with one."""
    assert answer.plain is not None
    assert answer.planned is not None
    plain = [
        batch
        for batch in range(1, answer.plain.batch + 2)
        if step_of(model, batch, **more).plain_peak_bytes <= answer.memory_bytes
    ]
    assert plain == list(range(1, answer.plain.batch + 1))
    assert fits_planned(model, answer.planned.batch, answer.memory_bytes, **more)
    assert not fits_planned(model, answer.planned.batch + 1, answer.memory_bytes, **more)


def test_both_answers_are_the_largest_there_are() -> None:
    """16,384 bytes of weights and gradients; without a plan 6 times 64 bytes a sample, with one 4 times."""
    model = Tower()
    answer = ask(model, 16384)
    assert_largest(answer, model)
    assert answer.plain is not None
    assert answer.planned is not None
    assert answer.planned.batch > answer.plain.batch
    assert answer.scaled
    assert answer.sampled == (4, 8)
    assert answer.captured == (4, 8, answer.plain.batch, answer.planned.batch)
    assert answer.notes == ()


def test_a_batch_that_fills_the_memory_to_the_byte_fits() -> None:
    model = Tower()
    answer = ask(model, step_of(model, 20).plain_peak_bytes)
    assert answer.plain is not None
    assert (answer.plain.batch, answer.plain.promised_bytes) == (20, answer.memory_bytes)


def test_the_answers_are_those_of_captures_at_these_batches() -> None:
    model = Tower()
    answer = ask(model, "24KB", optimizer="adam")
    assert answer.plain is not None
    assert answer.planned is not None
    plain = step_of(model, answer.plain.batch, optimizer="adam")
    assert answer.plain.peak_bytes == answer.plain.promised_bytes == plain.plain_peak_bytes
    planned = step_of(model, answer.planned.batch, optimizer="adam").solve("auto", answer.memory_bytes)
    assert answer.planned.peak_bytes == planned.peak_bytes <= answer.memory_bytes
    assert answer.planned.solution is not None
    assert answer.planned.solution.schedule == planned.schedule
    assert answer.optimizer == "adam"


def pictures(batch: int) -> Batch:
    return Batch(torch.empty(batch, 3, 32, 32, device="meta"), torch.sum)


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten())


def test_with_slices_many_more_samples_fit_and_a_capture_says_so_too() -> None:
    model, memory = Head(), 5 * LOGITS_BYTES
    whole, sliced = (
        largest_batch(model, tokens, memory=memory, profile=False, tiles=tiles) for tiles in (False, True)
    )
    assert whole.planned is not None
    assert sliced.planned is not None
    assert sliced.plain == whole.plain
    assert (whole.planned.slices, sliced.planned.slices) == (0, 1)
    assert sliced.planned.batch > 5 * whole.planned.batch
    assert (whole.notes, sliced.notes) == ((), ())
    (fits, next_fits) = (
        StepBudget(
            StepSpec(model, tokens(sliced.planned.batch + more), device="cpu", profile=False, tiles=True)
        )
        for more in (0, 1)
    )
    assert fits.solve("auto", memory).peak_bytes == sliced.planned.peak_bytes <= memory
    with pytest.raises(InfeasibleBudget):
        next_fits.solve("auto", memory)
    assert sliced.to_json()["tiles"] is True
    assert sliced.to_json()["planned"]["stretches_in_slices"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_time_that_slices_take_counts_against_a_time_limit() -> None:
    found = [
        largest_batch(Head().to("meta"), tokens, memory="300MB", device="cuda", tiles=True, time_limit=limit)
        for limit in (None, 1.1)
    ]
    reached = [each.planned for each in found]
    assert reached[0] is not None
    assert reached[1] is not None
    assert reached[0].extra_seconds_ratio is not None
    assert reached[1].extra_seconds_ratio is not None
    assert reached[0].extra_seconds_ratio > 0.1 >= reached[1].extra_seconds_ratio
    assert reached[0].batch > 5 * reached[1].batch
    assert (reached[0].slices, reached[1].slices) == (1, 0)
    told = "nothing of the planned step runs in slices: nothing that can be cut makes it better"
    assert [told in each.notes for each in found] == [False, True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_for_a_device_that_is_not_here_the_rules_hold_at_every_batch() -> None:
    model, of = convolutions(), pictures
    memory = 40 << 20
    answer = largest_batch(model, of, memory=memory, device="cuda")
    assert answer.plain is not None
    assert answer.planned is not None
    assert (answer.device, answer.scaled) == ("cuda:0", True)
    assert answer.planned.promised_bytes <= memory
    assert answer.planned.promised_bytes > answer.planned.peak_bytes  # a hundredth is left to the allocator
    step = StepBudget(StepSpec(model, of(answer.plain.batch).example, torch.sum, device="cuda")).plain.graph
    seconds = sum(estimated_seconds(op, step) for op in step.ops)
    assert answer.plain.samples_per_second == pytest.approx(answer.plain.batch / seconds)

    def peak(batch: int) -> int:
        return StepBudget(StepSpec(model, of(batch).example, torch.sum, device="cuda")).plain_peak_bytes

    assert peak(answer.plain.batch) <= memory < peak(answer.plain.batch + 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
def test_a_time_limit_holds_for_a_device_that_is_not_here() -> None:
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)]

    def ask_for(limit: float | None) -> LargestBatch:
        return largest_batch(
            nn.Sequential(*layers),
            lambda count: torch.empty(count, 256, device="meta"),
            loss=torch.sum,
            memory="128MiB",
            device="cuda",
            time_limit=limit,
        )

    free = ask_for(None)
    assert free.planned is not None
    assert free.planned.extra_seconds_ratio is not None
    limit = 1 + free.planned.extra_seconds_ratio / 2
    limited = ask_for(limit)
    assert limited.plain is not None
    assert limited.planned is not None
    assert limited.planned.extra_seconds_ratio is not None
    assert limited.planned.extra_seconds_ratio <= limit - 1
    assert limited.plain.batch <= limited.planned.batch < free.planned.batch


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
@pytest.mark.parametrize("factor", [0, 3])
def test_a_capture_that_needs_other_workspaces_than_predicted_corrects_the_search(
    monkeypatch: pytest.MonkeyPatch, factor: int
) -> None:
    """As where a kernel is chosen at large batches that small ones do not show: too little, or too much."""

    def mispriced(graph: Graph) -> Graph:
        ops = tuple(replace(op, workspace_bytes=factor * op.workspace_bytes) for op in price(graph).ops)
        return replace(graph, ops=ops)

    right = largest_batch(convolutions(), pictures, memory="40MiB", device="cuda")
    monkeypatch.setattr("lowtide.planner.batch_steps.with_costs_by_rule", mispriced)
    wrong = largest_batch(convolutions(), pictures, memory="40MiB", device="cuda")
    assert right.plain is not None
    assert wrong.plain is not None
    assert wrong.plain.promised_bytes <= wrong.memory_bytes
    assert 0.95 * right.plain.batch <= wrong.plain.batch <= right.plain.batch
    assert right.planned is not None
    assert wrong.planned is not None
    assert wrong.planned.promised_bytes <= wrong.memory_bytes
    assert 0.9 * right.planned.batch <= wrong.planned.batch <= right.planned.batch
    assert len(wrong.captured) > len(right.captured)


def test_a_batch_can_be_asked_to_be_a_multiple() -> None:
    free, eights = ask(Tower(), 16384), ask(Tower(), 16384, multiple_of=8)
    assert free.plain is not None
    assert free.planned is not None
    assert eights.plain is not None
    assert eights.planned is not None
    assert eights.plain.batch == free.plain.batch // 8 * 8
    assert eights.planned.batch == free.planned.batch // 8 * 8
    assert eights.sampled == (32, 64)


def test_where_only_a_plan_fits_there_is_no_plain_answer() -> None:
    model = Tower()

    def texts(batch: int) -> Tensor:
        return torch.empty(batch, 64, WIDTH, device="meta")

    memory = StepBudget(StepSpec(model, texts(1), device="cpu", profile=False)).plain_peak_bytes - 4
    answer = largest_batch(model, texts, memory=memory, device="cpu", profile=False)
    assert answer.plain is None
    assert answer.planned is not None
    assert answer.planned.batch >= 1
    assert answer.planned.peak_bytes <= memory


def test_more_than_can_be_counted_stops_at_a_bound_and_says_so() -> None:
    answer = ask(nn.Sequential(nn.Linear(WIDTH, 1)), "1TiB", loss=torch.sum)
    assert answer.plain is not None
    assert answer.plain.batch == MOST
    assert f"batches larger than {MOST} were not looked for" in answer.notes


def test_gradients_of_earlier_micro_batches_leave_less_room() -> None:
    once, often = ask(Tower(), 20000), ask(Tower(), 20000, accumulate=4)
    assert once.planned is not None
    assert often.planned is not None
    assert often.planned.batch < once.planned.batch


# Steps that do not scale ----------------------------------------------------------------------------------


def branch(above: int, x: Tensor) -> Tensor:
    return x.exp().exp().exp() if x.shape[0] > above else x.exp()


def squares(x: Tensor) -> Tensor:
    return (x @ x.T).exp()


def flat_squares(x: Tensor) -> Tensor:
    return squares(x).view(-1).exp()


@pytest.mark.parametrize(
    ("twist", "told"),
    [
        (partial(branch, 4), "runs"),  # between the samples
        (partial(branch, 12), "runs"),  # beyond them, below the answer
        (flat_squares, "was expected to be"),  # an extent that is the square of the batch
    ],
    ids=["between the samples", "beyond the samples", "squares"],
)
def test_what_does_not_scale_is_captured_batch_by_batch(twist: Callable[[Tensor], Tensor], told: str) -> None:
    model = Tower(twist)
    answer = ask(model, 16384)
    assert not answer.scaled
    note = next(note for note in answer.notes if "does not scale along a line" in note)
    assert told in note or "in one and" in note or "another order" in note
    assert_largest(answer, model)


def test_scores_of_all_with_all_grow_with_the_square_and_scale_all_the_same() -> None:
    model = Tower(squares)
    answer = ask(model, 16384)
    assert answer.scaled
    assert_largest(answer, model)


# Time -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hot() -> nn.Module:
    """Wide enough for times to mean something."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.GELU(), nn.Tanh())))


def timed(model: nn.Module, limit: float | None) -> LargestBatch:
    def of(batch: int) -> Batch:
        return Batch(torch.empty(batch, 64, device="meta"), torch.sum)

    return largest_batch(model, of, memory="2MiB", device="cpu", time_limit=limit)


def test_a_time_limit_is_kept_and_costs_some_of_the_batch(hot: nn.Module) -> None:
    free, none = timed(hot, None), timed(hot, 1.0)
    assert free.planned is not None
    assert none.planned is not None
    assert free.planned.extra_seconds_ratio is not None
    assert free.planned.extra_seconds_ratio > 0
    assert none.planned.extra_seconds_ratio == 0.0
    assert none.planned.solution is not None
    assert not none.planned.solution.recomputed
    middle = 1 + free.planned.extra_seconds_ratio / 2
    limited = timed(hot, middle)
    assert limited.planned is not None
    assert limited.planned.extra_seconds_ratio is not None
    assert limited.planned.extra_seconds_ratio <= middle - 1
    assert none.planned.batch <= limited.planned.batch <= free.planned.batch
    assert limited.time_limit == middle


def test_throughput_is_the_batch_over_the_time_of_a_step(hot: nn.Module) -> None:
    answer = timed(hot, None)
    assert answer.plain is not None
    assert answer.plain.seconds is not None
    assert answer.plain.samples_per_second == answer.plain.batch / answer.plain.seconds
    assert Reached(8, 1, 1, None).samples_per_second is None


# For real -------------------------------------------------------------------------------------------------


def test_the_plan_can_be_applied_and_the_memory_is_kept() -> None:
    model = Tower()
    answer = ask(model, "24KB")
    assert answer.planned is not None
    batch = Batch(torch.ones(answer.planned.batch, WIDTH))
    reading = measure_reached(answer.planned, model, batch, optimizer=None, device="cpu")
    resident = sum(p.numel() * 4 for p in model.parameters()) + batch.example.numel() * 4  # type: ignore[union-attr]
    assert reading.growth_bytes + resident == answer.planned.peak_bytes
    lowtide.remove(model)


def test_nothing_is_measured_on_a_device_that_is_not_here() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is here")
    with pytest.raises(DeviceMissing, match="cannot measure on 'cuda'"):
        measure_reached(Reached(1, 1, 1, None), Tower(), Batch(rows(1)), optimizer=None, device="cuda")


# Refusals -------------------------------------------------------------------------------------------------


def test_where_not_even_one_sample_fits_the_least_is_named() -> None:
    model = Tower()
    least = step_of(model, 1).solve("auto", "min").peak_bytes
    with pytest.raises(InfeasibleBudget, match="That is for a batch of 1, the smallest") as caught:
        ask(model, least - 1)
    assert caught.value.least_bytes == least
    found = ask(model, least)
    assert found.planned is not None
    assert found.planned.batch == 1


def test_a_time_limit_needs_times() -> None:
    with pytest.raises(BadRequest, match=r"no times to hold a time limit of 1\.2 against: no op was run"):
        ask(Tower(), 16384, time_limit=1.2)


@pytest.mark.parametrize(
    ("wish", "told"),
    [
        ({"time_limit": 0.9}, "a time limit of 0.9 cannot be kept: it is how many times as long"),
        ({"time_limit": float("nan")}, "a time limit of nan cannot be kept"),
        ({"multiple_of": 0}, "a batch cannot be a multiple of 0"),
        ({"method": "rotor"}, "rotor plans layers, and the largest batch is planned op by op"),
        ({"memory": "plenty"}, "cannot read 'plenty' as a size"),
        ({"optimizer": "sdg"}, "there is no optimizer 'sdg'"),
    ],
)
def test_what_makes_no_sense_is_refused(wish: dict[str, object], told: str) -> None:
    with pytest.raises(BadRequest, match=told):
        ask(Tower(), **{"memory": 16384, **wish})  # type: ignore[arg-type]
