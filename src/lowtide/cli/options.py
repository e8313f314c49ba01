"""Options that commands share, and callbacks that refuse what they cannot hold, naming the option."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lowtide.errors import BadRequest
from lowtide.text.budget import LOWEST, Budget
from lowtide.text.card import Card
from lowtide.text.sizes import parse_bytes

OPTIMIZERS = ("sgd", "momentum", "adam", "adamw")  # those of lowtide.trace.step, which would import torch
EFFORTS = ("full", "quick")  # those of lowtide.solvers.method, which would import numpy
GRANULARITIES = ("fine", "layer", "block")  # those of lowtide.chain.cuts, which would import numpy
_SIZES = {
    "vocab": "Words in the vocabulary.",
    "heads": "Attention heads.",
    "width": "Hidden size.",
    "layers": "Layers.",
    "classes": "Classes.",
    "tokens": "Tokens in a text.",
    "image": "Side of an image in pixels.",
    "batch": "Examples in a batch.  [default: 1]",
}
_MOST_DIGITS = 18  # what fits in 64 bits


def step_options(function: Any) -> Any:
    """What step of training is meant: MODEL, its sizes, the optimizer, the device, and whether to profile."""
    return click.argument("model")(_step(function))


def step_or_file_options(function: Any) -> Any:
    """The same, where a file may say it in the place of MODEL."""
    return click.argument("model", required=False)(_step(function))


def _step(function: Any) -> Any:
    for option in (
        click.option("--profile/--no-profile", default=True, help="Run each op once for what it takes."),
        _device_option,
        click.option("--optimizer", type=click.Choice(OPTIMIZERS), help="Include its states and its step."),
        _size_options,
    ):
        function = option(function)
    return function


def model_options(function: Any) -> Any:
    """What is trained, where no more of the step matters: MODEL, its sizes and the device."""
    return click.argument("model")(_size_options(_device_option(function)))


_device_option = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Where the step will run, here or not.  [default: cuda if here, else cpu]",
)


def _size_options(function: Any) -> Any:
    for name, text in _SIZES.items():
        function = click.option(f"--{name}", metavar="N", callback=whole_number, help=text)(function)
    return function


def cutting_options(function: Any) -> Any:
    """How the model is cut into a chain of layers."""
    for option in (
        click.option(
            "--module",
            "modules",
            metavar="PATH",
            multiple=True,
            help="Cut around this module instead; may be given several times.",
        ),
        click.option(
            "--granularity",
            type=click.Choice(GRANULARITIES),
            default="layer",
            show_default=True,
            help="How finely to cut: wherever possible, at layers with weights, or around whole blocks.",
        ),
    ):
        function = option(function)
    return function


def budget_option(text: str, lowest: bool = False) -> Callable[[Any], Any]:
    """A budget for a plan: a size, or a part of the plain peak; also "min", if `lowest` can be asked for."""
    metavar = f"SIZE|PART|{LOWEST}" if lowest else "SIZE|PART"
    return click.option(
        "--budget", metavar=metavar, callback=budget_or_lowest if lowest else budget, help=text
    )


def card_options(text: str) -> Callable[[Any], Any]:
    """A card by its name or its size, and what others hold of it: see `asked_card`."""

    def add(function: Any) -> Any:
        reserve = click.option(
            "--reserve", metavar="SIZE", callback=size, help="What others hold of the card: a display, 1GiB."
        )
        return click.option("--card", metavar="NAME|SIZE", help=text)(reserve(function))

    return add


def asked_card(card: str | None, reserve: int | None) -> Card | None:
    """The card that was asked for, if one was. Raises UsageError for a reserve of no card."""
    if card is not None:
        return Card(card, reserve or 0)
    if reserve is not None:
        raise click.UsageError("--reserve says what others hold of a --card; give both.")
    return None


def plot_option(text: str) -> Callable[[Any], Any]:
    """A picture to draw."""
    return click.option("--plot", metavar="FILE", callback=output_file(".png", ".svg"), help=text)


tiles_option = click.option(
    "--tiles",
    is_flag=True,
    help="Let stretches of the step run in slices where that pays, so that it peaks below what one op needs.",
)

kernels_option = click.option(
    "--kernels",
    type=click.Choice(["eager", "inductor"]),
    default="eager",
    show_default=True,
    help="Whose kernels run the plan: those of plain training, or code that Inductor generates.",
)

json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else."
)


def whole_number(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """A whole number of at least 1."""
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) >= 1):
        raise click.BadParameter(f"it must be a whole number of at least 1, not '{text:.60}'.", ctx, param)
    return int(text)


def size(ctx: click.Context, param: click.Parameter, text: str | None) -> int | None:
    """A number of bytes, such as 24GiB."""
    try:
        return None if text is None else parse_bytes(text)
    except BadRequest as error:
        raise click.BadParameter(str(error), ctx, param) from None


def budget_or_lowest(ctx: click.Context, param: click.Parameter, text: str | None) -> Budget:
    """A number of bytes, a part of the plain peak, such as 60%, or the word for the lowest peak there is."""
    try:
        return Budget.parse(text)
    except BadRequest as error:
        raise click.BadParameter(str(error), ctx, param) from None


def budget(ctx: click.Context, param: click.Parameter, text: str | None) -> Budget:
    """The same without the lowest peak."""
    found = budget_or_lowest(ctx, param, text)
    if found.is_lowest:
        raise click.BadParameter(f"'{LOWEST}' is for plans op by op. Write 60% or 8GiB.", ctx, param)
    return found


def several_budgets(ctx: click.Context, param: click.Parameter, text: str | None) -> tuple[str, ...]:
    """Budgets with commas between them, each as it was written."""
    parts = () if text is None else tuple(part.strip() for part in text.split(","))
    for part in parts:
        budget_or_lowest(ctx, param, part)
    return parts


def output_file(*suffixes: str) -> Callable[[click.Context, click.Parameter, str | None], Path | None]:
    """A file that can be written once there is something to write. Nothing is created."""

    def check(ctx: click.Context, param: click.Parameter, text: str | None) -> Path | None:
        if text is None:
            return None
        path = Path(text)
        if problem := _problem(path, suffixes):
            raise click.BadParameter(problem, ctx, param)
        return path

    return check


def _problem(path: Path, suffixes: tuple[str, ...]) -> str | None:
    if path.suffix.lower() not in suffixes:
        return f"'{path}' must end in {' or '.join(suffixes)}."
    if not path.parent.is_dir():
        return f"there is no directory '{path.parent}' to write '{path.name}' to."
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        return f"'{path}' cannot be written."
    return None
