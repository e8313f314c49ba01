"""Fakes by a rule of our own say what the real kernels return."""

from __future__ import annotations

import pytest
import torch
import torch._meta_registrations

from lowtide.compat.fake_kernels import as_kernels_do

ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)


def grouped(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("columns", [24, 32])
def test_a_grouped_product_has_the_shape_and_the_strides_that_its_kernel_gives_it(
    dtype: torch.dtype, columns: int
) -> None:
    def results(device: str) -> list[tuple[torch.Size, tuple[int, ...], int]]:
        rows = grouped(8, 16, dtype=dtype, device=device)
        weights = grouped(3, 16, columns, dtype=dtype, device=device)
        ends = ENDS.to(device)
        product = torch.ops.aten._grouped_mm.default
        found = [
            product(rows, weights, ends),
            product(rows.t(), product(rows, weights, ends), ends),  # the gradient of the weights
            product(weights.transpose(1, 2), rows.t(), ends),
            product(weights.transpose(1, 2), weights),
        ]
        return [(each.shape, each.stride(), each.untyped_storage().nbytes()) for each in found]

    with as_kernels_do():
        fakes = results("meta")
    assert fakes == results("cpu")


def test_rows_of_a_grouped_product_begin_at_multiples_of_sixteen_bytes() -> None:
    def strides(device: str) -> tuple[int, ...]:
        rows = grouped(8, 16, dtype=torch.float32, device=device)
        weights = grouped(3, 27, 16, dtype=torch.float32, device=device).transpose(1, 2)
        product: torch.Tensor = torch.ops.aten._grouped_mm.default(rows, weights, ENDS.to(device))
        return product.stride()

    with as_kernels_do():
        assert strides("meta") == strides("cpu") == (28, 1)


def test_afterwards_pytorchs_own_rule_is_there_again() -> None:
    before = torch._meta_registrations._meta_grouped_mm_common
    with as_kernels_do():
        assert torch._meta_registrations._meta_grouped_mm_common is not before
    assert torch._meta_registrations._meta_grouped_mm_common is before
