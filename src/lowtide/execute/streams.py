"""Random numbers outside of PyTorch's own streams: Python's, numpy's, and of generators that modules have."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from lowtide.compat.undo import undone

Get: TypeAlias = Callable[[], Any]
Set: TypeAlias = Callable[[Any], object]


def _of_numpy(generator: np.random.Generator) -> tuple[Get, Set]:
    return lambda: generator.bit_generator.state, partial(setattr, generator.bit_generator, "state")


_KINDS: dict[type, Callable[[Any], tuple[Get, Set]]] = {
    torch.Generator: lambda generator: (generator.get_state, generator.set_state),
    random.Random: lambda generator: (generator.getstate, generator.setstate),
    np.random.RandomState: lambda generator: (generator.get_state, generator.set_state),
    np.random.Generator: _of_numpy,
}
_SHARED: tuple[tuple[Get, Set], ...] = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
)


class Streams:
    """Where generators stand now: those among `things`, and those that all share: Python's, numpy's."""

    def __init__(self, things: Iterable[object], shared: bool) -> None:
        own = [_KINDS[type(thing)](thing) for thing in things if type(thing) in _KINDS]
        self._states = [(get, put, get()) for get, put in (*own, *(_SHARED if shared else ()))]

    def moved(self) -> bool:
        """Whether one of them stands somewhere else now. Those that do not are forgotten."""
        self._states = [(get, put, state) for get, put, state in self._states if not _are_same(get(), state)]
        return bool(self._states)

    @contextmanager
    def again(self) -> Iterator[None]:
        """They stand there when the block begins, and afterwards where they stood before it."""
        here = Streams((), shared=False)
        here._states = [(get, put, get()) for get, put, _ in self._states]
        with undone(here.put_back):
            self.put_back()
            yield

    def put_back(self) -> None:
        """Have them stand there."""
        for _, put, state in self._states:
            put(state)


def _are_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_are_same(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple):
        return all(map(_are_same, one, other))
    return bool(np.array_equal(one, other))
