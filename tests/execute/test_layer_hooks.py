"""Plans at work in eager PyTorch: the same gradients, the same streams, recomputed exactly as planned."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lowtide import zoo
from lowtide.chain.chain import Chain
from lowtide.chain.cuts import HEAVY
from lowtide.chain.plan import Plan, Segment
from lowtide.chain.unroll import replay
from lowtide.errors import BadRequest, CannotApply
from lowtide.execute.apply import apply, remove
from lowtide.ir.graph import Phase
from lowtide.planner.layers import Rehearsal
from lowtide.solvers import methods, solve
from lowtide.solvers.solution import Solution, Status
from lowtide.trace.dry_run import Trace
from lowtide.trace.step import Example, Loss, arguments
from tests.helpers.effort import long_but
from tests.helpers.narrowed import narrowed
from tests.helpers.transformer_models import KINDS, small_transformer

ALL_METHODS = [name for name in methods() if name != "exhaustive"]

SMALL: dict[str, dict[str, int]] = {
    "alexnet": {"batch": 2, "image": 64},
    "vgg11_bn": {"batch": 2, "image": 32},
    "resnet18": {"batch": 2, "image": 32},
    "resnet50": {"batch": 2, "image": 32},
    "preresnet20": {"batch": 2, "image": 32},
    "densenet121": {"batch": 2, "image": 32},
    "unet": {"batch": 1, "image": 32},
    "mlp": {"batch": 4},
    "lstm": {"batch": 2, "tokens": 5},
    "gpt": {"batch": 2, "tokens": 16, "layers": 3, "width": 32, "heads": 2, "vocab": 50},
    "vit": {"batch": 2, "image": 32, "layers": 3, "width": 32, "heads": 2},
}


LARGER: dict[str, dict[str, int]] = {"inception_v3": {"batch": 2, "image": 299}}


@dataclass(frozen=True)
class Work:
    model: nn.Module
    example: Example
    loss: Loss

    def rehearsal(self) -> Rehearsal:
        return Rehearsal(self.model, self.example, self.loss, profile=False)


def from_zoo(name: str) -> Work:
    torch.manual_seed(0)
    work = zoo.workload(name, zoo.Sizes(**{**SMALL, **LARGER}[name]))
    assert work.loss is not None
    return Work(narrowed(work.model), work.kwargs or work.args, work.loss)


def square(output: torch.Tensor) -> torch.Tensor:
    return (output.float() ** 2).mean()


def solution_of(chain: Chain, plan: Plan) -> Solution:
    return Solution(chain, "by hand", plan, Status.FEASIBLE, replay(chain, plan).peak_bytes, 0, 0.0, 0.0)


# The referee: plain training --------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """Everything that a step leaves behind."""

    loss: torch.Tensor
    gradients: Sequence[torch.Tensor | None]
    state: Mapping[str, torch.Tensor]
    stream: torch.Tensor


def outcome(
    work: Work, context: Callable[[], AbstractContextManager[object]] = nullcontext, steps: int = 1
) -> Outcome:
    """Train from the same state, and put the state back."""
    before = copy.deepcopy(work.model.state_dict())
    args, kwargs = arguments(work.example)
    torch.manual_seed(1)
    work.model.zero_grad()
    for _ in range(steps):
        with context():
            loss = work.loss(work.model(*args, **kwargs))
        loss.backward()
    found = Outcome(
        loss.detach(),
        [None if parameter.grad is None else parameter.grad.clone() for parameter in work.model.parameters()],
        copy.deepcopy(work.model.state_dict()),
        torch.get_rng_state(),
    )
    work.model.load_state_dict(before)
    return found


def assert_same(found: Outcome, plain: Outcome) -> None:
    assert torch.equal(found.loss, plain.loss)
    for one, other in zip(found.gradients, plain.gradients, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)
    assert list(found.state) == list(plain.state)
    assert all(torch.equal(found.state[key], plain.state[key]) for key in plain.state)
    assert torch.equal(found.stream, plain.stream)


def check(work: Work, plans: Callable[[int], Sequence[Plan]], **options: Any) -> None:
    """Each plan leaves behind what plain training does."""
    granularity = options.pop("granularity", "fine")
    chain = work.rehearsal().chain(granularity)
    plain = outcome(work, **options)
    for plan in plans(len(chain)):
        with options.get("context", nullcontext)():
            apply(work.model, solution_of(chain, plan))
        assert_same(outcome(work, **options), plain)
        remove(work.model)


def some_plans(n: int) -> list[Plan]:
    """Every layer by itself, one half, the whole model, and nested three deep."""
    assert n >= 4
    deep = Segment(0, n - 1, (Segment(0, n // 2, (Segment(0, max(n // 4, 1)),)), Segment(n // 2, n - 1)))
    return [Plan.at(range(1, n)), Plan.at([n // 2]), Plan.at([n]), Plan((deep,))]


@pytest.mark.parametrize("name", long_but(SMALL, "resnet18", "preresnet20", "mlp", "gpt", "vit"))
def test_every_method_on_the_zoo_gives_the_gradients_of_plain_training(name: str) -> None:
    work = from_zoo(name)
    chain = work.rehearsal().chain("layer")
    plain = outcome(work)
    found = {solve(chain, method).plan: method for method in ALL_METHODS if can(method, chain)}
    for plan in found:
        apply(work.model, solution_of(chain, plan))
        assert_same(outcome(work), plain)
        remove(work.model)


def can(method: str, chain: Chain) -> bool:
    try:
        solve(chain, method)
    except BadRequest:
        return False
    return True


@pytest.mark.parametrize(
    "name", long_but(["vgg11_bn", "resnet18", "densenet121", "unet", "gpt", "vit"], "resnet18", "gpt")
)
def test_plans_of_any_shape_give_the_gradients_of_plain_training(name: str) -> None:
    check(from_zoo(name), some_plans)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("granularity", long_but(["layer", "block"], "layer"))
def test_transformers_of_hugging_face_are_planned_by_layer_and_by_block(kind: str, granularity: str) -> None:
    model, batch = small_transformer(kind)
    work = Work(model, batch, lambda output: output.loss)
    rehearsal = work.rehearsal()
    chain = rehearsal.chain(granularity)
    plain = outcome(work)
    for method in ("chen-recursive", "hong-linear", "rotor"):
        solution = rehearsal.solve(chain, method)
        assert solution.confirmation is not None
        assert solution.confirmation.peak_bytes < solution.confirmation.plain_peak_bytes
        apply(model, solution)
        assert_same(outcome(work), plain)
        remove(model)


def test_a_cache_that_the_forward_fills_is_as_it_was_when_it_is_run_again() -> None:
    model, batch = small_transformer("gpt2", use_cache=True)
    assert model(**batch).past_key_values is not None
    check(Work(model, batch, lambda output: output.loss), lambda n: [Plan.at(range(1, n)), Plan.at([n // 2])])


@pytest.mark.long
def test_inception_with_its_branches_is_planned_too() -> None:
    work = from_zoo("inception_v3")
    chain = work.rehearsal().chain()
    plain = outcome(work)
    apply(work.model, solve(chain, "rotor"))
    assert_same(outcome(work), plain)


@pytest.mark.parametrize("name", long_but(["resnet18", "preresnet20", "gpt", "lstm"], "preresnet20", "gpt"))
def test_losses_are_equal_over_twenty_optimizer_steps(name: str) -> None:
    work = from_zoo(name)
    args, kwargs = arguments(work.example)

    def losses(model: nn.Module) -> list[float]:
        torch.manual_seed(2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = work.loss(model(*args, **kwargs))
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    plain, planned = copy.deepcopy(work.model), work.model
    chain = work.rehearsal().chain()
    apply(planned, solve(chain, "chen-recursive"))
    expected = losses(plain)
    assert losses(planned) == expected
    assert len(set(expected)) > 1
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), planned.parameters(), strict=True))


# Recomputed exactly as planned --------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts the matrix products and convolutions that are really executed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count += func.__name__.partition(".")[0] in HEAVY
        return func(*args, **(kwargs or {}))


def linear_tanh(depth: int) -> Work:
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(8, 8), nn.Tanh())]
    return Work(nn.Sequential(*layers), (torch.randn(4, 8),), square)


@pytest.mark.parametrize(
    ("plan", "products"),
    [
        # Eight products forward; backward two a layer, but none for the gradient of the batch.
        ("keep all", 8 + 15),
        ("[1-8]", 8 + 15 + 4),
        ("[1-4][5-8]", 8 + 15 + 4),
        ("[1-16]", 8 + 15 + 8),
        ("[1-7]", 8 + 15 + 3),  # the last product of a segment would make what nobody saved: it is not run
        ("[1-1][2-3][4-5]", 8 + 15 + 0),  # keep the products, recompute the activations
        ("[1-8 [1-4]]", 8 + 15 + 4 + 2),
        ("[1-12 [1-8 [1-4]]]", 8 + 15 + 6 + 4 + 2),
    ],
)
def test_as_many_products_are_executed_as_the_plan_says(plan: str, products: int) -> None:
    work = linear_tanh(8)
    chain = work.rehearsal().chain("fine")
    assert len(chain) == 16
    apply(work.model, solution_of(chain, Plan.read(plan)))
    with Products() as counted:
        outcome(work)
    assert counted.count == products


def planned_ops(trace: Trace, chain: Chain, plan: Plan) -> Counter[str]:
    """The ops that a plan runs again, from the record of the plain step alone.

    All of a segment up to what is saved last: an op that saves its arguments is not run for that.
    """
    ops = trace.graph.ops
    backward = next(op.id for op in ops if op.phase is Phase.BACKWARD)
    made = {value for op in ops[:backward] for value in op.creates}
    saved: dict[int, set[int]] = {}
    for later, earlier in trace.forward_ops.items():
        if needed := made.intersection(ops[later].reads):
            saved.setdefault(earlier, set()).update(needed)
    found: Counter[str] = Counter()
    for segment in plan.walk():
        inside = ops[chain.places[segment.start] : chain.places[segment.stop]]
        last = max((op.id for op in inside if op.id in saved), default=None)
        if last is None:
            continue
        saves_result = saved[last].intersection((*ops[last].creates, *ops[last].mutates))
        found.update(op.target for op in inside if op.id < last or (op.id == last and saves_result))
    return found


@pytest.mark.parametrize(
    "name", long_but(["alexnet", "resnet18", "densenet121", "unet", "gpt", "vit"], "resnet18", "gpt")
)
def test_the_ops_that_are_recomputed_are_those_of_the_plan(name: str) -> None:
    work = from_zoo(name)
    rehearsal = work.rehearsal()
    chain = rehearsal.chain("layer")
    n = len(chain)
    for plan in [
        Plan.at(range(1, n)),
        Plan.at([n // 3, n - 1]),
        Plan((Segment(0, n - 1, (Segment(0, n // 2),)),)),
    ]:
        trace = Rehearsal(work.model, work.example, work.loss, profile=False).under(solution_of(chain, plan))
        found = Counter(op.target for op in trace.graph.ops if op.phase is Phase.RECOMPUTE)
        expected = planned_ops(rehearsal.plain, chain, plan)
        del found["aten.zeros_like.default"]  # in place of BatchNorm's statistics, which advance once
        for counter in (found, expected):
            del counter["aten.empty.memory_format"]  # stands for random states too, which are put back
        assert found == expected


# What plain checkpointing gets wrong --------------------------------------------------------------------


def convolutions() -> Work:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, after in [(3, 8), (8, 8), (8, 8), (8, 8)]:
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers, nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(8 * 64, 4))
    return Work(model, (torch.randn(4, 3, 8, 8),), square)


def test_statistics_advance_once_a_step() -> None:
    work = convolutions()
    check(work, some_plans)
    apply(work.model, solution_of(work.rehearsal().chain("fine"), Plan.at([4, 8])))
    outcome_of_three = outcome(work, steps=3)
    assert outcome_of_three.state["1.num_batches_tracked"] == 3


def test_statistics_that_are_frozen_later_are_read_and_stay() -> None:
    work = convolutions()
    chain = work.rehearsal().chain("fine")
    outcome_before = {key: value.clone() for key, value in work.model.state_dict().items()}
    for module in work.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
            for statistic in (module.running_mean, module.running_var):
                assert statistic is not None
                nn.init.uniform_(statistic)
    plain = outcome(work)
    apply(work.model, solution_of(chain, Plan.at([4, 8])))
    assert_same(outcome(work), plain)
    assert not torch.equal(plain.state["1.running_mean"], outcome_before["1.running_mean"])


def test_statistics_that_begin_to_move_later_advance_once() -> None:
    work = convolutions()
    norms = [module for module in work.model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.eval()
    chain = work.rehearsal().chain("fine")
    for norm in norms:
        norm.train()
    plain = outcome(work)
    apply(work.model, solution_of(chain, Plan.at([4, 8])))
    assert_same(outcome(work), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_respected(dtype: torch.dtype) -> None:
    check(convolutions(), some_plans, context=lambda: torch.autocast("cpu", dtype=dtype))


def test_micro_batches_add_up() -> None:
    check(convolutions(), some_plans, steps=3)


class Glued(nn.Module):
    """Most of it happens between modules: parameters, residuals, views, dropout, ops in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.positions = nn.Parameter(torch.randn(16))
        self.act = nn.Tanh()
        self.out = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions
        for number, layer in enumerate(self.layers):
            y = self.act(layer(x)) * 2.0
            y += 0.5
            y[:, 0] = 1.0
            y = F.dropout(y, 0.2, self.training)
            x = x + y if number % 2 else y.view(-1, 4, 4).transpose(1, 2).reshape(-1, 16)
        return self.out(x)  # type: ignore[no-any-return]


