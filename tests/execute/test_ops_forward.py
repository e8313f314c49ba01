"""A planned model that is copied, given other parameters, or hooks: it trains as it would without a plan."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.modules import module as of_all_modules

import lowtide
from lowtide.errors import BadRequest, CannotApply
from tests.helpers.eager import assert_step_like, mean_square

X = torch.randn(3, 8)
Hooked = Callable[[nn.Sequential], Any]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture(autouse=True)
def _no_word_of_new_plans() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "lowtide: the model meets inputs without a plan")
        yield


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def planned(model: nn.Sequential, **options: Any) -> nn.Sequential:
    """`model` with a plan, after its first step."""
    lowtide.optimize(
        model, (X,), budget="min", loss=mean_square, effort="quick", profile=False, accumulate=2, **options
    )
    mean_square(model(X)).backward()
    model.zero_grad()
    return model


# Other parameters -----------------------------------------------------------------------------------------


def assigned(model: nn.Sequential) -> None:
    doubled = {name: tensor * 2 for name, tensor in network().state_dict().items()}
    model.load_state_dict(doubled, assign=True)


def replaced(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.full((16, 8), 0.1))


def another_layer(model: nn.Sequential) -> None:
    torch.manual_seed(3)
    model[2] = nn.Linear(16, 4)


def frozen_anew(model: nn.Sequential) -> None:
    model[0].weight = nn.Parameter(torch.full((16, 8), 0.1), requires_grad=False)


@pytest.mark.parametrize("change", [assigned, replaced, another_layer, frozen_anew])
def test_other_parameters_are_trained_from_the_next_step_on(change: Callable[[nn.Sequential], None]) -> None:
    model, plain = planned(network()), network()
    change(model)
    change(plain)
    assert_step_like(model, plain, X)


def test_parameters_that_were_replaced_are_let_go() -> None:
    model = planned(network())
    old = weakref.ref(model[0].weight)
    replaced(model)
    model(X)
    gc.collect()
    assert old() is None


# Copies ---------------------------------------------------------------------------------------------------


def shallow(model: nn.Sequential) -> nn.Sequential:
    """A copy with a first layer of its own."""
    copied = copy.copy(model)
    copied._modules = dict(model._modules)
    torch.manual_seed(5)
    copied[0] = nn.Linear(8, 16)
    return copied


def test_a_shallow_copy_trains_its_own_weights_by_the_plan() -> None:
    model, plain = planned(network()), network()
    copied, copied_plain = shallow(model), shallow(plain)
    assert_step_like(copied, copied_plain, X)
    assert model[0].weight.grad is None
    assert lowtide.plans_of(copied) == lowtide.plans_of(model)
    lowtide.remove(copied)
    assert lowtide.plans_of(model)
    assert not lowtide.plans_of(copied)


def test_another_plan_for_a_shallow_copy_is_not_one_for_the_model() -> None:
    model = planned(network())
    copied = shallow(model)
    planned(copied)
    assert_step_like(model, network(), X)


def replica(model: nn.Sequential) -> nn.Sequential:
    """What torch.nn.DataParallel makes of a model for one of its devices: parameters that are no leaves."""
    found: nn.Sequential = model._replicate_for_data_parallel()
    for name, child in model.named_children():
        copied = child._replicate_for_data_parallel()
        for key, parameter in child.named_parameters():
            setattr(copied, key, parameter * 3)
        found._modules[name] = copied
    return found


def test_a_replica_of_data_parallel_runs_with_its_own_weights_and_without_a_plan() -> None:
    model, plain = planned(network()), network()
    with pytest.warns(UserWarning, match="a replica that torch.nn.DataParallel has made") as told:
        found = [mean_square(replica(model)(X)) for _ in range(2)]
    assert len(told) == 1
    mean_square(replica(plain)(X)).backward()
    found[0].backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


def test_where_nothing_may_run_without_a_plan_a_replica_is_refused() -> None:
    model = planned(network(), on_new_shape="error")
    with pytest.raises(CannotApply, match="Use DistributedDataParallel"):
        replica(model)(X)


# Hooks ----------------------------------------------------------------------------------------------------


def doubled_output(_: nn.Module, __: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def doubled_input(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0] * 2,)


def doubled_gradient(_: nn.Module, gradients: Any, *__: Any) -> Any:
    return tuple(None if gradient is None else gradient * 2 for gradient in gradients)


HOOKS: dict[str, Hooked] = {
    "forward": lambda model: model[2].register_forward_hook(doubled_output),
    "before a forward": lambda model: model[2].register_forward_pre_hook(doubled_input),
    "the model's own": lambda model: model.register_forward_hook(doubled_output),
    "a parameter's": lambda model: model.get_parameter("0.weight").register_hook(torch.neg),
}
OF_ALL: dict[str, Callable[[], Any]] = {
    "forward": lambda: of_all_modules.register_module_forward_hook(doubled_output),  # type: ignore[arg-type]
    "before a forward": lambda: of_all_modules.register_module_forward_pre_hook(doubled_input),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", HOOKS)
def test_a_hook_that_is_registered_after_planning_counts_until_it_is_removed(kind: str) -> None:
    model, plain = planned(network()), network()
    handles = [HOOKS[kind](model), HOOKS[kind](plain)]
    assert_step_like(model, plain, X)
    for handle in handles:
        handle.remove()
    assert_step_like(model, plain, X)


def test_a_hook_that_is_removed_after_planning_does_not_count_until_it_is_there_again() -> None:
    model, plain = network(), network()
    handle = model[2].register_forward_hook(doubled_output)
    planned(model)
    handle.remove()
    assert_step_like(model, plain, X)
    for each in (model, plain):
        each[2].register_forward_hook(doubled_output)
    assert_step_like(model, plain, X)
    assert len(lowtide.plans_of(model)) == 2


@pytest.mark.parametrize("kind", OF_ALL)
def test_hooks_of_all_modules_count_as_well(kind: str) -> None:
    model, plain = planned(network()), network()
    handle = OF_ALL[kind]()
    try:
        assert_step_like(model, plain, X)
    finally:
        handle.remove()
    assert_step_like(model, plain, X)


# Modes ----------------------------------------------------------------------------------------------------


def normalised() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


def test_statistics_that_are_frozen_later_are_planned_for_once_and_so_is_training_them_again() -> None:
    model, plain = planned(normalised()), normalised()
    plain.load_state_dict(model.state_dict())
    for frozen in (False, True, False, True):
        for each in (model, plain):
            each.train()
            each[1].train(not frozen)
        assert_step_like(model, plain, X)
        with torch.no_grad():
            assert torch.equal(model.eval()(X), plain.eval()(X))
    assert len(lowtide.plans_of(model)) == 2


class Halves(nn.Module):
    """Two layers, one after the other: between them a graph may end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(self.first(x).relu())
        return found


