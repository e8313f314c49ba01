"""The pre-norm transformer block that `gpt` and `vit` share.

Vaswani et al., "Attention Is All You Need", arXiv:1706.03762 (2017); normalised before each half, as in
Xiong et al., "On Layer Normalization in the Transformer Architecture", arXiv:2002.04745 (2020).
"""

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head self-attention over (batch, tokens, width) with one projection for q, k and v."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(part) for part in self.qkv(x).chunk(3, dim=2))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=self.causal)
        x = self.out(mixed.transpose(1, 2).flatten(2))
        return x

    def _split(self, x: Tensor) -> Tensor:
        """(batch, tokens, width) to (batch, heads, tokens, width / heads), without a copy."""
        batch, tokens, width = x.shape
        return x.view(batch, tokens, self.heads, width // self.heads).transpose(1, 2)


class Block(nn.Module):
    """Attention, then a perceptron four times as wide, each normalised first and added to its input."""

    def __init__(
        self, width: int, heads: int, *, causal: bool = False, dropout: float = 0.0, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.attention = Attention(width, heads, causal=causal, dropout=dropout)
        self.norm2 = nn.LayerNorm(width, eps=eps)
        self.widen = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        x = x + self.dropout(self.narrow(self.gelu(self.widen(self.norm2(x)))))
        return x
