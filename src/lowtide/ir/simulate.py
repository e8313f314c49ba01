"""The referee: replays a schedule over a graph and counts bytes.

It knows what a schedule is and nothing of how anyone came by it. What it refuses cannot be executed;
what it counts is what an allocator holds that serves exactly these computes and frees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lowtide.errors import IllegalSchedule
from lowtide.ir.graph import Graph, Op, Phase, Role
from lowtide.ir.schedule import Compute, Free, Schedule

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
    steps: tuple[Compute | Free, ...]
    phases: tuple[Phase | None, ...]  # of the op computed; None for a free
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
    columns = categorise(graph, schedule)
    held = [allocator.held(graph.counted_bytes(value.id)) for value in graph.values]
    replay = _Replay(graph)

    now = np.zeros(len(CATEGORIES), dtype=np.int64)
    for value in graph.resident:
        now[column_of(graph, value, spans_backward=False)] += held[value]
    resident_bytes = int(now.sum())

    stack = np.empty((len(schedule), len(CATEGORIES)), dtype=np.int64)
    peak_bytes = -1
    peak_step: int | None = None
    for position, step in enumerate(schedule):
        if isinstance(step, Free):
            replay.free(position, step.value)
            now[columns[position][0]] -= held[step.value]
            stack[position] = now
            continue
        op = replay.compute(position, step.op)
        for value, column in zip(op.creates, columns[position], strict=True):
            now[column] += held[value]
        stack[position] = now
        stack[position, _INDEX[Category.WORKSPACE]] += op.workspace_bytes
        if (live := int(stack[position].sum())) > peak_bytes:
            peak_bytes, peak_step = live, position
    replay.finish()
    if peak_bytes < resident_bytes:  # resident values were freed before the first op ran
        peak_step = None
    peak = None if peak_step is None else schedule.steps[peak_step]
    return Timeline(
        stack=stack,
        steps=schedule.steps,
        phases=tuple(
            graph.ops[step.op].phase if isinstance(step, Compute) else None for step in schedule.steps
        ),
        peak_step=peak_step,
        peak_op=graph.ops[peak.op] if isinstance(peak, Compute) else None,
        holdings=_holdings(graph, schedule, columns, held, peak_step),
        resident_bytes=resident_bytes,
    )


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

    def compute(self, position: int, op_id: int) -> Op:
        if not 0 <= op_id < len(self.graph.ops):
            raise IllegalSchedule(f"step {position} computes op {op_id}, which is not in the graph")
        op = self.graph.ops[op_id]
        where = f"step {position}, op {op_id} ({op.label}),"
        if op.random and op_id in self.done:
            raise IllegalSchedule(f"{where} draws random numbers and is computed a second time")
        again = op_id in self.done
        for value, version in self.expected[op_id].items():
            if again and value in op.updates:
                continue
            if value not in self.alive:
                state = "was freed" if value in self.version else "does not exist yet"
                raise IllegalSchedule(f"{where} reads value {value} ({self._name(value)}), which {state}")
            if self.version[value] != version:
                raise IllegalSchedule(
                    f"{where} reads value {value} ({self._name(value)}) after it was changed "
                    f"{self.version[value]} times; in graph order it was changed {version} times"
                )
        for value in op.creates:
            if value in self.alive:
                raise IllegalSchedule(f"{where} creates value {value} ({self._name(value)}), which is alive")
            self.alive.add(value)
            self.version[value] = 0
        for value in op.mutates if again else (*op.mutates, *op.updates):
            self.version[value] += 1
        self.done.add(op_id)
        return op

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


def categorise(graph: Graph, schedule: Schedule) -> list[tuple[int, ...]]:
    """For each step, the category columns of the values it creates or frees.

    Only a whole life tells an activation from a temporary: it is one if the forward (or a
    recomputation of it) made it and a backward op runs before it is freed. So lives are collected
    first. A free of a value that is not alive gets a column too; the replay refuses it.
    """
    columns: list[list[int]] = [[] for _ in schedule.steps]
    born: dict[int, tuple[int, int, int]] = {}  # value -> position, index within creates, backwards before
    backwards = 0
    for position, step in enumerate(schedule):
        if isinstance(step, Compute) and 0 <= step.op < len(graph.ops):
            op = graph.ops[step.op]
            backwards += op.phase is Phase.BACKWARD
            for index, value in enumerate(op.creates):
                born[value] = (position, index, backwards)
                columns[position].append(column_of(graph, value, spans_backward=False))
        elif isinstance(step, Free):
            start, index, before = born.pop(step.value, (position, 0, backwards))
            column = column_of(graph, step.value, spans_backward=backwards > before)
            columns[position].append(column)
            if start != position:
                columns[start][index] = column
    for value, (start, index, before) in born.items():
        columns[start][index] = column_of(graph, value, spans_backward=backwards > before)
    return [tuple(found) for found in columns]


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
    graph: Graph, schedule: Schedule, columns: list[tuple[int, ...]], held: list[int], peak_step: int | None
) -> tuple[Holding, ...]:
    """What is alive at the peak, largest first. The schedule is known to be legal here."""
    alive = {value: column_of(graph, value, spans_backward=False) for value in graph.resident}
    until_peak = () if peak_step is None else schedule.steps[: peak_step + 1]
    for position, step in enumerate(until_peak):
        if isinstance(step, Compute):
            alive.update(zip(graph.ops[step.op].creates, columns[position], strict=True))
        else:
            del alive[step.value]
    found = [
        Holding(value, held[value], CATEGORIES[column], graph.values[value].module)
        for value, column in alive.items()
        if held[value]
    ]
    return tuple(sorted(found, key=lambda holding: (-holding.bytes, holding.value)))