def test_a_backward_hook_of_a_submodule_counts() -> None:
    model, plain = Halves(), Halves()
    lowtide.optimize(model, (X,), budget="min", loss=mean_square, effort="quick", profile=False)
    assert_step_like(model, plain, X)
    for each in (model, plain):
        each.zero_grad()
        each.second.register_full_backward_hook(doubled_gradient)
    assert_step_like(model, plain, X)


def test_where_there_is_no_new_plan_a_hook_is_refused_and_named() -> None:
    model = planned(network(), on_new_shape="error")
    HOOKS["forward"](model)
    with pytest.raises(CannotApply, match="hooks doubled_output on 2"):
        model(X)


class Reassigning(nn.Module):
    """Assigns a buffer to itself in every forward, as models do that want it on the device of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.scale: torch.Tensor = nn.Buffer(torch.full((16,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(x).exp()
        self.scale = self.scale.to(device=x.device, dtype=x.dtype)
        loss: torch.Tensor = (hidden * self.scale).exp().square().mean()
        return loss


def test_a_buffer_may_be_assigned_to_itself() -> None:
    torch.manual_seed(0)
    model, x = Reassigning(), torch.randn(64, 16)
    model(x).backward()
    plain = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    lowtide.optimize(model, (x,), budget="90%", effort="quick", profile=False)
    model(x).backward()
    for parameter, gradient in zip(model.parameters(), plain, strict=True):
        assert parameter.grad is not None
        assert gradient is not None
        assert torch.equal(parameter.grad, gradient)


# What else reads a forward --------------------------------------------------------------------------------


def by_layers() -> nn.Module:
    return lowtide.optimize(network(), (X,), method="every-k", loss=mean_square, profile=False)


def by_ops() -> nn.Module:
    return planned(network())


@pytest.mark.parametrize("make", [by_layers, by_ops])
def test_what_is_exported_is_the_model_without_its_plan(make: Callable[[], nn.Module]) -> None:
    model = make()
    exported = torch.export.export(model, (X,)).module()
    assert torch.equal(exported(X), model(X))


def test_a_forward_that_cannot_be_read_is_refused_by_name() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        with pytest.raises(CannotApply, match=r"torch\.jit wants .* Take the plan off first"):
            torch.jit.script(by_layers())


def test_a_plan_stays_at_work_where_torch_compile_has_the_model() -> None:
    graphs = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(module)
        return module.forward

    model, plain = by_ops(), network()
    for forward in (torch.compile(model, backend=backend), plain):
        mean_square(forward(X)).backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert torch.equal(mine.grad, other.grad)
    assert not graphs


def test_what_torch_compile_has_is_not_planned() -> None:
    alone = network()
    alone.compile(backend="eager")
    wrapped: Any = torch.compile(network(), backend="eager")
    for compiled in (wrapped, alone):
        with pytest.raises(BadRequest, match=r"this Sequential is compiled by torch\.compile"):
            lowtide.optimize(compiled, (X,), budget="min", loss=mean_square)
        with pytest.raises(BadRequest, match=r'torch\.compile\(model, backend="lowtide"'):
            lowtide.plan(compiled, (X,), loss=mean_square)
