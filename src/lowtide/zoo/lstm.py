"""A stacked LSTM unrolled step by step from a cell of plain operations.

Hochreiter and Schmidhuber, "Long Short-Term Memory", Neural Computation 9 (1997); with the forget gate of
Gers, Schmidhuber and Cummins (2000).

Plain operations, not `nn.LSTM`: a fused kernel would hide its intermediate tensors in one opaque
reserve, where these are ordinary activations, one set for each step.
"""

import torch
from torch import Tensor, nn


class Cell(nn.Module):
    """One step of one layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, 4 * width)
        self.hidden = nn.Linear(width, 4 * width, bias=False)  # the bias of `input` serves both

    def forward(self, x: Tensor, hidden: Tensor, carry: Tensor) -> tuple[Tensor, Tensor]:
        gates: Tensor = self.input(x) + self.hidden(hidden)
        enter, forget, value, leave = gates.chunk(4, dim=1)
        carry = torch.sigmoid(forget) * carry + torch.sigmoid(enter) * torch.tanh(value)
        return torch.sigmoid(leave) * torch.tanh(carry), carry


class LSTM(nn.Module):
    """Reads (batch, steps, width) and gives the logits of the last step."""

    def __init__(self, layers: int = 2, width: int = 512, classes: int = 10) -> None:
        super().__init__()
        self.cells = nn.ModuleList(Cell(width) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        zeros = x.new_zeros(x.shape[0], x.shape[2])
        states = [(zeros, zeros) for _ in self.cells]
        for signal in x.unbind(1):
            for index, cell in enumerate(self.cells):
                states[index] = cell(signal, *states[index])
                signal = states[index][0]
        logits: Tensor = self.head(states[-1][0])
        return logits
