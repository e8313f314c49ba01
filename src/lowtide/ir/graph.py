"""The one intermediate representation: a training step as ops over values.

Grammar:

    Graph  = ops, values, tensors, outputs          (ids are positions)
    Value  = a storage: bytes, device, role          views are folded into the value they look at
    Tensor = shape, stride, offset, dtype of a Value how an op looks at a storage
    Op     = target(args) -> tensors                 reads, creates and mutates values

A value that no op creates is *resident*: it is there before the step begins. Everything here is
immutable; passes return new graphs (`dataclasses.replace`). Nothing here imports torch: dtypes,
devices and targets are the strings torch prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias

from lowtide.ir.assumptions import Assumption


class Origin(StrEnum):
    """How a graph came to be. Ops of different origins are never mixed."""

    EAGER = "eager"  # what the user's step does as it is written, seen by a dry run
    JOINT = "joint"  # forward and backward as AOTAutograd captured them: may be rearranged
    EXPRESSION = "expression"  # drawn up by hand, from expressions: may be rearranged


class Phase(StrEnum):
    """Which part of the step an op belongs to."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"  # forward work done again during the backward, by checkpointing
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Role(StrEnum):
    """What a value is to the user."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    GRADIENT = "gradient"
    OPTIMIZER_STATE = "optimizer state"
    LIBRARY = "library"  # scratch memory that cuBLAS and the like take once and keep
    INTERMEDIATE = "intermediate"


class Signs(StrEnum):
    """What a tensor takes the numbers in its memory for. Complex tensors are conjugated by saying so."""

    AS_THEY_ARE = "as they are"
    CONJUGATE = "conjugate"
    NEGATIVE = "negative"
    BOTH = "conjugate negative"


class StepName(StrEnum):
    """What a captured graph calls the things that a step has and a model has no name for."""

    LOSS = "loss"  # a result
    LOSS_GRADIENT = "gradient of the loss"  # a value that is given, where the backward begins


OPTIMIZER_STEP = "lowtide.optimizer.step"  # the op that stands for all that an optimizer does


def gradient_name(parameter: str) -> str:
    """What the gradient of a parameter is called, as a value and as a result."""
    return f"{parameter}.grad"


def assigned_name(buffer: str) -> str:
    """What the tensor that the step assigns to a buffer is called, as a result."""
    return f"{buffer} after the step"


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that is a tensor, by id."""

    tensor: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """An argument that torch has a type for and JSON has not: Symbol('dtype', 'float32')."""

    kind: str
    text: str


Scalar: TypeAlias = bool | int | float | str | None
Arg: TypeAlias = Scalar | Ref | Symbol | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Value:
    """A storage. `name` and `module` are the ones a user would recognise."""

    id: int
    bytes: int
    role: Role
    name: str
    module: str = ""
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A way to look at a value. Strides and offset count elements.

    `signs` say what the numbers that lie there are taken for: their conjugates, their negatives, or both.
    """

    id: int
    value: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: str
    signs: Signs = Signs.AS_THEY_ARE


@dataclass(frozen=True, slots=True)
class Op:
    """One kernel call.

    `reads`, `creates` and `mutates` name values. An op may look at a value in `args` without reading
    it (a kernel that ignores an argument); it never reads one that is not in `args`. `updates` are resident
    values that it changes when it runs for the first time; computed again it is called without them and
    makes the same results (a BatchNorm that trains, and its running statistics).
    `workspace_bytes` is what the kernel takes beyond its outputs and gives back before it returns (less than
    nothing for a generated kernel that writes over what it reads last);
    it and `seconds` are zero until the graph is profiled.
    """

    id: int
    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    outputs: tuple[int | None, ...]
    reads: tuple[int, ...]
    creates: tuple[int, ...]
    mutates: tuple[int, ...] = ()
    updates: tuple[int, ...] = ()
    phase: Phase = Phase.FORWARD
    module: str = ""
    call: int = 0  # the how-maniest call of that module in the step
    section: int = 0  # which captured graph, where graph breaks make several; -1: runs eagerly between them
    random: bool = False
    workspace_bytes: int = 0
    seconds: float = 0.0
    extrapolated: bool = False  # costs come from a smaller batch

    @property
    def label(self) -> str:
        """The op as a user would name it: 'features.0: aten.convolution'."""
        short = self.target.rsplit(".", 1)[0]
        return f"{self.module}: {short}" if self.module else short


def short_name(target: str) -> str:
    """'convolution' for 'aten.convolution.default'; of an op that is not in a namespace all of its name."""
    return target.split(".")[1] if "." in target else target


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a module: the ops from `first` up to, not including, `stop` ran in it."""

    module: str
    call: int  # the how-maniest call of that module in the step
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class Tile:
    """The ops from `first` up to, not including, `stop`, in `count` slices: what `ops` did at once before.

    `where` names the region in the model and `extent` is how long the dimension is that is sliced.
    `spared_bytes` are those of the largest tensor that is never there as a whole.
    """

    first: int
    stop: int
    ops: tuple[int, ...]
    count: int
    extent: int
    where: str
    spared_bytes: int