def test_what_happens_between_modules_is_run_again_too() -> None:
    torch.manual_seed(0)
    check(Work(Glued(), (torch.randn(8, 16),), square), some_plans)


class Spectral(nn.Module):
    """Weights that depend on buffers, which every forward changes."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.layers = nn.ModuleList(norm(nn.Linear(16, 16)) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_buffers_are_seen_as_the_first_run_saw_them() -> None:
    torch.manual_seed(0)
    check(Work(Spectral(), (torch.randn(8, 16),), square), some_plans, steps=2)


class Shared(nn.Module):
    """One module, called again and again; what a call gets is what the one before gave."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(x[0])
        for frame in x:
            state = self.cell(frame, state)
        return self.head(state)  # type: ignore[no-any-return]


def test_calls_of_one_module_are_told_apart() -> None:
    torch.manual_seed(0)
    check(Work(Shared(), (torch.randn(6, 4, 8),), square), some_plans)


def test_what_is_already_checkpointed_inside_a_module_stays_so() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    work = Work(nn.Sequential(*[Inside() for _ in range(5)]), (torch.randn(4, 8),), square)
    rehearsal = work.rehearsal()
    chain = rehearsal.chain(modules=[str(number) for number in range(5)])
    plain = outcome(work)
    for plan in some_plans(len(chain)):
        apply(work.model, rehearsal.confirmed(solution_of(chain, plan)))
        assert_same(outcome(work), plain)
        remove(work.model)


