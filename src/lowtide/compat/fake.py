"""Fake tensors: shapes without numbers."""

from __future__ import annotations

from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

from lowtide.compat.private import Private

PRIVATE = (
    Private("torch._guards.detect_fake_mode", "tells whether code runs on fake tensors, to be planned"),
    Private(
        "torch._subclasses.fake_tensor.DataDependentOutputException",
        "raised where a fake is asked for a number",
    ),
    Private(
        "torch._subclasses.fake_tensor.DynamicOutputShapeException",
        "raised where a shape depends on numbers",
    ),
    Private("torch._subclasses.fake_tensor.FakeTensor", "stands for a tensor in a dry run"),
    Private(
        "torch._subclasses.fake_tensor.FakeTensorMode",
        "runs ops without computing them",
        parameters=("allow_non_fake_inputs",),
    ),
)


def is_fake_now() -> bool:
    """Whether the code that is running runs on fake tensors."""
    return detect_fake_mode() is not None
