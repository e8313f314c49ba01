"""Op-level plans at work: the peak is what was promised, and nothing else has changed."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.errors import BadRequest, CannotApply, InfeasibleBudget
from lowtide.ir.assumptions import NoGradient
from lowtide.planner.ops import StepBudget
from lowtide.solvers import at_effort
from lowtide.solvers.solution import GraphSolution
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import Arguments, training_step
from lowtide.zoo.gpt import GPT
from tests.helpers.effort import long_but
from tests.helpers.narrowed import narrowed
from tests.helpers.transformer_models import KINDS, small_transformer

Step = Callable[[], Any]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


class Net(nn.Module):
    """Convolutions, BatchNorm and dropout; the loss is inside if there are labels."""

    def __init__(self, width: int = 16, depth: int = 4, broken: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Dropout(0.1),
            )
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 10)
        self.broken = broken

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks[:2]:
            x = x + block(x)
        if self.broken:
            torch._dynamo.graph_break()
        for block in self.blocks[2:]:
            x = x + block(x)
        x = self.head(x.mean((2, 3)))
        return x if labels is None else F.cross_entropy(x, labels)


IMAGES, LABELS = torch.randn(8, 3, 24, 24), torch.randint(0, 10, (8,))


def small(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def route(model: nn.Module) -> Any:
    """What stands in for the model's forward."""
    return model.__dict__["forward"]


def loss_of(output: Any) -> torch.Tensor:
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return found


def trained(model: nn.Module, *args: Any, loss: Any = loss_of, **kwargs: Any) -> Step:
    """A step from empty gradients and a known random state, that holds on to the output."""

    def step() -> Any:
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(1)
        output = model(*args, **kwargs)
        loss(output).backward()
        return output

    return step


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    """Gradients and buffers are equal to the last bit."""
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), name
        assert mine.grad is None or torch.equal(mine.grad, other.grad), name  # type: ignore[arg-type]
    for (name, mine_buffer), other_buffer in zip(model.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine_buffer, other_buffer), name


def growth(step: Step) -> int:
    """What a step holds beyond what was there; the 4 bytes with which the backward begins are resident."""
    return lowtide.measure(step, device="cpu").growth_bytes - 4


def assert_kept(solution: GraphSolution, measured: int) -> None:
    predicted = solution.timeline.growth_bytes
    assert abs(measured - predicted) <= predicted // 100
    if solution.budget_bytes is not None:
        assert measured <= solution.budget_bytes - solution.timeline.resident_bytes


# Every model ------------------------------------------------------------------------------------------


def zoo_case(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]:
    from lowtide.zoo import Sizes, workload

    sizes = {
        "alexnet": {"batch": 4, "image": 64},
        "inception_v3": {"batch": 2, "image": 96},
        "lstm": {"batch": 4, "tokens": 12, "width": 32},
        "gpt": {"batch": 2, "tokens": 32, "layers": 3, "width": 64, "heads": 4},
        "vit": {"batch": 2, "image": 32, "layers": 3, "width": 64, "heads": 4},
        "mlp": {"batch": 16},
        "preresnet": {"batch": 2, "image": 32},
        "densenet121": {"batch": 2, "image": 32},
    }.get(name, {"batch": 2, "image": 32})
    torch.manual_seed(0)
    work = workload(name, Sizes(**sizes))
    return narrowed(work.model), work.args, dict(work.kwargs or {}), work.loss


ZOO = ["alexnet", "vgg11", "resnet18", "densenet121", "unet", "gpt", "vit", "lstm", "mlp"]


def solved_or_least(step: StepBudget, budget: str) -> GraphSolution:
    """A quick plan within the budget or, if that is too small, within the one that the refusal names."""
    quick = at_effort("auto", "quick")
    try:
        return step.solve(quick, budget)
    except InfeasibleBudget as error:
        return step.solve(quick, error.least_bytes)


