"""The head of a language model and its loss, computed a chunk of tokens at a time.

A vocabulary of 128,256 makes the logits the largest thing in a step. Nobody needs all of them at once: each
chunk's logits give their share of the loss and, right there, of the gradients, and are dropped. That is the
idea of Liger's fused linear cross entropy and of cut cross entropy, here in plain PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 2048
IGNORED = -100  # a label that asks for nothing, as in torch and transformers


class ChunkedHeadLoss(nn.Module):
    """A Hugging Face causal language model that returns its loss alone, made chunk by chunk.

    The loss is the mean over all labels but the first of each sequence, as the model's own is.
    """

    def __init__(self, model: Any, chunk_tokens: int = CHUNK_TOKENS) -> None:
        super().__init__()
        self.model = model
        self.chunk_tokens = chunk_tokens

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.model.base_model(input_ids=input_ids).last_hidden_state
        following = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
        weight = self.model.get_output_embeddings().weight
        loss: Tensor = _ONE_OP(hidden.flatten(0, 1), weight, following.flatten(), self.chunk_tokens)
        return loss


def _head_loss(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """The loss, to be one op to a compiler, as it is where a kernel of its own makes it.

    Unrolled into a compiled graph the chunks overlap: llama-1b then peaks at 12,099 MiB instead of 7,712.
    """
    apply: Any = _HeadLoss.apply
    loss: Tensor = apply(hidden, weight, labels, chunk_tokens)
    return loss


_ONE_OP: Any = torch.compiler.disable(_head_loss)


class _HeadLoss(torch.autograd.Function):
    """Cross entropy of `hidden @ weight.T`, with both gradients made in the forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        for_hidden, for_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        asked = labels != IGNORED
        count = asked.sum()
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for first in range(0, len(hidden), chunk_tokens):
            part = slice(first, first + chunk_tokens)
            logits = (hidden[part] @ weight.T).float()
            label = labels[part].clamp(min=0).unsqueeze(1)
            logits -= logits.logsumexp(1, keepdim=True)
            total -= (logits.gather(1, label).squeeze(1) * asked[part]).sum()
            slope = logits.exp_().scatter_add_(1, label, torch.full_like(label, -1, dtype=logits.dtype))
            slope *= (asked[part] / count).unsqueeze(1)
            small = slope.to(hidden.dtype)
            for_hidden[part] = small @ weight
            for_weight.addmm_(small.T, hidden[part])
        ctx.save_for_backward(for_hidden, for_weight)
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None, None]:
        for_hidden, for_weight = ctx.saved_tensors
        return for_hidden * slopes[0], for_weight * slopes[0], None, None
