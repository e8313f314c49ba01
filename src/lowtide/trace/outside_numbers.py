"""Numbers outside of torch: what Python and numpy draw, and tensors that are handed to numpy.

No dispatch mode sees them. A step may choose its path by the first, and can do nothing without the second.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch

from lowtide.compat.dynamo import look_at_random_functions
from lowtide.compat.fake import FakeTensor
from lowtide.compat.patches import patched
from lowtide.trace.guesses import Guesses
from lowtide.trace.ranges import Range

_DRAWS = (
    *((random, name) for name in ("random", "uniform")),
    *((np.random, name) for name in ("rand", "random", "random_sample", "uniform")),
)


@contextmanager
def outside_numbers(guesses: Guesses) -> Iterator[None]:
    """While the block runs, numbers that are drawn one by one are guessed, and fakes can go to numpy.

    The numbers are drawn all the same, so that whatever is drawn after them is what it would have been.
    """
    handed = _handing(guesses, torch.Tensor.numpy)
    why = "a fake has no numbers to hand to numpy"
    with outside_draws(guesses), patched(torch.Tensor, "numpy", handed, why=why, since="torch 2.11"):
        yield


@contextmanager
def outside_draws(guesses: Guesses) -> Iterator[None]:
    """While the block runs, numbers that are drawn one by one are guessed, and Dynamo leaves that alone."""
    look_at_random_functions()
    with ExitStack() as patches:
        for owner, name in _DRAWS:
            drawn = _drawing(guesses, getattr(owner, name), has_bounds=name == "uniform")
            why = "a number that decides a path is guessed, not drawn"
            patches.enter_context(patched(owner, name, drawn, why=why, since="python 3.11"))
        yield


def _drawing(guesses: Guesses, draw: Callable[..., Any], has_bounds: bool) -> Callable[..., Any]:
    def drawn(*args: Any, **kwargs: Any) -> Any:
        number = draw(*args, **kwargs)
        if not isinstance(number, float):
            return number
        low, high = args if has_bounds and len(args) == 2 else (0.0, 1.0)
        return guesses.draw(Range(kwargs.get("low", low), kwargs.get("high", high), reached=False))

    uncompiled: Callable[..., Any] = torch.compiler.disable(drawn)
    return uncompiled


def _handing(guesses: Guesses, own: Callable[..., Any]) -> Callable[..., Any]:
    def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return guesses.array(tensor) if isinstance(tensor, FakeTensor) else own(tensor, *args, **kwargs)

    return numpy