# The model stays what it was ----------------------------------------------------------------------------


def test_class_parameters_and_keys_stay() -> None:
    work = convolutions()
    before = (type(work.model), list(work.model.state_dict()), [id(p) for p in work.model.parameters()])
    modules = list(work.model.named_modules())
    applied = apply(work.model, solution_of(work.rehearsal().chain("fine"), Plan.at([4])))
    assert applied is work.model
    assert (type(applied), list(applied.state_dict()), [id(p) for p in applied.parameters()]) == before
    assert list(applied.named_modules()) == modules
    remove(applied)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in applied.modules())


def test_a_planned_model_is_given_back_as_soon_as_nobody_holds_it() -> None:
    work = convolutions()
    apply(work.model, solution_of(work.rehearsal().chain("fine"), Plan.at([4, 8])))
    outcome(work)
    watched = weakref.ref(work.model)
    gc.collect()
    gc.disable()
    try:
        del work
        assert watched() is None
    finally:
        gc.enable()


def test_a_copy_carries_the_plan_and_can_lose_it_alone() -> None:
    work = convolutions()
    plain = outcome(work)
    apply(work.model, solution_of(work.rehearsal().chain("fine"), Plan.at([4, 8])))
    for copied in (copy.deepcopy(work.model), pickle.loads(pickle.dumps(work.model))):
        again = replace(work, model=copied)
        with Products() as counted:
            assert_same(outcome(again), plain)
        remove(copied)
        with Products() as fewer:
            assert_same(outcome(again), plain)
        assert counted.count > fewer.count
    with Products() as counted:
        outcome(work)
    assert counted.count > fewer.count


