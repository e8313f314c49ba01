"""A clean stdout: what other code prints while lowtide works goes to stderr, or nowhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout


def hush_libraries() -> None:
    """Turn off what libraries print about themselves. To be called before they are imported.

    The environment is theirs to read and ours to set here only, in the command line's own process; what
    a user has set stands.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch.profiler announces each start and stop
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send what the user's own code prints to stderr, so that stdout holds the answer and nothing else."""
    with redirect_stdout(sys.stderr):
        yield
