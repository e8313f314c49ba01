"""What Inductor may fuse in a graph whose order a plan has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from lowtide.compat import inductor_order
from lowtide.compat.inductor import WRITTEN, generated, missing_compiler
from lowtide.inductor.reading import read

NO_COMPILER = missing_compiler("cpu")

ROWS, NARROW, WIDE = 64, 16, 512
WIDE_BYTES = 4 * ROWS * WIDE


def beside(x: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Two wide results of one wide tensor, the second of which is wanted after the first is dropped."""
    wide = WRITTEN(x @ up)
    narrow = WRITTEN(torch.tanh(wide)) @ down
    return narrow, WRITTEN(torch.sin(wide)).t() @ narrow


@dataclass
class Buffer:
    """What a kernel writes: so many numbers of four bytes."""

    count: int

    @property
    def node(self) -> Buffer:
        return self

    def get_numel(self) -> int:
        return self.count

    def get_dtype(self) -> torch.dtype:
        return torch.float32


@dataclass
class Kernel:
    """A kernel as Inductor's scheduler has it."""

    min_order: int
    ancestors: frozenset[str] = frozenset()
    count: int = 0
    extern: bool = False

    def is_extern(self) -> bool:
        return self.extern

    def get_operation_names(self) -> set[str]:
        return {f"op{self.min_order}"}

    def get_outputs(self) -> list[Buffer]:
        return [Buffer(self.count)]


def allows(one: Kernel, other: Kernel, shared_bytes: int) -> bool:
    """With a product at 2."""
    scheduler = SimpleNamespace(nodes=[one, Kernel(2, extern=True), other])
    return inductor_order._LibraryKernels().allow(scheduler, one, other, shared_bytes)


# By hand ----------------------------------------------------------------------------------------------


def test_kernels_with_no_product_between_them_may_be_one() -> None:
    assert allows(Kernel(0), Kernel(1, count=1000), 0)
    assert allows(Kernel(3), Kernel(4, count=1000), 0)


def test_across_a_product_only_what_is_small_beside_what_both_read_may_be_made() -> None:
    assert allows(Kernel(1), Kernel(3, count=10), 8 * 40)
    assert allows(Kernel(3, count=10), Kernel(1), 8 * 40)  # whichever is named first
    assert not allows(Kernel(1), Kernel(3, count=10), 8 * 40 - 1)


def test_what_reads_the_product_is_not_made_before_it() -> None:
    assert not allows(Kernel(1), Kernel(3, frozenset({"op2"}), count=1), 10**6)


# As it is generated -----------------------------------------------------------------------------------


def arguments() -> list[Tensor]:
    return [torch.randn(ROWS, NARROW), torch.randn(NARROW, WIDE), torch.randn(WIDE, NARROW)]


def growth_bytes(function: Any) -> tuple[int, str]:
    """What the code holds that is generated for a function, and that code."""
    args = arguments()
    with torch.no_grad():
        graph = make_fx(function, tracing_mode="fake")(*args)
    run = generated(graph, args, is_backward=False, handed_out=2)
    return read(run.source_code, args, "cpu").growth_bytes, run.source_code


@contextmanager
def as_inductor_likes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No order is kept."""
    with monkeypatch.context() as patched:
        patched.setattr(inductor_order, "_SMALL", 0)
        patched.setattr(inductor_order._LibraryKernels, "allow", lambda *_: True)
        yield


@pytest.mark.skipif(NO_COMPILER is not None, reason=f"{NO_COMPILER} is not here")
def test_what_is_wide_is_not_made_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the product between the two, three wide tensors are never there; fused, they are."""
    kept, _ = growth_bytes(beside)
    with as_inductor_likes(monkeypatch), torch._inductor.config.patch(force_disable_caches=True):
        fused, _ = growth_bytes(beside)
    assert kept < 2 * WIDE_BYTES + WIDE_BYTES / 2
    assert fused >= 3 * WIDE_BYTES
