"""What Dynamo keeps of what it compiles, and how to have it let go.

It keeps that with the code of the frame that it compiled, and the code of a method lives as long as its
class.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any

import torch._dynamo.convert_frame
import torch._dynamo.eval_frame
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, reset_code
from torch._dynamo.convert_frame import compile_lock, input_codes
from torch._dynamo.eval_frame import cached_backends
from torch._dynamo.guards import DeletedGuardManagerWrapper
from torch._dynamo.utils import get_metrics_context

from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._C._dynamo.eval_frame._debug_get_cache_entry_list", "what was compiled of a frame's code"),
    Private("torch._C._dynamo.eval_frame._ExtraState.invalidate", "drops one thing that was compiled"),
    Private("torch._dynamo.guards.DeletedGuardManagerWrapper", "what takes the place of its guards"),
    Private("torch._dynamo.eval_frame.cached_backends", "every backend that was used since the last reset"),
    Private("torch._dynamo.utils.get_metrics_context", "notes the stack of every compilation, for ever"),
    Private("torch._dynamo.metrics_context.MetricsContext._edits", "those stacks"),
    Private(
        "torch._C._dynamo.eval_frame.reset_code", "drops what is noted with code of which nothing is compiled"
    ),
    Private("torch._dynamo.eval_frame.__file__", "the code that runs what was compiled"),
    Private("torch._dynamo.convert_frame.__file__", "the code that compiles"),
    Private("sys._current_frames", "tells whether a thread is inside of Dynamo"),
    Private("torch._dynamo.convert_frame.compile_lock", "nothing is compiled while something is dropped"),
    Private("torch._dynamo.convert_frame.input_codes", "the code of every frame that Dynamo has met"),
    Private(
        "inspect._shadowed_dict_from_mro_tuple",
        "holds classes that Dynamo has looked at",
        pythons=((3, 12, 0), (3, 12, 3)),
    ),
)


def forget_tracing() -> None:
    """Have Dynamo and Python let go of what tracing has met.

    Dynamo notes the stack of every compilation, for an error that never comes: a stack holds the code of its
    frames, and the code of a frame what was compiled for it. Python 3.12.0 to 3.12.3 hold the last 128
    classes that `inspect.getattr_static` has looked at, and a class that was made in a function holds what
    its methods close over: the weights of a whole model, perhaps.
    """
    get_metrics_context()._edits.clear()
    classes = getattr(inspect, "_shadowed_dict_from_mro_tuple", None)
    if classes is not None:
        classes.cache_clear()


def forget_compiled(backend: object, options: object = None) -> None:
    """Have Dynamo drop what `backend` compiled, as it does where something that it guards dies.

    With `options`, these very ones, what it compiled for them alone.

    What others have compiled stays. Code of which nothing else is compiled is as if it had never been met:
    Dynamo notes with it what is not worth another try.
    """
    with compile_lock:
        for code in [code for reference in input_codes.seen if (code := reference()) is not None]:
            entries = _debug_get_cache_entry_list(code)
            of_backend = [each for each in entries if _is_of(each.backend, backend, options)]
            for entry in of_backend:
                state = entry.guard_manager.extra_state
                cached_backends.pop(id(entry.backend), None)
                if state is not None:
                    state.invalidate(entry, DeletedGuardManagerWrapper("the plan was given up"))
            if len(of_backend) == len(entries):
                _unused.add(code)
    _unused.reset()


def _is_of(compiler: object, backend: object, options: object) -> bool:
    """Whether `compiler`, which torch.compile made, calls `backend` with `options`."""
    if getattr(compiler, "compiler_fn", None) is not backend:
        return False
    given: Mapping[str, object] = getattr(compiler, "kwargs", {})
    return options is None or given.get("options") is options


class _Unused:
    """Code of which nothing is compiled any longer, until what Dynamo notes with it is dropped.

    A model may be given up at any moment, also in a garbage collection while Dynamo looks at the very frames
    that were compiled for it, and at what it has noted with their code. Then code waits for a collection that
    finds no thread inside of Dynamo.
    """

    def __init__(self) -> None:
        self._waiting: list[weakref.ref[CodeType]] = []

    def add(self, code: CodeType) -> None:
        self._waiting.append(weakref.ref(code))

    def reset(self) -> None:
        """Drop what is noted with the code, now or later."""
        has_hook = self._after_collection in gc.callbacks
        if self._waiting and _is_running():
            if not has_hook:
                gc.callbacks.append(self._after_collection)
            return
        while self._waiting:
            code = self._waiting.pop()()
            if code is not None and not any(map(_is_valid, _debug_get_cache_entry_list(code))):
                reset_code(code)
        if has_hook:
            gc.callbacks.remove(self._after_collection)

    def _after_collection(self, phase: str, _: Any) -> None:
        if phase == "stop":
            self.reset()


_unused = _Unused()
_DYNAMO = (torch._dynamo.eval_frame.__file__, torch._dynamo.convert_frame.__file__)


def _is_valid(entry: Any) -> bool:
    return not isinstance(entry.guard_manager, DeletedGuardManagerWrapper)


def _is_running() -> bool:
    """Whether a thread runs something that Dynamo has compiled, or compiles."""
    return any(frame.f_code.co_filename in _DYNAMO for frame in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None
    for frame in sys._current_frames().values():
        while frame is not None:
            yield frame
            frame = frame.f_back
