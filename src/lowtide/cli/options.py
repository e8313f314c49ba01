"""What options may hold: click callbacks, each refusing in words that name the option."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import click

from lowtide.errors import BadRequest
from lowtide.units import parse_bytes

_MOST_DIGITS = 18  # what fits in 64 bits


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
