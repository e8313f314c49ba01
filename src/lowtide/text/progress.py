"""Progress on stderr, for people: on a terminal, unless it is switched off, and a bar if it is worth one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:  # where nobody looks, rich is not imported
    from rich.console import Console
    from rich.progress import Progress

_PROGRESS = "lowtide.progress"  # where the context of a command keeps whether progress is wanted
_PATIENCE_SECONDS = 1.0  # what is over sooner needs no bar


def switch_progress(ctx: click.Context, wanted: bool) -> None:
    """Show progress in this run of the command line, or do not."""
    ctx.meta[_PROGRESS] = wanted


def wants_progress() -> bool:
    """Whether progress may be shown: unless it was switched off."""
    ctx = click.get_current_context(silent=True)
    return ctx is None or bool(ctx.meta.get(_PROGRESS, True))


def _terminal() -> Console | None:
    """Where to show progress; None where nobody would see it, or wants to."""
    from rich.console import Console

    console = Console(stderr=True)
    return console if wants_progress() and console.is_terminal else None


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[int, int], None] | None]:
    """Yield what to call with (done, of); None where nobody would see a bar. Later calls do nothing."""
    console = _terminal()
    if console is None:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(what)
    begun = time.monotonic()
    over = False

    def update(done: int, of: int) -> None:
        if over:
            return
        bar.update(task, completed=done, total=of)
        if not bar.live.is_started and time.monotonic() - begun > _PATIENCE_SECONDS:
            bar.start()

    try:
        yield update
    finally:
        over = True
        bar.stop()


def bar_while_planning(wanted: bool) -> Callable[[int, int], None] | None:
    """What to call with (done, of) in the first step of a training: a terminal shows a bar until all is done.

    None if it is not wanted.
    """
    if not wanted:
        return None
    shown = ExitStack()
    update: Callable[[int, int], None] | None = None

    def tell(done: int, of: int) -> None:
        nonlocal update
        if update is None:
            update = shown.enter_context(progress_bar("planning the training step"))
        if update is not None:
            update(done, of)
        if done == of:
            shown.close()
            update = None

    return tell


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say what is being done while the block runs, where it is not known how long that takes."""
    console = _terminal()
    if console is None:
        yield
        return
    with console.status(what):
        yield


class Stages:
    """What is being done, in one line, and a bar once it is known how much of it there is."""

    def __init__(self, bar: Progress | None) -> None:
        self._bar = bar
        self._task = None if bar is None else bar.add_task("", total=None)

    def begin(self, what: str) -> None:
        """Say what is being done from now on."""
        if self._bar is not None and self._task is not None:
            self._bar.reset(self._task, description=what, total=None)

    def update(self, done: int, of: int) -> None:
        """Say how much of it is done."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=of)


@contextmanager
def stages() -> Iterator[Stages]:
    """Yield what to tell of the stages of long work; on a terminal they are shown."""
    console = _terminal()
    if console is None:
        yield Stages(None)
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield Stages(bar)
