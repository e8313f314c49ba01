"""The training steps that the prediction benchmark asks about: models, batches and set-ups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide import zoo


@dataclass(frozen=True)
class Row:
    """One step: forward, loss and backward, gradients from None, no optimizer."""

    name: str
    build: Callable[[], tuple[nn.Module, Callable[[], None]]]
    checkpointing: bool = False


def _zoo_row(name: str, batch: int) -> Row:
    def build() -> tuple[nn.Module, Callable[[], None]]:
        work = zoo.workload(name, zoo.Sizes(batch=batch))
        loss = work.loss
        assert loss is not None

        def step() -> None:
            loss(work.model(*work.args, **work.kwargs)).backward()

        return work.model, step

    return Row(f"{name}, batch {batch}", build)


def _hf_row(name: str, make: Callable[[], Any], batch: int, tokens: int, checkpointing: bool) -> Row:
    def build() -> tuple[nn.Module, Callable[[], None]]:
        model = make()
        model.train()
        model.config.use_cache = False  # a cache of keys and values is for generating, not for training
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = torch.randint(0, model.config.vocab_size, (batch, tokens))

        def step() -> None:
            model(input_ids=ids, labels=ids).loss.backward()

        return model, step

    label = f"{name}, {batch}×{tokens}" + (", checkpointed" if checkpointing else "")
    return Row(label, build, checkpointing)


def _gpt2_medium() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=1024, n_layer=24, n_head=16))


def _llama_1b() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128_256,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


ROWS: tuple[Row, ...] = (
    _zoo_row("vgg19", 128),
    _zoo_row("alexnet", 1024),
    _zoo_row("resnet50", 192),
    _zoo_row("resnet152", 96),
    _zoo_row("densenet201", 96),
    _zoo_row("inception_v3", 128),
    _hf_row("gpt2-medium", _gpt2_medium, 8, 1024, checkpointing=False),
    _hf_row("gpt2-medium", _gpt2_medium, 8, 1024, checkpointing=True),
    _hf_row("llama-1b bf16", _llama_1b, 8, 2048, checkpointing=False),
    _hf_row("llama-1b bf16", _llama_1b, 8, 2048, checkpointing=True),
)
