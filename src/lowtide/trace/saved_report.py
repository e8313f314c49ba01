"""What a training step keeps from the forward for the backward, and why: the answer of `lowtide.saved`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any

from lowtide.ir.graph import Graph, Role
from lowtide.ir.schedule import Schedule
from lowtide.ir.simulate import Timeline, simulate
from lowtide.text.names import in_common, unnumbered, without_middle
from lowtide.text.rounding import unit_for
from lowtide.text.table import Table
from lowtide.text.units import format_bytes

_ROWS = 20
_MODULES = 8
_LONGEST_TENSOR = 26
_LONGEST_OP = 30
_LONGEST_REASON = 42
_ROOT = "(the model itself, loss)"


class Why(StrEnum):
    """What a value is to the op whose backward needs it."""

    INPUT = "input"
    OUTPUT = "output"
    STATISTICS = "statistics"  # what a normalisation or an attention found out beside its output
    MASK = "mask"
    INDICES = "indices"
    RANDOM = "random state"


class Held(StrEnum):
    """Why a value is there when the backward begins, though no autograd node has saved it."""

    LOSS = "the loss"
    OUTPUT = "the model's output, still referred to"
    BEGINNING = "the gradient that the backward begins with"
    REFERRED = "not saved: model or checkpoint holds it"


@dataclass(frozen=True, slots=True)
class Saver:
    """An autograd node that has saved a value: 'ConvolutionBackward0', made by a call of `module`."""

    node: str
    module: str
    why: Why

    def __str__(self) -> str:
        return f"{self.why} of {self.module}: {self.node}" if self.module else f"{self.why} of {self.node}"


@dataclass(frozen=True, slots=True)
class SavedValue:
    """One storage that is kept, however many save it.

    `bytes` are rounded as the device's allocator rounds. `op` and `module` made it, in the user's `line`
    where one is known; for what is there anyway they are empty. `held` is set if nobody has saved it.
    """

    value: int  # its id in the graph
    name: str
    role: Role
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    op: str
    line: str | None
    savers: tuple[Saver, ...]
    held: Held | None = None

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it is kept, in words: one reason for each kind of node that has saved it."""
        return tuple(map(str, self.savers)) if self.held is None else (self.held.value,)


