"""A decoder-only transformer in the shape of GPT-2: learned positions and a head tied to the embedding.

Radford et al., "Language Models are Unsupervised Multitask Learners", OpenAI (2019).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.zoo.transformer import Block


class GPT(nn.Module):
    """Token numbers (batch, tokens) to next-token logits (batch, tokens, vocab)."""

    def __init__(
        self,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        vocab: int = 50257,
        context: int = 1024,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(Block(width, heads, causal=True, dropout=dropout) for _ in range(layers))
        )
        self.norm = nn.LayerNorm(width)
        # PyTorch's unit-variance embedding would make the tied head start from logits far too large.
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.tokens(tokens) + self.positions(positions)
        x = self.dropout(x)
        x = self.blocks(x)
        x = self.norm(x)
        return F.linear(x, self.tokens.weight)
