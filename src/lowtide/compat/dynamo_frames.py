"""What Dynamo does with a frame before a backend sees any of it: it counts, and it may give up.

A frame that it has compiled for eight kinds of inputs it compiles no more, and one with a graph break inside
of a loop it does not compile at all. Both run eagerly then, and no backend hears of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from torch._dynamo import callback_handler, convert_frame
from torch._dynamo.cache_size import exceeds_recompile_limit as _exceeds_recompile_limit
from torch._dynamo.eval_frame import innermost_backend
from torch._dynamo.exc import SkipFrame, Unsupported

from lowtide.compat.patches import patched
from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._dynamo.callback_handler", "tells when the compilation of a frame is over"),
    Private("torch._dynamo.cache_size.exceeds_recompile_limit", "whether a frame is compiled no more"),
    Private("torch._dynamo.convert_frame", "is where that is asked"),
    Private(
        "torch._dynamo.convert_frame._compile",
        "compiles a frame, and has its backend in a variable",
        parameters=("compiler_fn",),
    ),
    Private("torch._dynamo.eval_frame.innermost_backend", "a backend without what Dynamo wraps it in"),
    Private("torch._dynamo.exc.SkipFrame", "ends the compilation of a frame that then runs eagerly"),
    Private("torch._dynamo.exc.Unsupported", "does so too"),
)

_COMPILE = "_compile"
_FRAMES_TO_COMPILE = 40  # from where Dynamo tells that a compilation is over to where it began
_IN_A_LOOP = "loop"


class Backends:
    """Some backends of torch.compile, for whose frames there is no limit as long as they have an owner."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._functions = functions
        self._owners = 0
        self._patches = ExitStack()

    def enter(self) -> None:
        """Another owner: what these backends compiled is put to use."""
        self._owners += 1
        if self._owners == 1:
            self._patches.enter_context(self.without_limit())

    def leave(self) -> None:
        """An owner has gone."""
        self._owners -= 1
        if not self._owners:
            self._patches.close()

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """While the block runs, a frame of these backends is compiled for however many kinds of inputs."""

        def exceeds(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
            if self.compile_in(sys._getframe(1), 1):
                return False, ""
            found: tuple[bool, str] = _exceeds_recompile_limit(cache_size, compile_id)
            return found

        with patched(
            convert_frame,
            "exceeds_recompile_limit",
            exceeds,
            why="what is compiled no more runs without a plan, beyond its budget",
            since="torch 2.11",
        ):
            yield

    def tell_of_skipped(self, tell: Callable[[Unsupported | SkipFrame], None]) -> None:
        """Have `tell` told of frames of these backends that are not compiled, until Dynamo is reset."""

        def over(_: object) -> None:
            error = sys.exc_info()[1]
            if not isinstance(error, Unsupported | SkipFrame) or _IN_A_LOOP not in str(error):
                return
            if self.compile_in(sys._getframe(1), _FRAMES_TO_COMPILE):
                tell(error)

        callback_handler.register_end_callback(over)

    def compile_in(self, frame: FrameType | None, frames: int) -> bool:
        """Whether one of these `frames`, from `frame` outwards, compiles for one of these backends."""
        for _ in range(frames):
            if frame is None:
                return False
            if frame.f_code.co_name == _COMPILE:
                backend = innermost_backend(frame.f_locals["compiler_fn"])
                return getattr(backend, "compiler_fn", backend) in self._functions
            frame = frame.f_back
        return False
