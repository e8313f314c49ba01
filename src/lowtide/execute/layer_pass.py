"""One call of a planned model: which segments are open, and what is being written down for them."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from lowtide.chain.placement import SegmentPlacement, Span, Unit
from lowtide.compat.ambient import Ambient
from lowtide.compat.autograd import saving_hooks
from lowtide.compat.dispatch import function_mode
from lowtide.compat.trees import tree_flatten
from lowtide.errors import CannotApply
from lowtide.execute.surroundings import Surroundings
from lowtide.execute.tape import Listening, Made, Tape, TapeSlots
from lowtide.execute.unit_state import Kept, UnitState

# A checkpoint that is not yet open, around what is to be recomputed from the tape and the tensors.
Opened: TypeAlias = Callable[[Tape, Sequence[torch.Tensor]], Generator[None, None, None]]


@dataclass(slots=True)
class _Open:
    """A segment that begins. `hooks` are those that decide what is saved in it: the checkpoint's."""

    span: Span
    tape: Tape
    generator: Generator[None, None, None]
    hooks: object = None

    def begin(self) -> None:
        enter(self.generator)
        self.hooks = saving_hooks()


@dataclass(frozen=True, slots=True)
class _RunningUnit:
    """The unit whose call is running: its arguments as they are written down, and what it keeps."""

    call: Unit
    args: Any
    kwargs: Any
    surroundings: Surroundings
    kept: Kept | None  # None outside of segments


