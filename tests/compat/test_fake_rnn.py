"""Fakes of cuDNN's recurrent layers; no GPU is needed for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.compat.fake_kernels import as_kernels_do

PLAIN, LSTM, GRU = 1, 2, 3
GATES = {PLAIN: 1, LSTM: 4, GRU: 3}
STEPS, BATCH, INPUTS, HIDDEN = 10, 4, 16, 32


def arguments(
    mode: int, layers: int = 1, both_ways: bool = False, batch_first: bool = False, dropout: float = 0.0
) -> list[Any]:
    ways, gates = 2 if both_ways else 1, GATES[mode]
    weights = []
    for layer in range(layers):
        inputs = INPUTS if layer == 0 else HIDDEN * ways
        for _ in range(ways):
            weights += [torch.empty(gates * HIDDEN, inputs), torch.empty(gates * HIDDEN, HIDDEN)]
            weights += [torch.empty(gates * HIDDEN), torch.empty(gates * HIDDEN)]
    hx = torch.empty(layers * ways, BATCH, HIDDEN)
    cx = torch.empty_like(hx) if mode == LSTM else None
    how = [mode, HIDDEN, 0, layers, batch_first, dropout, True, both_ways, [], None]
    x = torch.empty(BATCH, STEPS, INPUTS) if batch_first else torch.empty(STEPS, BATCH, INPUTS)
    return [x, weights, 4, None, hx, cx, *how]


@pytest.mark.parametrize(
    ("mode", "layers", "both_ways", "dropout", "expected"),
    [  # as cuDNN keeps them on an H200
        (LSTM, 1, False, 0, 25856),
        (LSTM, 3, False, 0, 87296),
        (LSTM, 2, True, 0, 112896),
        (LSTM, 3, False, 0.1, 87616),
        (GRU, 1, False, 0, 30976),
        (GRU, 2, True, 0, 133376),
        (GRU, 2, False, 0.1, 66976),
        (PLAIN, 1, False, 0, 5376),
        (PLAIN, 3, False, 0, 25856),
    ],
)
def test_a_forward_keeps_as_much_as_the_kernel(
    mode: int, layers: int, both_ways: bool, dropout: float, expected: int
) -> None:
    with as_kernels_do(), FakeTensorMode(), torch.device("cuda"):
        given = arguments(mode, layers, both_ways, dropout=dropout)
        reserve = torch.ops.aten._cudnn_rnn.default(*given)[3]
    assert (reserve.dtype, reserve.numel()) == (torch.uint8, expected)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("mode", [LSTM, GRU])
@pytest.mark.parametrize(("layers", "both_ways"), [(1, False), (2, True)])
def test_a_backward_makes_the_gradients_of_all_weights_in_one_storage(
    mode: int, layers: int, both_ways: bool, batch_first: bool
) -> None:
    with as_kernels_do(), FakeTensorMode(), torch.device("cuda"):
        given = arguments(mode, layers, both_ways, batch_first)
        output, _hy, _cy, reserve, weights_in_a_row = torch.ops.aten._cudnn_rnn.default(*given)
        x, weights, stride, _, hx, cx, *how = given
        gradients = (None, None, None)
        dx, dhx, dcx, dweights = torch.ops.aten._cudnn_rnn_backward.default(
            x, weights, stride, weights_in_a_row, hx, cx, output, *gradients, *how, reserve, [True] * 4
        )
    features = HIDDEN * (2 if both_ways else 1)
    assert output.shape == ((BATCH, STEPS, features) if batch_first else (STEPS, BATCH, features))
    # as cuDNN lays it out: one step of all sequences after the other
    assert output.stride() == (
        (features, BATCH * features, 1) if batch_first else (BATCH * features, features, 1)
    )
    assert dx.shape == x.shape
    assert dx.is_contiguous() != batch_first
    assert dhx.shape == hx.shape
    assert (dcx is None) == (mode == GRU)
    assert [each.shape for each in dweights] == [each.shape for each in weights]
    assert len({each.untyped_storage()._cdata for each in dweights}) == 1
    elements = sum(each.numel() for each in weights)
    assert dweights[0].untyped_storage().nbytes() == 4 * elements == 4 * weights_in_a_row.numel()
