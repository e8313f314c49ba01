"""A stretch of a model's forward, written down so that it can be run again.

What is written down is what the user's code did: calls of its own modules, and between them calls of
torch functions (a residual sum, `torch.flatten`). Running it again calls the same modules and functions
in the same order. Tensors that the stretch makes are not held: an entry says where an argument comes
from, not what it is. What it has not made it sees again as it was: see `originals`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lowtide.compat.trees import tree_flatten, tree_map
from lowtide.execute.originals import Original, Originals, changes_its_first, written_by
from lowtide.execute.surroundings import Surroundings


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a tensor that the stretch was given or makes."""

    number: int


@dataclass(frozen=True, slots=True)
class Drawing:
    """Stands for a generator of random numbers, at the state from which the first run drew."""

    generator: torch.Generator
    state: torch.Tensor


@dataclass(frozen=True, slots=True)
class Made:
    """One call: a module or a torch function, its arguments, and the slots that its result fills."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    fills: Mapping[int, int]  # position among the result's leaves -> slot
    surroundings: Surroundings


@dataclass
class Tape:
    """A stretch: what it starts from, and its entries, which may be stretches themselves."""

    given: tuple[int, ...]
    entries: list[Made | Tape] = field(default_factory=list)

    def reads(self) -> Iterator[int]:
        """The slots that this stretch needs, its own among them."""
        yield from self.given
        for entry in self.entries:
            yield from _reads(entry)


class TapeSlots:
    """Which tensor fills which slot while stretches are written down. Holds none of them.

    A stretch can name what it was given and what it has made itself. Anything else, even if a stretch
    around it has made it, is held by the entry that uses it: by the nature of a cut that is nothing
    that training depends on.
    """

    def __init__(self) -> None:
        self.originals = Originals()
        self._scopes: list[WeakIdKeyDictionary] = []
        self._count = 0

    def fill(self, tensor: torch.Tensor) -> int:
        """A new slot for `tensor`, which is what it is from now on: an op in place may have changed it."""
        self._scopes[-1][tensor] = self._count
        self._count += 1
        return self._count - 1

    def begin(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """A stretch begins that is given `tensors`; their slots."""
        known = [self.number(tensor) for tensor in tensors]
        self._scopes.append(WeakIdKeyDictionary())
        given = []
        for tensor, number in zip(tensors, known, strict=True):
            given.append(self.fill(tensor) if number is None else number)
            self._scopes[-1][tensor] = given[-1]
        return tuple(given)

    def end(self) -> None:
        """The innermost stretch is over; the one around it can name what it has made."""
        made = self._scopes.pop()
        if self._scopes:
            self._scopes[-1].update(made)

    def number(self, tensor: torch.Tensor) -> int | None:
        """The slot of `tensor`, if it was given to the innermost stretch or made by it."""
        found: int | None = self._scopes[-1].get(tensor) if self._scopes else None
        return found

    def written(self, arguments: Any) -> Any:
        """`arguments` with slots, or originals, in place of tensors, and with the states of generators."""
        return tree_map(self._named, arguments)

    def _named(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            number = self.number(leaf)
            return self.originals.of(leaf) if number is None else Slot(number)
        return Drawing(leaf, leaf.get_state()) if isinstance(leaf, torch.Generator) else leaf

    def fills(self, result: Any) -> dict[int, int]:
        """Slots for the tensors in `result`."""
        leaves = tree_flatten(result)[0]
        return {
            position: self.fill(leaf)
            for position, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor)
        }


class Listening(TorchFunctionMode):
    """Writes down on `tape` the torch functions that are called while it is on.

    Without a tape it does no more than keep the originals of what is written to.
    """

    def __init__(self, slots: TapeSlots) -> None:
        super().__init__()
        self.tape: Tape | None = None
        self._slots = slots

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self.tape is None:
            self._keep_originals(func, args, kwargs)
            return func(*args, **kwargs)
        written_args, written_kwargs = self._slots.written((args, kwargs))
        self._keep_originals(func, args, kwargs)
        surroundings = Surroundings.now()  # before: the function may be what switches something on
        result = func(*args, **kwargs)
        fills = self._slots.fills(result)
        if fills or changes_its_first(func):  # a question about a shape need not be asked again
            entry = Made(func, written_args, written_kwargs, fills, surroundings)
            self.tape.entries.append(entry)
        return result

    def _keep_originals(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for tensor in written_by(func, args, kwargs):
            self._slots.originals.before_writing(tensor)


Nested: TypeAlias = Callable[["Tape", Sequence[torch.Tensor], Callable[[], None]], None]


def replay_tape(tape: Tape, tensors: Sequence[torch.Tensor], nested: Nested) -> None:
    """Run `tape` from `tensors`. `nested(tape, tensors, run)` decides how a stretch inside is run."""
    environment = _Environment(dict(zip(tape.given, tensors, strict=True)))
    _run(tape, environment, nested, frozenset())


@dataclass
class _Environment:
    """What is at hand while stretches are run again: tensors by slot, and originals."""

    slots: dict[int, torch.Tensor]
    originals: dict[Original, torch.Tensor] = field(default_factory=dict)

    def filled(self, leaf: Any) -> Any:
        """What stands for an argument in a tape, as an argument."""
        if isinstance(leaf, Slot):
            return self.slots[leaf.number]
        if isinstance(leaf, Original):
            if leaf not in self.originals:
                self.originals[leaf] = leaf.look()
            return self.originals[leaf]
        return leaf.generator if isinstance(leaf, Drawing) else leaf


def _run(tape: Tape, environment: _Environment, nested: Nested, needed_after: frozenset[int]) -> None:
    slots = environment.slots
    last_use = {slot: position for position, entry in enumerate(tape.entries) for slot in _reads(entry)}
    for position, entry in enumerate(tape.entries):
        if isinstance(entry, Tape):
            later = frozenset(slot for slot, last in last_use.items() if last > position) | needed_after
            given = [slots[slot] for slot in entry.given]
            nested(entry, given, partial(_run, entry, environment, nested, later))
        else:
            _call(entry, environment)
        for slot in [slot for slot in slots if last_use.get(slot, -1) <= position]:
            if slot not in needed_after:
                del slots[slot]


def _call(entry: Made, environment: _Environment) -> None:
    drawings = [leaf for leaf in tree_flatten((entry.args, entry.kwargs))[0] if isinstance(leaf, Drawing)]
    args, kwargs = tree_map(environment.filled, (entry.args, entry.kwargs))
    with entry.surroundings.again(), ExitStack() as stack:
        for drawing in drawings:
            stack.callback(drawing.generator.set_state, drawing.generator.get_state())
            drawing.generator.set_state(drawing.state)
        leaves = tree_flatten(entry.call(*args, **kwargs))[0]
    for position, slot in entry.fills.items():
        environment.slots[slot] = leaves[position]


def _reads(entry: Made | Tape) -> Iterator[int]:
    if isinstance(entry, Tape):
        yield from entry.reads()
        return
    for leaf in tree_flatten((entry.args, entry.kwargs))[0]:
        if isinstance(leaf, Slot):
            yield leaf.number
