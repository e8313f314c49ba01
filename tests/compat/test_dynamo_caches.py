"""What Dynamo compiled for a plan goes with the plan, but not from under Dynamo's feet."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from lowtide.compat.dynamo_caches import forget_compiled


class Backend:
    """Runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.compiled = 0

    def __call__(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        self.compiled += 1
        return module.forward


@pytest.fixture(autouse=True)
def _nothing_is_compiled_yet() -> None:
    torch._dynamo.reset()  # or Dynamo might have enough of a function that other tests have compiled often


def test_what_was_compiled_is_compiled_anew_after_it_was_forgotten() -> None:
    backend = Backend()
    compiled = torch.compile(torch.sin, backend=backend)
    compiled(torch.ones(1))
    compiled(torch.ones(1))
    assert backend.compiled == 1
    forget_compiled(backend)
    compiled(torch.ones(1))
    assert backend.compiled == 2


def test_it_may_be_forgotten_while_it_is_running() -> None:
    """Garbage may be collected there, and with it a model that has a plan."""
    backend, callbacks = Backend(), list(gc.callbacks)
    waiting: list[object] = []

    def collect() -> None:
        if is_time:
            forget_compiled(backend)
            waiting.extend(set(gc.callbacks) - set(callbacks))
            gc.collect()

    uncompiled = torch.compiler.disable(collect)

    def twice(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        uncompiled()
        return y.sin()

    is_time = False
    compiled = torch.compile(twice, backend=backend)
    compiled(torch.ones(1))
    assert backend.compiled == 2  # graphs, around what is not compiled
    is_time = True
    assert torch.equal(compiled(torch.ones(1)), torch.ones(1).sin().sin())
    assert len(waiting) == 1
    assert backend.compiled == 3  # the second graph is compiled anew
    is_time = False
    gc.collect()
    assert gc.callbacks == callbacks
    compiled(torch.ones(1))
    assert backend.compiled == 4
