"""A budget that is a card: everything that is taken of it, from the first step on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.backend.request import Request
from lowtide.cost.cuda_rules import CONTEXT_BYTES
from lowtide.cost.roofline import RATES, Nominal, rates_of
from lowtide.errors import BadRequest, InfeasibleBudget
from lowtide.ir.graph import Phase, Role
from lowtide.ir.training_reserve import AllocatedRun
from lowtide.planner import on_card
from lowtide.planner.on_card import NCCL_BYTES, Beside, CardUse, Training, card_here, expand_segments
from lowtide.planner.ops import StepBudget
from lowtide.text.card import Card
from lowtide.text.known_cards import KNOWN_CARDS
from lowtide.trace.spec import StepSpec
from tests.helpers.handmade import Drawing, steps

MIB = 1 << 20
WIDTH = 1024


class Tower(nn.Module):
    """Eight layers, of 4 MiB each, and activations of 4 KiB a row."""

    def __init__(self) -> None:
        super().__init__()
        layers = (part for _ in range(8) for part in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).sum()
        return loss


def rows(batch: int) -> torch.Tensor:
    return torch.empty(batch, WIDTH, device="meta")


def tower() -> Tower:
    with torch.device("meta"):
        return Tower()


def step(batch: int = 8192, **more: Any) -> StepBudget:
    return StepBudget(StepSpec(tower(), rows(batch), optimizer="adamw", device="cuda", **more))


def card_of(left_bytes: int, reserve: int = 0) -> Card:
    """A card that leaves so much to the allocator."""
    return Card(left_bytes + CONTEXT_BYTES + reserve, reserve)


def drawn(hidden: int = 60) -> Training:
    """A weight of 20 MiB, a batch of 20, and what is hidden."""
    drawing = Drawing("cuda:0")
    weight, batch = drawing.value("w", 20 * MIB, Role.PARAMETER), drawing.value("x", 20 * MIB, Role.BATCH)
    made, gradient = drawing.value("h", hidden * MIB), drawing.value("w.grad", 20 * MIB, Role.GRADIENT)
    drawing.op("aten.one.default", [weight, batch], [made])
    drawing.op("aten.two.default", [made], [gradient], phase=Phase.BACKWARD)
    return Training(AllocatedRun(drawing.graph(outputs=[gradient]), steps(0, 1, f"f{made}")))


# What is counted ------------------------------------------------------------------------------------


def test_what_is_left_is_what_nobody_else_holds() -> None:
    card = Card("8GiB", reserve="1GiB")
    assert Beside.of(distributed=False).left_bytes(card) == (7 << 30) - CONTEXT_BYTES
    assert Beside.of(distributed=True).left_bytes(card) == (7 << 30) - CONTEXT_BYTES - NCCL_BYTES


def test_a_card_on_which_nothing_is_left_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"a card of 600\.0 MiB leaves nothing to train with: .* 693\.0 MiB"):
        Beside().left_bytes(Card("600MiB"))


def test_a_training_needs_its_reserve_and_a_hundredth_of_what_grows() -> None:
    # weight, two batches, gradient and hidden, in a validation pass: 140 MiB, 120 of them beyond the weight;
    # after a batch of 10 MiB blocks do not lie on pages any more, and one more is mapped
    training = drawn()
    assert training.within(None, expandable=True).allocated_bytes == 140 * MIB
    assert training.needed_bytes(1 << 30) == 160 * MIB + 120 * MIB // 100


def test_what_is_not_enough_is_told_by_how_much() -> None:
    training = drawn()
    assert training.needed_bytes(100 * MIB) == 140 * MIB + 120 * MIB // 100  # at least
    assert training.least_bytes(100 * MIB) == 160 * MIB + 120 * MIB // 100


def test_the_use_of_a_card_sums_up() -> None:
    card = card_of(200 * MIB, reserve=50 * MIB)
    use = CardUse.of(drawn(), card, Beside())
    assert use.fits
    assert use.reserved_bytes == 160 * MIB
    assert use.taken_bytes == 160 * MIB + CONTEXT_BYTES + 50 * MIB
    assert use.missing_bytes == 0
    assert use.to_json()["taken_bytes"] == use.taken_bytes
    assert "160.0 MiB reserved in expandable segments, 693.0 MiB for the CUDA context" in str(use)


def test_a_card_that_is_too_small_is_told_where_it_fails_and_by_how_much() -> None:
    use = CardUse.of(drawn(), card_of(130 * MIB), Beside())
    assert not use.fits
    assert use.failed == "a validation pass"  # a batch and gradients are still there
    assert use.failed_by_default == "the second step"
    assert use.missing_bytes == 10 * MIB + 120 * MIB // 100


def test_what_fits_only_just_is_no_promise() -> None:
    use = CardUse.of(drawn(), card_of(160 * MIB), Beside())
    assert (use.fits, use.missing_bytes) == (False, 2 * MIB)
    assert use.failed == "any kernel that takes a little more than was predicted"


# Plans ----------------------------------------------------------------------------------------------


def test_a_plan_for_a_card_trains_on_it_from_the_first_step_on() -> None:
    plain = step()
    card = card_of(plain.on(Card("80GiB")).plain_needed_bytes - CONTEXT_BYTES - 60 * MIB)
    planned = plain.within("auto", lowtide_budget(card))
    assert planned.recomputed
    use = plain.on(card).use_of(planned)
    assert use.fits
    assert use.taken_bytes <= card.memory_bytes
    assert planned.budget_bytes == Beside().left_bytes(card)


def lowtide_budget(card: Card) -> Any:
    from lowtide.text.budget import Budget

    return Budget.parse(card)


def test_the_card_that_would_hold_is_named_and_holds() -> None:
    plain = step()
    with pytest.raises(InfeasibleBudget, match=r"That is all of a card: .* would hold") as refused:
        plain.solve("auto", card_of(150 * MIB))
    assert refused.value.budget_bytes == 150 * MIB + CONTEXT_BYTES
    larger = Card(refused.value.least_bytes)
    assert plain.on(larger).use_of(plain.solve("auto", larger)).fits


def test_a_plain_budget_means_what_it_did() -> None:
    plain = step()
    by_peak = plain.solve("auto", "90%")
    assert by_peak.budget_bytes == int(0.9 * plain.plain_peak_bytes)
    assert plain.card is None
    assert plain.promised_bytes(by_peak) <= by_peak.budget_bytes


def test_a_card_is_for_steps_on_cuda() -> None:
    here = StepBudget(StepSpec(tower(), rows(8), device="cpu", profile=False))
    with pytest.raises(BadRequest, match=r"a card of 8\.00 GiB was asked for, and the step runs on cpu"):
        here.solve("auto", Card("8GiB"))


def test_layers_are_planned_for_a_card_as_well() -> None:
    card = card_of(700 * MIB)
    found = lowtide.plan(
        tower(), rows(8192), budget=card, method="rotor", optimizer="adamw", device="cuda", name="tower"
    )
    assert found.budget_bytes == 700 * MIB
    with pytest.raises(InfeasibleBudget, match="would hold"):
        lowtide.plan(tower(), rows(8192), budget=card_of(300 * MIB), method="rotor", device="cuda")


def test_the_largest_batch_on_a_card_trains_on_it() -> None:
    card = card_of(600 * MIB)
    found = lowtide.largest_batch(tower(), rows, memory=card, optimizer="adamw", device="cuda")
    assert found.plain is not None
    assert found.planned is not None
    assert found.card == card
    assert found.to_json()["card"] == {"name": None, "memory_bytes": card.memory_bytes, "reserve_bytes": 0}
    assert found.plain.batch < found.planned.batch
    for reached in (found.plain, found.planned):
        assert 0.95 * card.memory_bytes < reached.promised_bytes <= card.memory_bytes
    assert CardUse.of(plain_training(found.plain.batch), card, Beside()).fits
    assert not CardUse.of(plain_training(found.plain.batch + 1), card, Beside()).fits


def plain_training(batch: int) -> Training:
    trace = step(batch).plain
    return Training(AllocatedRun(trace.graph, trace.schedule))


def test_fit_tells_what_is_taken_of_a_card() -> None:
    found = lowtide.fit(tower(), rows(8192), optimizer="adamw", device="cuda", budget="rtx4090")
    assert found.use is not None
    assert found.fits
    assert found.budget_bytes is None
    assert found.margin_bytes == found.use.card.memory_bytes - found.use.taken_bytes
    assert found.to_json()["card"] == found.use.to_json()
    small = lowtide.fit(tower(), rows(8192), device="cuda", budget=card_of(200 * MIB))
    assert small.fits is False
    assert small.margin_bytes == -(small.use.missing_bytes if small.use else 0)
    assert any("no optimizer was named" in note for note in small.notes)


def test_the_backend_leaves_a_part_of_the_card_to_what_is_reserved() -> None:
    request = Request.read({"budget": card_of(500 * MIB)})
    assert request.budget_bytes == 490 * MIB


@pytest.mark.parametrize("what", ["compare", "solve", "Partitioner"])
def test_who_counts_peaks_alone_refuses_a_card(what: str) -> None:
    asked: dict[str, Callable[[], object]] = {
        "compare": lambda: lowtide.compare(lowtide.Rehearsal(tower(), rows(8)), budget="8GiB card"),
        "solve": lambda: lowtide.solve(step(8).graph, budget="8GiB card"),
        "Partitioner": lambda: lowtide.Partitioner("8GiB card"),
    }
    with pytest.raises(BadRequest, match=r"a card of 8\.00 GiB is no budget for this"):
        asked[what]()


# Times ----------------------------------------------------------------------------------------------


def test_times_are_those_of_the_card_that_is_named() -> None:
    h200 = step()
    t4 = h200.on(Card("t4"))
    slower = sum(op.seconds for op in t4.graph.ops) / sum(op.seconds for op in h200.graph.ops)
    assert 67 / 8.1 * 0.9 < slower < 4800 / 300 * 1.1
    assert sum(op.seconds for op in h200.on(Card("16GiB")).graph.ops) == sum(
        op.seconds for op in h200.graph.ops
    )


def test_the_rates_of_an_h200_are_those_that_were_measured() -> None:
    known = KNOWN_CARDS["h200"]
    nominal = Nominal(known.full_flops, known.tensor_flops, known.half_flops, known.bandwidth)
    for pace, rate in rates_of(nominal).items():
        assert rate.bytes == pytest.approx(RATES[pace].bytes)
        assert rate.flops == pytest.approx(RATES[pace].flops)


# Segments -------------------------------------------------------------------------------------------


class Cuda:
    """A stand-in for a GPU of 10 GiB, on which others hold 1 GiB and this process 700 MiB of segments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, reserved: int) -> None:
        self.switched = 0
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: reserved)
        free = (10 << 30) - (1 << 30) - CONTEXT_BYTES - reserved
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 10 << 30))
        monkeypatch.setattr(on_card, "switch_expandable_segments_on", self.switch)

    def switch(self) -> None:
        self.switched += 1


def test_expandable_segments_are_switched_on_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, reserved=0)
    with pytest.warns(UserWarning, match=r"^lowtide: expandable segments are switched on\.$"):
        expand_segments(stacklevel=1)
    assert cuda.switched == 1


def test_what_was_reserved_before_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    Cuda(monkeypatch, reserved=700 * MIB)
    with pytest.warns(UserWarning, match=r"700\.0 MiB were reserved before and stay in segments"):
        expand_segments(stacklevel=1)


def test_nothing_is_switched_where_segments_cannot_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, reserved=0)
    monkeypatch.setattr(on_card, "segments_expand", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expand_segments(stacklevel=1)
    assert cuda.switched == 0


def test_the_card_that_is_here_is_known_with_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    assert card_here() is None
    Cuda(monkeypatch, reserved=700 * MIB)
    assert card_here() == Card("10GiB", reserve="1GiB")