@pytest.mark.parametrize(
    "name", long_but([*ZOO, *(f"hf:{kind}" for kind in KINDS)], "gpt", "mlp", "hf:llama")
)
def test_every_budget_is_kept_and_gradients_are_equal(name: str) -> None:
    loss: Any = None
    args: tuple[Any, ...] = ()
    if name.startswith("hf:"):
        model, kwargs = small_transformer(name[3:])
    else:
        model, args, kwargs, loss = zoo_case(name)
    plain = copy.deepcopy(model)
    state = copy.deepcopy(model.state_dict())
    step = StepBudget(StepSpec(model, Arguments(args, kwargs), loss))
    trained(plain, *args, loss=loss or loss_of, **kwargs)()
    times: list[float] = []
    for budget in ("90%", "75%", "60%", "45%", "min"):
        solution = solved_or_least(step, budget)
        lowtide.apply(model, solution)
        run = trained(model, *args, loss=loss or loss_of, **kwargs)
        run()
        model.load_state_dict(state)
        assert_kept(solution, growth(run))
        assert_same(model, plain)
        times.append(solution.extra_seconds)
    assert times == sorted(times)  # more budget never costs more time


# The model stays what it was --------------------------------------------------------------------------


def planned(model: nn.Module, budget: str = "60%", **options: Any) -> GraphSolution:
    solution = lowtide.plan(model, (IMAGES, LABELS), budget=budget, effort="quick", **options)
    assert isinstance(solution, GraphSolution)
    return solution


def test_class_parameters_and_keys_stay_and_the_plan_comes_off() -> None:
    model = small()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    solution = planned(model)
    assert "forward" not in vars(model)
    assert lowtide.apply(model, solution) is model
    assert type(model) is Net
    assert list(model.state_dict()) == keys
    assert all(mine is other for mine, other in zip(model.parameters(), parameters, strict=True))
    lowtide.remove(model)
    assert "forward" not in vars(model)


def test_twenty_steps_of_training_are_the_same() -> None:
    model = small()
    plain = copy.deepcopy(model)
    lowtide.optimize(model, (IMAGES, LABELS), budget="60%", optimizer="adamw")
    losses: list[list[torch.Tensor]] = []
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        torch.manual_seed(3)
        losses.append([])
        for _ in range(20):
            optimizer.zero_grad()
            loss = each(IMAGES, LABELS)
            loss.backward()
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
            losses[-1].append(loss.detach())
    assert torch.equal(torch.stack(losses[0]), torch.stack(losses[1]))
    assert losses[0][-1] < losses[0][0]
    assert_same(model, plain)


def test_without_gradients_and_in_evaluation_there_is_no_plan() -> None:
    model = lowtide.optimize(small(), (IMAGES, LABELS), budget="60%")
    plain = small()
    with torch.no_grad():
        assert torch.equal(model.eval()(IMAGES), plain.eval()(IMAGES))
    assert torch.equal(model(IMAGES), plain(IMAGES))  # another number of arguments, and nothing is planned
    assert not route(model)._courses


