"""The worst length of an epoch: what scaling tells of each is what a dry run of it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import BadRequest, InfeasibleBudget
from lowtide.planner.length_steps import sampled_lengths
from lowtide.planner.ops import StepBudget
from lowtide.planner.worst import Epoch, worst
from lowtide.trace.spec import StepSpec
from lowtide.zoo.gpt import GPT
from lowtide.zoo.lstm import LSTM
from tests.helpers.eager import mean_square
from tests.helpers.transformer_models import small_transformer

LENGTHS = [2, 3, 17, 32, 33, 64, 70, 90, 96]


def gpt() -> GPT:
    return GPT(layers=1, width=16, heads=2, vocab=20, context=96)


def ids(length: int) -> Tensor:
    return torch.empty(3, length, dtype=torch.long, device="meta")


def step_of(model: nn.Module, example: Any, loss: Any = mean_square, **more: Any) -> StepBudget:
    return StepBudget(StepSpec(model, example, loss, **{"device": "cpu", "profile": False, **more}))


def ask(model: nn.Module, lengths: Any, example_of: Callable[[int], Any] = ids, **more: Any) -> Epoch:
    return worst(
        model, lengths, example_of, **{"loss": mean_square, "device": "cpu", "profile": False, **more}
    )


# Which lengths are captured -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "sampled"),
    [
        ([5, 6, 7], ()),  # as few as there would be samples
        ([1, 2, 3, 4], (2, 4, 3)),
        ([10, 20, 30, 40], (16, 32, 18)),
        ([64, 128, 192, 512], (256, 512, 192)),
        ([128, 256, 384, 512], (256, 512)),  # as round as kernels can wish
        ([100, 200, 300, 2047], (896, 1920, 129)),
    ],
)
def test_two_round_lengths_are_sampled_and_one_that_is_not(
    lengths: list[int], sampled: tuple[int, ...]
) -> None:
    assert sampled_lengths(lengths) == sampled


# Peaks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_length_peaks_as_its_dry_run_does(device: str) -> None:
    """On CUDA attention's statistics are rounded up to 32 tokens."""
    model = gpt()
    found = ask(model, LENGTHS, device=device, optimizer="adamw")
    assert found.scaled
    assert found.captured == (32, 33, 64, 96)[::1] or found.captured == tuple(sorted({*found.sampled, 96}))
    for each in found.lengths:
        step = step_of(model, ids(each.length), device=device, optimizer="adamw")
        running = step.plain.timeline.peak_op
        assert running is not None
        assert (each.peak_bytes, each.op) == (step.plain_peak_bytes, running.label)
    assert found.worst.length == 96
    assert (found.fits, found.too_long) == (None, ())
    assert found.notes == ()


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.long)])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.long)])
def test_masks_of_transformers_grow_with_the_square(kind: str, device: str) -> None:
    model, _ = small_transformer(kind)

    def masked(length: int) -> dict[str, Tensor]:
        tokens = torch.zeros(3, length, dtype=torch.long)
        mask = torch.ones_like(tokens)
        mask[0, length // 2 :] = 0
        return {"input_ids": tokens, "labels": tokens, "attention_mask": mask}

    found = ask(model, [5, 30, 65, 70], masked, loss=None, device=device)
    assert found.scaled
    for each in found.lengths:
        step = step_of(model, masked(each.length), None, device=device)
        assert each.peak_bytes == step.plain_peak_bytes


def test_a_loop_over_tokens_is_traced_at_every_length() -> None:
    model = LSTM(layers=1, width=8, classes=3)
    lengths = {2: 5, 3: 1, 4: 1, 6: 2}
    found = ask(model, lengths, lambda length: torch.empty(2, length, 8, device="meta"))
    assert not found.scaled
    assert found.sampled == ()
    assert found.notes == (
        "the step does not scale with its length, so each was captured: op 25 is head: "
        "aten.addmm in one and cells.0.input: aten.addmm in the other",
    )
    for each in found.lengths:
        step = step_of(model, torch.empty(2, each.length, 8, device="meta"))
        assert each.peak_bytes == step.plain_peak_bytes
    assert [each.samples for each in found.lengths] == [5, 1, 1, 2]


def test_a_single_token_is_a_step_of_its_own() -> None:
    """Alone it attends to nothing: transformers leave the mask out."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layer(x)
            return found if x.shape[1] == 1 else found.softmax(1) @ found.transpose(1, 2)

    def states(length: int) -> Tensor:
        return torch.empty(2, length, 4, device="meta")

    model = Attending()
    found = ask(model, [1, 4, 6, 8, 10], states)
    assert found.scaled
    for each in found.lengths:
        assert each.peak_bytes == step_of(model, states(each.length)).plain_peak_bytes


def test_the_worst_need_not_be_the_longest() -> None:
    """Where the examples of long texts are few."""

    def few_of_the_long(length: int) -> Tensor:
        return torch.empty(8 if length < 30 else 1, length, dtype=torch.long, device="meta")

    found = ask(gpt(), [10, 20, 90], few_of_the_long)
    assert found.worst.length == 20


# Memory ---------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_told_with_and_without_a_plan() -> None:
    model = gpt()
    lengths = dict.fromkeys(LENGTHS, 10)
    peaks = {length: step_of(model, ids(length)) for length in (70, 90, 96)}
    least = {length: step.promised_bytes(step.solve("auto", "min")) for length, step in peaks.items()}
    memory = least[90]
    found = ask(model, lengths, memory=memory)
    assert [each.length for each in found.too_long] == [
        each.length for each in found.lengths if each.peak_bytes > memory
    ]
    assert found.fits is False
    assert [each.length for each in found.too_long_planned] == [96]
    assert {90, 96} <= set(found.captured)
    with pytest.raises(InfeasibleBudget):
        peaks[96].solve("auto", memory)
    assert "nor with a plan: length 96, 10 of 90 samples (11.1 %)" in str(found)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_with_costs_other_lengths_are_scaled_too(device: str) -> None:
    """For a GPU that is not here a profile adds the workspaces of libraries to what is resident."""
    model = gpt()
    peaks = {length: step_of(model, ids(length), device=device, profile=True) for length in (60, 90)}
    memory = peaks[90].plain_peak_bytes - 1
    found = ask(model, [8, 16, 60, 90], device=device, profile=True, memory=memory)
    assert found.scaled, found.notes
    by_length = {each.length: each for each in found.lengths}
    assert by_length[60].peak_bytes == peaks[60].plain_peak_bytes
    assert (by_length[90].fits, by_length[90].fits_planned) == (False, True)


def test_of_a_card_everything_is_counted() -> None:
    """Context and segments beside the peak, as `largest_batch` counts them; a peak of that size would fit."""
    model = gpt()
    at = {length: step_of(model, ids(length), device="cuda", profile=True) for length in (16, 90)}
    size = lowtide.Card("1GiB")
    needed = {length: step.on(size).plain_needed_bytes for length, step in at.items()}
    assert needed[90] > at[90].plain_peak_bytes
    found = ask(model, [8, 16, 60, 90], device="cuda", profile=True, memory=size)
    assert {each.length: each.peak_bytes for each in found.lengths}.items() >= needed.items()
    assert found.fits is True
    assert "all 4 lengths fit in a card of 1.00 GiB" in str(found)
    document = found.to_json()
    assert document["card"] is not None
    assert document["memory_bytes"] == 1 << 30


def test_what_fits_is_told_in_one_line() -> None:
    found = ask(gpt(), [10, 20], memory="1GiB")
    assert found.fits is True
    assert "all 2 lengths fit in 1.00 GiB" in str(found)
    document = found.to_json()
    assert document["fits"] is True
    assert document["worst"]["length"] == 20
    assert [row["samples"] for row in document["lengths"]] == [1, 1]


# Refusals -------------------------------------------------------------------------------------------------


def test_a_length_without_a_position_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"row 199 of an embedding that has 96: gpt\.py"):
        ask(gpt(), [8, 16, 24, 200])


def test_what_does_not_scale_and_has_too_many_lengths_is_refused() -> None:
    model = LSTM(layers=1, width=8, classes=3)
    with pytest.raises(BadRequest, match=r"does not scale with its length .*, and 70 are too many for that"):
        ask(model, range(1, 71), lambda length: torch.empty(2, length // 16 + 1, 8, device="meta"))


def test_no_lengths_and_methods_for_layers_are_refused() -> None:
    with pytest.raises(BadRequest, match="there are no lengths"):
        ask(gpt(), [])
    with pytest.raises(BadRequest, match="a length of 0 leaves nothing to train on"):
        ask(gpt(), [0, 4])
    with pytest.raises(BadRequest, match="the memory is 60%, and it is a size"):
        ask(gpt(), [4], memory="60%")
    with pytest.raises(BadRequest, match="rotor plans layers, and lengths are planned op by op"):
        ask(gpt(), [4], method="rotor")


def test_a_capture_that_is_off_the_lines_ends_them() -> None:
    """What only the longest text does is found where that is traced."""

    class Twisted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layer(x)
            return found.tanh() if x.shape[1] > 9 else found

    found = ask(Twisted(), [4, 6, 8, 10], lambda length: torch.empty(2, length, 4, device="meta"))
    assert not found.scaled
    assert set(found.captured) == {4, 6, 8, 10}
    assert "does not scale" in found.notes[0]


def test_the_result_is_what_the_front_door_gives() -> None:
    assert lowtide.worst is worst
    assert isinstance(replace(ask(gpt(), [4]), model="x"), lowtide.Epoch)
