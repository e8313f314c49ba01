"""Kinds of modules under op plans: their training is the plain one, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers.eager import assert_trains_like_plain


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


IMAGES = torch.randn(4, 3, 12, 12)


class Siamese(nn.Module):
    """One network for several images."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )

    def forward(self, *images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.network(image).relu() for image in images)


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("budget", ["min", "100%"])
def test_a_batch_norm_that_runs_several_times_counts_each(times: int, budget: str) -> None:
    model = Siamese()
    assert_trains_like_plain(model, *(IMAGES + n for n in range(times)), budget=budget)
    assert model.get_buffer("network.1.num_batches_tracked") == 2 * times


@pytest.mark.parametrize("affine", [True, False])
def test_an_instance_norm_with_running_statistics(affine: bool) -> None:
    norm = nn.InstanceNorm2d(4, affine=affine, track_running_stats=True)
    assert_trains_like_plain(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 3)), IMAGES)


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.layer(words)[0]
        return outputs


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"bidirectional": True, "bias": False, "batch_first": True}),
        (nn.LSTM, {"num_layers": 2, "dropout": 0.3}),
        (nn.LSTM, {"proj_size": 3}),
        (nn.GRU, {"num_layers": 2, "dropout": 0.3}),
        (nn.RNN, {"bidirectional": True}),
    ],
)
def test_recurrent_layers(kind: Any, options: dict[str, Any]) -> None:
    """Tracing alone would take them apart otherwise, and forget the dropout between layers."""
    assert_trains_like_plain(Recurrent(kind(32, 32, **options)), torch.randn(3, 2, 32))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest", "nearest-exact"])
def test_images_that_are_made_larger(mode: str) -> None:
    class Larger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Conv2d(3, 2, 3)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return F.interpolate(self.head(images), size=(17, 23), mode=mode).sigmoid()

    assert_trains_like_plain(Larger(), IMAGES)
