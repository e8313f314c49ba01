"""A budget that is a card: what a training takes from the device, with everything that is beside PyTorch.

    card = what others hold + CUDA context and libraries + NCCL + what PyTorch's allocator reserves

The last is replayed, from the first step on, with no more to be had than is left. A hundredth of what the
training holds beyond the model stays free: which kernels are chosen is known to that.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch

from lowtide.compat.memory import segments_expand, switch_expandable_segments_on
from lowtide.cost.cache import BY_RULE
from lowtide.cost.cuda_rules import CONTEXT_BYTES
from lowtide.cost.roofline import Nominal, rates_of, with_estimated_seconds
from lowtide.errors import BadRequest, InfeasibleBudget
from lowtide.ir.graph import Graph
from lowtide.ir.training_reserve import AllocatedRun, TrainingReserve, training_reserve
from lowtide.text.card import Card
from lowtide.text.units import format_bytes

NCCL_BYTES = 512 << 20  # a rank's buffers: an allowance, measured by nobody here
_MARGIN = 100  # one part in so many of what grows
_TOO_CLOSE = "any kernel that takes a little more than was predicted"
_TRIES = 12  # to find the card that would hold


@dataclass(frozen=True)
class Beside:
    """What a process takes from a card beside what PyTorch's allocator reserves."""

    context_bytes: int = CONTEXT_BYTES
    nccl_bytes: int = 0

    @classmethod
    def of(cls, distributed: bool) -> Beside:
        """Of a process alone, or of one among several."""
        return cls(nccl_bytes=NCCL_BYTES if distributed else 0)

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.context_bytes + self.nccl_bytes

    def left_bytes(self, card: Card) -> int:
        """What of `card` is left to the allocator.

        Raises:
            BadRequest: nothing is.
        """
        left = card.usable_bytes - self.bytes
        if left <= 0:
            raise BadRequest(
                f"{card} leaves nothing to train with: the CUDA context and libraries take "
                f"{format_bytes(self.bytes)} of it. Name a larger card, or reserve less."
            )
        return left


@dataclass(frozen=True)
class Training:
    """A step that is trained by, and the step as it was written where that is another."""

    step: AllocatedRun
    plain: AllocatedRun | None = None

    def within(self, left_bytes: int | None, expandable: bool | None = None) -> TrainingReserve:
        """What it takes where no more than that is left, by the segments that there are unless told."""
        grows = segments_expand() if expandable is None else expandable
        return training_reserve(self.step, self.plain, expandable=grows, allowed_bytes=left_bytes)

    def needed_bytes(self, left_bytes: int) -> int:
        """What has to be left for it to be safe: no more than is, or by how much it is not enough."""
        free = self.within(None)
        margin = free.growth_bytes // _MARGIN
        if free.reserved_bytes + margin <= left_bytes:
            return free.reserved_bytes + margin
        if free.allocated_bytes + margin > left_bytes:
            return free.allocated_bytes + margin
        found = self.within(left_bytes - margin)
        if found.failed is not None:
            return left_bytes + found.missing_bytes
        return found.reserved_bytes + margin

    def least_bytes(self, left_bytes: int) -> int:
        """How much has to be left, found from an amount that is not enough."""
        for _ in range(_TRIES):
            needed = self.needed_bytes(left_bytes)
            if needed <= left_bytes:
                break
            left_bytes = needed
        return left_bytes