@pytest.mark.parametrize("budget", ["85%", "min"])
def test_a_large_output_whose_loss_is_outside_is_counted_while_its_gradient_is_held(budget: str) -> None:
    torch.manual_seed(0)
    model = GPT(layers=3, width=32, heads=4, vocab=600, context=32)
    words, next_words = torch.randint(600, (4, 32)), torch.randint(600, (4 * 32,))

    def loss(scores: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(scores.flatten(0, 1), next_words)

    solution = lowtide.plan(model, words, loss=loss, budget=budget)
    assert isinstance(solution, GraphSolution)
    lowtide.apply(model, solution)
    step = training_step(model, words, loss)
    step()
    model.zero_grad()
    assert_kept(solution, growth(step))


def test_a_copy_is_planned_too_and_stands_alone() -> None:
    model = lowtide.optimize(small(), (IMAGES, LABELS), budget="60%")
    copied, plain = copy.deepcopy(model), small()
    trained(copied, IMAGES, LABELS)()
    copied.load_state_dict(plain.state_dict())
    (solution,) = lowtide.plans_of(copied)
    assert isinstance(solution, GraphSolution)
    assert_kept(solution, growth(trained(copied, IMAGES, LABELS)))
    trained(plain, IMAGES, LABELS)()
    assert_same(copied, plain)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_planned_model_is_not_pickled_whole() -> None:
    model = lowtide.optimize(small(), (IMAGES, LABELS), budget="60%")
    with pytest.raises(pickle.PicklingError, match=r"Save its state_dict, or take the plan off first"):
        pickle.dumps(model)


def test_a_planned_model_dies_when_it_is_given_up() -> None:
    model = lowtide.optimize(small(), (IMAGES, LABELS), budget="60%")
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_a_plan_is_replaced_without_compiling_again() -> None:
    model, plain = small(), small()
    step = StepBudget(StepSpec(model, (IMAGES, LABELS)))
    lowtide.apply(model, step.solve("auto", "90%"))
    run = trained(model, IMAGES, LABELS)
    run()
    (course,) = route(model)._courses.values()
    lower = step.solve("auto", "min")
    lowtide.apply(model, lower)
    assert list(route(model)._courses.values()) == [course]
    model.load_state_dict(plain.state_dict())
    assert_kept(lower, growth(run))
    trained(plain, IMAGES, LABELS)()
    assert_same(model, plain)


# Kinds of models and steps ----------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is the output layer as well; several inputs, keywords and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))
        self.output = nn.Linear(32, 50, bias=False)
        self.output.weight = self.embedding.weight

    def forward(
        self, tokens: torch.Tensor, weights: torch.Tensor, *, shift: float = 0.0
    ) -> dict[str, torch.Tensor]:
        hidden = self.body(self.embedding(tokens)) * weights + shift
        scores = self.output(self.frozen(hidden) * self.scale)
        return {"loss": F.cross_entropy(scores.flatten(0, 1), tokens.flatten()), "hidden": hidden}


def test_tied_frozen_buffers_keywords_and_several_outputs() -> None:
    torch.manual_seed(0)
    model = Tied()
    plain = copy.deepcopy(model)
    tokens, weights = torch.randint(0, 50, (4, 64)), torch.rand(4, 64, 1)
    example = Arguments((tokens, weights), {"shift": 0.25})
    solution = lowtide.plan(model, example, budget="70%")
    assert isinstance(solution, GraphSolution)
    lowtide.apply(model, solution)
    run = trained(model, tokens, weights, shift=0.25, loss=lambda out: out["loss"])
    output = run()
    assert_kept(solution, growth(run))
    expected = trained(plain, tokens, weights, shift=0.25, loss=lambda out: out["loss"])()
    assert torch.equal(output["hidden"], expected["hidden"])
    assert_same(model, plain)
    assert model.frozen.weight.grad is None


def test_a_loss_outside_of_the_model_is_counted() -> None:
    model, plain = small(), small()

    def loss(output: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, LABELS)

    solution = lowtide.plan(model, (IMAGES,), budget="60%", loss=loss)
    assert isinstance(solution, GraphSolution)
    assert any(op.section == -1 for op in solution.graph.ops)
    lowtide.apply(model, solution)
    run = trained(model, IMAGES, loss=loss)
    run()
    model.load_state_dict(plain.state_dict())
    assert_kept(solution, growth(run))
    trained(plain, IMAGES, loss=loss)()
    assert_same(model, plain)


class Regularised(nn.Module):
    """Leaves a part of the loss on itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)
        self.penalty: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        self.penalty = hidden.square().mean()
        found: torch.Tensor = self.second(hidden)
        return found

    def loss(self, output: torch.Tensor) -> torch.Tensor:
        assert self.penalty is not None
        return output.square().mean() + self.penalty


def test_a_loss_may_read_what_the_forward_has_left_on_the_model() -> None:
    model, plain, x = Regularised(), Regularised(), torch.randn(4, 8)
    solution = lowtide.plan(model, (x,), loss=model.loss, budget="min")
    assert model.penalty is None
    lowtide.apply(model, solution)
    trained(model, x, loss=model.loss)()
    trained(plain, x, loss=plain.loss)()
    assert_same(model, plain)


def test_graphs_between_breaks_share_one_budget() -> None:
    model, plain = small(broken=True, depth=5), small(broken=True, depth=5)
    step = StepBudget(StepSpec(model, (IMAGES, LABELS)))
    assert {op.section for op in step.graph.ops} >= {0, 1}
    trained(plain, IMAGES, LABELS)()
    for budget in ("70%", "min"):
        solution = step.solve("auto", budget)
        assert {solution.graph.ops[op].section for op in solution.recomputed} == {0, 1}
        lowtide.apply(model, solution)
        run = trained(model, IMAGES, LABELS)
        run()
        model.load_state_dict(small(broken=True, depth=5).state_dict())
        assert_kept(solution, growth(run))
        assert_same(model, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_as_without_recomputation(dtype: torch.dtype) -> None:
    """Captured, autocast casts a weight where it is used; the bits are those of the graph that keeps all."""
    model = small()
    state = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)

    def run() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype):
            loss = model(IMAGES, LABELS)
        scaler.scale(loss).backward()

    with torch.autocast("cpu", dtype):
        step = StepBudget(StepSpec(model, (IMAGES, LABELS)))
        solutions = [step.solve("auto", budget) for budget in (1 << 40, "min")]
    assert solutions[1].recomputed
    gradients: list[list[torch.Tensor | None]] = []
    for solution in solutions:
        lowtide.apply(model, solution)
        model.load_state_dict(state)
        run()
        gradients.append([parameter.grad for parameter in model.parameters()])
        model.load_state_dict(state)
        assert_kept(solution, growth(run))
    for kept_all, recomputed in zip(*gradients, strict=True):
        assert kept_all is not None
        assert recomputed is not None
        assert torch.equal(kept_all, recomputed)


def test_declared_accumulation_is_inside_the_budget() -> None:
    model, plain = small(), small()
    solution = planned(model, budget="80%", accumulate=2)
    lowtide.apply(model, solution, accumulate=2)

    def twice(each: nn.Module) -> None:
        for parameter in each.parameters():
            parameter.grad = None
        torch.manual_seed(1)
        each(IMAGES, LABELS).backward()
        each(IMAGES, LABELS).backward()

    twice(model)
    model.load_state_dict(plain.state_dict())
    earlier = sum(parameter.nbytes for parameter in model.parameters())
    measured = lowtide.measure(lambda: twice(model), device="cpu").growth_bytes - earlier
    assert solution.budget_bytes is not None
    assert measured <= solution.budget_bytes - solution.timeline.resident_bytes
    twice(plain)
    assert_same(model, plain)


def test_undeclared_accumulation_is_warned_of_once() -> None:
    model = lowtide.optimize(small(), (IMAGES, LABELS), budget="80%")
    model(IMAGES, LABELS).backward()
    with pytest.warns(UserWarning, match=r"gradients of an earlier backward .* accumulate=2"):
        model(IMAGES, LABELS).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(IMAGES, LABELS).backward()


def test_the_optimizers_states_are_part_of_the_peak() -> None:
    model = small()
    without, with_states = planned(model, budget="min"), planned(model, budget="min", optimizer="adamw")
    states = 2 * sum(parameter.nbytes for parameter in model.parameters())
    assert with_states.timeline.resident_bytes - without.timeline.resident_bytes >= states


@pytest.mark.parametrize("is_first", [True, False])
def test_a_backward_can_be_run_twice_if_it_is_retained(is_first: bool) -> None:
    model, plain = small(), small()
    lowtide.apply(model, planned(model))
    for each in (model, plain):
        if not is_first:  # PyTorch compiles a backward when it first runs, and asks then
            trained(each, IMAGES, LABELS)()
            each.load_state_dict(small().state_dict())
            each.zero_grad()
        torch.manual_seed(1)
        loss = each(IMAGES, LABELS)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same(model, plain)


@pytest.mark.filterwarnings("ignore:lowtide. the model meets inputs without a plan")
def test_inputs_that_are_new_within_a_checkpoint_are_planned_without_it() -> None:
    """It would save the dry run's fakes, and run the model again on them."""
    model, plain = small(), small()
    lowtide.optimize(model, (IMAGES, LABELS), budget="70%", effort="quick", profile=False)
    for each in (model, plain):
        torch.manual_seed(1)
        images = IMAGES[:6].clone().requires_grad_()
        loss_of(checkpoint(each, images, LABELS[:6], use_reentrant=False)).backward()
    assert_same(model, plain)
    assert len(lowtide.plans_of(model)) == 2


def test_a_backward_of_the_backward_is_refused_with_advice() -> None:
    model = small()
    lowtide.apply(model, planned(model))
    loss = model(IMAGES, LABELS)
    with pytest.raises(
        CannotApply, match=r"cannot be differentiated \(create_graph=True\)\. Take the plan off"
    ):
        torch.autograd.grad(loss, [model.stem.weight], create_graph=True)


def test_a_backward_from_another_output_than_the_loss_is_refused() -> None:
    model, batch = small_transformer("gpt2")
    solution = lowtide.plan(model, batch, budget="90%")
    assert isinstance(solution, GraphSolution)
    assert any(isinstance(each, NoGradient) for each in solution.graph.assumptions)
    lowtide.apply(model, solution)
    output = model(**batch)
    assert output.logits.requires_grad
    with pytest.raises(CannotApply, match=r"a backward reaches an output .* Plan with a `loss` that uses"):
        (output.loss + output.logits.mean()).backward()


# Other inputs -----------------------------------------------------------------------------------------


def test_another_batch_is_planned_for_under_the_same_budget_and_said_once() -> None:
    model, plain = small(), small()
    lowtide.optimize(model, (IMAGES, LABELS), budget="80%")
    trained(model, IMAGES, LABELS)()
    (first,) = lowtide.plans_of(model)
    assert first.budget_bytes is not None
    with pytest.warns(UserWarning, match=r"float32\[6, 3, 24, 24\].* planned for now, under the same budget"):
        trained(model, IMAGES[:6], LABELS[:6])()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, IMAGES[:5], LABELS[:5])()
    model.load_state_dict(plain.state_dict())
    plans = lowtide.plans_of(model)
    assert plans[0] is first
    assert len(plans) == 3
    assert all(solution.peak_bytes <= first.budget_bytes for solution in plans)
    trained(model, IMAGES[:6], LABELS[:6])()
    trained(plain, IMAGES[:6], LABELS[:6])()
    assert_same(model, plain)


