"""A loop with Accelerate within a budget: `python examples/accelerate_loop.py` (a CPU will do)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide
from lowtide.integrations.accelerate import prepare

DATA = TensorDataset(torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,)))


def network() -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1))
        for _ in range(5)
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    return nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), *blocks, *head)


def train(budget: str | None) -> tuple[list[float], int]:
    """The losses of a training, and what its last step held beyond what is always there."""
    accelerator = Accelerator(cpu=True)
    model = network()
    things = (model, torch.optim.AdamW(model.parameters()), DataLoader(DATA, batch_size=16))
    if budget is None:
        model, optimizer, data = accelerator.prepare(*things)
    else:  # while it plans, lowtide needs a loss: one that is made of the output as the real one is
        model, optimizer, data = prepare(
            accelerator, *things, budget=budget, loss=lambda logits: F.cross_entropy(logits, logits.argmax(1))
        )
    losses, held_bytes = [], 0
    for images, labels in data:

        def step(images: torch.Tensor = images, labels: torch.Tensor = labels) -> None:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))

        if not losses:  # the first batch is planned for
            step()
        else:
            held_bytes = lowtide.measure(step).growth_bytes
    return losses, held_bytes


plain_losses, plain_bytes = train(None)
losses, held_bytes = train("50%")
print(f"a plain step holds     {plain_bytes / 2**20:6.1f} MiB beside what is always there")
print(f"within 50% of its peak {held_bytes / 2**20:6.1f} MiB")
print(f"losses are equal:      {losses == plain_losses}")
