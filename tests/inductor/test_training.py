"""Training with `kernels="inductor"`, end to end on the CPU: numbers, memory, and what is left alone."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lowtide
from lowtide.backend import plans_of
from lowtide.compat.inductor import missing_compiler
from lowtide.errors import InfeasibleBudget
from lowtide.execute.corrected import Corrected
from lowtide.ir.graph import Phase
from lowtide.solvers.solution import GraphSolution

NO_COMPILER = missing_compiler("cpu")
pytestmark = pytest.mark.skipif(NO_COMPILER is not None, reason=f"{NO_COMPILER} is not here")

SEED_BYTES = 4  # the gradient of the loss: to the plan it is there before, to a measured step it is not
Gradients = Mapping[str, Tensor]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture(autouse=True)
def codes(monkeypatch: pytest.MonkeyPatch) -> list[Corrected]:
    """What became known of generated code, in the order of the plans."""
    found: list[Corrected] = []
    made = Corrected.__init__

    def note(self: Corrected, *args: Any) -> None:
        made(self, *args)
        found.append(self)

    monkeypatch.setattr(Corrected, "__init__", note)
    return found


class Pictures(nn.Module):
    """Two convolutions with BatchNorm, a shortcut, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.second = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = torch.relu(self.norms[0](self.first(images)))
        x = torch.relu(self.norms[1](self.second(x)) + x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def pictures() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 3, 16, 16), torch.arange(8)


class Layers(nn.Module):
    """An embedding, layers with a norm and dropout, a head and its loss; the head is wide beside the rest."""

    WORDS = 300

    def __init__(self, *, dropout: float = 0.0, breaks: bool = False, logits: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(self.WORDS, 16)
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)
        self.head, self.dropout = nn.Linear(16, self.WORDS, bias=False), nn.Dropout(dropout)
        self.breaks, self.logits = breaks, logits

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.words(ids)
        x = x + self.dropout(self.down(F.gelu(self.up(x))))
        if self.breaks:
            torch._dynamo.graph_break()
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits, labels)
        return (loss, logits) if self.logits else loss


def words(count: int = 64) -> tuple[Tensor, Tensor]:
    ids = torch.arange(count) * 7 % Layers.WORDS
    return ids, ids * 3 % Layers.WORDS


def gradients(model: nn.Module, args: tuple[Any, ...], run: Callable[..., Any] | None = None) -> Gradients:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    loss = (model if run is None else run)(*args)
    (loss if isinstance(loss, Tensor) else loss[0]).backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


def exact(model: nn.Module, args: tuple[Any, ...]) -> Gradients:
    """Gradients in twice the precision."""
    wide = (each.double() if each.is_floating_point() else each for each in args)
    return gradients(copy.deepcopy(model).double(), tuple(wide))


def errors(found: Gradients, right: Gradients) -> dict[str, float]:
    """How far each gradient is off, as a part of what is largest in it."""
    assert found.keys() == right.keys()
    return {name: float((found[name] - each).abs().max() / each.abs().max()) for name, each in right.items()}


