"""What the paper's experiment trains: its networks and batches, transformers, and small ones for a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide import zoo
from lowtide.training import Example, Loss


@dataclass(frozen=True)
class Made:
    """A model and a batch for it. `checkpoint` switches the library's own checkpointing on and off."""

    model: nn.Module
    example: Example
    loss: Loss | None = None
    checkpoint: Callable[[bool], None] | None = None


@dataclass(frozen=True)
class Subject:
    """One network at one size, and how finely it is cut."""

    name: str
    build: Callable[[], Made]
    granularities: tuple[str, ...]


def _network(name: str, granularities: tuple[str, ...] = ("layer", "fine"), **sizes: int) -> Subject:
    def build() -> Made:
        work = zoo.workload(name, zoo.Sizes(**sizes))
        return Made(work.model, work.kwargs or work.args, work.loss)

    image = f"×{sizes['image']}²" if "image" in sizes else ""
    return Subject(f"{name}, batch {sizes['batch']}{image}", build, granularities)


def _text(name: str, make: Callable[[], Any], batch: int, tokens: int) -> Subject:
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


def _gpt2(**sizes: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**sizes))


def _bert(**sizes: int) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**sizes))


LARGE = (
    _network("alexnet", batch=1024, image=224),
    _network("vgg19", batch=64, image=224),
    _network("vgg19", batch=128, image=224),
    _network("resnet50", batch=64, image=224),
    _network("resnet152", ("layer",), batch=16, image=224),
    _network("densenet201", ("layer",), batch=16, image=224),
    _network("inception_v3", ("layer",), batch=32, image=300),
    _text("gpt2", _gpt2, 8, 1024),
    _text("bert-base", _bert, 16, 512),
)
SMALL = (
    _network("alexnet", batch=16, image=128),
    _network("vgg19", ("layer",), batch=8, image=96),
    _network("resnet50", ("layer",), batch=4, image=96),
    _network("densenet121", ("layer",), batch=4, image=64),
    _network("unet", ("layer",), batch=2, image=96),
    _network("vit", ("layer", "block"), batch=8, image=64, layers=6, width=128, heads=4),
    _text("gpt2 small", lambda: _gpt2(n_embd=128, n_layer=6, n_head=4, vocab_size=1000), 4, 128),
    _text(
        "bert small",
        lambda: _bert(
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
