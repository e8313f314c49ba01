"""What is switched on around a piece of code in this thread: function modes, and hooks of saved tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode

from lowtide.compat.autograd import saving_hooks
from lowtide.compat.private import Private
from lowtide.compat.undo import undone

PRIVATE = (
    Private("torch.overrides._get_current_function_mode_stack", "how many function modes are on"),
    Private("torch.overrides._pop_mode", "switches off a function mode whose end was never reached"),
    Private(
        "torch._C._autograd._pop_saved_tensors_default_hooks",
        "takes off hooks of saved tensors whose end was never reached",
    ),
    Private("torch._C._autograd._push_saved_tensors_default_hooks", "puts back those that were taken off"),
)


class Ambient:
    """What is on now, to be gone back to after an interrupt, however far what was begun since has come."""

    def __init__(self) -> None:
        self._modes = len(_get_current_function_mode_stack())
        self.hooks = saving_hooks()

    def restore(self) -> None:
        """Switch off what was switched on since and is still on."""
        while len(_get_current_function_mode_stack()) > self._modes:
            _pop_mode()
        while saving_hooks() not in (self.hooks, None):
            torch._C._autograd._pop_saved_tensors_default_hooks()


@contextmanager
def without_saving_hooks() -> Iterator[None]:
    """While the block runs, nobody decides how tensors are saved for a backward: no checkpoint, say."""
    taken: list[Any] = []

    def put_back() -> None:
        while taken:
            torch._C._autograd._push_saved_tensors_default_hooks(*taken.pop())

    with undone(put_back):
        while (hooks := saving_hooks()) is not None:
            taken.append(hooks)
            torch._C._autograd._pop_saved_tensors_default_hooks()
        yield