def assert_as_near_as_stock(
    model: nn.Module, args: tuple[Any, ...], found: Gradients, plain: nn.Module
) -> None:
    """At most 1.5 times as far from exact gradients as those of a stock torch.compile, roundings aside."""
    right = exact(plain, args)
    stock = copy.deepcopy(plain)
    theirs = errors(gradients(stock, args, torch.compile(stock, dynamic=False)), right)
    for name, error in errors(found, right).items():
        assert error <= max(1.5 * theirs[name], 1e-6), (name, error, theirs[name])
    for (name, one), other in zip(model.named_buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def planned(model: nn.Module, args: tuple[Any, ...], **options: Any) -> GraphSolution:
    asked: dict[str, Any] = {"profile": False, "effort": "quick", "kernels": "inductor", **options}
    solution = lowtide.plan(model, args, **asked)
    assert isinstance(solution, GraphSolution)
    assert solution.graph.fused is not None
    return solution


def measured_growth(model: nn.Module, args: tuple[Any, ...]) -> int:
    def step() -> None:
        made = model(*args)
        (made if isinstance(made, Tensor) else made[0]).backward()

    model.zero_grad(set_to_none=True)
    return lowtide.measure(step, device="cpu").growth_bytes


def known_growth(found: Corrected, solution: GraphSolution) -> int:
    return found.peak_bytes - solution.timeline.resident_bytes + SEED_BYTES


# Numbers and memory -----------------------------------------------------------------------------------


def test_convolutions_with_batch_norm_train_as_in_a_stock_compile(codes: list[Corrected]) -> None:
    model, args = Pictures(), pictures()
    plain = copy.deepcopy(model)
    solution = planned(model, args, budget="min", profile=True)
    assert solution.recomputed
    lowtide.apply(model, solution)
    assert_as_near_as_stock(model, args, gradients(model, args), plain)
    assert measured_growth(model, args) <= known_growth(codes[0], solution)


@pytest.mark.parametrize("budget", ["min", pytest.param("70%", marks=pytest.mark.long)])
def test_a_language_model_trains_as_in_a_stock_compile_within_what_was_said(
    budget: str, codes: list[Corrected]
) -> None:
    model, args = Layers(), words()
    plain = copy.deepcopy(model)
    solution = planned(model, args, budget=budget)
    lowtide.apply(model, solution)
    assert_as_near_as_stock(model, args, gradients(model, args), plain)
    for _ in range(2):
        growth = measured_growth(model, args)
        assert growth == known_growth(codes[0], solution)
        resident = solution.timeline.resident_bytes
        assert solution.budget_bytes is None or resident + growth <= solution.budget_bytes + SEED_BYTES


def test_a_head_that_is_cut_is_never_whole_and_trains_the_same(codes: list[Corrected]) -> None:
    model, args = Layers(), words(256)
    plain = copy.deepcopy(model)
    solution = planned(model, args, budget="min", tiles=True)
    assert solution.graph.fused is not None
    assert solution.graph.fused.plain.tiled is not None
    lowtide.apply(model, solution)
    assert_as_near_as_stock(model, args, gradients(model, args), plain)
    logits_bytes = 256 * Layers.WORDS * 4
    growth = measured_growth(model, args)
    parameters = sum(each.nbytes for each in model.parameters())
    assert growth < logits_bytes / 2 + parameters
    assert growth == known_growth(codes[0], solution)


def small(name: str) -> tuple[nn.Module, tuple[Tensor]]:
    """A small model of transformers whose forward is its loss, and its batch."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if name == "llama":
            config = transformers.LlamaConfig(
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=1000,
                use_cache=False,
            )
            inner = transformers.LlamaForCausalLM(config)
        else:
            config = transformers.GPT2Config(
                n_embd=32,
                n_layer=2,
                n_head=4,
                vocab_size=1000,
                use_cache=False,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
            inner = transformers.GPT2LMHeadModel(config)
    return LossAlone(inner), (torch.randint(1000, (2, 64)),)


class LossAlone(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.train()

    def forward(self, ids: Tensor) -> Any:
        return self.inner(input_ids=ids, labels=ids).loss


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("options", [{"budget": "min"}, {"budget": "75%"}, {"budget": "min", "tiles": True}])
@pytest.mark.filterwarnings("ignore")
def test_models_of_transformers_train_as_in_a_stock_compile(
    name: str, options: dict[str, Any], codes: list[Corrected]
) -> None:
    model, args = small(name)
    plain = copy.deepcopy(model)
    solution = planned(model, args, **options)
    lowtide.apply(model, solution)
    assert_as_near_as_stock(model, args, gradients(model, args), plain)
    growth = measured_growth(model, args)
    assert growth <= known_growth(codes[0], solution)
    assert growth >= 0.95 * known_growth(codes[0], solution)


# What else a step does --------------------------------------------------------------------------------


def test_a_backward_that_runs_again_leaves_what_it_was_given(codes: list[Corrected]) -> None:
    model, args = Layers(), words()
    plain = copy.deepcopy(model)
    lowtide.apply(model, planned(model, args, budget="80%"))
    for owner in (model, plain):
        loss = owner(*args)
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    del loss
    expected = gradients(plain, args)
    for name, each in gradients(model, args).items():
        torch.testing.assert_close(each, expected[name])


def test_dropout_drops_the_same_in_both_halves_and_once_a_step() -> None:
    """Masks are drawn by the kernels of plain training: so its gradients and its random stream are those."""
    model, args = Layers(dropout=0.5), words()
    plain = copy.deepcopy(model)
    lowtide.apply(model, planned(model, args, budget="min"))
    found = gradients(model, args)
    after = torch.get_rng_state()
    for name, each in gradients(plain, args).items():
        torch.testing.assert_close(found[name], each)
    assert torch.equal(after, torch.get_rng_state())
    model.zero_grad(set_to_none=True)
    torch.manual_seed(8)
    assert not torch.equal(model(*args), plain(*args))  # another draw


def test_an_output_beside_the_loss_and_a_model_that_is_as_it_was() -> None:
    model, args = Layers(logits=True), words()
    plain = copy.deepcopy(model)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    solution = planned(model, args, budget="min", loss=first)
    assert lowtide.apply(model, solution) is model
    loss, logits = model(*args)
    expected, theirs = plain(*args)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits, theirs)
    loss.backward()
    expected.backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert type(model) is Layers
    assert list(model.state_dict()) == list(before)
    lowtide.remove(model)
    assert "forward" not in vars(model)
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])
    assert torch.equal(model(*args)[0], expected)


def first(results: Any) -> Tensor:
    found: Tensor = results[0]
    return found


def test_autocast_runs_in_half_precision_as_in_a_stock_compile(codes: list[Corrected]) -> None:
    class InHalf(Layers):
        def forward(self, ids: Tensor, labels: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids, labels)

    model, args = InHalf(), words()
    plain = copy.deepcopy(model)
    solution = planned(model, args, budget="min", profile=True)
    lowtide.apply(model, solution)
    right = exact(Layers(), args)
    stock = copy.deepcopy(plain)
    stocks = errors(gradients(stock, args, torch.compile(stock, dynamic=False)), right)
    for name, error in errors(gradients(model, args), right).items():
        assert error <= max(1.5 * stocks[name], 1e-2), (name, error, stocks[name])
    assert measured_growth(model, args) <= known_growth(codes[0], solution)


def test_a_plan_from_a_file_is_put_to_work(tmp_path: Any, codes: list[Corrected]) -> None:
    model, args = Layers(), words()
    plain = copy.deepcopy(model)
    solution = planned(model, args, budget="min")
    lowtide.save_solution(solution, tmp_path / "plan.json")
    loaded = lowtide.load_solution(tmp_path / "plan.json")
    assert loaded == solution
    lowtide.apply(model, loaded)
    expected = gradients(plain, args)
    for name, each in gradients(model, args).items():
        torch.testing.assert_close(each, expected[name])
    assert measured_growth(model, args) == known_growth(codes[0], solution)


# Budgets that the first code exceeds --------------------------------------------------------------------


def test_a_step_whose_code_exceeds_the_budget_is_planned_anew(codes: list[Corrected]) -> None:
    """After the first step its forward is said to hold 20,000 bytes too much: so the next plan holds less."""
    model, args = Layers(), words()
    expected = gradients(copy.deepcopy(model), args)
    solution = planned(model, args, budget="90%")
    assert solution.budget_bytes is not None
    lowtide.apply(model, solution)
    gradients(model, args)
    (known,) = codes
    before = known.peak_bytes
    assert before <= solution.budget_bytes
    known.note((0, Phase.FORWARD), solution.budget_bytes + 20_000 - solution.timeline.resident_bytes)
    for _ in range(2):
        for name, each in gradients(model, args).items():
            torch.testing.assert_close(each, expected[name])
    assert known.peak_bytes < before
    assert measured_growth(model, args) <= known_growth(known, solution)


def test_a_budget_that_no_code_keeps_is_refused_with_one_that_would_hold(
    monkeypatch: pytest.MonkeyPatch, codes: list[Corrected]
) -> None:
    model, args = Layers(), words()
    solution = planned(model, args, budget="80%")
    read = Corrected.note
    monkeypatch.setattr(Corrected, "note", lambda self, half, growth: read(self, half, growth + 10**6))
    lowtide.apply(model, solution)

    def steps() -> None:
        for _ in range(6):
            gradients(model, args)

    with pytest.raises(InfeasibleBudget, match="needed by code that Inductor has generated") as refusal:
        steps()
    assert refusal.value.budget_bytes == solution.budget_bytes
    assert refusal.value.least_bytes > 10**6


# torch.compile(backend="lowtide") -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # Dynamo looks, where graphs break
@pytest.mark.parametrize("tiles", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_step_of_several_graphs_is_planned_as_one(tiles: bool, codes: list[Corrected]) -> None:
    model, args = Layers(breaks=True), words()
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"budget": "min", "kernels": "inductor", "profile": False, "tiles": tiles}
    step = torch.compile(model, backend="lowtide", options=options, dynamic=False)
    expected = gradients(plain, args)
    for _ in range(3):
        for name, each in gradients(model, args, step).items():
            torch.testing.assert_close(each, expected[name])
    (solution,) = plans_of(options)
    assert solution.graph.fused is not None
    assert {op.section for op in solution.graph.ops} >= {0, 1}
    model.zero_grad(set_to_none=True)
    growth = lowtide.measure(lambda: step(*args).backward(), device="cpu").growth_bytes
    assert growth <= known_growth(codes[0], solution)
