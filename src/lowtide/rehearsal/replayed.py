"""A rehearsal without a GPU: the training runs on the CPU, and its memory is replayed by CUDA's rules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lowtide.cost.cuda_rules import CONTEXT_BYTES, cuda_rules
from lowtide.rehearsal.ledger import CardLedger
from lowtide.rehearsal.outcome import Ended, Rehearsed, in_steps
from lowtide.rehearsal.owners import Owners
from lowtide.rehearsal.played import PlayedByCpu, cuda_answers
from lowtide.rehearsal.training_watch import TrainingWatch
from lowtide.rehearsal.watch import CardWatch
from lowtide.text.card import Card

_BY_DEVICE = "the script names CUDA: what it moves or makes there is on the card, played by the CPU"
_BY_USE = (
    "the script does not name CUDA: parameters that are used, what is moved to its device, and whatever "
    "takes part with them are taken to be on the card"
)
_AUTOTUNING = (
    "cudnn.benchmark is on: what cuDNN takes while it tries its kernels in first steps is not known here"
)


class Replayed:
    """Watches a training on the CPU."""

    def __init__(self, card: Card, *, expandable: bool, most_steps: int | None) -> None:
        self._card = card
        self._expandable = expandable
        self._owners = Owners()
        self._following = TrainingWatch(most_steps)
        allowed_bytes = card.usable_bytes - CONTEXT_BYTES
        self._ledger = CardLedger(allowed_bytes, expandable=expandable, look=self._look)
        self._watch = CardWatch(self._ledger, self._following, self._owners)
        self._notes: dict[str, None] = {}
        self._told: list[dict[str, Any]] = []  # parameter groups that work otherwise in the step that runs

    @contextmanager
    def running(self) -> Iterator[None]:
        """The training runs in this block."""
        following, watch = self._following, self._watch
        following.changed = watch.turn
        following.before_step, following.after_step = self._before_step, self._after_step
        with ExitStack() as stack:
            stack.enter_context(cuda_rules(for_real=True))
            stack.enter_context(cuda_answers(watch))
            stack.enter_context(following.watched())
            self._owners.look_around()
            watch.adopt_trained()
            stack.enter_context(PlayedByCpu(watch))
            stack.enter_context(watch)
            stack.callback(self._end)
            yield

    def found(self, ended: Ended) -> Rehearsed:
        """What is known so far."""
        ledger = self._ledger
        return Rehearsed(
            card=self._card,
            context_bytes=CONTEXT_BYTES,
            acts=tuple(in_steps(ledger.peaks(), self._following.steps)),
            shortfall=ledger.shortfall,
            timeline=ledger.glimpses(),
            steps=self._following.steps,
            replayed=True,
            expandable=self._expandable,
            other_segments_fit=not ledger.other.refusals,
            ended=ended,
            notes=(_BY_DEVICE if self._watch.told_of_device else _BY_USE, *self._notes),
        )

    def _end(self) -> None:
        self._watch.bury()
        self._ledger.settle()
        if torch.backends.cudnn.benchmark:
            self._notes[_AUTOTUNING] = None

    def _look(self) -> None:
        self._watch.label()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._owners.met(optimizer)
        self._watch.label()
        self._told = list(_working_singly(optimizer))
        for group in self._told:
            group["foreach"] = True  # as on CUDA, with temporaries as large as all parameters

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._watch.label()
        for group in self._told:
            group["foreach"] = None


def _working_singly(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """The groups that have not been told how to work on their parameters: on CUDA, all at once."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            yield group
