"""What a derivative is made of: a rule per kernel, and the site where it is applied.

A rule says, for every argument that it can differentiate by, which numbers of the forward it looks at:
arguments (`given`), results (`made`) or nothing. That is all the backward of an op depends on beside the
gradients of its results, and so all that the forward has to keep for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeAlias

from lowtide.errors import NotDifferentiable
from lowtide.ir.builder import Form, Growing
from lowtide.ir.graph import Arg, Op, Ref
from lowtide.ir.strides import Ints

Slot: TypeAlias = tuple[int, int]  # position of an argument, and of an item where it is a list


class Need(NamedTuple):
    """Numbers of the forward that a derivative looks at."""

    made: bool  # a result of the op, not an argument
    position: int


def given(position: int) -> Need:
    """An argument of the op."""
    return Need(False, position)


def made(position: int) -> Need:
    """A result of the op."""
    return Need(True, position)


class Site:
    """An op that is being differentiated: what it was called with, and the gradients of what it made."""

    def __init__(
        self, growing: Growing, op: Op, gradients: Mapping[int, Ref], wanted: Collection[Slot]
    ) -> None:
        self.growing = growing
        self.op = op
        self.gradients = gradients
        self.wanted = wanted

    @property
    def grad(self) -> Ref:
        """The gradient of the op's first result."""
        return self.gradients[0]

    def wants(self, position: int, item: int = 0) -> bool:
        """Whether a gradient is asked for by this argument."""
        return (position, item) in self.wanted

    def mask(self, *positions: int) -> tuple[bool, ...]:
        """Which of these arguments a gradient is asked for by, as backward kernels want to be told."""
        return tuple(self.wants(position) for position in positions)

    def option(self, position: int, name: str, default: Arg = None) -> Arg:
        """An argument, by position or name; `default` if it was left to the kernel."""
        if position < len(self.op.args):
            return self.op.args[position]
        return dict(self.op.kwargs).get(name, default)

    def given(self, position: int) -> Ref:
        """An argument that is a tensor."""
        found = self.op.args[position]
        assert isinstance(found, Ref)
        return found

    def made(self, position: int = 0) -> Ref:
        """A result."""
        found = self.op.outputs[position]
        assert found is not None
        return Ref(found)

    def masked(
        self, target: str, args: Sequence[Arg], forms: Mapping[int, Form]
    ) -> Iterator[tuple[int, Ref]]:
        """Call one kernel for several arguments; it makes a gradient for each that is wanted."""
        wanted = [form if self.wants(position) else None for position, form in forms.items()]
        for position, gradient in zip(forms, self.growing.calls(target, args, wanted), strict=True):
            if gradient is not None:
                yield position, gradient

    def refuse(self, reason: str, advice: str) -> NoReturn:
        """Raise NotDifferentiable for this op."""
        raise NotDifferentiable(self.op.id, self.op.label, reason, advice)

    def shape(self, position: int) -> Ints:
        """The shape of an argument."""
        return self.growing.shape(self.given(position))


Contribution: TypeAlias = tuple[int | Slot, Ref]
Derive: TypeAlias = Callable[[Site], Iterator[Contribution]]
Needs: TypeAlias = Mapping[int, Sequence[Need]]


@dataclass(frozen=True, slots=True)
class Rule:
    """How to differentiate a kernel.

    `needs` has an entry for every argument that a gradient can be had by; it is what that gradient looks at;
    where that depends on how the kernel is called, it is a function of the op.
    `derive` appends ops and yields gradients by argument; an argument it passes over has gradient zero.
    `results` are the results whose gradients it can take; `constant` are those that do not change with the
    arguments it differentiates by.
    """

    needs: Needs | Callable[[Op], Needs]
    derive: Derive
    results: tuple[int, ...] = (0,)
    constant: tuple[int, ...] = ()

    def needs_of(self, op: Op) -> Needs:
        """What the gradients of an op of this kernel look at, by argument."""
        return self.needs(op) if callable(self.needs) else self.needs


Rules: TypeAlias = dict[str, Rule]


def register(
    rules: Rules,
    *targets: str,
    needs: Needs | Callable[[Op], Needs],
    results: tuple[int, ...] = (0,),
    constant: tuple[int, ...] = (),
) -> Callable[[Derive], Derive]:
    """Enter the decorated function into `rules`, for these targets."""

    def enter(derive: Derive) -> Derive:
        for target in targets:
            rules[target] = Rule(needs, derive, results, constant)
        return derive

    return enter


def slots(op: Op) -> Iterator[tuple[Slot, Ref]]:
    """The tensors that an op was called with, by position, and by item where an argument is a list."""
    for position, arg in enumerate(op.args):
        items = arg if isinstance(arg, tuple) else (arg,)
        for item, ref in enumerate(items):
            if isinstance(ref, Ref):
                yield (position, item), ref


def number(arg: Arg) -> int | float:
    """An argument that is a number."""
    assert isinstance(arg, int | float)
    return arg


def numbers(arg: Arg) -> Ints:
    """An argument that is a list of whole numbers; None and nothing are an empty one."""
    items = arg if isinstance(arg, tuple) else () if arg is None else (arg,)
    return tuple(int(number(item)) for item in items)
