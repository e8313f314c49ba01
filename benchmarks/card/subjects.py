"""What is trained on cards of many sizes: the models, and a batch of any size for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.shared.subjects import gpt2, llama, llama_1b
from benchmarks.standing.models import LossAlone
from lowtide import zoo
from lowtide.trace.step import Example, Loss

_SMALL_LLAMA = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32_000,
}


@dataclass(frozen=True)
class OnCard:
    """A model, its batches by their size, and the loss. In half precision it trains under autocast."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], Example]
    loss: Loss | None = None
    half: bool = False

    def precision(self, device: str) -> AbstractContextManager[Any]:
        """What forward and loss run under."""
        return torch.autocast(device, torch.bfloat16) if self.half else nullcontext()

    @property
    def key(self) -> str:
        """The name with the precision."""
        return f"{self.name} {'bf16' if self.half else 'fp32'}"


def _text(name: str, make: Callable[[], Any], tokens: int, words: int, half: bool) -> OnCard:
    def model() -> nn.Module:
        found = make()
        found.train()
        found.config.use_cache = False
        found.loss_type = "ForCausalLM"
        return LossAlone(found)

    def batch(count: int) -> Example:
        ids = torch.randint(0, words, (count, tokens))
        return {"input_ids": ids, "labels": ids}

    return OnCard(name, model, batch, None, half)


def _zoo(name: str, half: bool, **sizes: int) -> OnCard:
    def work(count: int) -> Any:
        return zoo.workload(name, zoo.Sizes(batch=count, **sizes))

    def batch(count: int) -> Example:
        made = work(count)
        found: Example = made.kwargs or made.args
        return found

    return OnCard(name, lambda: work(1).model, batch, _of_outputs, half)


def _of_outputs(output: Any) -> torch.Tensor:
    """A loss that any output has: no labels need be kept in step with the batch."""
    found: torch.Tensor = output.float().square().mean()
    return found


def _timm(name: str, half: bool) -> OnCard:
    def model() -> nn.Module:
        import timm

        found: nn.Module = timm.create_model(name)
        return found

    return OnCard(name, model, lambda count: (torch.rand(count, 3, 224, 224),), _of_outputs, half)


def subjects() -> Iterator[OnCard]:
    """Every model, in both precisions."""
    small_llama = partial(llama, **_SMALL_LLAMA)
    yield _text("llama-160m, bf16 weights", small_llama, 512, 32_000, half=False)
    yield _text("llama-1b, bf16 weights", llama_1b, 512, 128_256, half=False)
    for half in (False, True):
        yield _timm("resnet50", half)
        yield _timm("convnext_tiny", half)
        yield _timm("vit_base_patch16_224", half)
        yield _text("gpt2", gpt2, 512, 50_257, half)
        yield _zoo("unet", half, image=256)
        yield _zoo("lstm", half)
