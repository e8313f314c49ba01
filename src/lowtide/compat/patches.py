"""Somebody else's code, replaced for a while: the one way in, and the one way out.

Does not import torch. What lowtide does to a model that it was asked to plan is not among it: a plan stays
until `lowtide.remove`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowtide.compat.undo import undone

_ABSENT = object()
_active: list[Patch] = []

ONE_THREAD = threading.RLock()
"""Held where foreign code is replaced while a model runs: by one thread after another, for all see it."""


@dataclass(frozen=True, eq=False)
class Patch:
    """A replacement: of what, why, and since which release of its library it is needed."""

    owner: object
    name: str
    why: str
    since: str

    def __str__(self) -> str:
        owner = getattr(self.owner, "__qualname__", None) or getattr(self.owner, "__name__", None)
        return f"{owner or type(self.owner).__qualname__}.{self.name} (since {self.since}: {self.why})"


def active() -> tuple[Patch, ...]:
    """What is replaced now, in this process."""
    return tuple(_active)


@contextmanager
def patched(owner: Any, name: str, replacement: object, *, why: str, since: str) -> Iterator[None]:
    """`owner.name` is `replacement` while the block runs; afterwards it is the very object that it was.

    `owner` is a module, a class, an instance or a closure's cell. What it has inherited it inherits again.
    """
    patch = Patch(owner, name, why, since)
    own = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name)
    with undone(partial(_undo, patch, own)):
        _active.append(patch)
        setattr(owner, name, replacement)
        yield


def _undo(patch: Patch, own: object) -> None:
    """Put `own` back, however much of that is done already."""
    if patch in _active:
        _active.remove(patch)
    if own is not _ABSENT:
        setattr(patch.owner, patch.name, own)
    elif patch.name in vars(patch.owner):
        delattr(patch.owner, patch.name)
