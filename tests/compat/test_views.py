"""Fakes looked at in another shape have the strides that PyTorch's kernels choose."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.compat.tensors import storage_key
from lowtide.compat.views import views_as_they_run
from lowtide.ir.strides import viewed


@pytest.mark.parametrize("shape", [(1, 8, 6, 6), (8, 36), (8, 6, 1, 6), (1, 8, -1)])
def test_dimensions_of_one_element_have_the_strides_of_real_views(shape: tuple[int, ...]) -> None:
    real = torch.randn(1, 36, 8).permute(0, 2, 1)
    with FakeTensorMode() as mode, views_as_they_run(viewed):
        fake = mode.from_tensor(real)
        look = fake.view(shape)
    assert look.stride() == real.view(shape).stride()
    assert storage_key(look) == storage_key(fake)
