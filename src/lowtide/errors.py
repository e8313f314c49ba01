"""Every error lowtide raises on purpose.

    LowtideError
    ├── BadRequest            what was asked makes no sense; says why and what to do instead
    │   ├── UnknownModel      no model of that name; carries the nearest names
    │   ├── UnknownMethod     no method of that name; carries the nearest names
    │   ├── UnknownCard       no card of that name; carries the nearest names
    │   ├── UnknownFunction   no function of that name in an expression; carries the nearest names
    │   ├── ShapeMismatch     shapes in an expression do not go together; names both
    │   ├── NotDifferentiable there is no derivative of an op; names it and says why
    │   ├── InfeasibleBudget  no plan fits; carries the least that would, and who needs it
    │   ├── ArenaTooSmall     a layout does not fit in the arena; carries what would, and who needs it
    │   └── DeviceMissing     measuring or profiling was asked for on a device that is not there
    ├── MalformedGraph        a graph breaks its own rules; names the op
    ├── IllegalSchedule       a schedule the referee refuses; names the step and the op
    ├── IllegalLayout         a layout the referee refuses; names both values, the op and the bytes
    ├── BadFile               a file is damaged, cut off, foreign or of another schema
    ├── CannotCapture         the model cannot be captured; names the user's line
    ├── CannotTrace           the dry run cannot follow the step; names the user's line
    ├── CannotApply           a plan does not fit the model, or the model cannot be recomputed
    ├── PlanDisagrees         a real step under the plan is not the plain one; says what differs
    ├── CannotRun             a graph has an op that cannot be called; names it
    └── MissingExtra          an optional dependency is needed; says what to install

The command line turns each of these into one message and exit code 2. Anything else is a bug and
shows its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lowtide.text.units import format_bytes  # which imports nothing

_DIFFERENCES_SHOWN = 3


class LowtideError(Exception):
    """Base of all errors that lowtide raises on purpose."""


class BadRequest(LowtideError):
    """What was asked cannot be done as asked."""


class UnknownModel(BadRequest):
    """No model goes by this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.nearest = tuple(difflib.get_close_matches(name, list(known), n=3, cutoff=0.5))
        hint = f" Did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        super().__init__(
            f"there is no model called '{name}'.{hint}\n"
            "Give a zoo name (see `lowtide zoo`), hf:TYPE, torchvision:NAME, timm:NAME "
            "or path/to/file.py:function."
        )


class UnknownMethod(BadRequest):
    """No method goes by this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        self.nearest = tuple(difflib.get_close_matches(name, self.known, n=3, cutoff=0.5))
        hint = f" Did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        super().__init__(f"there is no method called '{name}'.{hint} There are: {', '.join(self.known)}.")


class UnknownCard(BadRequest):
    """No card goes by this name, and it is no size."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        bare = "".join(name.casefold().split())
        self.nearest = tuple(difflib.get_close_matches(bare, self.known, n=3, cutoff=0.5))
        hint = f" Did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        super().__init__(
            f"there is no card called '{name:.60}'.{hint} Write a size such as 24GiB, or one of: "
            f"{', '.join(self.known)}."
        )


