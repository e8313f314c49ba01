"""A rehearsal on a GPU, with a stand-in for one: the cap is set and put back, and what runs out is told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.cuda_rules import CONTEXT_BYTES
from lowtide.rehearsal import capped
from lowtide.rehearsal.outcome import Act, Ended

GIB = 1 << 30
MESSAGE = "CUDA out of memory. Tried to allocate 3.07 GiB. GPU 0 has a total capacity of 80.00 GiB."


class Gpu:
    """What `torch.cuda` tells, of a device with 80 GiB."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fractions = [1.0]
        self.allocated = self.peak = 2 * GIB
        self.trace: list[dict[str, Any]] = []
        self.recording = False
        answers = {
            "is_available": lambda: True,
            "current_device": lambda: 0,
            "mem_get_info": lambda device: (79 * GIB, 80 * GIB),
            "get_per_process_memory_fraction": lambda device: self.fractions[-1],
            "set_per_process_memory_fraction": lambda fraction, device: self.fractions.append(fraction),
            "memory_allocated": lambda device=None: self.allocated,
            "memory_reserved": lambda device=None: self.allocated + GIB,
            "max_memory_allocated": lambda device=None: self.peak,
            "max_memory_reserved": lambda device=None: self.peak + GIB,
            "reset_peak_memory_stats": self.reset,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(capped, "history", self.history)

    def reset(self, device: object) -> None:
        self.peak = self.allocated

    def hold(self, more_bytes: int) -> None:
        """Allocate, or free."""
        self.allocated += more_bytes
        self.peak = max(self.peak, self.allocated)
        action = "alloc" if more_bytes > 0 else "free_requested"
        self.trace.append({"action": action, "size": abs(more_bytes), "time_us": 0})

    @contextmanager
    def history(self, device: torch.device) -> Iterator[Any]:
        self.recording = True
        yield lambda: {"device_traces": [self.trace]}
        self.recording = False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_pytorch_may_reserve_what_the_card_has_beside_the_context_and_what_others_hold(gpu: Gpu) -> None:
    with lowtide.card("16GiB", reserve="1GiB") as rehearsal:
        assert gpu.recording
        assert gpu.fractions[-1] == (15 * GIB - CONTEXT_BYTES) / (80 * GIB)
    assert gpu.fractions[-1] == 1.0
    assert not gpu.recording
    assert rehearsal.fits
    assert rehearsal.found.replayed is False


def test_every_part_of_a_training_has_its_peak(gpu: Gpu) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with lowtide.card("16GiB") as rehearsal:
        for _ in range(3):
            gpu.hold(4 * GIB)
            optimizer.step()
            gpu.hold(-4 * GIB)
        model.eval()
        gpu.hold(6 * GIB)
        gpu.hold(-6 * GIB)
        model.train()
    found = {act.act: (act.times, act.allocated_bytes, act.reserved_bytes) for act in rehearsal.found.acts}
    assert found == {
        Act.FIRST: (1, 6 * GIB, 7 * GIB),
        Act.TRAINING: (2, 6 * GIB, 7 * GIB),
        Act.VALIDATION: (1, 8 * GIB, 9 * GIB),
    }
    assert max(glimpse.allocated_bytes for glimpse in rehearsal.found.timeline) == 8 * GIB


def test_what_runs_out_of_memory_ends_the_block_and_is_told_with_its_line(gpu: Gpu) -> None:
    with lowtide.card("16GiB") as rehearsal:
        gpu.hold(4 * GIB)
        raise torch.OutOfMemoryError(MESSAGE)
    found = rehearsal.found
    assert (rehearsal.fits, found.ended, gpu.fractions[-1]) == (False, Ended.OUT_OF_MEMORY, 1.0)
    short = found.shortfall
    assert short is not None
    assert short.asked_bytes == lowtide.parse_bytes("3.07GiB")
    assert (short.allocated_bytes, short.reserved_bytes) == (6 * GIB, 7 * GIB)
    assert "test_capped.py" in short.moment.line
    assert "raise torch.OutOfMemoryError(MESSAGE)" in short.moment.line
    assert "ran out of memory in first step" in str(rehearsal)
    assert [act.fits for act in found.acts] == [False]


def test_other_errors_go_on_and_the_cap_is_put_back(gpu: Gpu) -> None:
    with pytest.raises(ZeroDivisionError), lowtide.card("16GiB"):
        1 / 0  # noqa: B018
    assert gpu.fractions[-1] == 1.0


def test_a_card_larger_than_the_gpu_is_refused(gpu: Gpu) -> None:
    with pytest.raises(lowtide.BadRequest, match=r"cannot be rehearsed on this GPU, which has 80"):
        lowtide.card("96GiB")
