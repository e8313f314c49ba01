"""Python's collector of garbage, which looks at all that there is again and again while much is made."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from lowtide.compat.undo import undone

SELDOM = 100_000  # objects more than before, until those made since are looked at

_lock = threading.Lock()
_before: list[tuple[int, int, int]] = []  # the thresholds that every block that runs now has found


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """While the block runs, garbage is collected less often; not at all stays not at all.

    What a step is traced and captured with stays until the end, and the collector would walk through all of
    it some twenty times: a sixth of the time. Blocks may run in several threads: the last one to end puts
    back what the first has found.
    """
    with _lock:
        _before.append(gc.get_threshold())
        first, *others = _before[0]
        gc.set_threshold(max(first, SELDOM) if first else 0, *others)
    with undone(_put_back):
        yield


def _put_back() -> None:
    with _lock:
        if len(_before) == 1:
            gc.set_threshold(*_before[0])
        if _before:
            del _before[-1]
