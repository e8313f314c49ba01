"""Training with `tiles=True`, end to end: within the budget, as much as was said, as plain training does."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.solvers.solution import GraphSolution

WORDS = 256
Backward = Callable[[nn.Module, tuple[Any, ...]], object]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Language(nn.Module):
    """An MLP and a head that is wide beside it; dropout in between."""

    def __init__(self, *, dropout: float = 0.1, tied: bool = False, breaks: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, 16)
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)
        self.head, self.dropout = nn.Linear(16, WORDS, bias=False), nn.Dropout(dropout)
        self.breaks = breaks
        if tied:
            self.head.weight = self.words.weight

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + self.dropout(self.down(F.gelu(self.up(x))))
        if self.breaks:
            torch._dynamo.graph_break()
        found: Tensor = self.head(self.norm(x))
        return found

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), labels.flatten())


class InHalf(Language):
    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(tokens, labels)


class WithLogits(Language):
    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        found = self.logits(tokens)
        return F.cross_entropy(found.flatten(0, 1), labels.flatten()), found


class TwoLosses(Language):
    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        return super().forward(tokens, labels) + 0.3 * super().forward(tokens, labels.roll(1, 1))


def batch(sentences: int = 2, tokens: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sentences + tokens)
    made = torch.randint(WORDS, (2, sentences, tokens), generator=generator)
    return made[0], made[1]


def backward(model: nn.Module, args: tuple[Any, ...]) -> object:
    return model(*args).backward()


def gradients(
    model: nn.Module, args: tuple[Any, ...], run: Backward, times: int = 1
) -> dict[str, Tensor | None]:
    torch.manual_seed(7)
    for _ in range(times):
        run(model, args)
    found = {name: each.grad for name, each in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_close(
    model: nn.Module, plain: nn.Module, args: tuple[Any, ...], run: Backward, **how: Any
) -> None:
    """Gradients are those of plain training, within roundings of what is largest."""
    tolerance = how.pop("tolerance", 1e-5)
    found, expected = gradients(model, args, run, **how), gradients(plain, args, run, **how)
    for name, right in expected.items():
        mine = found[name]
        assert (mine is None) == (right is None), name
        if mine is not None and right is not None:
            assert (mine - right).abs().max() <= tolerance * right.abs().max(), name


def tiled_plan(model: nn.Module, args: tuple[Any, ...], **options: Any) -> GraphSolution:
    solution = lowtide.plan(model, args, tiles=True, profile=False, effort="quick", **options)
    assert isinstance(solution, GraphSolution)
    return solution


def slices(solution: GraphSolution) -> int:
    return 0 if solution.graph.tiled is None else len(solution.graph.tiled.blocks)


# As much memory as was said -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", ["min", "40%", "60%"])
def test_a_step_in_slices_holds_what_was_said_and_keeps_a_budget_that_nothing_else_keeps(budget: str) -> None:
    model, args = Language(), batch()
    plain = copy.deepcopy(model)
    untiled = lowtide.plan(model, args, budget="min", profile=False, effort="quick")
    solution = tiled_plan(model, args, budget=budget)
    assert slices(solution) > 0
    assert solution.peak_bytes < untiled.peak_bytes
    assert solution.budget_bytes is None or solution.peak_bytes <= solution.budget_bytes
    lowtide.apply(model, solution)
    assert_close(model, plain, args, backward)
    reading = lowtide.measure(lambda: backward(model, args), device="cpu")
    assert reading.growth_bytes == pytest.approx(solution.timeline.growth_bytes, rel=1e-3)


class Shifted(Language):
    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        found = self.logits(tokens)[..., :-1, :].contiguous()
        return F.cross_entropy(found.view(-1, found.size(-1)), labels[..., 1:].reshape(-1))


def test_logits_that_are_shifted_by_slicing_are_never_whole() -> None:
    model, args = Shifted(), batch(sentences=4)
    plain = copy.deepcopy(model)
    solution = tiled_plan(model, args, budget="min")
    logits_bytes = 4 * 32 * WORDS * 4
    made = {value for op in solution.graph.ops for value in op.creates}
    assert max(solution.graph.values[value].bytes for value in made) < logits_bytes / 2
    lowtide.apply(model, solution)
    assert_close(model, plain, args, backward)


class Attending(Language):
    """Attention that is written out, with dropout of its scores, as GPT-2 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        scores = torch.baddbmm(x[:, :, :1], self.query(x), self.key(x).transpose(1, 2), alpha=0.25, beta=0)
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        kept = self.dropout(scores.masked_fill(later, float("-inf")).softmax(-1))
        found: Tensor = self.head(self.norm(x + self.dropout(kept @ x)))
        return found


@pytest.mark.parametrize("seed", [0, 1])
def test_scores_of_attention_with_dropout_are_never_whole_but_for_what_is_dropped(seed: int) -> None:
    model, args = Attending(), batch(2, 512)
    plain = copy.deepcopy(model)
    solution = lowtide.plan(model, args, budget="min", tiles=True, effort="quick")
    assert isinstance(solution, GraphSolution)
    scores = 2 * 512 * 512
    sizes = [solution.graph.values[value].bytes for op in solution.graph.ops for value in op.creates]
    assert scores in sizes
    assert max(sizes) < 2 * scores
    masks = [op for op in solution.graph.ops if op.target == "aten.bernoulli_.float"]
    assert all(op.random for op in masks)
    lowtide.apply(model, solution)
    assert_close(model, plain, args, backward)
    streams = []
    for each in (model, plain):
        torch.manual_seed(seed)
        backward(each, args)
        streams.append(torch.rand(4))
        each.zero_grad()
    assert torch.equal(*streams)
    reading = lowtide.measure(lambda: backward(model, args), device="cpu")
    assert reading.growth_bytes == pytest.approx(solution.timeline.growth_bytes, rel=1e-3)


