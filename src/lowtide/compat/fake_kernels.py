"""Fakes that fail where what is real does not: they do here as the real ones do, by rules of our own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch._meta_registrations

from lowtide.compat.fake_layouts import laid_out_as_kernels_do
from lowtide.compat.fake_rnn import recurrent_layers_of_cudnn
from lowtide.compat.patches import patched
from lowtide.compat.private import Private
from lowtide.compat.tensors import key_of_storage

PRIVATE = (
    Private(
        "torch._meta_registrations._meta_grouped_mm_common",
        "the fake of a grouped product; it refuses other types than bf16, which kernels take",
        parameters=("mat_a", "mat_b", "scale_a", "offs", "out_dtype"),
    ),
)

_ROW_BYTES = 16  # rows of a grouped product begin at multiples of so many bytes

_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
_scaled_or_not = torch._meta_registrations._meta_grouped_mm_common


@contextmanager
def as_kernels_do() -> Iterator[None]:
    """While the block runs, fake ops take what the real ones take, and return what these return."""
    with (
        laid_out_as_kernels_do(),
        recurrent_layers_of_cudnn(),
        patched(
            torch._meta_registrations,
            "_meta_grouped_mm_common",
            _grouped_product,
            why="a grouped product in fp32 has a kernel, and no fake",
            since="torch 2.11",
        ),
        patched(
            torch.utils,
            "swap_tensors",
            _swapped_unless_the_same,
            why="a fake parameter that a module's `to` leaves as it is cannot be swapped",
            since="torch 2.11",
        ),
    ):
        yield


def _swapped_unless_the_same(old: torch.Tensor, new: torch.Tensor) -> None:
    same = old.dtype == new.dtype and old.device == new.device and old.shape == new.shape
    if not same or key_of_storage(old.untyped_storage()) != key_of_storage(new.untyped_storage()):
        _swap(old, new)


def _grouped_product(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    if scale_a is not None:
        scaled: torch.Tensor = _scaled_or_not(
            mat_a, mat_b, scale_a, scale_b, offs, bias, scale_result, out_dtype, use_fast_accum
        )
        return scaled
    groups = None if offs is None else offs.shape[0]
    rows = mat_a.shape[-2] if mat_a.dim() == 2 or mat_b.dim() == 3 else mat_a.shape[1]
    columns = mat_b.shape[-1]
    dtype = out_dtype or mat_a.dtype
    step = _ROW_BYTES // dtype.itemsize
    padded = (columns + step - 1) // step * step
    if mat_a.dim() == mat_b.dim():  # a product for each group, or of each pair
        count = groups if mat_a.dim() == 2 else mat_a.shape[0]
        assert count is not None, "products of groups have offsets"
        shape, strides = (count, rows, columns), (rows * padded, padded, 1)
        return torch.empty_strided(shape, strides, dtype=dtype, device=mat_a.device)
    return torch.empty_strided((rows, columns), (padded, 1), dtype=dtype, device=mat_a.device)