@dataclass(frozen=True)
class Tiled:
    """What a graph was before some of its ops were cut into slices.

    `origin` has for each op of the graph its number in `plain`; -1 for those in `blocks`. Values that are in
    both have equal ids; those that are gone, being there in slices only, have no bytes and no creator.
    """

    plain: Graph
    origin: tuple[int, ...]
    blocks: tuple[Tile, ...]

    @cached_property
    def ops(self) -> frozenset[int]:
        """The ops that are in blocks."""
        return frozenset(op for block in self.blocks for op in range(block.first, block.stop))


@dataclass(frozen=True)
class Fused:
    """What a graph was before ops that a compiler makes one kernel of became one op.

    `members` has for each op of the graph the ops of `plain` that it stands for, in order; the last of them
    makes what the op makes. An op of `plain` whose result no kernel writes to memory may be a member of many.
    A block of slices in `plain` is one op here, by its number among those that `contracted` leaves.
    Values have equal ids in both; those that no kernel writes have no bytes and no creator here. `written`
    are ops of `plain` that a compiler might leave unwritten, and that are to be written.
    """

    plain: Graph
    members: tuple[tuple[int, ...], ...]
    written: frozenset[int]


@dataclass(frozen=True)
class Graph:
    """A training step on one device: ops in the order in which they first ran.

    `device` is where memory is counted; values elsewhere are listed but weigh nothing.
    `outputs` are the values that outlive the step (the loss, new gradients, …). `results` say how the user
    sees them: the loss or outputs and the gradients, by name, as tensors.
    `notes` say in words what the graph does not know, such as a tensor's value that had to be guessed.
    `assumptions` are what was found to be so whatever the batch, and was taken for granted in capturing:
    running the graph has to do the same.
    `tiled` is there if some ops run slice by slice: what the graph was before. `fused` is there if ops are
    kernels that a compiler makes of several: what it was before that.
    """

    name: str
    origin: Origin
    device: str
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    tensors: tuple[Tensor, ...]
    outputs: frozenset[int] = frozenset()
    results: tuple[tuple[str, int], ...] = ()
    profiled_on: str | None = None
    notes: tuple[str, ...] = field(default=())
    assumptions: tuple[Assumption, ...] = field(default=())
    tiled: Tiled | None = field(default=None, repr=False)
    fused: Fused | None = field(default=None, repr=False)

    def __hash__(self) -> int:
        """Of how much there is: to look at all of it takes longer than what is remembered for a graph."""
        return hash((self.name, self.device, len(self.ops), len(self.values), len(self.tensors)))

    @cached_property
    def creator(self) -> Mapping[int, int]:
        """The op that creates each value; resident values are absent."""
        return {value: op.id for op in self.ops for value in op.creates}

    @cached_property
    def readers(self) -> Mapping[int, tuple[int, ...]]:
        """The ops that read or change each value, in order; a value nobody touches is absent."""
        touching: dict[int, list[int]] = {}
        for op in self.ops:
            for value in dict.fromkeys((*op.reads, *op.mutates, *op.updates)):
                touching.setdefault(value, []).append(op.id)
        return {value: tuple(ops) for value, ops in touching.items()}

    @cached_property
    def resident(self) -> tuple[int, ...]:
        """Values that are there before the step begins."""
        made = set(self.creator)
        for before in (self.tiled, self.fused):
            made |= set() if before is None else before.plain.made
        return tuple(value.id for value in self.values if value.id not in made)

    @property
    def made(self) -> set[int]:
        """Values that ops create here, or did before there were slices."""
        return {*self.creator, *(() if self.tiled is None else self.tiled.plain.creator)}

    def counted_bytes(self, value: int) -> int:
        """Bytes of `value` on the graph's own device."""
        found = self.values[value]
        return found.bytes if found.device == self.device else 0


def refs(arg: Arg) -> Iterator[int]:
    """The tensors an argument names, in order."""
    if isinstance(arg, Ref):
        yield arg.tensor
    elif isinstance(arg, tuple):
        for item in arg:
            yield from refs(item)


def argument_tensors(op: Op) -> Iterator[int]:
    """The tensors in an op's arguments, in order, with repetitions."""
    yield from refs(op.args)
    for _, arg in op.kwargs:
        yield from refs(arg)
