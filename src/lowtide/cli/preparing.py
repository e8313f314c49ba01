"""What commands do before their own work: refuse early, load the model, set up the rehearsal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lowtide.errors import BadRequest
from lowtide.text.budget import Budget
from lowtide.text.card import Card

if TYPE_CHECKING:
    from lowtide.planner.fit import Fit
    from lowtide.planner.layers import Rehearsal
    from lowtide.solvers.method import Scheduler
    from lowtide.solvers.solution import GraphSolution, Solution
    from lowtide.trace.spec import StepSpec
    from lowtide.zoo.setup import Setup

_FRONTIERS = "auto"  # what plans a frontier unless told otherwise


@dataclass(frozen=True)
class Asked:
    """The step of training that is meant."""

    model: str
    sizes: Mapping[str, int | None]
    optimizer: str | None
    device: str | None
    profile: bool
    real: bool = False  # so that steps can be run
    tiles: bool = False
    kernels: str = "eager"

    def load(self) -> Setup:
        """Its model, which takes no memory unless it is real, and its batch."""
        return load_model(self.model, self.sizes, self.device or default_device() if self.real else "meta")

    def spec(
        self, setup: Setup, progress: Callable[[int, int], None] | None = None, accumulate: int = 1
    ) -> StepSpec:
        """The step, with the model and the batch that were loaded."""
        from lowtide.trace.spec import StepSpec

        return StepSpec(
            setup.model,
            setup.example,
            setup.loss,
            self.optimizer,
            accumulate,
            self.device or default_device(),
            self.profile,
            setup.name,
            progress,
            self.tiles,
            self.kernels,
        )


@dataclass(frozen=True)
class Cutting:
    """How to cut a model into a chain of layers."""

    granularity: str
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Wanted:
    """How a plan is told, and which files are written."""

    plot: Path | None
    output: Path | None
    as_json: bool

    @property
    def kind(self) -> str:
        """The kind of picture."""
        return "" if self.plot is None else self.plot.suffix.lower().removeprefix(".")

    def write(self, solution: Solution | GraphSolution | None, picture: bytes | None) -> None:
        """Write what was asked for, once all of it exists."""
        from lowtide.report.picture.plot import write_picture
        from lowtide.solvers.files import save_solution

        if self.output is not None and solution is not None:
            save_solution(solution, self.output)
        if self.plot is not None and picture is not None:
            write_picture(picture, self.plot)


def check_can_draw(plot: Path | None) -> None:
    """Raise MissingExtra if a picture is wanted that cannot be drawn."""
    from lowtide.report.picture.plot import require_matplotlib

    if plot is not None:
        require_matplotlib()


def chosen_method(name: str | None, budget: Budget, frontier: bool) -> str:
    """The method asked for, or the one that plans where none is. Raises UnknownMethod, BadRequest."""
    from lowtide.solvers import default_method, schedulers

    if frontier and name is not None and not plans_ops(name):
        raise BadRequest(
            f"{name} plans layers, and a frontier is planned op by op. These do: {', '.join(schedulers())}."
        )
    return name or (_FRONTIERS if frontier else default_method(budget))


def searching(method: str, effort: str) -> str | Scheduler:
    """The method of that name, told how long to search. Raises UnknownMethod, BadRequest."""
    from lowtide.solvers import at_effort

    return at_effort(method, effort)


def plans_ops(method: str) -> bool:
    """Whether the method of that name plans op by op. Raises UnknownMethod."""
    from lowtide.solvers import is_scheduler

    return is_scheduler(method)


def default_device() -> str:
    """Where a step will run if nobody says where."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(model: str, sizes: Mapping[str, int | None], device: str = "meta") -> Setup:
    """The model that the user named, with the sizes that were given."""
    from lowtide.zoo.sources.specs import load

    return load(model, {key: value for key, value in sizes.items() if value is not None}, device)


def rehearsed(asked: Asked, setup: Setup) -> Rehearsal:
    """A rehearsal whose plain step has been traced; on a terminal that is shown."""
    from lowtide.planner.layers import Rehearsal
    from lowtide.text.progress import stages

    with stages() as stage:
        stage.begin("running the step on fake tensors")
        rehearsal = Rehearsal.of(asked.spec(setup, stage.update))
        _ = rehearsal.plain
    return rehearsal


def predicted(asked: Asked, budget: int | Card | None = None) -> tuple[Setup, Fit]:
    """What was asked for, built and predicted; on a terminal that is shown."""
    from lowtide.planner.fit import fit
    from lowtide.text.progress import stages

    with stages() as stage:
        stage.begin("building the model")
        setup = asked.load()
        stage.begin("running the step on fake tensors")
        found = fit(
            setup.model,
            setup.example,
            setup.loss,
            optimizer=asked.optimizer,
            device=asked.device or default_device(),
            budget=budget,
            profile=asked.profile,
            name=setup.name,
            progress=stage.update,
        )
    return setup, found