@dataclass(frozen=True)
class Saved:
    """What a training step keeps from the forward for the backward, largest first.

    `entries` are all values that the forward made and that are there when the backward begins: their bytes
    are exactly the timeline's activations at that moment, and gradients that the forward itself computed
    and uses. `resident` ones (parameters, buffers, the batch) are saved as well, but are there anyway and
    cost nothing more.
    """

    model: str
    graph: Graph = field(repr=False)  # thousands of ops
    schedule: Schedule = field(repr=False)
    entries: tuple[SavedValue, ...]
    resident: tuple[SavedValue, ...]

    @property
    def device(self) -> str:
        """Where the step will run."""
        return self.graph.device

    @cached_property
    def timeline(self) -> Timeline:
        """The whole step, as the referee counts it."""
        return simulate(self.graph, self.schedule)

    @cached_property
    def total_bytes(self) -> int:
        """What all entries take."""
        return sum(entry.bytes for entry in self.entries)

    @cached_property
    def by_module(self) -> Mapping[str, int]:
        """Bytes by the module that made them, largest first; '' is what no submodule made. They sum to it."""
        found: dict[str, int] = {}
        for entry in self.entries:
            found[entry.module] = found.get(entry.module, 0) + entry.bytes
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the dry run does not know, in words."""
        return self.graph.notes

    def __str__(self) -> str:
        title = f"{self.model}, on {self.device}: kept for the backward"
        return "\n\n".join(filter(None, [title, *map(str, self.tables()), self.there_anyway()]))

    def tables(self, most_rows: int = _ROWS, most_modules: int = _MODULES) -> tuple[Table, Table]:
        """What is kept, and which modules made it: the largest, and how much the others are.

        Values that differ in nothing but the number of a layer share a row. The printed bytes add up to
        the printed totals.
        """
        return _values_table(self, most_rows), _modules_table(self, most_modules)

    def there_anyway(self) -> str:
        """In one line what is saved and costs nothing; empty if there is no such thing."""
        parts = []
        for role in (Role.PARAMETER, Role.BUFFER, Role.BATCH):
            if found := [entry.bytes for entry in self.resident if entry.role is role]:
                plural = "s" if len(found) > 1 else ""
                what = "the batch" if role is Role.BATCH else f"{len(found)} {role.value}{plural}"
                parts.append(f"{what} ({format_bytes(sum(found))})")
        return f"saved as well, but there anyway: {', '.join(parts)}" if parts else ""

    def to_json(self) -> dict[str, Any]:
        """Everything but the step itself, as JSON can hold it."""
        return {
            "model": self.model,
            "device": self.device,
            "total_bytes": self.total_bytes,
            "by_module": dict(self.by_module),
            "entries": [asdict(entry) for entry in self.entries],
            "resident": [asdict(entry) for entry in self.resident],
            "notes": list(self.notes),
        }


# Tables ---------------------------------------------------------------------------------------------


def _values_table(saved: Saved, most: int) -> Table:
    groups = _alike(saved.entries)
    shown, hidden = groups[:most], groups[most:]
    unit = unit_for(saved.total_bytes)
    counts = [_bytes_of(group) for group in shown]
    rest = [saved.total_bytes - sum(counts)] if hidden else []
    sizes = unit.column([*counts, *rest])
    rows = [row for group, size in zip(shown, sizes, strict=False) for row in _rows(group, size)]
    if hidden:
        rows.append((sizes[-1], f"{sum(map(len, hidden))}", "smaller ones", "", "", ""))
    return Table(
        titles=(unit.name, "values", "tensor", "made by", "line", "kept as"),
        rows=tuple(rows),
        totals=(unit.text(saved.total_bytes), f"{len(saved.entries)}", "in all", "", "", ""),
        numbers=frozenset([0, 1]),
    )


def _modules_table(saved: Saved, most: int) -> Table:
    shown = dict(list(saved.by_module.items())[:most])
    others = len(saved.by_module) - len(shown)
    names = [*(module or _ROOT for module in shown), *([f"{others} others"] if others else [])]
    rest = [saved.total_bytes - sum(shown.values())] if others else []
    unit = unit_for(saved.total_bytes)
    return Table(
        titles=("by module", unit.name),
        rows=tuple(zip(names, unit.column([*shown.values(), *rest]), strict=True)),
        totals=("in all", unit.text(saved.total_bytes)),
        numbers=frozenset([1]),
    )


def _alike(entries: Iterable[SavedValue]) -> list[list[SavedValue]]:
    """Values that differ in nothing but the number of a layer, those that take most together first."""
    groups: dict[object, list[SavedValue]] = {}
    for entry in entries:
        key = (entry.dtype, entry.shape, entry.line, unnumbered(_made_by(entry)))
        groups.setdefault((key, *map(unnumbered, entry.reasons)), []).append(entry)
    return sorted(groups.values(), key=lambda group: -_bytes_of(group))


def _rows(group: Sequence[SavedValue], size: str) -> Iterator[tuple[str, ...]]:
    one = group[0]
    reasons = (in_common(texts) for texts in zip(*(entry.reasons for entry in group), strict=True))
    first, *others = (without_middle(_without_suffix(reason), _LONGEST_REASON) for reason in reasons)
    yield (
        size,
        f"{len(group)}",
        without_middle(f"{one.dtype}{list(one.shape)}", _LONGEST_TENSOR),
        without_middle(in_common([_made_by(entry) for entry in group]), _LONGEST_OP),
        (one.line or "").partition(",")[0],
        first,
    )
    yield from (("", "", "", "", "", other) for other in others)


def _bytes_of(group: Iterable[SavedValue]) -> int:
    return sum(entry.bytes for entry in group)


def _made_by(entry: SavedValue) -> str:
    return entry.name if " copy of " in entry.name else entry.op.replace("aten.", "")


def _without_suffix(reason: str) -> str:
    return reason.removesuffix("0").removesuffix("Backward")
