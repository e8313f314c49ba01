"""What a whole training takes from a device, replayed from its first step on.

The first step is not like the others: gradients are born in it, libraries take their workspaces at their
first product, and an optimizer makes its states when it is first called, when the activations are gone and
the gradients there. What lies where then stays so. Later come steps as all others, a pass over the
validation set (the forward alone, nothing of it kept), and a last batch of half the size. A checkpoint that
is saved takes nothing: `torch.save` copies one tensor after the other to the CPU.

A batch arrives while the one before it is still there, as it does in a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import TypeAlias

from lowtide.ir.cuda_allocator import CachedBlock, CachingAllocator, OutOfReserve
from lowtide.ir.graph import OPTIMIZER_STEP, Graph, Op, Phase, Role, short_name
from lowtide.ir.schedule import Schedule, in_order
from lowtide.ir.walk import walk

_PRODUCTS = frozenset(
    ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear", "_addmm_activation")
)
_FORWARDS = (Phase.FORWARD, Phase.OPTIMIZER)  # what runs in the main thread
_LAST_BATCH = 2  # it is so many times smaller
_SO_FAR = " so far"  # gradients of earlier micro-batches
Blocks: TypeAlias = dict[int, CachedBlock]
Late: TypeAlias = Mapping[int, Iterable[tuple[int, int]]]  # values and bytes, by the op that has them made
_NOTHING: Late = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training: the most that was handed out in it, and what was reserved by its end."""

    name: str
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class TrainingReserve:
    """What the allocator hands out and takes from the device, stage by stage.

    `failed` is the stage in which there was too little, by `missing_bytes`; None where all of them ran.
    """

    stages: tuple[Stage, ...]
    failed: str | None = None
    missing_bytes: int = 0

    @property
    def allocated_bytes(self) -> int:
        """The most that was handed out at once."""
        return max(stage.allocated_bytes for stage in self.stages)

    @property
    def reserved_bytes(self) -> int:
        """The most that was taken from the device."""
        return max(stage.reserved_bytes for stage in self.stages)

    @property
    def growth_bytes(self) -> int:
        """The most that was handed out beyond the model."""
        return self.allocated_bytes - self.stages[0].allocated_bytes


