"""A training, or a part of one, rehearsed on a card: under a real cap on CUDA, replayed without."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Protocol

import torch

from lowtide.cost.cuda_rules import CONTEXT_BYTES
from lowtide.errors import BadRequest
from lowtide.rehearsal.capped import Capped
from lowtide.rehearsal.outcome import Ended, Rehearsed
from lowtide.rehearsal.replayed import Replayed
from lowtide.rehearsal.telling import told
from lowtide.rehearsal.training_watch import Enough
from lowtide.text.card import Card
from lowtide.text.units import format_bytes


class Stand(Protocol):
    """One way to watch a training."""

    def running(self) -> AbstractContextManager[None]:
        """The training runs in this block."""

    def found(self, ended: Ended) -> Rehearsed:
        """What is known so far."""


def card(
    memory: str | int | Card,
    *,
    reserve: str | int = 0,
    steps: int | None = None,
    expandable_segments: bool = False,
) -> CardRehearsal:
    """Run a part of a training as if on a card of that size: `with lowtide.card("16GiB") as rehearsal:`.

    On CUDA the cap is real: what does not fit is out of memory, which ends the block and goes no further.
    Without CUDA the block runs on the CPU to its end, and every allocation is replayed by the rules of CUDA's
    caching allocator. `rehearsal.found` tells what each part of the training held at most, and where it would
    have run out of memory first; `print(rehearsal)` shows it.

    `reserve` is what others hold of the card. With `steps`, passes over a DataLoader end after so many steps
    (or batches, in validation), and the block after so many, or twice as many with a DataLoader.
    `expandable_segments` replays PyTorch's allocator as that setting has it.

    Raises:
        BadRequest: it is no size, nothing is left beside the CUDA context, or this GPU has less.
    """
    found = Card.parse(memory, reserve)
    if found.usable_bytes <= CONTEXT_BYTES:
        raise BadRequest(
            f"{found} leaves PyTorch nothing: the CUDA context alone takes about "
            f"{format_bytes(CONTEXT_BYTES)}. Name a larger card."
        )
    if steps is not None and steps < 1:
        raise BadRequest(f"a rehearsal of {steps} steps shows nothing; give 1 or more")
    return CardRehearsal(found, steps, expandable_segments)


class CardRehearsal:
    """A block of a training under a card; what was found is known while it runs, and afterwards."""

    def __init__(self, card: Card, steps: int | None, expandable: bool) -> None:
        on_cuda = torch.cuda.is_available()
        self._stand: Stand = (
            Capped(card, most_steps=steps)
            if on_cuda
            else Replayed(card, expandable=expandable, most_steps=steps)
        )
        self._running: AbstractContextManager[None] | None = None
        self._ended = Ended.INTERRUPTED

    @property
    def found(self) -> Rehearsed:
        """What is known so far."""
        return self._stand.found(self._ended)

    @property
    def fits(self) -> bool:
        """Whether all that was seen so far fits on the card."""
        return self.found.fits

    def __str__(self) -> str:
        return told(self.found)

    def __enter__(self) -> CardRehearsal:
        if self._running is not None:
            raise BadRequest("a rehearsal runs one block. Make another: lowtide.card(…).")
        self._running = self._stand.running()
        self._running.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        assert self._running is not None, "a block ends that has begun"
        out_of_memory = isinstance(error, torch.OutOfMemoryError)
        self._running.__exit__(kind, error, traceback)
        self._ended = _how(error)
        return out_of_memory or isinstance(error, Enough)


def _how(error: BaseException | None) -> Ended:
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return Ended.WHOLE
    if isinstance(error, Enough):
        return Ended.ENOUGH
    if isinstance(error, torch.OutOfMemoryError):
        return Ended.OUT_OF_MEMORY
    return Ended.INTERRUPTED if isinstance(error, KeyboardInterrupt) else Ended.FAILED