def test_another_batch_is_refused_if_asked() -> None:
    model = lowtide.optimize(small(), (IMAGES, LABELS), budget="80%", on_new_shape="error")
    with pytest.raises(
        CannotApply, match=r"not for these inputs: float32\[6, 3, 24, 24\], int64\[6\] instead"
    ):
        model(IMAGES[:6], LABELS[:6])


def test_an_applied_plan_warns_of_another_batch_and_runs_without() -> None:
    model, plain = small(), small()
    lowtide.apply(model, planned(model))
    with pytest.warns(UserWarning, match=r"runs without a plan, and may exceed the budget"):
        trained(model, IMAGES[:6], LABELS[:6])()
    trained(plain, IMAGES[:6], LABELS[:6])()
    assert_same(model, plain)


# Files ------------------------------------------------------------------------------------------------


def test_a_plan_is_saved_loaded_and_applied(tmp_path: Path) -> None:
    model, plain = small(), small()
    solution = planned(model)
    lowtide.save_solution(solution, tmp_path / "plan.json")
    loaded = lowtide.load_solution(tmp_path / "plan.json")
    assert loaded == solution
    lowtide.apply(model, loaded)
    run = trained(model, IMAGES, LABELS)
    run()
    model.load_state_dict(plain.state_dict())
    assert_kept(solution, growth(run))
    trained(plain, IMAGES, LABELS)()
    assert_same(model, plain)