class UnknownFunction(BadRequest):
    """No function of expressions goes by this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        self.nearest = tuple(difflib.get_close_matches(name, self.known, n=3, cutoff=0.5))
        hint = f" Did you mean {' or '.join(self.nearest)}?" if self.nearest else ""
        super().__init__(f"there is no function called '{name}'.{hint} There are: {', '.join(self.known)}.")


class ShapeMismatch(BadRequest):
    """Shapes that an op cannot take together."""

    def __init__(self, function: str, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        self.function = function
        self.shapes = tuple(shapes)
        found = " and ".join(f"{name} is {shape}" for name, shape in self.shapes)
        super().__init__(f"{function}: these shapes do not go together: {found}. Give other shapes.")


class NotDifferentiable(BadRequest):
    """The gradient asked for goes through an op that has no derivative."""

    def __init__(self, op: int, label: str, reason: str, advice: str) -> None:
        self.op = op
        self.label = label
        self.reason = reason
        super().__init__(f"cannot differentiate op {op} ({label}): {reason}. {advice}")


RAISE_OR_CUT = "Raise the budget to at least that, shrink the batch, or cut the model finer."


class InfeasibleBudget(BadRequest):
    """No plan that the method can make stays within the budget."""

    def __init__(
        self,
        method: str,
        budget_bytes: int,
        least_bytes: int,
        needed_by: str,
        advice: str = RAISE_OR_CUT,
    ) -> None:
        self.method = method
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.needed_by = needed_by
        super().__init__(
            f"no plan of {method} fits in {format_bytes(budget_bytes)}: the least it reaches is "
            f"{format_bytes(least_bytes)} ({least_bytes} bytes), needed by {needed_by}. {advice}"
        )


class ArenaTooSmall(BadRequest):
    """No layout that the method can make stays within the arena."""

    def __init__(
        self,
        method: str,
        asked_bytes: int,
        needed_bytes: int,
        lower_bound_bytes: int,
        fullest_op: str,
        unplaced: str,
    ) -> None:
        self.method = method
        self.asked_bytes = asked_bytes
        self.needed_bytes = needed_bytes
        self.lower_bound_bytes = lower_bound_bytes
        self.fullest_op = fullest_op
        self.unplaced = unplaced
        below = asked_bytes < lower_bound_bytes
        advice = (
            "Recompute more, shrink the batch, or give a larger arena."
            if below
            else "Give an arena of that size, or try another method."
        )
        super().__init__(
            f"no layout of {method} fits in an arena of {asked_bytes} bytes: it needs {needed_bytes}, and no "
            f"layout less than {lower_bound_bytes}, which is live at once at {fullest_op}. The first value "
            f"to stick out is {unplaced}. {advice}"
        )


class DeviceMissing(BadRequest):
    """The device is not on this machine."""

    def __init__(self, device: str, doing: str) -> None:
        self.device = device
        super().__init__(
            f"cannot {doing} on '{device}': this machine has no such device. "
            "Do it on a machine that has one; predicting for it needs none (`lowtide fit --device cuda`)."
        )


class MalformedGraph(LowtideError):
    """A graph breaks one of its own rules."""


class IllegalSchedule(LowtideError):
    """A schedule cannot be executed as written."""


class IllegalLayout(LowtideError):
    """A layout would let values overwrite each other, or has no place for one."""


class BadFile(LowtideError):
    """A file cannot be read as what it should be, or not be written."""

    def __init__(self, path: object, reason: str, doing: str = "read") -> None:
        self.path = str(path)
        self.reason = reason
        super().__init__(f"cannot {doing} '{path}': {reason}")


class CannotCapture(LowtideError):
    """The model's forward and backward cannot be captured as graphs."""


class CannotTrace(LowtideError):
    """The dry run cannot follow the step."""


class CannotApply(LowtideError):
    """A plan was made for another model or batch, or a part of the model cannot be run twice."""


@dataclass(frozen=True, slots=True)
class Difference:
    """What of a planned step is not as in a plain one: of a peak in bytes, of all else the largest number.

    `what` is "loss", "gradient", "buffer", "input", "random state" or "peak", `name` says of which parameter.
    `by` is infinite where one of the two steps has no such thing.
    """

    what: str
    name: str
    by: float
    allowed: float

    def __str__(self) -> str:
        named = f"the {self.what}{f' of {self.name!r}' if self.name else ''}"
        if self.what == "peak":
            return f"{named} is {format_bytes(int(self.by))} ({int(self.by)} bytes) higher than promised"
        if self.by == float("inf"):
            return f"{named} is there in one of the two steps only, or not a number in one"
        return f"{named} is off by {self.by:.3g}, and by {self.allowed:.3g} it may be"


class PlanDisagrees(LowtideError):
    """A step was run under a plan, to verify it, and is not what the plain step is."""

    def __init__(self, method: str, differences: Sequence[Difference]) -> None:
        self.method = method
        self.differences = tuple(differences)
        more = len(self.differences) - _DIFFERENCES_SHOWN
        shown = "; ".join(map(str, self.differences[:_DIFFERENCES_SHOWN]))
        super().__init__(
            f"the plan of {method} was tried on a real step, and was not put to use: {shown}"
            f"{f'; and {more} more' if more > 0 else ''}. Plan by another method, or within a lower "
            "budget if only the peak differs, or train without a plan; and please report it."
        )


class RanksDisagree(LowtideError):
    """The ranks of a process group cannot share a plan: they differ, or one of them is missing."""


class CannotRun(LowtideError):
    """A graph has an op that cannot be called on its own, or there is no one graph of the step."""


class MissingExtra(LowtideError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package = package
        super().__init__(f"{purpose} needs {package}: pip install 'lowtide[{extra}]'")
