"""The training steps that the prediction benchmark asks about: models, batches and set-ups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.shared.subjects import bert, gpt2_medium, llama_1b
from lowtide import zoo


@dataclass(frozen=True)
class Made:
    """A model, a step that trains it, and the optimizer that the step calls, if any."""

    model: nn.Module
    step: Callable[[], None]
    optimizer: torch.optim.Optimizer | None = None


@dataclass(frozen=True)
class Row:
    """One step. Without an optimizer: forward, loss and backward, gradients from None."""

    name: str
    build: Callable[[], Made]
    held_out: bool = False  # played no part in finding the rules for CUDA


def _zoo_row(name: str, held_out: bool = False, **sizes: int) -> Row:
    def build() -> Made:
        work = zoo.workload(name, zoo.Sizes(**sizes))
        loss = work.loss
        assert loss is not None

        def step() -> None:
            loss(work.model(*work.args, **work.kwargs)).backward()

        return Made(work.model, step)

    image = f"×{sizes['image']}²" if "image" in sizes else ""
    return Row(f"{name}, batch {sizes['batch']}{image}", build, held_out)


def _autocast_row(name: str, batch: int, tokens: int) -> Row:
    """Mixed precision and AdamW: casts of the weights, and temporaries as large as all parameters."""

    def build() -> Made:
        work = zoo.workload(name, zoo.Sizes(batch=batch, tokens=tokens))
        loss = work.loss
        assert loss is not None
        optimizer = torch.optim.AdamW(work.model.parameters(), foreach=True)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                number = loss(work.model(*work.args, **work.kwargs))
            number.backward()
            optimizer.step()

        return Made(work.model, step, optimizer)

    return Row(f"{name}, {batch}×{tokens}, bf16 autocast, AdamW", build)


def _hf_row(
    name: str,
    make: Callable[[], Any],
    batch: int,
    tokens: int,
    checkpointing: bool = False,
    held_out: bool = False,
) -> Row:
    def build() -> Made:
        model = make()
        model.train()
        model.config.use_cache = False  # a cache of keys and values is for generating, not for training
        if checkpointing:
            model.gradient_checkpointing_enable()
        ids = torch.randint(0, model.config.vocab_size, (batch, tokens))

        def step() -> None:
            model(input_ids=ids, labels=ids).loss.backward()

        return Made(model, step)

    label = f"{name}, {batch}×{tokens}" + (", checkpointed" if checkpointing else "")
    return Row(label, build, held_out)


ROWS: tuple[Row, ...] = (
    _zoo_row("vgg19", batch=128),
    _zoo_row("alexnet", batch=1024),
    _zoo_row("resnet50", batch=192),
    _zoo_row("resnet152", batch=96),
    _zoo_row("densenet201", batch=96),
    _zoo_row("inception_v3", batch=128),
    _hf_row("gpt2-medium", gpt2_medium, 8, 1024),
    _hf_row("gpt2-medium", gpt2_medium, 8, 1024, checkpointing=True),
    _hf_row("llama-1b bf16", llama_1b, 8, 2048),
    _hf_row("llama-1b bf16", llama_1b, 8, 2048, checkpointing=True),
    _zoo_row("unet", held_out=True, batch=32, image=256),
    _zoo_row("vgg16_bn", held_out=True, batch=64),
    _zoo_row("resnet34", held_out=True, batch=256, image=160),
    _zoo_row("vit", held_out=True, batch=64),
    _zoo_row("lstm", held_out=True, batch=256),
    _hf_row("bert-base", bert, 16, 512, held_out=True),
    _autocast_row("gpt", 8, 1024),
)