@dataclass(frozen=True)
class CardUse:
    """What a training takes from a card, by the segments that are best and by PyTorch's own.

    `reserved_bytes` is the most that the allocator reserves on that card; where that is not enough, what it
    would reserve on a larger one. `failed` is the part of the training that runs out of memory.
    """

    card: Card
    beside: Beside
    reserved_bytes: int
    needed_bytes: int  # of the allocator, with what is left free
    failed: str | None
    failed_by_default: str | None  # with the segments that PyTorch has unless told

    @classmethod
    def of(cls, training: Training, card: Card, beside: Beside) -> CardUse:
        """What that training takes."""
        left = beside.left_bytes(card)
        needed = training.needed_bytes(left)
        found = training.within(left) if needed <= left else training.within(None)
        failed = None if needed <= left else training.within(left).failed or _TOO_CLOSE
        by_default = training.within(left, expandable=False)
        return cls(card, beside, found.reserved_bytes, needed, failed, by_default.failed)

    @property
    def fits(self) -> bool:
        """Whether the card holds it."""
        return self.failed is None

    @property
    def taken_bytes(self) -> int:
        """Everything that is taken, what others hold of the card included."""
        return self.reserved_bytes + self.beside.bytes + self.card.reserve_bytes

    @property
    def missing_bytes(self) -> int:
        """By how much the card is too small; 0 if it is not."""
        return max(0, self.needed_bytes - self.beside.left_bytes(self.card))

    def __str__(self) -> str:
        nccl = f", {format_bytes(self.beside.nccl_bytes)} for NCCL" if self.beside.nccl_bytes else ""
        return (
            f"on {self.card}: {format_bytes(self.reserved_bytes)} reserved in expandable segments, "
            f"{format_bytes(self.beside.context_bytes)} for the CUDA context and libraries{nccl}; together "
            f"{format_bytes(self.taken_bytes)}"
        )

    def to_json(self) -> dict[str, object]:
        """All of it, as JSON can hold it."""
        return {
            **card_to_json(self.card),
            "fits": self.fits,
            "taken_bytes": self.taken_bytes,
            "reserved_bytes": self.reserved_bytes,
            "context_bytes": self.beside.context_bytes,
            "nccl_bytes": self.beside.nccl_bytes,
            "missing_bytes": self.missing_bytes,
            "runs_out_in": self.failed,
            "runs_out_by_default_in": self.failed_by_default,
        }


def expand_segments(stacklevel: int) -> None:
    """Switch expandable segments on where there are any, and say so, with what is too late for that.

    Whoever counts on a card has counted with them. Nothing happens on a machine without CUDA.
    """
    if not torch.cuda.is_available() or not segments_expand():
        return
    switch_expandable_segments_on()
    taken_bytes = torch.cuda.memory_reserved() if torch.cuda.is_initialized() else 0
    late = (
        f"; {format_bytes(taken_bytes)} were reserved before and stay in segments of the other kind: set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True, or plan before the model is moved to the GPU"
    )
    warnings.warn(
        f"lowtide: expandable segments are switched on{late if taken_bytes else ''}.", stacklevel=stacklevel
    )


def card_here() -> Card | None:
    """The GPU of this machine, with what others hold of it now; None if there is none."""
    if not torch.cuda.is_available():
        return None
    free_bytes, memory_bytes = torch.cuda.mem_get_info()
    own_bytes = CONTEXT_BYTES + torch.cuda.memory_reserved()
    return Card(memory_bytes, max(0, memory_bytes - free_bytes - own_bytes))


def timed_for(card: Card | None, graph: Graph) -> Graph:
    """`graph` with seconds of that card, where they are estimates and the card is one that is known."""
    if card is None or card.known is None or graph.profiled_on != BY_RULE:
        return graph
    known = card.known
    nominal = Nominal(known.full_flops, known.tensor_flops, known.half_flops, known.bandwidth)
    return with_estimated_seconds(graph, rates_of(nominal))


def check_on_card(card: Card, device: str) -> None:
    """Raise BadRequest where the step runs on no card."""
    if not device.startswith("cuda"):
        raise BadRequest(
            f"{card} was asked for, and the step runs on {device}. Say that it runs on CUDA (device='cuda', "
            "--device cuda), here or not; or give the bytes of a peak, such as 8GiB."
        )


def card_refusal(method: str, card: Card, missing_bytes: int, needed_by: str) -> InfeasibleBudget:
    """Nothing fits on `card`: the card that would hold is so much larger."""
    least_bytes = card.memory_bytes + missing_bytes
    advice = (
        f"That is all of a card: {format_bytes(card.memory_bytes)} of memory were asked for, and a card of "
        f"{format_bytes(least_bytes)} would hold. Shrink the batch, train in a smaller type (autocast), or "
        "reserve less for others."
    )
    return InfeasibleBudget(method, card.memory_bytes, least_bytes, needed_by, advice)


def card_to_json(card: Card) -> dict[str, object]:
    """What a card is, as JSON can hold it."""
    return {
        "name": None if card.known is None else card.known.name,
        "memory_bytes": card.memory_bytes,
        "reserve_bytes": card.reserve_bytes,
    }
