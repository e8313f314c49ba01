"""Do our definitions compute what torchvision's do?

    python -m benchmarks.prediction.zoo_against_torchvision [-o FILE.json]

Loads the same weights into both (strictly, so that every key must match), then compares outputs and
gradients in training mode with dropout off, and outputs in evaluation mode. Needs torchvision.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from lowtide import zoo
from lowtide.text.documents import write_text

NAMES = (
    "alexnet",
    *(f"vgg{depth}{norm}" for depth in (11, 13, 16, 19) for norm in ("", "_bn")),
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152)),
    *(f"densenet{depth}" for depth in (121, 161, 169, 201)),
    "inception_v3",
)


def compare(name: str, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(device):
        work = zoo.workload(name, zoo.Sizes(batch=4))
        options = {"init_weights": False} if name == "inception_v3" else {}
        theirs = torchvision.models.get_model(name, weights=None, **options)
    keys_equal = list(work.model.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(work.model.state_dict(), strict=True)
    for module in (*work.model.modules(), *theirs.modules()):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    outputs = [tuple(flat(model.train()(*work.args))) for model in (work.model, theirs)]
    for found in outputs:
        torch.stack([output.square().mean() for output in found]).sum().backward()
    pairs = zip(work.model.parameters(), theirs.parameters(), strict=True)
    gradients = all(
        torch.equal(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None
    )
    with torch.no_grad():
        evaluated = [model.eval()(*work.args) for model in (work.model, theirs)]
    return {
        "name": name,
        "parameters": sum(p.numel() for p in theirs.parameters()),
        "same keys in the same order": keys_equal,
        "same outputs in training": all(torch.equal(a, b) for a, b in zip(*outputs, strict=True)),
        "same gradients": gradients,
        "same outputs in evaluation": torch.equal(*evaluated),
    }


def flat(output: Any) -> list[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [compare(name, device) for name in NAMES]
    for row in rows:
        print(*row.values())
    machine = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    if chosen.output:
        write_text(chosen.output, json.dumps({"machine": machine, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
