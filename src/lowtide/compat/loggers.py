"""Loggers of PyTorch, by name. Does not import torch."""

from __future__ import annotations

from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._subclasses.fake_tensor", "a logger goes by this name that repeats what errors say"),
)

FAKE_KERNELS = "torch._subclasses.fake_tensor"  # prints a traceback before an error is raised
