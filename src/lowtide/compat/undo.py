"""What is undone when a block ends, whatever ends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def undone(undo: Callable[[], object]) -> Iterator[None]:
    """When the block ends, `undo` is called, and called anew if an interrupt came while it ran."""
    try:
        yield
    finally:
        try:
            undo()
        except BaseException:
            undo()
            raise