class Pass:
    """One call of the model: the segments that are open, and where on their tapes we are."""

    def __init__(
        self,
        placement: SegmentPlacement,
        state_of: Callable[[str, nn.Module], UnitState],
        opened: Opened,
        is_deaf: Callable[[], bool],
        draws: bool,
    ) -> None:
        self.placement = placement
        self.state_of = state_of
        self.opened = opened
        self.is_deaf = is_deaf  # while something is run again, what is called does not count
        self.draws = draws
        self.stray = ""  # how the model has left the planned path
        self.thread: int | None = threading.get_ident()  # None once it is over
        self.ambient = Ambient()
        self.handles: list[RemovableHandle] = []
        self.calls: Counter[str] = Counter()
        self.slots = TapeSlots()
        self.open: list[_Open] = []
        self.waiting = list(reversed(placement.segments))
        self.reached = -1
        self.listening = Listening(self.slots)
        self.is_listening = False
        self.unit: _RunningUnit | None = None
        self.depth: list[Unit] = []

    # Hooks ----------------------------------------------------------------------------------------------

    def attach(self, path: str, module: nn.Module) -> None:
        """Follow the calls of a module. A unit is run again with its hooks, so ours are outermost."""
        entering, leaving = partial(self._enter, path), partial(self._leave, path)
        self.handles.append(module.register_forward_pre_hook(entering, with_kwargs=True, prepend=True))
        self.handles.append(module.register_forward_hook(leaving, always_call=True))

    def _enter(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # Another thread may call this before it is known to want keywords, and is not meant either.
        if threading.get_ident() == self.thread and not self.is_deaf():
            self.enter(path, module, args, kwargs or {})

    def _leave(self, path: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if threading.get_ident() == self.thread and not self.is_deaf():
            error = sys.exc_info()[1] if output is None else None  # always called, also where it raised
            self.leave(module, output, error)

    # What the model does --------------------------------------------------------------------------------

    def begin(self, at_hand: Any) -> None:
        """The model's forward begins."""
        self._reach(self.placement.model.first, at_hand)

    def enter(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The call of a module begins."""
        call = (path, self.calls[path])
        self.calls[path] += 1
        self.depth.append(call)
        span = self.placement.span(call)
        planned = path in self.placement.called if self.unit is not None else span is not None
        if not planned and any(True for _ in module.parameters()):
            self._stray(f"it calls {path} where that was not planned")
        if self.unit is not None:
            return
        if span is not None:
            self._reach(span.first, (args, kwargs))
        if call not in self.placement.entered:
            self._begin_unit(call, module, args, kwargs)

    def _begin_unit(self, call: Unit, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._listen(None)
        kept, given = None, (args, kwargs)
        if self.open:
            self._check_undisturbed()
            args, kwargs = self.slots.written((args, kwargs))
            kept = self.state_of(call[0], module).before(self.slots.originals, self.draws)
        self.unit = _RunningUnit(call, args, kwargs, Surroundings.now(), kept)
        kept_ones = kept is not None and kept.tensors
        self._listen(Heard.WRITES if kept_ones or self.slots.originals.among(module, given) else None)

    def leave(self, module: nn.Module, output: Any, error: BaseException | None = None) -> None:
        """The call of a module has ended, with an error perhaps."""
        call = self.depth.pop()
        if self.unit is not None and self.unit.call != call:
            return
        if self.unit is not None:
            self._end_unit(self.unit, module, output, error)
        span = self.placement.span(call)
        if span is not None and error is None:
            self._reach(span.stop, output)

    def _end_unit(
        self, unit: _RunningUnit, module: nn.Module, output: Any, error: BaseException | None
    ) -> None:
        self._listen(None)
        self.unit = None
        if unit.kept is not None:
            state = self.state_of(unit.call[0], module)
            again = partial(state.run_again, module, unit.kept)
            if error is None:
                state.check(unit.kept, self.slots.originals)
            else:  # the model may go on without it
                again = partial(_failing, again, type(error))
            fills = self.slots.fills(output)
            self.open[-1].tape.entries.append(Made(again, unit.args, unit.kwargs, fills, unit.surroundings))
        self._listen_between()

    def end(self) -> None:
        """The model's forward is over: nothing stays open."""
        self._listen(None)
        while self.open:
            close(self.open[-1].generator)
            self.open.pop()

    def abandon(self) -> None:
        """Take away and switch off whatever is still there or on. It may be begun anew."""
        self.thread = None
        for handle in self.handles:
            handle.remove()
        while self.open:
            self.open[-1].generator.close()
            self.open.pop()
        self.ambient.restore()

    # Segments -------------------------------------------------------------------------------------------

    def _reach(self, place: int, at_hand: Any) -> None:
        """Close the segments that end up to here, and open those that begin. `at_hand` is what is carried."""
        if place < self.reached:
            self._stray("it calls its modules in another order")
            return
        if (self._ends(place) or self._begins(place)) and not self.open and self._is_disturbed():
            return  # it begins when that is over
        self.reached = place
        if not self._ends(place) and not self._begins(place):
            return
        self._listen(None)
        self._check_undisturbed()
        while self._ends(place):
            close(self.open[-1].generator)
            self.open.pop()
            self.slots.end()
        while self._begins(place):
            span = self.waiting.pop()
            if span.stop > place:
                self._open(span, at_hand)
        self._listen_between()

    def _ends(self, place: int) -> bool:
        return bool(self.open) and self.open[-1].span.stop <= place

    def _begins(self, place: int) -> bool:
        return bool(self.waiting) and self.waiting[-1].first <= place

    def _open(self, span: Span, at_hand: Any) -> None:
        tensors = [leaf for leaf in tree_flatten(at_hand)[0] if isinstance(leaf, torch.Tensor)]
        planned_bytes = self.placement.carried_bytes.get(span.first, 0)
        carried = [tensor.untyped_storage().nbytes() for tensor in tensors if tensor.requires_grad]
        if 0 < planned_bytes < max(carried, default=0):
            self._stray("what goes from one module to the next is larger than planned")
        if self.open:  # what the segment around this one cannot give again is held
            tensors = [tensor for tensor in tensors if self.slots.number(tensor) is not None]
        else:  # the rest the model may change in place: it is seen as it was, like all that is not made here
            tensors = [tensor for tensor in tensors if tensor.requires_grad]
        tape = Tape(self.slots.begin(tensors))
        if self.open:
            self.open[-1].tape.entries.append(tape)
        self.open.append(_Open(span, tape, self.opened(tape, tensors)))
        self.open[-1].begin()

    def _stray(self, how: str) -> None:
        self.stray = self.stray or how

    def _is_disturbed(self) -> bool:
        """Whether a part of the model that is running has decided anew what is saved."""
        return saving_hooks() != (self.open[-1].hooks if self.open else self.ambient.hooks)

    def _check_undisturbed(self) -> None:
        if self._is_disturbed():
            raise CannotApply(
                "a segment would begin or end inside a part of the model that already decides what is saved: "
                "it is checkpointed by itself, or runs under saved_tensors_hooks. Switch that off "
                "(gradient_checkpointing_disable()), or plan around whole modules that contain it."
            )

    # Listening ------------------------------------------------------------------------------------------

    def _listen_between(self) -> None:
        """Between units: to all in a segment, and after one to what writes to something that it used."""
        if self.open:
            self._listen(Heard.ALL)
        else:
            self._listen(Heard.WRITES if self.slots.originals else None)

    def _listen(self, heard: Heard | None) -> None:
        self.listening.tape = self.open[-1].tape if heard is Heard.ALL else None
        if heard is not None and not self.is_listening:
            self.listening.__enter__()  # type: ignore[no-untyped-call]
            self.is_listening = True
        elif heard is None and self.is_listening:
            if function_mode() is not self.listening:
                raise CannotApply(
                    "a torch function mode was switched on in the middle of the model's forward and is still "
                    "on where a module is called; segments cannot be closed around it. Switch it on outside."
                )
            self.listening.__exit__(None, None, None)
            self.is_listening = False


class Heard(Enum):
    """Which torch functions are listened to."""

    ALL = auto()  # to be run again
    WRITES = auto()  # what they write to is copied before, if it is to be seen again


def enter(generator: Generator[None, None, None]) -> None:
    """Enter a checkpoint, also where no gradients are recorded: they may be again before it ends."""
    with torch.enable_grad():
        next(generator)


def close(generator: Generator[None, None, None]) -> None:
    """Leave a checkpoint that was entered."""
    try:
        next(generator)
    except StopIteration:
        return
    raise AssertionError("a checkpoint was left and is still running")


def _failing(again: Callable[..., Any], kind: type[BaseException], *args: Any, **kwargs: Any) -> None:
    """Call what has raised an error of this kind when it was called first, and was caught."""
    try:
        again(*args, **kwargs)
    except BaseException as error:
        if type(error) is not kind:
            raise
