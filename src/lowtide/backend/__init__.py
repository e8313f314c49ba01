"""`torch.compile(model, backend="lowtide", options={"budget": "8GiB"})`.

A backend is handed one graph at a time and never sees the whole step. So in the first step each graph keeps
as little as it can for its backward, and is watched: which graphs run, in which order, what passes from one
to another, and what of that is held by others. From the second step on all of them follow one schedule,
within the budget.

Counted is what the graphs are given and make, and on CUDA what else is allocated when a step begins. What
runs outside of them (a loss that is not compiled, say) is not: compile a function that includes it, or
use `lowtide.optimize`, which sees it.

Inside a DistributedDataParallel all ranks follow the schedules that the first one finds, and its buckets are
counted. Dynamo cuts graphs where buckets end, so that reducing and computing overlap as they do without.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from lowtide.backend.request import Request
from lowtide.backend.step import CompiledStep
from lowtide.solvers.solution import GraphSolution

_steps: dict[
    int, tuple[Any, CompiledStep]
] = {}  # by the options of a torch.compile: these it hands over each time


def lowtide(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The Dynamo backend. Its options are `budget` (a size, or "min"), `method` and `profile`.

    Raises:
        BadRequest: an option is missing, unknown or makes no sense.
        InfeasibleBudget: the budget is below what the graphs need at least.
    """
    known = _steps.get(id(options))
    if known is None:
        known = _steps[id(options)] = (options, CompiledStep(Request.read(options)))
    return known[1].compile(module, inputs)


def plans_of(options: Mapping[str, Any]) -> tuple[GraphSolution, ...]:
    """The plans for the `torch.compile` that was given `options`, this very dictionary.

    There is one for each kind of step. A step is planned when the next one begins, so there are none before
    the second.
    """
    known = _steps.get(id(options))
    return () if known is None else tuple(plan.solution for plan in known[1].plans)
