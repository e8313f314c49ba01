"""What the benchmarks train: the paper's networks and batches, transformers, and small ones for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide import zoo
from lowtide.trace.step import Example, Loss


@dataclass(frozen=True)
class Made:
    """A model and a batch for it. `checkpoint` switches the library's own checkpointing on and off."""

    model: nn.Module
    example: Example
    loss: Loss | None = None
    checkpoint: Callable[[bool], None] | None = None


@dataclass(frozen=True)
class Subject:
    """One network at one size, and how finely it is cut where it is cut."""

    name: str
    build: Callable[[], Made]
    granularities: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The network, without its size."""
        return self.name.partition(",")[0]


def network(name: str, granularities: tuple[str, ...] = ("layer", "fine"), **sizes: int) -> Subject:
    def build() -> Made:
        work = zoo.workload(name, zoo.Sizes(**sizes))
        return Made(work.model, work.kwargs or work.args, work.loss)

    image = f"×{sizes['image']}²" if "image" in sizes else ""
    return Subject(f"{name}, batch {sizes['batch']}{image}", build, granularities)


def text(name: str, make: Callable[[], Any], batch: int, tokens: int) -> Subject:
    def build() -> Made:
        model = make()
        model.train()
        model.config.use_cache = False  # a cache of keys and values is for generating, not for training
        ids = torch.randint(0, model.config.vocab_size, (batch, tokens))

        def checkpoint(on: bool) -> None:
            if on:
                model.gradient_checkpointing_enable()
            else:
                model.gradient_checkpointing_disable()

        return Made(model, {"input_ids": ids, "labels": ids}, None, checkpoint)

    return Subject(f"{name}, {batch}×{tokens}", build, ("layer", "block"))


def gpt2(**sizes: float) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**sizes))


def llama(**sizes: int) -> Any:
    """In bfloat16, the head tied to the embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True)).to(torch.bfloat16)


def gpt2_medium() -> Any:
    return gpt2(n_embd=1024, n_layer=24, n_head=16)


def llama_1b() -> Any:
    return llama(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
    )


def bert(**sizes: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**sizes))


LARGE = (
    network("alexnet", batch=1024, image=224),
    network("vgg19", batch=64, image=224),
    network("vgg19", batch=128, image=224),
    network("resnet50", batch=64, image=224),
    network("resnet152", ("layer",), batch=16, image=224),
    network("densenet201", ("layer",), batch=16, image=224),
    network("inception_v3", ("layer",), batch=32, image=300),
    text("gpt2", gpt2, 8, 1024),
    text("bert-base", bert, 16, 512),
)
SMALL = (
    network("alexnet", batch=16, image=128),
    network("vgg19", ("layer",), batch=8, image=96),
    network("resnet50", ("layer",), batch=4, image=96),
    network("densenet121", ("layer",), batch=4, image=64),
    network("unet", ("layer",), batch=2, image=96),
    network("vit", ("layer", "block"), batch=8, image=64, layers=6, width=128, heads=4),
    text("gpt2 small", lambda: gpt2(n_embd=128, n_layer=6, n_head=4, vocab_size=1000), 4, 128),
    text(
        "bert small",
        lambda: bert(
            hidden_size=128,
            num_hidden_layers=6,
            num_attention_heads=4,
            intermediate_size=512,
            vocab_size=1000,
        ),
        4,
        128,
    ),
)
FRONTIER = (
    network("vgg19", (), batch=128, image=224),
    network("resnet50", (), batch=192, image=224),
    network("resnet152", (), batch=96, image=224),
    network("densenet201", (), batch=96, image=224),
    network("inception_v3", (), batch=128, image=299),
    text("gpt2-medium", gpt2_medium, 8, 1024),
    text("llama-1b", llama_1b, 8, 2048),
)
FRONTIER_SMALL = (
    network("vgg19", (), batch=2, image=64, classes=10),
    network("resnet50", (), batch=2, image=64),
    network("densenet121", (), batch=2, image=64),
    network("inception_v3", (), batch=2, image=299),
    text("gpt2", lambda: gpt2(n_embd=128, n_layer=4, n_head=4, vocab_size=1000), 2, 128),
    text(
        "llama",
        lambda: llama(
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=1000,
        ),
        2,
        128,
    ),
)