@dataclass(frozen=True)
class AllocatedRun:
    """A schedule over a graph, as an allocator sees it."""

    graph: Graph
    schedule: Schedule

    @cached_property
    def moves(self) -> tuple[tuple[Op | None, tuple[int, ...], tuple[int, ...]], ...]:
        """Of every step the op that runs, what is born and what dies."""
        return tuple((event.op, event.born, event.died) for event in walk(self.graph, self.schedule))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of every value that are asked of the device."""
        return tuple(map(self.graph.counted_bytes, range(len(self.graph.values))))

    @cached_property
    def staying(self) -> frozenset[int]:
        """What is there between steps: residents, and the second part of what libraries have."""
        return frozenset((*self.graph.resident, *(~value for value in self.of_role(Role.LIBRARY))))

    def of_role(self, *roles: Role) -> list[int]:
        """What is there before the step begins, of these roles."""
        values = self.graph.values
        return [value for value in self.graph.resident if values[value].role in roles]

    def evaluated(self) -> AllocatedRun:
        """The forward alone, of which nothing is kept for a backward."""
        forward = [op.id for op in self.graph.ops if op.phase is Phase.FORWARD]
        return AllocatedRun(self.graph, in_order(self.graph, forward))

    def updating(self) -> AllocatedRun:
        """What the optimizer does, of the whole."""
        updates = {op.id for op in self.graph.ops if op.phase is Phase.OPTIMIZER}
        made = {value for op in updates for value in self.graph.ops[op].creates}
        steps = (
            step
            for step, (op, _, died) in zip(self.schedule, self.moves, strict=True)
            if (op.id in updates if op is not None else made.issuperset(died))
        )
        return AllocatedRun(self.graph, Schedule(tuple(steps)))

    def smaller(self, times: int = _LAST_BATCH) -> AllocatedRun:
        """The same for a batch that is so many times smaller: all that is no parameter's is smaller too."""
        batch = (Role.INTERMEDIATE, Role.BATCH)
        values = tuple(
            replace(value, bytes=-(-value.bytes // times)) if value.role in batch else value
            for value in self.graph.values
        )
        ops = tuple(replace(op, workspace_bytes=op.workspace_bytes // times) for op in self.graph.ops)
        return AllocatedRun(replace(self.graph, values=values, ops=ops), self.schedule)

    def born_late(self) -> dict[int, list[tuple[int, int]]]:
        """What is there before all steps but the first, by the op that has it made: values and bytes.

        Libraries take their memory in either thread; one of them has a part of the value, under its number,
        and the other the rest, under a number that no value has.
        """
        late: dict[int, list[tuple[int, int]]] = {}
        updates = [op.id for op in self.graph.ops if op.phase is Phase.OPTIMIZER]
        for value in self.of_role(Role.OPTIMIZER_STATE) if updates else ():
            late.setdefault(updates[0], []).append((value, self.sizes[value]))
        products = [op for op in self.graph.ops if short_name(op.target) in _PRODUCTS]
        main = next((op.id for op in products if op.phase in _FORWARDS), None)
        engine = next((op.id for op in products if op.phase not in _FORWARDS), None)
        threads = [op for op in (main, engine) if op is not None]
        for value in self.of_role(Role.LIBRARY) if threads else ():
            for place, op in enumerate(threads):
                number = value if place == 0 else ~value
                late.setdefault(op, []).append((number, self.sizes[value] // len(threads)))
        return late


def training_reserve(
    step: AllocatedRun,
    plain: AllocatedRun | None = None,
    *,
    expandable: bool = False,
    allowed_bytes: int | None = None,
    device_bytes: int | None = None,
) -> TrainingReserve:
    """Replay a training by `step` from its beginning on; `plain` is the step as it was written, if it is not.

    The optimizer's temporaries are those of `plain`. With `allowed_bytes` or `device_bytes` there is no more.
    """
    allocator = CachingAllocator(
        expandable=expandable, allowed_bytes=allowed_bytes, device_bytes=device_bytes
    )
    replay = _Process(allocator, plain.updating() if plain is not None else None)
    stages: list[Stage] = []
    for name, part in _training(replay, step, (plain or step).evaluated()):
        allocator.peak_allocated_bytes = allocator.allocated_bytes
        try:
            part()
        except OutOfReserve as refused:
            return TrainingReserve((*stages, replay.stage(name)), name, refused.missing_bytes)
        stages.append(replay.stage(name))
    return TrainingReserve(tuple(stages))


def _training(
    replay: _Process, step: AllocatedRun, evaluated: AllocatedRun
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The parts of a training, in order."""
    smaller = step.smaller()
    yield "loading the model", partial(replay.load, step)
    yield "the first step", partial(replay.step, step, step.born_late())
    yield "the second step", partial(replay.step, step)
    yield "the third step", partial(replay.step, step)
    yield "a validation pass", partial(replay.evaluate, evaluated)
    yield "a step after validation", partial(replay.step, step)
    yield "a last, smaller batch", partial(replay.step, smaller)
    yield "a second validation pass", partial(replay.evaluate, evaluated)
    yield "the next epoch", partial(replay.step, step)
    yield "and its second step", partial(replay.step, step)


class _Process:
    """What is held of one training, step after step."""

    def __init__(self, allocator: CachingAllocator, updating: AllocatedRun | None) -> None:
        self._allocator = allocator
        self._updating = updating
        self._resident: Blocks = {}
        self._gradients: Blocks = {}  # of the last step, which the next one drops

    def stage(self, name: str) -> Stage:
        """What there was to see since the stage began."""
        return Stage(name, self._allocator.peak_allocated_bytes, self._allocator.peak_reserved_bytes)

    def load(self, step: AllocatedRun) -> None:
        """Put there what is there before the first step."""
        late = {value for born in step.born_late().values() for value, _ in born}
        for value in step.graph.resident:
            if value not in late and step.graph.values[value].role not in (Role.GRADIENT, Role.BATCH):
                self._born(self._resident, value, step.sizes[value])

    def step(self, step: AllocatedRun, late: Late = _NOTHING) -> None:
        """Train on the next batch, which is there before the last one and the gradients are gone."""
        for value in step.of_role(Role.BATCH):
            before = self._resident.pop(value, None)
            self._born(self._resident, value, step.sizes[value])
            if before is not None:
                self._allocator.release(before)
        self._drop(self._gradients)
        held = dict(self._resident)
        self._run(step, held, late)
        self._carry_over(step, held)

    def evaluate(self, evaluated: AllocatedRun) -> None:
        """Run a forward of which nothing is kept."""
        held: Blocks = {}
        for value in evaluated.of_role(Role.BATCH):
            self._born(held, value, evaluated.sizes[value])
        self._run(evaluated, held)
        self._drop(held)

    def _run(self, run: AllocatedRun, held: Blocks, late: Late = _NOTHING) -> None:
        allocator = self._allocator
        for op, born, died in run.moves:
            if op is not None and op.id in late:
                for value, size in late[op.id]:
                    self._born(held, value, size)
            for value in born:
                self._born(held, value, run.sizes[value])
            if op is not None and op.target == OPTIMIZER_STEP and self._updating is not None:
                temporaries: Blocks = {}
                self._run(self._updating, temporaries)
                self._drop(temporaries)
            elif op is not None and op.workspace_bytes > 0:
                allocator.release(allocator.allocate(op.workspace_bytes))
            for value in died:
                if (block := held.pop(value, None)) is not None:
                    allocator.release(block)

    def _carry_over(self, step: AllocatedRun, held: Blocks) -> None:
        """What is there before the next step. New gradients take the place of those that were dropped."""
        values = step.graph.values
        kept: Blocks = {value: block for value, block in held.items() if value in step.staying}
        left = {value: block for value, block in held.items() if value not in kept}
        named = {values[value].name: value for value in left if values[value].role is Role.GRADIENT}
        for value in step.graph.resident:
            made = named.get(values[value].name.removesuffix(_SO_FAR))
            if value not in kept and made is not None:
                kept[value] = left.pop(made)
            elif value not in kept and values[value].role is not Role.LIBRARY:
                self._born(kept, value, step.sizes[value])
        self._gradients = {value: left.pop(value) for value in named.values() if value in left}
        self._drop(left)
        self._resident = kept

    def _born(self, held: Blocks, value: int, size: int) -> None:
        if size:
            held[value] = self._allocator.allocate(size)

    def _drop(self, held: Blocks) -> None:
        for block in held.values():
            self._allocator.release(block)
        held.clear()
