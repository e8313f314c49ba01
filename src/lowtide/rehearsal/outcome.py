"""What a rehearsal finds: how much each part of a training holds at most, and where it runs out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from lowtide.ir.simulate import Category
from lowtide.text.card import Card
from lowtide.text.documents import Json


class Act(StrEnum):
    """The parts of a training, each with troubles of its own."""

    SETUP = "setting up"  # before the first forward that trains
    FIRST = "first step"  # kernels are tuned, a plan is warmed up, the optimizer makes its states
    TRAINING = "training"  # every step after it, the last smaller batch as well
    VALIDATION = "validation"  # forwards without gradients of a model in evaluation
    SAVING = "saving"  # torch.save


class Doing(StrEnum):
    """What a step is doing."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "optimizer step"
    ELSE = "work outside of steps"
    SAVE = "torch.save"


@dataclass(frozen=True, slots=True)
class Instant:
    """When something was: `steps` optimizer steps were over.

    `line` is of the user's own files, `maker` the innermost one, which may be a package's: a model's, say.
    """

    act: Act
    steps: int
    doing: Doing
    op: str
    line: str
    maker: str

    def __str__(self) -> str:
        if self.act in (Act.SETUP, Act.FIRST):
            when = self.act.value
        elif self.act is Act.TRAINING:
            when = f"step {self.steps + 1}"
        else:
            when = f"{self.act} after step {self.steps}"
        return f"{when}, {self.doing}"

    def to_json(self) -> dict[str, Json]:
        """As a part of a document."""
        told: dict[str, Json] = {"part": self.act.value, "steps_done": self.steps}
        return {**told, "doing": self.doing.value, "op": self.op, "line": self.line, "made_at": self.maker}


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds memory: a tensor of the model by its name, or all that one line of code has made."""

    category: Category
    name: str
    bytes: int
    tensors: int

    def to_json(self) -> dict[str, Json]:
        """As a part of a document."""
        found: dict[str, Json] = {"category": self.category.value, "name": self.name}
        return {**found, "bytes": self.bytes, "tensors": self.tensors}


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Where the card would be out of memory, or was: how much was asked for, and who held what then."""

    moment: Instant
    asked_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    held: Mapping[Category, int]
    holders: tuple[Holder, ...]

    def to_json(self) -> dict[str, Json]:
        """As a part of a document."""
        return {
            **self.moment.to_json(),
            "asked_bytes": self.asked_bytes,
            "allocated_bytes": self.allocated_bytes,
            "reserved_bytes": self.reserved_bytes,
            "held": {category.value: count for category, count in self.held.items() if count},
            "holders": [holder.to_json() for holder in self.holders],
        }


@dataclass(frozen=True, slots=True)
class ActPeak:
    """The most that a part of the training held. It came `times` times: steps, passes or files."""

    act: Act
    times: int
    allocated_bytes: int
    reserved_bytes: int
    moment: Instant | None  # None: the part asked for nothing, what it held was there before
    held: Mapping[Category, int]
    fits: bool

    def to_json(self) -> dict[str, Json]:
        """As a part of a document."""
        return {
            "part": self.act.value,
            "times": self.times,
            "peak_allocated_bytes": self.allocated_bytes,
            "peak_reserved_bytes": self.reserved_bytes,
            "fits": self.fits,
            "peak": None if self.moment is None else self.moment.to_json(),
            "held": {category.value: count for category, count in self.held.items() if count},
        }


def in_steps(acts: Iterable[ActPeak], steps: int) -> Iterator[ActPeak]:
    """The same, with training counted in steps after the first one, of which there were `steps` in all."""
    for act in acts:
        if act.act is not Act.TRAINING:
            yield act
        elif steps > 1 or act.moment is not None:
            yield replace(act, times=max(1, steps - 1))


@dataclass(frozen=True, slots=True)
class Glimpse:
    """Neighbouring events of the allocator, told by the one that held most."""

    act: Act
    allocated_bytes: int
    reserved_bytes: int
    stack: tuple[int, ...]  # bytes by category, in the order of CATEGORIES


class Ended(StrEnum):
    """How a rehearsal came to its end."""

    WHOLE = "the whole script ran"
    ENOUGH = "ended after the steps that were asked for"
    INTERRUPTED = "interrupted: what was seen until then"
    OUT_OF_MEMORY = "ended by running out of memory"
    FAILED = "ended by an error of the script's own"


@dataclass(frozen=True)
class Rehearsed:
    """What a training held on a card, part by part, and where it would have run out of memory first.

    `allowed_bytes` is what PyTorch may reserve: the card less what others hold and less the CUDA context.
    `other_segments_fit` says whether it would do with expandable segments, where it was rehearsed without, or
    without them, where it was rehearsed with; None: not known. `replayed` says that no GPU was used.
    """

    card: Card
    context_bytes: int
    acts: tuple[ActPeak, ...]
    shortfall: Shortfall | None
    timeline: tuple[Glimpse, ...]
    steps: int
    replayed: bool
    expandable: bool
    other_segments_fit: bool | None
    ended: Ended
    notes: tuple[str, ...] = ()

    @property
    def allowed_bytes(self) -> int:
        """What PyTorch may reserve."""
        return self.card.usable_bytes - self.context_bytes

    @property
    def fits(self) -> bool:
        """Whether all that was seen fits on the card."""
        return self.shortfall is None

    @property
    def peak_reserved_bytes(self) -> int:
        """The most that was reserved."""
        return max((act.reserved_bytes for act in self.acts), default=0)

    def to_json(self) -> dict[str, Json]:
        """As a document."""
        return {
            "fits": self.fits,
            "card_bytes": self.card.memory_bytes,
            "reserve_bytes": self.card.reserve_bytes,
            "context_bytes": self.context_bytes,
            "allowed_bytes": self.allowed_bytes,
            "replayed": self.replayed,
            "expandable_segments": self.expandable,
            "other_segments_fit": self.other_segments_fit,
            "optimizer_steps": self.steps,
            "ended": self.ended.value,
            "parts": [act.to_json() for act in self.acts],
            "shortfall": None if self.shortfall is None else self.shortfall.to_json(),
            "notes": list(self.notes),
        }
