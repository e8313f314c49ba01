"""One call of a planned model: which segments are open, and what is being written down for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from lowtide.chain.placement import Edge, SegmentPlacement, Unit
from lowtide.compat.autograd import saving_hooks
from lowtide.compat.dispatch import function_mode
from lowtide.compat.trees import tree_flatten
from lowtide.errors import CannotApply
from lowtide.execute.buffers import Before, UnitBuffers
from lowtide.execute.tape import Listening, Made, Tape, TapeSlots

# Opens a checkpoint around what happens from now on, to be recomputed from the tape and the tensors.
Opened: TypeAlias = Callable[[Tape, Sequence[torch.Tensor]], Generator[None, None, None]]


@dataclass(frozen=True, slots=True)
class _Open:
    """A segment that has begun. `hooks` are those that decide what is saved in it: the checkpoint's."""

    tape: Tape
    generator: Generator[None, None, None]
    hooks: object


# The arguments of a call that is running, and its buffers before it.
_Pending: TypeAlias = tuple[tuple[Any, Any], Before, list[int]]


class Pass:
    """One call of the model: the segments that are open, and where on their tapes we are."""

    def __init__(
        self, placement: SegmentPlacement, buffers: Mapping[str, UnitBuffers], opened: Opened
    ) -> None:
        self.placement = placement
        self.buffers = buffers
        self.opened = opened
        self.crossed: set[Edge] = set()
        self.calls: Counter[str] = Counter()
        self.slots = TapeSlots()
        self.open: list[_Open] = []
        self.listening = Listening(self.slots)
        self.hooks = saving_hooks()
        self.is_listening = False
        self.unit: Unit | None = None  # the unit whose call is running
        self.pending: _Pending | None = None
        self.depth: list[Unit] = []

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The call of a module begins."""
        call = (path, self.calls[path])
        self.calls[path] += 1
        self.depth.append(call)
        if self.unit is not None:
            return
        self.cross(Edge(call, ends=False), (args, kwargs))
        if call in self.placement.units:
            self.unit = call
            self._listen(False)
            if self.open:
                self._check_undisturbed()
                buffers = self.buffers[path]
                written = self.slots.written((args, kwargs))
                self.pending = (written, buffers.before(module), buffers.versions(module))

    def leave(self, path: str, module: nn.Module, output: Any) -> None:
        """The call of a module has ended."""
        call = self.depth.pop()
        if self.unit is not None and self.unit != call:
            return
        if self.unit == call:
            self.unit = None
            if self.pending is not None:
                (args, kwargs), before, versions = self.pending
                self.pending = None
                buffers = self.buffers[path]
                buffers.check(path, module, versions)
                again = buffers.again(module, before)
                self.open[-1].tape.entries.append(Made(again, args, kwargs, self.slots.fills(output)))
            self._listen(bool(self.open))
        self.cross(Edge(call, ends=True), output)

    def cross(self, edge: Edge, at_hand: Any) -> None:
        """Close and open the segments that end and begin here. `at_hand` holds the tensor of the cut."""
        closing, opening = self.placement.closes.get(edge, 0), self.placement.opens.get(edge, 0)
        if not closing and not opening:
            return
        self.crossed.add(edge)
        self._listen(False)
        self._check_undisturbed()
        for _ in range(min(closing, len(self.open))):
            close(self.open.pop().generator)
            self.slots.end()
        for _ in range(opening):
            self._open(at_hand)
        self._listen(bool(self.open))

    def _check_undisturbed(self) -> None:
        expected = self.open[-1].hooks if self.open else self.hooks
        if saving_hooks() != expected:
            raise CannotApply(
                "a segment would begin or end inside a part of the model that already decides what is saved: "
                "it is checkpointed by itself, or runs under saved_tensors_hooks. Switch that off "
                "(gradient_checkpointing_disable()), or plan around whole modules that contain it."
            )

    def _open(self, at_hand: Any) -> None:
        tensors = [leaf for leaf in tree_flatten(at_hand)[0] if isinstance(leaf, torch.Tensor)]
        if self.open:  # what the segment around this one cannot give again is held
            tensors = [tensor for tensor in tensors if self.slots.number(tensor) is not None]
        tape = Tape(self.slots.begin(tensors))
        if self.open:
            self.open[-1].tape.entries.append(tape)
        generator = self.opened(tape, tensors)
        self.open.append(_Open(tape, generator, saving_hooks()))

    def _listen(self, wanted: bool) -> None:
        if wanted and not self.is_listening:
            self.listening.tape = self.open[-1].tape
            self.listening.__enter__()  # type: ignore[no-untyped-call]
            self.is_listening = True
        elif not wanted and self.is_listening:
            if function_mode() is not self.listening:
                raise CannotApply(
                    "a torch function mode was switched on in the middle of the model's forward and is still "
                    "on where a module is called; segments cannot be closed around it. Switch it on outside."
                )
            self.listening.__exit__(None, None, None)
            self.is_listening = False

    def finish(self) -> bool:
        """The model's call is over: nothing stays open. Whether the path was the planned one."""
        self._listen(False)
        while self.open:
            close(self.open.pop().generator)
        return self.crossed == self.placement.edges

    def abandon(self) -> None:
        """The forward has failed: undo what was opened, innermost first."""
        if self.is_listening and function_mode() is self.listening:
            self.listening.__exit__(None, None, None)
        self.is_listening = False
        while self.open:
            self.open.pop().generator.close()


def close(generator: Generator[None, None, None]) -> None:
    """Leave a checkpoint that was entered."""
    try:
        next(generator)
    except StopIteration:
        return
    raise AssertionError("a checkpoint was left and is still running")
