"""Fake tensors: shapes without numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

from lowtide.compat.dispatch import without_modes
from lowtide.compat.private import Private
from lowtide.compat.tensors import map_tensors, tensors_in

_MOST_TRIED_BYTES = 64 << 20

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


def runs_for_real(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op takes such arguments, tried with small real ones on the CPU that are all zero."""
    given = list(tensors_in(args, kwargs))
    too_large = sum(tensor.numel() * tensor.element_size() for tensor in given) > _MOST_TRIED_BYTES
    if too_large or any(tensor.dtype == torch.uint8 for tensor in given):  # opaque bytes cannot be made up
        return False
    with without_modes(), torch.no_grad():
        tried = map_tensors(_zeros, (args, {name: arg for name, arg in kwargs.items() if name != "device"}))
        try:
            func(*tried[0], **tried[1])
        except Exception:  # noqa: BLE001 – whatever the kernel has against them
            return False
    return True


def _zeros(fake: torch.Tensor) -> torch.Tensor:
    made = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    whole = torch.empty(0, dtype=fake.dtype).set_(made.untyped_storage())  # it may overlap itself
    whole.zero_()
    return made
