"""A training with the usual troubles: `lowtide rehearse examples/rehearsed_training.py --card 1GiB`.

It fits while it trains. Then it validates on a larger batch, and keeps the outputs of all of them on the
device; then it saves a checkpoint of a copy of the model.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--epochs", type=int, default=1)
options = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"

torch.manual_seed(0)
images, labels = torch.randn(100, 3, 32, 32), torch.randint(0, 10, (100,))
data = TensorDataset(images, labels)
model = nn.Sequential(
    *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(32 * 64, 10)),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for epoch in range(options.epochs):
    model.train()
    for x, y in DataLoader(data, batch_size=options.batch, shuffle=True):
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        features = [model[:6](x.to(device)) for x, _ in DataLoader(data, batch_size=100) for _ in range(6)]
    print(f"epoch {epoch}: loss {loss.item():.2f}, features {torch.stack(features).mean().item():.2f}")
    del features
    average = copy.deepcopy(model)
    torch.save(average.state_dict(), Path(tempfile.gettempdir()) / "rehearsed.pt")