def test_without_gradients_nothing_happens() -> None:
    work = convolutions()
    (x,) = arguments(work.example)[0]
    apply(work.model, solution_of(work.rehearsal().chain("fine"), Plan.at([4, 8])))
    work.model.eval()
    with torch.no_grad(), Products() as counted:
        planned = work.model(x)
    remove(work.model)
    with torch.no_grad():
        assert torch.equal(planned, work.model(x))
    assert counted.count == 5


def test_users_hooks_run_and_may_change_what_they_see() -> None:
    work = convolutions()
    modules = dict(work.model.named_modules())
    modules["3"].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    modules["4"].register_forward_hook(lambda module, args, output: output + 1)
    modules["6"].register_full_backward_hook(lambda module, given, taken: (given[0] * 3,))
    check(work, some_plans)


def test_several_backwards_through_one_forward() -> None:
    work = convolutions()
    apply(work.model, solution_of(work.rehearsal().chain("fine"), Plan((Segment(0, 8, (Segment(0, 4),)),))))
    (x,) = arguments(work.example)[0]
    torch.manual_seed(3)
    loss = work.loss(work.model(x))
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in work.model.parameters() if parameter.grad is not None]
    loss.backward()
    twice = [parameter.grad for parameter in work.model.parameters() if parameter.grad is not None]
    assert all(torch.equal(two, one * 2) for one, two in zip(once, twice, strict=True))


