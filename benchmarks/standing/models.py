"""What is trained to see where lowtide stands: two language models and two for images, large and small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.shared.subjects import Made, gpt2, gpt2_medium, llama, llama_1b, network


@dataclass(frozen=True)
class Sample:
    """One model at one size. `library` says whose model it is, and of which version."""

    name: str
    build: Callable[[], Made]
    library: Callable[[], str]
    is_text: bool = False


# Language models ------------------------------------------------------------------------------------------


class LossAlone(nn.Module):
    """A Hugging Face model that returns nothing but its loss, so that nobody holds the logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def text(name: str, make: Callable[[], Any], batch: int, tokens: int) -> Sample:
    def build() -> Made:
        model = make()
        model.train()
        model.config.use_cache = False  # a cache of keys and values is for generating, not for training
        model.loss_type = "ForCausalLM"  # else it is looked for, with a warning, in the middle of a graph
        ids = torch.randint(0, model.config.vocab_size, (batch, tokens))

        def checkpointing(on: bool) -> None:
            if on:
                model.gradient_checkpointing_enable()
            else:
                model.gradient_checkpointing_disable()

        return Made(LossAlone(model), {"input_ids": ids, "labels": ids}, None, checkpointing)

    return Sample(name, build, lambda: f"transformers {version('transformers')}", is_text=True)


# Images ---------------------------------------------------------------------------------------------------


class Autocast(nn.Module):
    """A model that computes in bfloat16 where autocast would."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, dtype=torch.bfloat16):
            logits: Tensor = self.model(images)
        return logits


def convnext(name: str, batch: int, image: int) -> Sample:
    """ConvNeXt by timm, or by torchvision where there is no timm; without stochastic depth in either."""

    def build() -> Made:
        model, checkpointing = _timm(name) if find_spec("timm") else _torchvision(name)
        return classifier(model, checkpointing, batch, image)

    return Sample(f"{name}, {batch}×{image}², bf16 autocast", build, _library_of_convnext)


def classifier(
    model: nn.Module, checkpointing: Callable[[bool], None] | None, batch: int, image: int
) -> Made:
    """A network for images of a thousand classes, in bfloat16 where autocast would."""
    images = torch.randn(batch, 3, image, image)
    labels = torch.randint(0, 1000, (batch,))

    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.float(), labels)

    return Made(Autocast(model.train()), (images,), loss, checkpointing)


def _library_of_convnext() -> str:
    library = "timm" if find_spec("timm") else "torchvision"
    return f"{library} {version(library)}"


def _timm(name: str) -> tuple[Any, Callable[[bool], None]]:
    import timm

    model = timm.create_model(name, pretrained=False)
    return model, model.set_grad_checkpointing


def _torchvision(name: str) -> tuple[Any, Callable[[bool], None]]:
    """Its models have no checkpointing of their own: a checkpoint around every block."""
    from torchvision.models import get_model
    from torchvision.models.convnext import CNBlock

    model = get_model(name, stochastic_depth_prob=0.0)
    blocks = [found for found in model.modules() if isinstance(found, CNBlock)]

    def checkpointing(on: bool) -> None:
        for block in blocks:
            if on:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            else:
                del block.forward

    return model, checkpointing


def images(name: str, batch: int, image: int) -> Sample:
    """A network of lowtide's zoo, which is torchvision's."""
    return Sample(
        f"{name}, {batch}×{image}², fp32",
        network(name, (), batch=batch, image=image).build,
        lambda: "lowtide's zoo",
    )


LARGE = {
    "llama-1b": text("llama-1b, 8×2048, bf16", llama_1b, 8, 2048),
    "convnext": convnext("convnext_base", 96, 224),
    "resnet50": images("resnet50", 192, 224),
    "gpt2-medium": text("gpt2-medium, 8×1024, fp32", gpt2_medium, 8, 1024),
}
SMALL = {
    "llama-1b": text(
        "small llama, 2×128, bf16",
        partial(
            llama,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=8000,
        ),
        2,
        128,
    ),
    "convnext": convnext("convnext_tiny", 2, 64),
    "resnet50": images("resnet50", 2, 64),
    "gpt2-medium": text(
        "small gpt2, 2×128, fp32", partial(gpt2, n_embd=128, n_layer=4, n_head=4, vocab_size=1000), 2, 128
    ),
}
