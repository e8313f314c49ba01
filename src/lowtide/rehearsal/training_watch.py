"""Which part of a training runs now: told by what every training does, however its loop is written.

An optimizer's step ends a step; a model that can be trained, put into evaluation, with gradients off, is
validated; `torch.save` saves.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

from lowtide.compat.autograd import in_backward
from lowtide.compat.patches import patched
from lowtide.rehearsal.outcome import Act, Doing


class Enough(BaseException):
    """As many steps were made as were asked for. No error: the script's own handlers must not take it."""


def _replaced(
    owner: Any, name: str, made: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> AbstractContextManager[None]:
    why = "a rehearsal tells the parts of a training apart"
    return patched(owner, name, made(getattr(owner, name)), why=why, since="torch 2.11")


class TrainingWatch:
    """Counts steps, and knows the act. `changed` is called where another may have begun.

    With `sees_ops` somebody tells at every op whether it is `quiet`: no gradient goes back through it. Else
    validation is whenever a model is in evaluation.
    """

    def __init__(self, most_steps: int | None = None, *, sees_ops: bool = True) -> None:
        self.steps = 0
        self.training = False  # whether a forward that trains has begun
        self.changed: Callable[[], None] = lambda: None
        self.before_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        self.after_step: Callable[[torch.optim.Optimizer], None] = lambda optimizer: None
        self._most_steps = most_steps
        self.quiet = not sees_ops
        self._optimizing = 0
        self._saving = 0
        self._evaluated: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._switching = False
        self._has_loaders = False

    def act(self) -> Act:
        """The act that runs now."""
        if self._saving:
            return Act.SAVING
        if self._is_validating():
            return Act.VALIDATION
        if self.steps:
            return Act.TRAINING
        return Act.FIRST if self.training else Act.SETUP

    def doing(self) -> Doing:
        """What it is doing."""
        if self._saving:
            return Doing.SAVE
        if self._optimizing:
            return Doing.UPDATE
        if in_backward():
            return Doing.BACKWARD
        is_forward = torch.is_grad_enabled() or self._is_validating()
        return Doing.FORWARD if is_forward and self.act() is not Act.SETUP else Doing.ELSE

    def _is_validating(self) -> bool:
        quiet = self.quiet and bool(self._evaluated)
        return quiet and not self._optimizing and not in_backward()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Listen while the block runs."""
        with ExitStack() as stack:
            for handle in (
                register_optimizer_step_pre_hook(self._enter_step),
                register_optimizer_step_post_hook(self._leave_step),
            ):
                stack.callback(handle.remove)
            stack.enter_context(_replaced(nn.Module, "train", self._switched))
            stack.enter_context(_replaced(torch, "save", self._saved))
            if self._most_steps is not None:
                stack.enter_context(_replaced(DataLoader, "__iter__", self._shortened))
            yield

    # What is listened to --------------------------------------------------------------------------------

    def _enter_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizing += 1
        self.before_step(optimizer)

    def _leave_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._optimizing -= 1
        self.after_step(optimizer)
        if not self._optimizing:
            self.changed()
            self.steps += 1
            self._stop_if_enough()

    def _stop_if_enough(self) -> None:
        """End the script: at so many steps, or twice as many where what comes between them is to be seen."""
        if self._most_steps is not None and self.steps >= self._most_steps * (1 + self._has_loaders):
            raise Enough

    def _switched(self, plain: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        @functools.wraps(plain)
        def train(module: nn.Module, mode: bool = True) -> nn.Module:
            if self._switching:  # a module switches those within it
                return plain(module, mode)
            self.changed()
            self._switching = True
            try:
                switched = plain(module, mode)
            finally:
                self._switching = False
            if mode:
                self._evaluated.difference_update(module.modules())
            elif any(parameter.requires_grad for parameter in module.parameters()):
                self._evaluated.add(module)
            self.changed()
            return switched

        return train

    def _saved(self, plain: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(plain)
        def save(*args: Any, **kwargs: Any) -> None:
            self.changed()
            self._saving += 1
            try:
                self.changed()
                plain(*args, **kwargs)
            finally:
                self._saving -= 1
                self.changed()

        return save

    def _shortened(self, plain: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """A pass over data that ends after as many steps as were asked for, or batches where none is made."""
        most = self._most_steps
        assert most is not None, "passes are shortened for a number of steps"

        @functools.wraps(plain)
        def shortened(loader: DataLoader[Any]) -> Iterator[Any]:
            self._has_loaders = True
            before = self.steps
            for count, batch in enumerate(plain(loader), start=1):
                yield batch
                if self.steps - before >= most or (count >= most and self.act() is Act.VALIDATION):
                    return

        return shortened
