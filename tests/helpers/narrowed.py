"""Networks without most of their weights."""

from __future__ import annotations

from torch import nn

_WIDTH = 64


def narrowed(model: nn.Module) -> nn.Module:
    """AlexNet and VGG with 64 features in the classifier, where they have 4096; any other model as it is.

    Weights of half a gigabyte take seconds to make, to copy and to compare, and plans do nothing with them.
    """
    classifier = getattr(model, "classifier", None)
    if not isinstance(classifier, nn.Sequential):
        return model
    last = len(classifier) - 1
    before: int | None = None
    for number, layer in enumerate(classifier):
        if isinstance(layer, nn.Linear):
            after = layer.out_features if number == last else _WIDTH
            classifier[number] = nn.Linear(before or layer.in_features, after)
            before = after
    return model
