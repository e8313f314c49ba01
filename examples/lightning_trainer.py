"""Lightning within a budget: `python examples/lightning_trainer.py` (a CPU will do)."""

from __future__ import annotations

import copy
import logging
from typing import Any

import lightning.pytorch as lightning
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide
from lowtide.integrations.lightning import LowtideCallback

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
DATA = TensorDataset(torch.randn(48, 3, 32, 32), torch.randint(0, 10, (48,)))


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """A small convolutional network, which knows its losses and what its last step held."""

    def __init__(self) -> None:
        super().__init__()
        block = (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1))
        blocks = [copy.deepcopy(layer) for _ in range(5) for layer in block]
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *head)
        self.losses: list[float] = []
        self.held_bytes = 0

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        def step() -> None:
            super(Classifier, self).optimizer_step(*args, **kwargs)

        if not self.losses:  # the first batch is planned for
            step()
        else:
            self.held_bytes = lowtide.measure(step).growth_bytes
        self.losses.append(float(self.trainer.callback_metrics["loss"]))


def train(callbacks: list[Any]) -> Classifier:
    torch.manual_seed(0)
    model = Classifier()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", callbacks=callbacks, **quiet)
    trainer.fit(model, DataLoader(DATA, batch_size=16))
    return model


plain, planned = train([]), train([LowtideCallback(budget="50%")])
print(f"a plain step holds     {plain.held_bytes / 2**20:6.1f} MiB beside what is always there")
print(f"within 50% of its peak {planned.held_bytes / 2**20:6.1f} MiB")
print(f"losses are equal:      {planned.losses == plain.losses}")
