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
from weakref import WeakValueDictionary

from torch import fx

from lowtide.backend.step import CompiledStep
from lowtide.solvers.solution import GraphSolution

# By the id of the options of a torch.compile, the same dictionary for all of its graphs. A step belongs to
# what was compiled for it, and holds its options, so that no others can have their id.
_steps: WeakValueDictionary[int, CompiledStep] = WeakValueDictionary()


def lowtide(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The Dynamo backend. Its options are `budget` (a size, or "min"), `method` and `profile`.

    Raises:
        BadRequest: an option is missing, unknown or makes no sense.
        InfeasibleBudget: the budget is below what the graphs need at least.
    """
    step = _steps.get(id(options))
    if step is None:
        step = _steps[id(options)] = CompiledStep(options)
    return step.compile(module, inputs)


def plans_of(options: Mapping[str, Any]) -> tuple[GraphSolution, ...]:
    """The plans for the `torch.compile` that was given `options`, this very dictionary.

    There is one for each kind of step. A step is planned when the next one begins, so there are none before
    the second. They go with what Dynamo compiled for them: when it is reset, or with the model's class.
    """
    step = _steps.get(id(options))
    return () if step is None else tuple(plan.solution for plan in step.plans)
