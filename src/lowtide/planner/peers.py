"""One step by everything that people train it with today, and by lowtide: what each holds and takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowtide.cost.measure import present_device
from lowtide.cost.profile import Progress
from lowtide.errors import BadRequest
from lowtide.execute.apply import set_aside
from lowtide.planner.as_found import as_found
from lowtide.planner.peer_steps import PeerSteps
from lowtide.planner.peer_ways import PeerRow, PeerTrial, PeerWishes
from lowtide.solvers import at_effort
from lowtide.solvers.method import Effort
from lowtide.text.budget import Budget
from lowtide.trace.inputs import named_inputs
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import Example, Loss, Updates, declared, optimizer_name, optimizer_of

_METHOD = "auto"


@dataclass(frozen=True)
class PeerComparison:
    """Rows in the order in which they were measured, eager training first.

    `interrupted` is whether somebody had enough before all were there.
    """

    model: str
    device: str
    optimizer: str | None
    rows: tuple[PeerRow, ...]
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {**self.__dict__, "rows": [row.to_json() for row in self.rows]}


def compare_peers(
    model: nn.Module,
    example: Example,
    *,
    loss: Loss | None = None,
    target: Any = None,
    optimizer: Updates | None = None,
    budgets: Sequence[str | int] = (),
    compiled: bool = True,
    tiles: bool = True,
    effort: str = Effort.FULL,
    repeats: int = 5,
    profile: bool = True,
    device: str | torch.device | None = None,
    name: str | None = None,
    progress: Progress | None = None,
    telling: Callable[[str], None] | None = None,
) -> PeerComparison:
    """Train a step in every way there is, and measure peak and time of each.

    The ways: as it is; the library's own checkpointing, or torch's around its blocks; `torch.compile` as it
    is, at memory budgets of 0.5, 0.2 and 0, and with checkpointing; and lowtide's plans: everything kept,
    within what each of the others holds, within `budgets`, and the lowest peak, with eager kernels and with
    generated ones, with and without `tiles`. Without `compiled` nothing is compiled.

    Every row is really measured, on a copy of the model with the same weights, from the same start: the peak
    of its second step and later ones, and the median time of `repeats` steps that take turns with eager
    ones. Loss and gradients of its first step are compared with eager's. A way that fails has its reason in
    its row. Code is compiled anew in each row, and what else this process has compiled is forgotten.
    Interrupted (Ctrl-C), it returns the rows that are there.

    The model is left as it was, its plan, gradients and random streams included. `telling` is told what is
    being done, `progress(done, of)` how much of that. The other arguments are as in `lowtide.plan`.

    Raises:
        BadRequest: model or batch are not where they are to be measured, or cannot be copied.
        DeviceMissing: this machine does not have the device.
    """
    example, loss = declared(example, loss, target)
    spec = StepSpec(
        model, example, loss, optimizer, device=device, profile=profile, name=name, progress=progress
    )
    wishes = PeerWishes(
        method=at_effort(_METHOD, effort),
        budgets=tuple(map(Budget.of_a_peak, budgets)),
        compiled=compiled,
        tiles=tiles,
    )
    rows: list[PeerRow] = []
    interrupted = False
    with trying(spec, wishes, repeats) as trial:
        try:
            for row in _measured(trial, telling or _silent):
                rows.append(row)
        except KeyboardInterrupt:
            interrupted = True
        where = trial.steps.where
    named = name or type(model).__name__
    return PeerComparison(named, str(where), optimizer_name(optimizer), tuple(rows), interrupted)


def _measured(trial: PeerTrial, tell: Callable[[str], None]) -> Iterable[PeerRow]:
    for way in trial.ways():
        tell(way.label)
        yield trial.row(way)


def _silent(_: str) -> None:
    pass


@contextmanager
def trying(spec: StepSpec, wishes: PeerWishes, repeats: int) -> Iterator[PeerTrial]:
    """The ways to train that step, to be measured one by one; afterwards the model is as it was."""
    if repeats < 1:
        raise BadRequest(f"steps cannot be timed {repeats} times; give 1 or more.")
    where = _where(spec)
    optimizer = optimizer_of(spec.optimizer, spec.model, where)
    settled = replace(spec, device=where, optimizer=optimizer)
    with set_aside(spec.model), as_found(settled) as put_back:
        steps = PeerSteps(settled, where, put_back, repeats)
        steps.another()  # before any work
        yield PeerTrial(steps, wishes)


def _where(spec: StepSpec) -> torch.device:
    held = {
        "model": [*spec.model.parameters(), *spec.model.buffers()],
        "batch": list(named_inputs(spec.model, spec.example, spec.loss).values()),
    }
    first = next((tensor.device for tensors in held.values() for tensor in tensors), torch.device("cpu"))
    where = present_device(spec.device or first, "measure")
    for what, tensors in held.items():
        for tensor in tensors:
            if tensor.device.type != where.type:
                raise BadRequest(
                    f"cannot measure on '{where}': the {what} is on '{tensor.device}'. Build both there."
                )
    return where
