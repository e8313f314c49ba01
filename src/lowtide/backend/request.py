"""What the options of a `torch.compile` ask for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lowtide.aot.kernels import Kernels
from lowtide.errors import BadRequest, UnknownMethod
from lowtide.planner.on_card import Beside, expand_segments
from lowtide.solvers import methods, schedulers
from lowtide.text.budget import Budget

_OPTIONS = ("budget", "method", "profile", "tiles", "kernels")
_RESERVED_PART = 50  # of what a card leaves, one part in so many is reserved beyond what is allocated


@dataclass(frozen=True)
class Request:
    """What the options ask for."""

    budget_bytes: int | None  # None: as low as possible
    method: str
    profile: bool
    tiles: bool
    kernels: Kernels = Kernels.EAGER

    @staticmethod
    def read(options: Mapping[str, Any] | None) -> Request:
        given = dict(options or {})
        for name in given:
            if name not in _OPTIONS:
                raise BadRequest(f"the lowtide backend has no option {name!r}; it has {', '.join(_OPTIONS)}.")
        if given.get("budget") is None:
            raise BadRequest(
                "the lowtide backend needs a budget: "
                'torch.compile(model, backend="lowtide", options={"budget": "8GiB"}).'
            )
        budget, method = given["budget"], str(given.get("method", "auto"))
        if str(budget).strip().endswith("%"):
            raise BadRequest(
                f"the lowtide backend does not know the plain peak, of which {budget} is to be a part. "
                "Give a size, or use lowtide.optimize."
            )
        if method in methods():
            raise BadRequest(f"{method} plans layers; the backend plans op by op. Use auto, or leave it out.")
        if method not in schedulers():
            raise UnknownMethod(method, schedulers())
        wishes = bool(given.get("profile", True)), bool(given.get("tiles", False))
        kernels = Kernels.named(str(given.get("kernels", Kernels.EAGER)))
        kernels = kernels.in_slices() if wishes[1] else kernels
        return Request(_bytes_of(Budget.parse(budget)), method, *wishes, kernels)


def _bytes_of(budget: Budget) -> int | None:
    """What graphs may hold: of a card, what is left of it beside the rest, less a part.

    The backend sees graphs, and neither the optimizer nor the first step of a training, so it cannot replay
    what will be reserved beyond what is allocated.
    """
    if budget.card is None:
        return budget.bytes
    expand_segments(stacklevel=6)
    return Beside.of(distributed=False).left_bytes(budget.card) * (_RESERVED_PART - 1) // _RESERVED_PART
