"""`torch.compile(model, backend="lowtide", options={"budget": "8GiB"})`.

A backend is handed one graph at a time and never sees the whole step. So in the first step each graph keeps
as little as it can for its backward, and is watched: which graphs run, in which order, what passes from one
to another, and what of that is held by others. From the second step on all of them follow one schedule,
within the budget. That holds for each kind of step: where one begins like another and parts from it later
(a branch after a graph break), what they have in common goes on keeping as little as it can.

Counted is what the graphs are given and make, and on CUDA what else is allocated when a step begins. What
runs outside of them (a loss that is not compiled, say) is not: compile a function that includes it, or
use `lowtide.optimize`, which sees it.

Inside a DistributedDataParallel all ranks follow the schedules that the first one finds, and its buckets are
counted. Dynamo cuts graphs where buckets end, so that reducing and computing overlap as they do without.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakValueDictionary

from torch import fx

from lowtide.backend.step import CompiledStep
from lowtide.compat.dynamo_caches import forget_compiled
from lowtide.compat.dynamo_frames import Backends
from lowtide.errors import LowtideError
from lowtide.solvers.solution import GraphSolution
from lowtide.trace.user_lines import line_read

# By the id of the options of a torch.compile, the same dictionary for all of its graphs. A step belongs to
# what was compiled for it, and holds its options, so that no others can have their id.
_steps: WeakValueDictionary[int, CompiledStep] = WeakValueDictionary()


def lowtide(
    module: fx.GraphModule, inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """The Dynamo backend. Its options are `budget` (a size, or "min"), `method`, `profile` and `tiles`.

    With `tiles` stretches of a graph may run in slices, as in `lowtide.plan`. None reaches over a graph
    break, so have the loss in the function that is compiled. The first step of a kind, where each graph keeps
    as little as it can, has slices only where it would not be within the budget without.

    Every kind of input is planned for, however many there are; Dynamo's limit stays for other backends.

    Raises:
        BadRequest: an option is missing, unknown or makes no sense.
        InfeasibleBudget: the budget is below what the graphs need at least.
    """
    try:
        step = _steps.get(id(options))
        if step is None:
            step = _steps[id(options)] = CompiledStep(options)
            _ours.enter()
            weakref.finalize(step, _ours.leave).atexit = False
        return step.compile(module, inputs)
    except LowtideError as error:  # raised from here, Dynamo would wrap it in an error of its own
        return _refusing(error, options)


def plans_of(options: Mapping[str, Any]) -> tuple[GraphSolution, ...]:
    """The plans for the `torch.compile` that was given `options`, this very dictionary.

    There is one for each kind of step. A step is planned when the next one begins, so there are none before
    the second. They go with what Dynamo compiled for them: when it is reset, or with the model's class.
    """
    step = _steps.get(id(options))
    return () if step is None else step.solutions


def _refusing(error: LowtideError, options: Mapping[str, Any] | None) -> Callable[..., NoReturn]:
    """Raises `error` when the graph is to run, and has it compiled anew: a budget may have been raised."""

    def refuse(*_: Any) -> NoReturn:
        forget_compiled(lowtide, options)
        raise error.with_traceback(None)

    return refuse


def _tell_of_skipped(error: BaseException) -> None:
    warnings.warn(
        f"lowtide: a graph ends inside of a loop, at {line_read(error)}, and Dynamo compiles nothing of "
        "a function where that happens. It runs without a plan, and may exceed the budget. Use "
        "lowtide.optimize, which plans such a model layer by layer, or move what ends the graph out of the "
        "loop.",
        stacklevel=2,
    )


_ours = Backends(lowtide)
_ours.tell_of_skipped(_tell_of_skipped)
