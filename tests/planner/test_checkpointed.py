"""Checkpointing as people switch it on: around what, and that it computes what the model did."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.errors import BadRequest
from lowtide.planner.checkpointed import switch_checkpointing_on


@pytest.mark.parametrize(
    ("name", "sizes", "how"),
    [
        ("resnet18", {"image": 32}, "torch.utils.checkpoint around each of 8 blocks (BasicBlock)"),
        ("densenet121", {"image": 32}, "torch.utils.checkpoint around each of 58 blocks (DenseLayer)"),
        ("vit", {"image": 32, "width": 32, "heads": 2}, "torch.utils.checkpoint around each of 12 blocks"),
        ("vgg11", {"image": 32}, "torch.utils.checkpoint around 5 stretches of 21 modules in a row"),
    ],
)
def test_what_repeats_is_checkpointed_and_computes_the_same(
    name: str, sizes: dict[str, int], how: str
) -> None:
    torch.manual_seed(0)
    work = zoo.workload(name, zoo.Sizes(batch=2, classes=3, **sizes))
    other = copy.deepcopy(work.model)
    assert switch_checkpointing_on(other).startswith(how)
    assert work.loss is not None
    found = []
    for model in (work.model, other):
        torch.manual_seed(1)
        loss = work.loss(model(*work.args))
        loss.backward()
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
    for mine, others in zip(*found, strict=True):
        torch.testing.assert_close(mine, others)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found: torch.Tensor = self.second(self.first(x).relu())
        return found


def test_blocks_run_again_in_the_backward() -> None:
    model = nn.Sequential(*(Counting() for _ in range(3)))
    switch_checkpointing_on(model)
    loss = model(torch.ones(2, 4)).sum()
    assert [block.calls for block in model] == [1, 1, 1]
    loss.backward()
    assert [block.calls for block in model] == [2, 2, 2]


def test_the_library_knows_best() -> None:
    class Own(nn.Module):
        supports_gradient_checkpointing = True

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Counting() for _ in range(3))
            self.on = False

        def gradient_checkpointing_enable(self) -> None:
            self.on = True

    wrapped = nn.Sequential(Own())
    assert switch_checkpointing_on(wrapped) == "transformers' gradient_checkpointing_enable"
    assert wrapped[0].on


def test_a_model_of_timm_that_has_none_is_checkpointed_around_its_blocks() -> None:
    class Without(nn.Sequential):
        def set_grad_checkpointing(self, enable: bool = True) -> None:
            assert not enable, "gradient checkpointing not supported"

    found = switch_checkpointing_on(Without(*(Counting() for _ in range(4))))
    assert found == "torch.utils.checkpoint around each of 4 blocks (Counting)"


def test_no_stretch_begins_with_what_works_in_place() -> None:
    parts = [part for _ in range(5) for part in (nn.Linear(4, 4), nn.LeakyReLU(0.5, inplace=True))]
    plain, other = nn.Sequential(*parts), copy.deepcopy(nn.Sequential(*parts))
    switch_checkpointing_on(other)
    x = torch.randn(3, 4)
    plain(x).sum().backward()
    other(x).sum().backward()
    for mine, others in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, others.grad)


def test_a_model_in_which_nothing_repeats_is_refused() -> None:
    with pytest.raises(BadRequest, match="it is not clear around what to put a checkpoint"):
        switch_checkpointing_on(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
