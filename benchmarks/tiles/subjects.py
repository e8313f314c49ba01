"""The steps in which one op decides the peak, and what is asked of each: MiB at most, ms at most."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.shared.subjects import Made, gpt2
from benchmarks.standing import models
from benchmarks.standing.models import Sample, images, text

EAGER = "eager"
CHECKPOINTED = "own checkpointing"
CHUNKED = "own checkpointing, chunked loss"
COMPILED_HALF = "torch.compile, budget 0.5"
LOWEST = "lowest"


@dataclass(frozen=True)
class Question:
    """What lowtide is asked for: the lowest peak, or the least time within so much."""

    within: str  # what a peer holds, a number of bytes, or LOWEST
    most_mib: float | None = None
    most_ms: float | None = None
    most_times: float | None = None  # the time of eager training


@dataclass(frozen=True)
class Subject:
    """A step, the peers that train it too, and questions."""

    sample: Sample
    peers: tuple[str, ...]
    questions: tuple[Question, ...]


class HeadAlone(nn.Module):
    """A head and its loss: of hidden states that are parameters here, so that they get a gradient too."""

    def __init__(self, tokens: int, width: int, words: int) -> None:
        super().__init__()
        self.hidden = nn.Parameter(torch.randn(tokens, width, dtype=torch.bfloat16))
        self.head = nn.Linear(width, words, bias=False, dtype=torch.bfloat16)

    def forward(self, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.hidden).float(), labels)


def head(name: str, tokens: int, width: int, words: int) -> Sample:
    def build() -> Made:
        return Made(HeadAlone(tokens, width, words), (torch.randint(0, words, (tokens,)),))

    return Sample(name, build, lambda: "written out")


def qwen3(**sizes: int) -> Any:
    """In bfloat16, the head tied to the embedding."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=True)).to(torch.bfloat16)


def qwen3_600m() -> Any:
    return qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=40_960,
    )


LARGE: Mapping[str, Subject] = {
    "llama-1b": Subject(
        models.LARGE["llama-1b"],
        (EAGER, CHECKPOINTED, CHUNKED),
        (
            Question(LOWEST, most_mib=6500),
            Question(CHUNKED, most_ms=395),
            Question(CHECKPOINTED, most_ms=345),
        ),
    ),
    "qwen3-0.6b": Subject(
        text("qwen3-0.6b, 1×16384, bf16", qwen3_600m, 1, 16_384),
        (EAGER, CHECKPOINTED),
        (Question(LOWEST, most_mib=5000), Question(CHECKPOINTED, most_ms=520)),
    ),
    "gpt2-medium": Subject(
        models.LARGE["gpt2-medium"],
        (EAGER, CHECKPOINTED),
        (Question(LOWEST, most_mib=5500), Question(CHECKPOINTED, most_ms=560)),
    ),
    "vgg19": Subject(
        images("vgg19", 128, 224),
        (EAGER, COMPILED_HALF),
        (Question(LOWEST, most_mib=4500), Question(COMPILED_HALF)),
    ),
    "head": Subject(
        head("head and loss alone, 16384×2048×248320, bf16", 16_384, 2048, 248_320),
        (EAGER,),
        (Question(LOWEST, most_mib=6e9 / 2**20), Question("6GB", most_mib=6e9 / 2**20, most_times=1.2)),
    ),
}

SMALL: Mapping[str, Subject] = {
    "llama-1b": Subject(
        models.SMALL["llama-1b"],
        (EAGER, CHECKPOINTED, CHUNKED),
        (Question(LOWEST), Question(CHUNKED), Question(CHECKPOINTED)),
    ),
    "gpt2-medium": Subject(
        text(
            "small gpt2, 2×128, fp32",
            partial(gpt2, n_embd=128, n_layer=4, n_head=4, vocab_size=8000),
            2,
            128,
        ),
        (EAGER, CHECKPOINTED),
        (Question(LOWEST), Question(CHECKPOINTED)),
    ),
    "head": Subject(
        head("head and loss alone, 256×64×8000, bf16", 256, 64, 8000), (EAGER,), (Question(LOWEST),)
    ),
}
