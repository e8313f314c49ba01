"""A small model with a large head, whose logits are most of what a step needs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

VOCABULARY, WIDTH, TOKENS = 1000, 16, 128
LOGITS_BYTES = TOKENS * VOCABULARY * 4


class Head(nn.Module):
    """An embedding, a layer, a head and its loss."""

    def __init__(self, words: int = VOCABULARY, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(words, width)
        self.layer = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(self.head(torch.tanh(self.layer(self.embed(ids)))), labels)


def batch(tokens: int = TOKENS, words: int = VOCABULARY) -> tuple[Tensor, Tensor]:
    """Words in a row, and those to be told."""
    ids = torch.arange(tokens) * 7 % words
    return ids, ids * 3 % words
