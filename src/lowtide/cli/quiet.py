"""A clean stdout and stderr: the answer, and what lowtide itself has to say."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from lowtide.compat.loggers import FAKE_KERNELS
from lowtide.compat.patches import patched


def hush_libraries() -> None:
    """Turn off what libraries print about themselves. To be called before they are imported.

    The environment is set here only, in the command line's own process; what a user has set stands.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch.profiler announces each start and stop
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextmanager
def undisturbed() -> Iterator[None]:
    """Send what the user's code prints to stderr, and leave errors of fake kernels to be told by us."""
    kernels = logging.getLogger(FAKE_KERNELS)
    silent = patched(kernels, "disabled", True, why="it repeats what the error says", since="torch 2.11")
    with silent, redirect_stdout(sys.stderr):
        yield
