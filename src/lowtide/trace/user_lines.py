"""Which line of the user's own code is responsible, in words."""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import torch

from lowtide import errors

OURS = str(Path(errors.__file__).parent)  # where lowtide itself lies
_STANDARD = f"{Path(linecache.__file__).parent}/"
CodePlace: TypeAlias = tuple[str, int, str]  # file, line, function
_LIBRARIES = (str(Path(torch.__file__).parent), f"{OURS}/", "<")


def is_users(filename: str) -> bool:
    """Whether a file is neither lowtide's (its zoo excepted) nor torch's nor Python's own."""
    is_pythons = filename.startswith(_STANDARD) and "-packages/" not in filename
    return filename.startswith(f"{OURS}/zoo") or not (is_pythons or filename.startswith(_LIBRARIES))


_is_users = cache(is_users)


def current_line() -> str:
    """The innermost line of user code that is running now: 'model.py:12, in forward: `if x.sum() > 0:`'."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return _describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def current_places() -> tuple[CodePlace, CodePlace]:
    """The same line, not put into words yet: where many are asked for. And the one of no installed package.

    The two are the same unless a line of a package (a model from transformers, say) is innermost.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    innermost = _place(frame)
    outer: FrameType | None = frame
    while outer is not None and not _is_own(outer.f_code.co_filename):
        outer = outer.f_back
    return innermost, innermost if outer is None else _place(outer)


def _place(frame: FrameType) -> CodePlace:
    return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name


@cache
def _is_own(filename: str) -> bool:
    return is_users(filename) and not _is_installed(filename)


@cache
def place_in_words(place: CodePlace) -> str:
    """A line as `current_line` tells it."""
    return _describe(*place)


def line_within(caller: str) -> str | None:
    """The innermost line of user code that is running now, if a function of the file `caller` called it."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename != caller:
        if is_users(frame.f_code.co_filename):
            return _describe(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return None


def line_of(error: BaseException) -> str:
    """The innermost line of user code that an error passed through."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    if not frames:
        return "an unknown line"
    return described(frames[-1])


def line_read(error: BaseException) -> str:
    """The line of user code where Dynamo went wrong: it reads code instead of running it, and keeps note."""
    stack = [frame for frame in getattr(error, "real_stack", None) or () if is_users(frame.filename)]
    return described(stack[-1]) if stack else line_of(error)


def described(frame: traceback.FrameSummary) -> str:
    """A line of a traceback, in the same words."""
    return _describe(frame.filename, frame.lineno or 0, frame.name)


def shortened(error: BaseException) -> str:
    """An error's traceback with the user's own frames only.

    Of installed packages (a model from transformers, say) only the frame that raised is shown.
    """
    frames: Iterable[traceback.FrameSummary] = traceback.extract_tb(error.__traceback__)
    found = [frame for frame in frames if is_users(frame.filename)]
    kept = [frame for frame in found if not _is_installed(frame.filename) or frame is found[-1]]
    lines = ["Traceback (your frames only):\n", *traceback.format_list(kept)]
    return "".join([*lines, *traceback.format_exception_only(error)]).rstrip()


def _is_installed(filename: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(filename).parts)


def _describe(filename: str, lineno: int, function: str) -> str:
    linecache.checkcache(filename)  # it may have been edited, or be another file by the same name
    source = linecache.getline(filename, lineno).strip()
    text = f": `{source}`" if source else ""
    return f"{Path(filename).name}:{lineno}, in {function}{text}"
