"""What commands do before their own work: refuse early, load the model, set up the rehearsal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowtide.planning import Rehearsal
    from lowtide.zoo.setup import Setup


def check_can_draw(plot: Path | None) -> None:
    """Raise MissingExtra if a picture is wanted that cannot be drawn."""
    from lowtide.report.plot import require_matplotlib

    if plot is not None:
        require_matplotlib()


def check_methods(names: Iterable[str]) -> None:
    """Raise UnknownMethod for a name that no method has."""
    from lowtide.errors import UnknownMethod
    from lowtide.solvers import methods

    for name in names:
        if name not in methods():
            raise UnknownMethod(name, methods())


def chosen_method(name: str | None, budget: str | None) -> str:
    """The method asked for, or the one that plans where none is. Raises UnknownMethod."""
    from lowtide.solvers import default_method

    check_methods([name] if name else [])
    return name or default_method(budget)


def default_device() -> str:
    """Where a step will run if nobody says where."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load_model(model: str, sizes: Mapping[str, int | None], device: str = "meta") -> Setup:
    """The model that the user named, with the sizes that were given."""
    from lowtide.zoo.specs import load

    return load(model, {key: value for key, value in sizes.items() if value is not None}, device)


def rehearsed(setup: Setup, *, optimizer: str | None, device: str | None, profile: bool) -> Rehearsal:
    """A rehearsal whose plain step has been traced, with a bar while it is profiled."""
    from lowtide.cli.progress import progress_bar
    from lowtide.planning import Rehearsal

    with progress_bar("profiling") as progress:
        rehearsal = Rehearsal(
            setup.model,
            setup.example,
            setup.loss,
            optimizer=optimizer,
            device=device or default_device(),
            profile=profile,
            name=setup.name,
            progress=progress,
        )
        _ = rehearsal.plain
    return rehearsal
