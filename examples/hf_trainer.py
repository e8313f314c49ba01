"""Hugging Face's Trainer within a budget: `python examples/hf_trainer.py` (a CPU will do)."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from transformers.utils import logging

import lowtide
from lowtide.integrations.transformers import LowtideCallback

logging.set_verbosity_error()
WORDS, TOKENS = 100, 128
SENTENCES = [{"input_ids": words, "labels": words} for words in torch.randint(2, WORDS, (16, TOKENS))]


class MeasuringTrainer(Trainer):  # type: ignore[misc]
    """Says what its last step held beyond what was there before."""

    held_bytes = 0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step + 1 < self.state.max_steps:
            return super().training_step(*args, **kwargs)
        loss: list[Any] = []
        reading = lowtide.measure(
            lambda: loss.append(super(MeasuringTrainer, self).training_step(*args, **kwargs))
        )
        self.held_bytes = reading.growth_bytes
        return loss[0]


def train(callbacks: list[Any]) -> tuple[list[float], int]:
    """The losses of a training, and what its last step held."""
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 64, "n_head": 4, "vocab_size": WORDS, "n_positions": TOKENS}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=1, use_cache=False))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, per_device_train_batch_size=8, max_steps=4, logging_steps=1, save_strategy="no",
            report_to=[], disable_tqdm=True, dataloader_pin_memory=False, use_cpu=True,
        )  # fmt: skip
        trainer = MeasuringTrainer(model, args, train_dataset=SENTENCES, callbacks=callbacks)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer.held_bytes


plain_losses, plain_bytes = train([])
losses, held_bytes = train([LowtideCallback(budget="50%")])
print(f"a plain step holds     {plain_bytes / 2**20:6.1f} MiB beside parameters and optimizer states")
print(f"within 50% of its peak {held_bytes / 2**20:6.1f} MiB")
print(f"losses are equal:      {losses == plain_losses}")