# Kinds of steps -------------------------------------------------------------------------------------------


def thrice(model: nn.Module, args: tuple[Any, ...]) -> object:
    return (model(*args) * 3).backward()


def beside_another(model: nn.Module, args: tuple[Any, ...]) -> object:
    decay = torch.stack([each.square().sum() for each in model.parameters()]).sum()
    return (model(*args) + 0.1 * decay).backward()


def twice_through(model: nn.Module, args: tuple[Any, ...]) -> object:
    loss = model(*args)
    loss.backward(retain_graph=True)
    return loss.backward()


def first_result(model: nn.Module, args: tuple[Any, ...]) -> object:
    return model(*args)[0].backward()


STEPS: dict[str, tuple[Language, Backward, dict[str, Any], dict[str, Any]]] = {
    "a loss that is scaled": (Language(), thrice, {}, {}),
    "a loss beside another": (Language(), beside_another, {}, {}),
    "two micro-batches": (Language(), backward, {"accumulate": 2}, {"times": 2}),
    "a backward twice": (Language(dropout=0.0), twice_through, {}, {}),
    "tied weights": (Language(tied=True), backward, {}, {}),
    "a graph break": (Language(breaks=True), backward, {}, {}),
    "logits that are returned": (WithLogits(), first_result, {}, {}),
    "two losses": (TwoLosses(), backward, {}, {}),
    "autocast": (InHalf(dropout=0.0), backward, {}, {"tolerance": 0.02}),
}


@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_those_of_plain_training(name: str) -> None:
    model, run, options, how = STEPS[name]
    model, plain = copy.deepcopy(model), copy.deepcopy(model)
    solution = tiled_plan(model, batch(), budget="min", **options)
    assert slices(solution) > 0
    lowtide.apply(model, solution, **options)
    assert_close(model, plain, batch(), run, **how)


def test_a_loss_outside_of_the_model() -> None:
    args = (torch.randn(8, 3, 16, 16),)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(2, 16), nn.ReLU(), nn.Conv2d(16, 4, 3), nn.AvgPool2d(2)
    )
    plain = copy.deepcopy(model)

    def run(found: nn.Module, given: tuple[Any, ...]) -> object:
        return found(*given).tanh().square().mean().backward()

    solution = tiled_plan(model, args, budget="min", loss=lambda output: output.tanh().square().mean())
    assert slices(solution) > 0
    lowtide.apply(model, solution)
    assert_close(model, plain, args, run)


def test_a_loss_of_logits_outside_of_the_model() -> None:
    """What is scaled after a backward that ran ahead is in no block; the search once took it for one."""

    class Logits(Language):
        def forward(self, tokens: Tensor, labels: Tensor) -> Any:
            return self.logits(tokens)

    model, (tokens, labels) = Logits(), batch()
    plain = copy.deepcopy(model)

    def loss(output: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1), labels.flatten())

    def run(found: nn.Module, given: tuple[Any, ...]) -> object:
        return loss(found(*given)).backward()

    lowtide.apply(model, tiled_plan(model, (tokens, labels), budget="min", loss=loss))
    assert_close(model, plain, (tokens, labels), run)


def test_training_over_batches_of_which_one_has_another_shape() -> None:
    model = Language()
    plain = copy.deepcopy(model)
    lowtide.optimize(model, batch(), budget="40%", tiles=True, profile=False, effort="quick", optimizer="sgd")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # another shape is told of
        for step, args in enumerate([batch(), batch(), batch(3, 20), batch(3, 20), batch()]):
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                torch.manual_seed(step)
                backward(each, args)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
    for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_a_tiled_plan_in_an_arena() -> None:
    model, args = Language(dropout=0.0), batch()
    plain = copy.deepcopy(model)
    solution = tiled_plan(model, args, budget="min")
    assert slices(solution) > 0
    step = lowtide.in_arena(model, args, solution=solution)
    for _ in range(2):
        for each in (model, plain):
            each.zero_grad(set_to_none=True)
        found, right = step(), plain(*args)
        right.backward()
        torch.testing.assert_close(found.detach(), right.detach())
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert other.grad is not None
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


# Where nothing can be cut ---------------------------------------------------------------------------------


class Normed(nn.Module):
    """What needs most is a BatchNorm's, which ties the images of a batch together."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.leave(self.norm(self.enter(images)).relu())
        return found.mean((1, 2, 3)).square().sum()


def test_a_step_of_which_nothing_can_be_cut_is_planned_as_ever_and_it_is_said() -> None:
    model, images = Normed(), torch.randn(4, 3, 32, 32)
    reason = "nothing of the step runs in slices: nothing that can be cut makes it peak lower"
    with pytest.warns(UserWarning, match=reason):
        solution = tiled_plan(model, (images,), budget="min")
    assert slices(solution) == 0
    assert reason in solution.remark
    untiled = lowtide.plan(model, images, budget="min", profile=False, effort="quick")
    assert solution.peak_bytes == untiled.peak_bytes


def test_what_needs_no_slices_has_none_and_nothing_is_said() -> None:
    solution = tiled_plan(Language(), batch(), budget="100%")
    assert (slices(solution), solution.remark) == (0, "")


def test_slices_are_for_methods_that_plan_op_by_op() -> None:
    with pytest.raises(lowtide.BadRequest, match="tiles are for methods that plan op by op"):
        lowtide.plan(Language(), batch(), method="rotor", budget="60%", tiles=True)
