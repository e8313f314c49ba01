"""Ways to run the forward of a model under a plan, whatever kind of plan it is."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from lowtide.aot.graph_backend import Spares
from lowtide.aot.sections import compiling
from lowtide.compat.dynamo_caches import forget_compiled
from lowtide.execute.layer_hooks import LayerCourse
from lowtide.execute.ops_graphs import Execution
from lowtide.execute.out_of_memory import explained
from lowtide.solvers.solution import GraphSolution, Solution

_MOST_COMPILED = 32  # times that each graph may be compiled anew before all are let go of


class Course(Protocol):
    """One way to run a model: the plan for one kind of input, at work."""

    def run(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """What `forward`, which is the model's own, returns; run as planned."""


@dataclass(frozen=True)
class OpsCourse:
    """A schedule at work: the forward is compiled, with a backend that does as the schedule says."""

    execution: Execution
    backend: Callable[..., Any]
    compiled: Callable[..., Any]
    is_method: bool  # whether what was compiled wants the model as its first argument

    def run(
        self, model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.execution.compiled > _MOST_COMPILED * self.execution.sections:
            self._begin_anew()
        self.execution.begin()
        with compiling(self.execution.graph.assumptions):
            output = (
                self.compiled(model, *args, **kwargs) if self.is_method else self.compiled(*args, **kwargs)
            )
        self.execution.end(output)
        return output

    def _begin_anew(self) -> None:
        """Let go of what was compiled: most of it is for what has changed since."""
        forget_compiled(self.backend)
        self.execution.compiled = 0
        warnings.warn(
            f"lowtide: the model was compiled {_MOST_COMPILED} times for one plan, step after step: its "
            " forward reads a number of Python's that changes, an argument or a counter that it keeps. "
            "That takes time; in a tensor, or a buffer, a number may change.",
            stacklevel=2,
        )


def check_layers(model: nn.Module, solution: Solution) -> None:
    """Raise what `course_of` would, without putting anything to work."""
    LayerCourse(model, solution, astray=lambda how: None)


def course_of(
    model: nn.Module,
    solution: Solution | GraphSolution,
    own: Callable[..., Any] | None,
    astray: Callable[[str], None],
    spares: Spares | None = None,
) -> Course:
    """`solution` at work in `model`, whose forward is `own`, or that of its class.

    `astray` is told how the model has left the path that was planned, where that can be gone on with. What
    is in `spares` need not be taken apart again.

    Raises:
        CannotApply: the plan was made for a model with other parameters.
    """
    if isinstance(solution, Solution):
        return LayerCourse(model, solution, astray)
    reference = weakref.ref(model)

    def explain(doing: str, began: int) -> AbstractContextManager[None]:
        return explained(reference(), solution, doing, began)

    budget_bytes = solution.budget_bytes
    execution = Execution(solution.graph, solution.schedule, spares, astray, budget_bytes, explain)
    backend = execution.backend
    compiled = torch.compile(own or type(model).forward, backend=backend, dynamic=False)
    course = OpsCourse(execution, backend, compiled, is_method=own is None)
    weakref.finalize(course, forget_compiled, backend).atexit = False
    return course
