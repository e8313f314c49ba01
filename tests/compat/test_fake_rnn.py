"""Fakes of cuDNN's recurrent layers; no GPU is needed for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.compat.fake_kernels import as_kernels_do

LSTM, GRU = 2, 3
STEPS, BATCH, INPUTS, HIDDEN = 5, 3, 4, 8


def arguments(mode: int, layers: int = 1, both_ways: bool = False) -> list[Any]:
    ways, gates = 2 if both_ways else 1, {LSTM: 4, GRU: 3}[mode]
    weights = []
    for layer in range(layers):
        inputs = INPUTS if layer == 0 else HIDDEN * ways
        for _ in range(ways):
            weights += [torch.empty(gates * HIDDEN, inputs), torch.empty(gates * HIDDEN, HIDDEN)]
            weights += [torch.empty(gates * HIDDEN), torch.empty(gates * HIDDEN)]
    hx = torch.empty(layers * ways, BATCH, HIDDEN)
    cx = torch.empty_like(hx) if mode == LSTM else None
    how = [mode, HIDDEN, 0, layers, False, 0.0, True, both_ways, [], None]
    return [torch.empty(STEPS, BATCH, INPUTS), weights, 4, None, hx, cx, *how]


@pytest.mark.parametrize("mode", [LSTM, GRU])
@pytest.mark.parametrize(("layers", "both_ways"), [(1, False), (2, True)])
def test_a_backward_makes_the_gradients_of_all_weights_in_one_storage(
    mode: int, layers: int, both_ways: bool
) -> None:
    with as_kernels_do(), FakeTensorMode(), torch.device("cuda"):
        given = arguments(mode, layers, both_ways)
        output, _hy, _cy, reserve, weights_in_a_row = torch.ops.aten._cudnn_rnn.default(*given)
        ways = 2 if both_ways else 1
        assert output.shape == (STEPS, BATCH, HIDDEN * ways)
        assert reserve.dtype == torch.uint8
        numbers = 4 * STEPS * BATCH * HIDDEN * layers * ways
        assert reserve.numel() >= numbers * {LSTM: 4, GRU: 3}[mode]
        x, weights, stride, _, hx, cx, *how = given
        state = (None, None, None)
        dx, dhx, dcx, dweights = torch.ops.aten._cudnn_rnn_backward.default(
            x, weights, stride, weights_in_a_row, hx, cx, output, *state, *how, reserve, [True] * 4
        )
        assert dx.shape == x.shape
        assert dhx.shape == hx.shape
        assert (dcx is None) == (mode == GRU)
        assert [each.shape for each in dweights] == [each.shape for each in weights]
        assert len({each.untyped_storage()._cdata for each in dweights}) == 1
        elements = sum(each.numel() for each in weights)
        assert dweights[0].untyped_storage().nbytes() == 4 * elements == 4 * weights_in_a_row.numel()