def test_two_forwards_before_their_backwards() -> None:
    work = convolutions()
    (x,) = arguments(work.example)[0]

    def gradients() -> list[torch.Tensor]:
        torch.manual_seed(3)
        work.model.zero_grad()
        first, second = work.loss(work.model(x)), work.loss(work.model(x * 2))
        second.backward()
        first.backward()
        return [parameter.grad.clone() for parameter in work.model.parameters() if parameter.grad is not None]

    before = copy.deepcopy(work.model.state_dict())
    plain = gradients()
    work.model.load_state_dict(before)
    apply(work.model, solution_of(work.rehearsal().chain("fine"), Plan.at([4, 8])))
    assert all(torch.equal(a, b) for a, b in zip(gradients(), plain, strict=True))


# Failures leave nothing half-done -----------------------------------------------------------------------


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("on purpose")
        return torch.tanh(self.linear(x))


def saving_hooks() -> object:
    found: object = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


@pytest.mark.parametrize("plan", ["[1-4]", "[1-2][3-4]", "[1-4 [1-3 [1-2]]]"])
def test_a_forward_that_fails_leaves_nothing_open(plan: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Fragile() for _ in range(5)])
    work = Work(model, (torch.randn(4, 8),), square)
    plain = outcome(work)
    apply(model, solution_of(work.rehearsal().chain("block"), Plan.read(plan)))
    for number in range(5):
        model[number].fails = True  # type: ignore[assignment]
        with pytest.raises(ValueError, match="on purpose"):
            model(torch.randn(4, 8))
        assert _get_current_function_mode() is None
        assert saving_hooks() is None
        model[number].fails = False  # type: ignore[assignment]
    assert_same(outcome(work), plain)


class Interrupted(nn.Module):
    interrupts: bool

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Fragile() for _ in range(4))
        self.interrupts = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.interrupts and number == 1:
                raise KeyboardInterrupt
        return x


