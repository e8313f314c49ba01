"""Small Hugging Face models with random weights, and batches for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

KINDS = ("gpt2", "bert", "llama", "vit")


def small_transformer(kind: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A model in training mode and a batch with labels; skips the test without transformers."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    small = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    text = {**small, "vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    ids = torch.randint(3, 300, (4, 48))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if kind == "gpt2":
        sizes = {
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "vocab_size": 300,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "use_cache": False,
        }
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **options}))
    elif kind == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**text, **options))
    elif kind == "llama":
        config = transformers.LlamaConfig(**text, num_key_value_heads=2, use_cache=False, **options)
        model = transformers.LlamaForCausalLM(config)
    else:
        config = transformers.ViTConfig(**small, image_size=32, patch_size=8, num_labels=5, **options)
        model = transformers.ViTForImageClassification(config)
        batch = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 5, (4,))}
    model.train()
    return model, batch