def test_a_plan_for_something_else_is_refused() -> None:
    model = small()
    solution = planned(model)
    with pytest.raises(CannotApply, match=r"made for another model than this Net"):
        lowtide.apply(small(width=8), solution)
    with pytest.raises(CannotApply, match=r"made with torch 2\.1, and this is torch 2\."):
        lowtide.apply(model, replace(solution, torch_version="2.1"))
    with pytest.raises(CannotApply, match=r"made for cuda, and the model is on cpu"):
        lowtide.apply(model, replace(solution, graph=replace(solution.graph, device="cuda")))
    with pytest.raises(BadRequest, match=r"for the graph Net alone"):
        lowtide.apply(model, replace(solution, fingerprint=""))
    assert "forward" not in vars(model)


def test_a_step_that_is_not_the_planned_one_is_told_and_trains_as_without_a_plan() -> None:
    class Moody(Net):
        mood = 0.0

        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
            found = super().forward(x, labels)
            return found if self.mood == 0 else found * self.mood

    torch.manual_seed(0)
    model = Moody()
    plain = copy.deepcopy(model)
    lowtide.apply(model, planned(model))
    model.mood = plain.mood = 2.0
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=r"took another path than the one that was planned"):
        model(IMAGES, LABELS).backward()
    torch.manual_seed(1)
    plain(IMAGES, LABELS).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)