def test_after_an_interrupt_the_next_step_is_a_whole_one() -> None:
    torch.manual_seed(0)
    work = Work(Interrupted(), (torch.randn(4, 8),), square)
    plain = outcome(work)
    apply(work.model, solution_of(work.rehearsal().chain("block"), Plan.read("[1-3]")))
    work.model.interrupts = True  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        work.model(torch.randn(4, 8))
    work.model.interrupts = False  # type: ignore[assignment]
    assert_same(outcome(work), plain)
    assert _get_current_function_mode() is None
    assert saving_hooks() is None


# Other inputs than planned ------------------------------------------------------------------------------


@pytest.fixture
def planned() -> tuple[Work, Solution]:
    work = linear_tanh(4)
    return work, solution_of(work.rehearsal().chain("layer"), Plan.at([2]))


def test_other_inputs_are_told_once(planned: tuple[Work, Solution]) -> None:
    work, solution = planned
    apply(work.model, solution)
    with pytest.warns(UserWarning, match=r"not for these inputs: float32\[6, 8\] instead of float32\[4, 8\]"):
        work.model(torch.randn(6, 8)).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        work.model(torch.randn(6, 8)).sum().backward()


def test_other_inputs_are_an_error_if_asked(planned: tuple[Work, Solution]) -> None:
    work, solution = planned
    apply(work.model, solution, on_new_inputs="error")
    with pytest.raises(CannotApply, match="the plan is not for these inputs"):
        work.model(torch.randn(6, 8))
    work.model(torch.randn(4, 8)).sum().backward()


# Refusals -------------------------------------------------------------------------------------------------


def test_a_plan_for_another_model_is_refused(planned: tuple[Work, Solution]) -> None:
    with pytest.raises(CannotApply, match="made for another model than this Sequential"):
        apply(nn.Sequential(nn.Linear(8, 9)), planned[1])


def test_a_plan_from_sizes_cannot_be_applied() -> None:
    solution = solve(Chain.from_sizes([0, 1, 1]), "keep-all")
    with pytest.raises(BadRequest, match="made from sizes and knows no modules"):
        apply(nn.Linear(1, 1), solution)


def test_what_to_do_with_other_inputs_is_one_of_three(planned: tuple[Work, Solution]) -> None:
    with pytest.raises(BadRequest, match="on_new_inputs is 'shrug'; it is one of warn, error, ignore"):
        apply(planned[0].model, planned[1], on_new_inputs="shrug")


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_a_segment_does_not_begin_inside_another_checkpoint() -> None:
    work = Work(Checkpointed(), (torch.randn(4, 8),), square)
    rehearsal = work.rehearsal()
    assert len(rehearsal.chain("fine")) == 1
    with pytest.raises(CannotApply, match="already decides what is saved"):
        rehearsal.confirmed(solution_of(rehearsal.chain("fine"), Plan.at([1])))
    assert saving_hooks() is None


class Counting(nn.Module):
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_a_change_between_modules_is_made_once() -> None:
    work = Work(Counting(), (torch.randn(4, 8),), square)
    check(work, lambda n: [Plan.at([2])], steps=2)


def test_buffers_that_begin_to_change_later_are_seen_as_the_first_run_saw_them() -> None:
    work = Work(Spectral().eval(), (torch.randn(4, 16),), square)
    solution = solution_of(work.rehearsal().chain(), Plan.at([2]))
    work.model.train()
    plain = outcome(work)
    apply(work.model, solution)
    assert_same(outcome(work), plain)


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient  # type: ignore[no-any-return]


class Unlisted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Saving.apply(layer(x)) * 0.1  # type: ignore[no-untyped-call]
        return x


def test_what_cannot_be_written_down_is_refused_before_it_runs() -> None:
    work = Work(Unlisted(), (torch.randn(4, 8),), square)
    rehearsal = work.rehearsal()
    with pytest.raises(CannotApply, match="does not save what it saved before"):
        rehearsal.confirmed(solution_of(rehearsal.chain(), Plan.at([2])))
