"""A two-layer perceptron, the smallest network with something to keep for its backward pass.

Rumelhart, Hinton and Williams, "Learning representations by back-propagating errors", Nature 323 (1986);
with ReLU in place of the sigmoid.
"""

from torch import Tensor, nn


class MLP(nn.Module):
    """`inputs` to `width` hidden units to `classes` logits."""

    def __init__(self, inputs: int = 784, width: int = 4096, classes: int = 10) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, width)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(x)
        x = self.relu(x)
        x = self.head(x)
        return x
