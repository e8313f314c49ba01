"""What a step may change on the Python side, remembered and put back: attributes, and random streams."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_CONTAINERS = (dict, list, set, OrderedDict, defaultdict)


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
