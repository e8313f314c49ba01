"""Kinds of modules under op plans: their training is the plain one, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tests.helpers.same_training import assert_same_training


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

    def forward(self, *images: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.network(image).relu().square().mean() for image in images]).sum()


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("budget", ["min", "100%"])
def test_a_batch_norm_that_runs_several_times_counts_each(times: int, budget: str) -> None:
    model = assert_same_training(Siamese(), tuple(IMAGES + n for n in range(times)), budget=budget)
    assert model.get_buffer("network.1.num_batches_tracked") == 2 * times


class Normalised(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 3))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images).square().mean()


@pytest.mark.parametrize("affine", [True, False])
def test_an_instance_norm_with_running_statistics(affine: bool) -> None:
    norm = nn.InstanceNorm2d(4, affine=affine, track_running_stats=True)
    assert_same_training(Normalised(norm), (IMAGES,))
