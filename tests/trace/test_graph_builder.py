"""What is an op and what is a view, for everybody who reads calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowtide.trace.graph_builder import is_op

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("func", "known", "expected"),
    [
        (aten.relu.default, [False], True),
        (aten.t.default, [True], False),
        (aten.relu_.default, [True], True),  # makes nothing new, and changes what there was
        (aten.native_dropout.default, [True, False], True),
        (aten.split.Tensor, [True, True], False),
        (aten._local_scalar_dense.default, [], True),
    ],
)
def test_an_op_makes_or_changes_something_or_makes_no_tensor(
    func: Any, known: list[bool], expected: bool
) -> None:
    assert is_op(func, known) is expected
