"""Kinds of modules under op plans: their training is the plain one, to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.aot.capture import capture_forward
from lowtide.solvers.solution import GraphSolution
from tests.helpers.eager import assert_trains_like_plain, mean_square


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


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = (self.query(words) @ self.key(words).mT).softmax(-1)
        return F.gelu(scores @ words), scores


class Blocks(nn.Module):
    """Blocks that are graphs of their own. The scores that they return are dropped, at once or later."""

    def __init__(self, at_once: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(3))
        self.at_once = at_once

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            torch._dynamo.graph_break()
            if self.at_once:
                words = block(words)[0]
            else:
                results = block(words)
                words = results[0]
        return words


@pytest.mark.parametrize("at_once", [True, False])
def test_a_graphs_results_are_there_when_its_forward_ends_though_its_caller_drops_them(at_once: bool) -> None:
    assert_trains_like_plain(Blocks(at_once), torch.randn(2, 20, 16))


def test_a_graphs_results_are_counted_for_as_long_as_its_caller_holds_them() -> None:
    """While a block runs, the scores of the one before are held in a variable."""
    peaks = [
        lowtide.plan(Blocks(at_once), torch.randn(2, 20, 16), budget="min", loss=mean_square, profile=False)
        for at_once in (True, False)
    ]
    scores_bytes = 2 * 20 * 20 * 4
    assert peaks[1].peak_bytes - peaks[0].peak_bytes == 2 * scores_bytes


@pytest.mark.parametrize("ends", [True, False])
def test_what_dynamo_leaves_in_circles_where_graphs_end_is_not_held_to_the_end_of_the_step(
    ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Blocks(at_once=True) if ends else Attention()
    collected: list[tuple[int, ...]] = []  # of all generations, or of some as Dynamo itself does it
    monkeypatch.setattr("lowtide.aot.capture.gc.collect", lambda *some: collected.append(some))
    capture_forward(model, (torch.randn(2, 20, 16),), mean_square)
    assert (() in collected) == ends


class Masked(nn.Module):
    """A mask that one graph makes and the next one reads at its beginning; its caller holds it meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(words).tril()
        torch._dynamo.graph_break()
        words = self.layer(words + mask)
        scale = words.detach().repeat(1, 4).exp().mean()
        return (words * scale).square().mean()


def test_what_a_graph_is_given_is_counted_for_as_long_as_its_caller_holds_it() -> None:
    model, words = Masked(), torch.randn(64, 64)
    solution = lowtide.plan(model, words, budget="min")
    assert isinstance(solution, GraphSolution)
    lowtide.apply(model, solution)
    model(words).backward()
    model.zero_grad(set_to_none=True)
    reading = lowtide.measure(lambda: model(words).backward(), device="cpu")
    assert abs(reading.growth_bytes - solution.timeline.growth_bytes) < 64


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


def test_a_frozen_layer_of_every_second_number() -> None:
    """Running takes the rows of the whole batch as one matrix; tracing in Python would multiply by batch."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.mix = nn.Linear(8, 8).requires_grad_(False)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.mix(torch.fft.fft2(self.stem(words)).real))

    assert_trains_like_plain(Mixed(), torch.randn(3, 6, 8))
