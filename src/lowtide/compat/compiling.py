"""How `torch.compile` is made to start from nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch._inductor.utils import fresh_cache as _fresh_cache

from lowtide.compat.private import Private

PRIVATE = (
    Private(
        "torch._inductor.utils.fresh_cache", "an empty cache on disk, so that a compilation is really made"
    ),
)


@contextmanager
def compiling_afresh(from_cache: bool = False) -> Iterator[None]:
    """What is compiled in the block is compiled there, and nothing else in this process is left compiled.

    With `from_cache` code that is on disk from earlier may be taken instead.
    """
    torch.compiler.reset()
    try:
        with nullcontext() if from_cache else _empty_caches():
            yield
    finally:
        torch.compiler.reset()


@contextmanager
def _empty_caches() -> Iterator[None]:
    error: Exception | None = None
    # a compiler that was interrupted may still be writing
    directory = tempfile.TemporaryDirectory(prefix="lowtide-", ignore_cleanup_errors=True)
    with directory as place, _fresh_cache(dir=place):
        try:
            yield
        except Exception as found:  # noqa: BLE001  it is raised below: of one that passes there torch says more
            error = found
    if error is not None:
        raise error
