"""A rehearsal on a GPU: the training runs as it is, and PyTorch may reserve what a card would let it."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from lowtide.compat.memory import history
from lowtide.cost.cuda_rules import CONTEXT_BYTES
from lowtide.errors import BadRequest
from lowtide.ir.simulate import CATEGORIES, Category
from lowtide.rehearsal.ledger import Glimpses
from lowtide.rehearsal.outcome import (
    Act,
    ActPeak,
    Ended,
    Glimpse,
    Holder,
    Instant,
    Rehearsed,
    Shortfall,
    in_steps,
)
from lowtide.rehearsal.owners import Owners, keys_of
from lowtide.rehearsal.training_watch import TrainingWatch
from lowtide.text.card import Card
from lowtide.text.sizes import parse_bytes
from lowtide.text.units import format_bytes
from lowtide.trace.user_lines import line_of

_ASKED = re.compile(r"Tried to allocate ([\d.]+ [KMGT]?i?B)")
_MOST_HOLDERS = 12
_TAKES, _GIVES = "alloc", "free_requested"
_NOTE = "validation is told by model.eval(), and what was held at peaks is known where memory ran out alone"


class Capped:
    """Watches a training on the current CUDA device, under a cap.

    Raises:
        BadRequest: the device has less memory than the card.
    """

    def __init__(self, card: Card, *, most_steps: int | None) -> None:
        self._card = card
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._total_bytes = torch.cuda.mem_get_info(self._device)[1]
        if card.memory_bytes > self._total_bytes:
            raise BadRequest(
                f"{card} cannot be rehearsed on this GPU, which has {format_bytes(self._total_bytes)}. "
                "Hide it (CUDA_VISIBLE_DEVICES=), and the training is replayed on the CPU."
            )
        self._following = TrainingWatch(most_steps, sees_ops=False)
        self._owners = Owners()
        self._peaks: dict[Act, ActPeak] = {}
        self._turns: list[tuple[int, Act]] = []  # when an act began, in microseconds as the allocator counts
        self._shortfall: Shortfall | None = None
        self._glimpses: tuple[Glimpse, ...] = ()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The training runs in this block, and may run out of memory."""
        device, following = self._device, self._following
        following.changed, following.before_step = self._turn, self._owners.met
        following.training = True  # nobody sees when it begins
        before = torch.cuda.get_per_process_memory_fraction(device)
        with ExitStack() as stack:
            stack.callback(torch.cuda.set_per_process_memory_fraction, before, device)
            allowed = self._card.usable_bytes - CONTEXT_BYTES
            torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / self._total_bytes), device)
            snapshot = stack.enter_context(history(device))
            stack.enter_context(following.watched())
            torch.cuda.reset_peak_memory_stats(device)
            begun = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
            self._turns = [(time.time_ns() // 1000, following.act())]
            try:
                yield
            except torch.OutOfMemoryError as error:
                self._shortfall = self._told(error)
                raise
            finally:
                self._close(self._turns[-1][1])
                self._glimpses = self._timeline(snapshot()["device_traces"][device.index or 0], *begun)

    def found(self, ended: Ended) -> Rehearsed:
        """What is known so far."""
        return Rehearsed(
            card=self._card,
            context_bytes=CONTEXT_BYTES,
            acts=tuple(in_steps(self._peaks.values(), self._following.steps)),
            shortfall=self._shortfall,
            timeline=self._glimpses,
            steps=self._following.steps,
            replayed=False,
            expandable=False,
            other_segments_fit=None,
            ended=ended,
            notes=(_NOTE,),
        )

    def _turn(self) -> None:
        act = self._following.act()
        if act is not self._turns[-1][1]:
            self._close(self._turns[-1][1])
            torch.cuda.reset_peak_memory_stats(self._device)
            self._turns.append((time.time_ns() // 1000, act))

    def _close(self, act: Act) -> None:
        """Note what an act held at most, which ends here."""
        peak = torch.cuda.max_memory_allocated(self._device)
        reserved = torch.cuda.max_memory_reserved(self._device)
        known = self._peaks.get(act)
        self._peaks[act] = ActPeak(
            act=act,
            times=1 + (known.times if known else 0),
            allocated_bytes=max(peak, known.allocated_bytes if known else 0),
            reserved_bytes=max(reserved, known.reserved_bytes if known else 0),
            moment=None,
            held={},
            fits=self._shortfall is None,
        )

    def _told(self, error: torch.OutOfMemoryError) -> Shortfall:
        following = self._following
        line = line_of(error)
        moment = Instant(following.act(), following.steps, following.doing(), "an allocation", line, line)
        asked = _ASKED.search(str(error))
        allocated = torch.cuda.memory_allocated(self._device)
        held, holders = self._held(allocated)
        reserved = torch.cuda.memory_reserved(self._device)
        return Shortfall(moment, parse_bytes(asked[1]) if asked else 0, allocated, reserved, held, holders)

    def _held(self, allocated_bytes: int) -> tuple[Mapping[Category, int], tuple[Holder, ...]]:
        """What modules and optimizers hold; the rest is taken to be kept by autograd, or in use."""
        self._owners.look_around()
        sizes: dict[int, Holder] = {}
        for key, category, name, size in keys_of(self._owners.owned(), on_cuda=True):
            sizes.setdefault(key, Holder(category, name, size, 1))
        held = Counter(dict.fromkeys(CATEGORIES, 0))
        for holder in sizes.values():
            held[holder.category] += holder.bytes
        held[Category.ACTIVATIONS] = max(0, allocated_bytes - held.total())
        largest = sorted(sizes.values(), key=lambda holder: (-holder.bytes, holder.name))
        return dict(held), tuple(largest[:_MOST_HOLDERS])

    def _timeline(self, trace: Any, allocated: int, reserved: int) -> tuple[Glimpse, ...]:
        """What the allocator has written down, in the acts that its times fall into."""
        glimpses, turns = Glimpses(), list(self._turns)
        act = turns[0][1]
        stack = [0] * len(CATEGORIES)
        for entry in trace:
            while turns and turns[0][0] <= entry.get("time_us", 0):
                act = turns.pop(0)[1]
            allocated += entry["size"] * ((entry["action"] == _TAKES) - (entry["action"] == _GIVES))
            reserved += entry["size"] * _GROWTH.get(entry["action"], 0)
            stack[CATEGORIES.index(Category.ACTIVATIONS)] = allocated
            glimpses.add(act, allocated, reserved, stack)
        return glimpses.all()


_GROWTH = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
