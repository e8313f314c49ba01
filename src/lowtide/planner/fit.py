"""Will it fit? One training step, predicted: what it holds at its peak, and whether a budget holds that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.cost.cuda_rules import CONTEXT_BYTES
from lowtide.cost.price import is_here
from lowtide.cost.profile import Progress
from lowtide.ir.cuda_allocator import Reserve, cached
from lowtide.ir.graph import Op
from lowtide.ir.simulate import Category
from lowtide.ir.training_reserve import AllocatedRun
from lowtide.planner.on_card import Beside, CardUse, Training, check_on_card
from lowtide.text.card import Card, is_a_name
from lowtide.text.sizes import parse_bytes
from lowtide.text.units import format_bytes
from lowtide.trace.dry_run import Trace
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import Example, Loss, declared
from lowtide.trace.training import trace_training

_NO_WORKSPACES = (
    "workspaces are not included: the step was not profiled, and kernels (convolutions above all) "
    "take memory of their own while they run"
)
_BEFORE_THE_CARD = "no optimizer was named: its states are not counted, which a training will need"
_NOT_WORTH_TELLING = 4 << 20  # bytes, and a hundredth of what is not resident
_BY_RULE = (
    "workspaces are those that CUDA's kernels are known to take: this machine has no such device to "
    "profile them on"
)


@dataclass(frozen=True)
class Fit:
    """What a training step will hold, and whether a budget holds that.

    Everything is read off `trace`, so the numbers cannot disagree. `reserved_bytes` is the most that
    PyTorch's caching allocator will take from the device (as in `Reading`), `context_bytes` what CUDA
    itself takes, `allocated_bytes` the peak as that allocator counts it once it is warm, which may hand out
    blocks larger than asked for; all are None on the CPU, and none is part of the peak or the budget.
    """

    model: str
    trace: Trace = field(repr=False)  # thousands of ops
    predicted_on: str
    profiled: bool  # whether the kernels' workspaces were found by running them
    optimizer: str | None = None
    budget_bytes: int | None = None
    reserved_bytes: int | None = None
    context_bytes: int | None = None
    allocated_bytes: int | None = None
    use: CardUse | None = None  # of a card, where one is the budget

    @property
    def device(self) -> str:
        """Where the step will run."""
        return self.trace.graph.device

    @property
    def peak_bytes(self) -> int:
        """The most bytes the step holds at once."""
        return self.trace.timeline.peak_bytes

    @property
    def resident_bytes(self) -> int:
        """What is there before the step begins: parameters, batch, gradients and states of earlier steps."""
        return self.trace.timeline.resident_bytes

    @property
    def categories(self) -> Mapping[Category, int]:
        """Bytes at the peak by category. They sum to `peak_bytes`."""
        return self.trace.timeline.categories

    @property
    def modules(self) -> Mapping[str, int]:
        """Bytes at the peak by module path, largest first; '' is what no submodule owns. They sum to it."""
        return self.trace.timeline.modules

    @property
    def peak_op(self) -> Op | None:
        """The op that runs at the peak; None if the peak is what is there before the step begins."""
        return self.trace.timeline.peak_op

    @property
    def workspaces_from(self) -> str | None:
        """Where the kernels' own workspaces were learnt; None if they are not included."""
        return self.trace.graph.profiled_on

    @property
    def extrapolated(self) -> int:
        """How many ops were too large to be run here and have costs from smaller batches."""
        return sum(op.extrapolated for op in self.trace.graph.ops)

    @property
    def margin_bytes(self) -> int | None:
        """What the budget leaves over; negative if it is exceeded, None without a budget."""
        if self.use is not None:
            spare = self.use.card.memory_bytes - self.use.taken_bytes
            return spare if self.use.fits else -self.use.missing_bytes
        return None if self.budget_bytes is None else self.budget_bytes - self.peak_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the budget, or the card holds the training; None without a budget."""
        if self.use is not None:
            return self.use.fits
        return None if self.margin_bytes is None else self.margin_bytes >= 0

    @property
    def card_bytes(self) -> int | None:
        """What a card must have for the step to run: reserved memory and context. None on the CPU."""
        if self.reserved_bytes is None or self.context_bytes is None:
            return None
        return self.reserved_bytes + self.context_bytes

    @property
    def whole_blocks_bytes(self) -> int:
        """How much more than the peak the allocator may count, by a replay of some steps."""
        return 0 if self.allocated_bytes is None else max(0, self.allocated_bytes - self.peak_bytes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the prediction does not know, in words."""
        own = [] if self.profiled else [_NO_WORKSPACES if self.workspaces_from is None else _BY_RULE]
        if self.extrapolated:
            own.append(f"the workspaces of {self.extrapolated} ops are extrapolated from smaller batches")
        if self.whole_blocks_bytes > max((self.peak_bytes - self.resident_bytes) // 100, _NOT_WORTH_TELLING):
            more = format_bytes(self.whole_blocks_bytes)
            own.append(
                f"PyTorch's allocator may count {more} more, depending on what ran before: "
                "it hands out a free block whole if less than 1 MiB of it would be left over. "
                "expandable_segments does not"
            )
        if self.use is not None:
            own += self._of_the_card(self.use)
        elif self.fits and self.card_bytes is not None and self.card_bytes > (self.budget_bytes or 0):
            own.append(
                f"the peak is within the budget, but a card needs {format_bytes(self.card_bytes)}: "
                "what PyTorch reserves and the CUDA context come on top. expandable_segments reserves less"
            )
        return (*own, *self.trace.graph.notes)

    def _of_the_card(self, use: CardUse) -> list[str]:
        found = [_BEFORE_THE_CARD] if self.optimizer is None else []
        if use.fits and use.failed_by_default is not None:
            found.append(
                f"with PyTorch's own segments it runs out of memory in {use.failed_by_default}: set "
                "PYTORCH_ALLOC_CONF=expandable_segments:True (lowtide.optimize does, for a card)"
            )
        if use.card.known is not None and not use.card.known.is_measured:
            found.append(f"the memory of {use.card.known.name} is nominal, less a part: see docs/card.md")
        return found

    def to_json(self) -> dict[str, Any]:
        """Everything but the trace itself, as JSON can hold it."""
        op = self.peak_op
        return {
            "model": self.model,
            "device": self.device,
            "optimizer": self.optimizer,
            "peak_bytes": self.peak_bytes,
            "resident_bytes": self.resident_bytes,
            "reserved_bytes": self.reserved_bytes,
            "context_bytes": self.context_bytes,
            "categories": {category.value: held for category, held in self.categories.items()},
            "modules": dict(self.modules),
            "peak_op": None if op is None else _op_to_json(op),
            "predicted_on": self.predicted_on,
            "profiled": self.profiled,
            "workspaces_from": self.workspaces_from,
            "extrapolated": self.extrapolated,
            "budget_bytes": self.budget_bytes,
            "card": None if self.use is None else self.use.to_json(),
            "fits": self.fits,
            "margin_bytes": self.margin_bytes,
            "notes": list(self.notes),
        }


def fit(
    model: nn.Module,
    example: Example,
    loss: Loss | None = None,
    *,
    target: Any = None,
    optimizer: str | None = None,
    device: str | torch.device | None = None,
    budget: str | int | Card | None = None,
    profile: bool = True,
    name: str | None = None,
    progress: Progress | None = None,
) -> Fit:
    """Predict what training `model` on a batch like `example` will hold at its peak.

    The step is zero_grad, forward, loss, backward and `optimizer` ("sgd", "momentum", "adam", "adamw")
    once its states exist; without an optimizer it is forward, loss and backward into empty gradients.
    It runs on fake tensors: nothing is allocated and the model stays as it is. `example` is a tuple of
    arguments, a dict of keyword arguments or a single tensor; `loss` makes a number of the model's output
    and may be left out if the output is that number or carries it (`.loss`, `["loss"]`, first of a tuple).
    A loss of output and target, such as `nn.CrossEntropyLoss()`, takes the `target`, or what comes last in
    the example: `(images, labels)`.

    `device` is where the step will run, by default where the model is. With `profile`, each distinct op is
    run once for the workspace its kernel takes, and `progress(done, of)` is called meanwhile; if the device
    is not on this machine, workspaces are those that CUDA's kernels are known to take. Without it they are
    missing from the peak. `notes` say which.

    A `budget` is bytes of the peak, or a card ("24GiB card", "rtx4090", `lowtide.Card("24GiB")`): `use` then
    says what a training takes of it, from its first step on, with everything that is beside PyTorch.

    Raises:
        BadRequest: an argument makes no sense, the step has no loss, or the model itself raises; then the
            message is its traceback, shortened to the user's frames.
        CannotTrace: the dry run cannot follow the step.
    """
    card = None
    if isinstance(budget, Card) or (budget is not None and is_a_name(budget)):
        card, budget = Card.parse(budget), None
    budget_bytes = None if budget is None else parse_bytes(budget)
    example, loss = declared(example, loss, target)
    trace = trace_training(
        StepSpec(
            model,
            example,
            loss,
            optimizer,
            device=device,
            profile=profile,
            name=name,
            progress=progress,
        )
    )
    use = None if card is None else _use(trace, card)
    here, reserve = is_here(trace.graph.device), _reserve(trace)
    return Fit(
        model=name or type(model).__name__,
        trace=trace,
        predicted_on=_predicted_on(trace, here),
        profiled=profile and here,
        optimizer=optimizer,
        budget_bytes=budget_bytes,
        reserved_bytes=None if reserve is None else reserve.reserved_bytes,
        context_bytes=None if reserve is None else CONTEXT_BYTES,
        allocated_bytes=None if reserve is None else reserve.allocated_bytes,
        use=use,
    )


def _use(trace: Trace, card: Card) -> CardUse:
    check_on_card(card, trace.graph.device)
    training = Training(AllocatedRun(trace.graph, trace.schedule))
    return CardUse.of(training, card, Beside.of(distributed=False))


def _reserve(trace: Trace) -> Reserve | None:
    """What the caching allocator takes from the device, and hands out; the CPU has none."""
    on_cuda = trace.graph.device.startswith("cuda")
    return cached(trace.graph, trace.schedule) if on_cuda else None


def _predicted_on(trace: Trace, here: bool) -> str:
    place = trace.graph.device if here else "cpu"
    costs = "profile" if here else trace.graph.profiled_on
    how = "dry run" if trace.graph.profiled_on is None else f"dry run and {costs}"
    return f"{place}, {how}, torch {torch.__version__.partition('+')[0]}"


def _op_to_json(op: Op) -> dict[str, Any]:
    return {
        "label": op.label,
        "target": op.target,
        "module": op.module,
        "phase": op.phase.value,
        "workspace_bytes": op.workspace_bytes,
    }
