"""A bar for planning that happens in the middle of something else: in the first step of a training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from lowtide.cli.progress import progress_bar


def bar_while_planning(wanted: bool) -> Callable[[int, int], None] | None:
    """What to call with (done, of): a terminal shows a bar until all is done. None if it is not wanted."""
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