# Refusals ---------------------------------------------------------------------------------------------


def test_a_budget_below_the_floor_names_the_least_and_what_needs_it() -> None:
    model = small()
    with pytest.raises(
        InfeasibleBudget, match=r"the least it reaches is .*needed by .*shrink the batch"
    ) as e:
        planned(model, budget="5%")
    least = planned(model, budget=str(e.value.least_bytes))
    assert least.peak_bytes <= e.value.least_bytes
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_new_shape": "ask"}, r"on_new_shape is 'ask'; it is one of plan, error"),
        ({"granularity": "block"}, r"plans op by op and cuts nothing"),
        ({"accumulate": 0}, r"accumulate is 0"),
        ({"method": "rotor", "accumulate": 2}, r"accumulate is for methods that plan op by op"),
        ({"method": "rotor", "budget": "min"}, r'the budget "min" is for methods that plan op by op'),
    ],
)
def test_requests_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    model = small()
    with pytest.raises(BadRequest, match=message):
        lowtide.optimize(model, (IMAGES, LABELS), **{"budget": "60%", **options})
    assert "forward" not in vars(model)


def outliving(plan_it: Callable[[nn.Module, torch.Tensor], object]) -> list[bool]:
    """Whether the weights, and the batch, are still there when nobody wants them any more."""
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(32, 8)
    plan_it(model, batch)
    watched = [weakref.ref(tensor) for tensor in (*model.parameters(), batch)]
    del model, batch
    gc.collect()
    return [reference() is not None for reference in watched]


@pytest.mark.parametrize(
    "plan_it",
    [
        lambda model, batch: lowtide.fit(model, batch, torch.sum, optimizer="adamw").peak_bytes,
        lambda model, batch: lowtide.plan(model, batch, loss=torch.sum, budget="min").peak_bytes,
        lambda model, batch: lowtide.plan(model, batch, loss=torch.sum, method="rotor").peak_bytes,
        lambda model, batch: lowtide.optimize(model, batch, loss=torch.sum, budget="min")(batch).sum(),
    ],
    ids=["fit", "plan of ops", "plan of layers", "optimize"],
)
def test_nothing_of_a_model_outlives_it(plan_it: Callable[[nn.Module, torch.Tensor], object]) -> None:
    assert not any(outliving(plan_it))
