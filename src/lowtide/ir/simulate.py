"""The referee: replays a schedule over a graph and counts bytes.

It knows what a schedule is and nothing of how anyone came by it. What it refuses cannot be executed;
what it counts is what an allocator holds that serves exactly these computes and frees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from lowtide.errors import IllegalSchedule
from lowtide.ir.graph import Graph, Op, Phase, Role
from lowtide.ir.schedule import Event, Schedule, Step
from lowtide.ir.walk import walk

Bytes = npt.NDArray[np.int64]


class Category(StrEnum):
    """What memory is held for. Every counted byte belongs to exactly one."""

    PARAMETERS = "parameters"
    BUFFERS = "buffers"
    OPTIMIZER_STATE = "optimizer state"
    GRADIENTS = "gradients"
    BATCH = "batch"
    ACTIVATIONS = "activations"  # made by the forward and still held when the backward runs
    TEMPORARIES = "temporaries"
    WORKSPACE = "workspace"


_CATEGORY_OF_ROLE = {
    Role.PARAMETER: Category.PARAMETERS,
    Role.BUFFER: Category.BUFFERS,
    Role.OPTIMIZER_STATE: Category.OPTIMIZER_STATE,
    Role.GRADIENT: Category.GRADIENTS,
    Role.BATCH: Category.BATCH,
    Role.LIBRARY: Category.WORKSPACE,
}
CATEGORIES = tuple(Category)
_NOTHING: list[int] = []
Columns: TypeAlias = tuple[list[list[int]], list[list[int]]]
_INDEX = {category: position for position, category in enumerate(CATEGORIES)}


@dataclass(frozen=True, slots=True)
class Allocator:
    """How a device's allocator turns a request into bytes held."""

    name: str = "exact"
    granularity_bytes: int = 1

    def held(self, requested_bytes: int) -> int:
        """The bytes held for a request."""
        grain = self.granularity_bytes
        return -(-requested_bytes // grain) * grain


EXACT = Allocator()
CUDA = Allocator("cuda", 512)


def allocator_of(device: str) -> Allocator:
    """The rounding that PyTorch's allocator applies on `device` ('cpu', 'cuda', 'cuda:0')."""
    return CUDA if device.partition(":")[0] == "cuda" else EXACT


@dataclass(frozen=True, slots=True)
class Holding:
    """One value held at the peak."""

    value: int
    bytes: int
    category: Category
    module: str


@dataclass(frozen=True)
class Timeline:
    """Live bytes at every step of a schedule, and what is alive at the peak.

    `stack[step, category]` are the bytes held while that step runs: for a compute its inputs, its
    outputs and its workspace together, for a free what remains. Columns follow `CATEGORIES`.
    """

    stack: Bytes
    steps: tuple[Step, ...]
    phases: tuple[Phase | None, ...]  # of the op that runs; None where none does
    peak_step: int | None  # None: before the first step, with everything resident still there
    peak_op: Op | None
    holdings: tuple[Holding, ...]
    resident_bytes: int

    @cached_property
    def live_bytes(self) -> Bytes:
        """Bytes held while each step runs."""
        return np.asarray(self.stack.sum(axis=1), dtype=np.int64)

    @property
    def peak_bytes(self) -> int:
        """The most bytes held at once; never less than what is resident before the first step."""
        return self.resident_bytes if self.peak_step is None else int(self.live_bytes[self.peak_step])

    @property
    def growth_bytes(self) -> int:
        """The peak less what was there before the step began."""
        return self.peak_bytes - self.resident_bytes

    @cached_property
    def categories(self) -> Mapping[Category, int]:
        """Bytes at the peak by category. They sum to `peak_bytes` exactly."""
        if self.peak_step is None:
            return {category: self._held_as(category) for category in CATEGORIES}
        row = self.stack[self.peak_step]
        return {category: int(row[column]) for column, category in enumerate(CATEGORIES)}

    @cached_property
    def modules(self) -> Mapping[str, int]:
        """Bytes at the peak by module path, largest first. They sum to `peak_bytes` exactly."""
        totals: dict[str, int] = {}
        for holding in self.holdings:
            totals[holding.module] = totals.get(holding.module, 0) + holding.bytes
        if self.peak_op is not None and self.peak_op.workspace_bytes:
            module = self.peak_op.module
            totals[module] = totals.get(module, 0) + self.peak_op.workspace_bytes
        return dict(sorted(totals.items(), key=lambda item: (-item[1], item[0])))

    def _held_as(self, category: Category) -> int:
        return sum(holding.bytes for holding in self.holdings if holding.category is category)


def simulate(graph: Graph, schedule: Schedule, allocator: Allocator | None = None) -> Timeline:
    """Replay `schedule` over `graph` and return what is held at every step.

    Counts every value on the graph's device, resident ones included, rounded as `allocator` rounds
    (by default the one of the graph's device), and each op's workspace while it runs. Does not count
    what the allocator keeps in reserve, nor the device's own context.

    Raises:
        IllegalSchedule: the schedule reads a value that is not there or was changed since, creates
            one that is, frees twice, draws a random op twice, leaves an op out or loses an output.
    """
    allocator = allocator or allocator_of(graph.device)
    events = _legal(graph, schedule)
    columns = categorise(graph, events)
    held = [allocator.held(graph.counted_bytes(value.id)) for value in graph.values]

    resident = np.zeros(len(CATEGORIES), dtype=np.int64)
    for value in graph.resident:
        resident[column_of(graph, value, spans_backward=False)] += held[value]
    resident_bytes = int(resident.sum())

    stack = resident + np.cumsum(_changes(events, columns, held), axis=0)
    workspaces = (0 if event.op is None else event.op.workspace_bytes for event in events)
    stack[:, _INDEX[Category.WORKSPACE]] += np.fromiter(workspaces, dtype=np.int64, count=len(events))
    peak_step = _peak(events, stack, resident_bytes)
    return Timeline(
        stack=stack,
        steps=schedule.steps,
        phases=tuple(None if event.op is None else event.op.phase for event in events),
        peak_step=peak_step,
        peak_op=None if peak_step is None else events[peak_step].op,
        holdings=_holdings(graph, events, columns, held, peak_step),
        resident_bytes=resident_bytes,
    )


def _changes(events: list[Event], columns: Columns, held: list[int]) -> Bytes:
    """What each event adds to each category; less than nothing for what dies."""
    cells: list[int] = []
    amounts: list[int] = []
    for position, (event, born_as, died_as) in enumerate(zip(events, *columns, strict=True)):
        row = position * len(CATEGORIES)
        if born_as:
            cells += [row + column for column in born_as]
            amounts += [held[value] for value in event.born]
        if died_as:
            cells += [row + column for column in died_as]
            amounts += [-held[value] for value in event.died]
    changes = np.zeros(len(events) * len(CATEGORIES), dtype=np.int64)
    np.add.at(changes, np.asarray(cells, dtype=np.int64), np.asarray(amounts, dtype=np.int64))
    return changes.reshape(len(events), len(CATEGORIES))


def _peak(events: list[Event], stack: Bytes, resident_bytes: int) -> int | None:
    """The first step that holds the most; None if more is resident before the first step."""
    live = stack.sum(axis=1)
    grows = np.asarray([event.op is not None or bool(event.born) for event in events], dtype=bool)
    step = int(np.where(grows, live, -1).argmax()) if grows.any() else None
    return None if step is None or live[step] < resident_bytes else step


def _legal(graph: Graph, schedule: Schedule) -> list[Event]:
    """The events of a schedule that can be executed; any other is refused at the first illegal step."""
    replay = _Replay(graph)
    events: list[Event] = []
    for event in walk(graph, schedule):
        replay.follow(event)
        events.append(event)
    replay.finish()
    return events


class _Replay:
    """Which values are alive, and in which version: enough to tell a legal step from an illegal one.

    A value's version counts the ops that have mutated it since it was created. An op may only see the
    versions it saw in graph order; that one rule forbids recomputing from values that were overwritten,
    and mutating a resident value (BatchNorm's statistics, say) twice.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.alive: set[int] = set(graph.resident)
        self.version = dict.fromkeys(graph.resident, 0)
        self.done: set[int] = set()
        self.expected, self.final = _versions_seen(graph)

    def follow(self, event: Event) -> None:
        position, _, op, born, died = event
        if op is not None:
            self.compute(position, op, born)
        else:
            for value in born:
                self.bring_back(position, value)
        for value in died:
            self.free(position, value)

    def compute(self, position: int, op: Op, born: tuple[int, ...]) -> None:
        op_id = op.id
        where = partial(_where, position, op)
        if op.random and op_id in self.done:
            raise IllegalSchedule(f"{where()} draws random numbers and is computed a second time")
        again = op_id in self.done
        for value, version in self.expected[op_id].items():
            if again and value in op.updates:
                continue
            if value not in self.alive:
                state = "was freed" if value in self.version else "does not exist yet"
                raise IllegalSchedule(f"{where()} reads value {value} ({self._name(value)}), which {state}")
            if self.version[value] != version:
                raise IllegalSchedule(
                    f"{where()} reads value {value} ({self._name(value)}) after it was changed "
                    f"{self.version[value]} times; in graph order it was changed {version} times"
                )
        for value in born:
            if value in self.alive:
                raise IllegalSchedule(
                    f"{where()} creates value {value} ({self._name(value)}), which is alive"
                )
            self.alive.add(value)
            self.version[value] = 0
        for value in op.mutates if again else (*op.mutates, *op.updates):
            self.version[value] += 1
        self.done.add(op_id)

    def bring_back(self, position: int, value: int) -> None:
        if value in self.alive or value not in self.version:
            state = "is alive" if value in self.alive else "was never made"
            raise IllegalSchedule(f"step {position} brings back value {value}, which {state}")
        self.alive.add(value)

    def free(self, position: int, value: int) -> None:
        if not 0 <= value < len(self.graph.values):
            raise IllegalSchedule(f"step {position} frees value {value}, which is not in the graph")
        if value not in self.alive:
            state = "already freed" if value in self.version else "not yet created"
            raise IllegalSchedule(f"step {position} frees value {value} ({self._name(value)}), {state}")
        self.alive.remove(value)

    def finish(self) -> None:
        for op in self.graph.ops:
            if op.id not in self.done:
                raise IllegalSchedule(f"op {op.id} ({op.label}) is never computed")
        for value in sorted(self.graph.outputs - self.alive):
            raise IllegalSchedule(f"value {value} ({self._name(value)}) must outlive the step but is freed")
        for value in sorted(self.graph.outputs):
            found, meant = self.version[value], self.final.get(value, 0)
            if found != meant:
                raise IllegalSchedule(
                    f"value {value} ({self._name(value)}) must outlive the step but ends it changed "
                    f"{found} times; in graph order it is changed {meant} times"
                )

    def _name(self, value: int) -> str:
        return repr(self.graph.values[value].name)


def _where(position: int, op: Op) -> str:
    return f"step {position}, op {op.id} ({op.label}),"


def _versions_seen(graph: Graph) -> tuple[list[dict[int, int]], dict[int, int]]:
    """In graph order: for each op the version of every value it reads or mutates; and those at the end."""
    version: dict[int, int] = {}
    seen: list[dict[int, int]] = []
    for op in graph.ops:
        touched = (*op.reads, *op.mutates, *op.updates)
        seen.append({value: version.get(value, 0) for value in touched if value not in op.creates})
        for value in (*op.mutates, *op.updates):
            version[value] = version.get(value, 0) + 1
    return seen, version


def categorise(graph: Graph, events: Sequence[Event]) -> Columns:
    """For each event the category columns of the values that are born, and those of the values that die.

    Only a whole life tells an activation from a temporary: it is one if the forward (or a
    recomputation of it) made it and a backward op runs before it is freed. So a column is known
    when a life has ended.
    """
    born_as, died_as = ([_NOTHING] * len(events) for _ in range(2))
    begun: dict[int, tuple[list[int], int, int]] = {}  # value -> where its column is; backwards before
    backwards = 0
    for position, _, op, born, died in events:
        backwards += op is not None and op.phase is Phase.BACKWARD
        if born:
            born_as[position] = [0] * len(born)
            for index, value in enumerate(born):
                begun[value] = (born_as[position], index, backwards)
        if died:
            died_as[position] = []
            for value in died:
                start, index, before = begun.pop(value, ([0], 0, backwards))
                start[index] = column_of(graph, value, spans_backward=backwards > before)
                died_as[position].append(start[index])
    for value, (start, index, before) in begun.items():
        start[index] = column_of(graph, value, spans_backward=backwards > before)
    return born_as, died_as


def column_of(graph: Graph, value: int, *, spans_backward: bool) -> int:
    """The category column of a value that lives, or does not live, while a backward op runs."""
    if not 0 <= value < len(graph.values):
        return _INDEX[Category.TEMPORARIES]
    category = _CATEGORY_OF_ROLE.get(graph.values[value].role)
    if category is None:
        maker = graph.creator.get(value)
        forward = maker is not None and graph.ops[maker].phase in (Phase.FORWARD, Phase.RECOMPUTE)
        category = Category.ACTIVATIONS if forward and spans_backward else Category.TEMPORARIES
    return _INDEX[category]


def _holdings(
    graph: Graph, events: list[Event], columns: Columns, held: list[int], peak_step: int | None
) -> tuple[Holding, ...]:
    """What is alive at the peak, largest first. The schedule is known to be legal here."""
    alive = {value: column_of(graph, value, spans_backward=False) for value in graph.resident}
    until_peak = 0 if peak_step is None else peak_step + 1
    for event, born_as in zip(events[:until_peak], columns[0], strict=False):
        alive.update(zip(event.born, born_as, strict=True))
        for value in event.died:
            del alive[value]
    found = [
        Holding(value, held[value], CATEGORIES[column], graph.values[value].module)
        for value, column in alive.items()
        if held[value]
    ]
    return tuple(sorted(found, key=lambda holding: (-holding.bytes, holding.value)))
