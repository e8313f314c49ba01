"""Interrupts at chosen moments inside lowtide, and what must be as it was afterwards."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as of_all_modules
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import lowtide
from lowtide.compat import patches
from lowtide.compat.autograd import saving_hooks

_OURS = str(Path(lowtide.__file__).parent)


class Moments:
    """Counts the moments at which an interrupt can come, and brings one at number `at`.

    Python looks for signals when a function begins and when one that is written in C has returned.
    """

    def __init__(self, at: int | None = None) -> None:
        self.count = 0
        self.where = ""
        self._at = at

    def during(self, work: Callable[[], object]) -> bool:
        """Whether `work` was interrupted."""
        sys.setprofile(self._look)
        try:
            work()
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(_OURS):
            self.count += 1
            is_time = self._at is not None and self.count >= self._at
            if is_time and not _is_out_of_reach(frame):
                sys.setprofile(None)
                self.where = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
                raise KeyboardInterrupt


def _is_out_of_reach(frame: FrameType | None) -> bool:
    """Whether this frame is called by something that swallows interrupts, or does not survive them.

    That is PyTorch's C++ in the midst of an op, and the call when a tensor dies.
    """
    while frame is not None and frame.f_code.co_name not in ("__torch_dispatch__", "_died"):
        frame = frame.f_back
    return frame is not None


class FailingOp(TorchDispatchMode):
    """Raises `error` at op number `at`, as a kernel does that finds no memory."""

    def __init__(self, at: int | None, error: type[BaseException]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self._at = at
        self._error = error

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        if self.count == self._at:
            raise self._error("on purpose")
        return func(*args, **(kwargs or {}))


def switched_on() -> dict[str, object]:
    """What is switched on in PyTorch, and replaced in it, in this process and thread."""
    return {
        "function modes": list(_get_current_function_mode_stack()),
        "dispatch modes": list(_get_current_dispatch_mode_stack()),
        "hooks of saved tensors": saving_hooks(),
        "patches": patches.active(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "hooks of all modules": [
            len(hooks)
            for hooks in (of_all_modules._global_forward_hooks, of_all_modules._global_forward_pre_hooks)
        ],
    }


def make_up(model: nn.Module) -> dict[str, object]:
    """What a model is made of: the objects in its modules, but for the contents of tensors."""
    found: dict[str, object] = {}
    for path, module in model.named_modules():
        for name, thing in vars(module).items():
            if isinstance(thing, dict):
                found[f"{path}.{name}"] = {key: id(each) for key, each in thing.items()}
            else:
                found[f"{path}.{name}"] = id(thing) if name == "forward" else repr(thing)
    return found


def streams() -> tuple[object, ...]:
    """Where random numbers stand."""
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


def differences(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """The names under which something else is found."""
    return [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
