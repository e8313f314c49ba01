"""What a step may change on the Python side, remembered and put back: attributes, caches, random streams."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch

_CONTAINERS = (dict, list, set, OrderedDict, defaultdict)
_CACHED = type(lru_cache(int))  # a function whose results functools keeps


def restorer(thing: Any) -> Callable[[], None]:
    """Undo for the attributes of `thing`, and for the contents of those that are plain containers.

    Containers are put back by contents, in the same object: others may hold references to them.
    """
    before = dict(thing.__dict__)
    contents = [
        (container, copy.copy(container)) for container in before.values() if type(container) in _CONTAINERS
    ]

    def restore() -> None:
        thing.__dict__.clear()
        thing.__dict__.update(before)
        for container, saved in contents:
            container.clear()
            container.extend(saved) if isinstance(container, list) else container.update(saved)

    return restore


def caches(things: Iterable[object]) -> Callable[[], None]:
    """Undo for what `functools.lru_cache` keeps of the methods of `things`, and beside their classes.

    A cache that something was added to is emptied: what it holds may be fake, and is made again when needed.
    """
    found = {id(cache): (cache, cache.cache_info().misses) for cache in _caches_of(things)}

    def restore() -> None:
        for cache, misses in found.values():
            if cache.cache_info().misses != misses:
                cache.cache_clear()

    return restore


def _caches_of(things: Iterable[object]) -> Iterator[Any]:
    classes = {base for thing in things for base in type(thing).__mro__}
    modules = {name: sys.modules[name] for each in classes if (name := each.__module__) in sys.modules}
    for place in (*classes, *modules.values()):
        for value in list(vars(place).values()):
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            cells = function.__closure__ if isinstance(function, FunctionType) else None
            decorated = map(_contents, cells or ())  # by a function that calls the cached one
            yield from (each for each in (function, *decorated) if isinstance(each, _CACHED))


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # there are none yet
        return None


def random_streams() -> Callable[[], None]:
    """Undo for the random streams of torch, Python and numpy."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    here, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()

    def restore() -> None:
        torch.set_rng_state(here)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        random.setstate(of_python)
        np.random.set_state(of_numpy)

    return restore
