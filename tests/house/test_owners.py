"""Nothing outlives its owner: with a model go its weights, gradients, graphs, plans and generated code.

What lowtide made is counted, whatever its type; only then are single things followed by weak references. A
collection is asked for first: Dynamo's own tracing leaves circles, and a class refers to itself.
"""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.backend import plans_of
from lowtide.errors import CannotCapture, InfeasibleBudget

Tensor = torch.Tensor
Batch = tuple[Tensor, ...]
Way = Callable[[nn.Module, Batch], object]

SAMPLES, FEATURES, CLASSES = 8, 6, 4


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()
    gc.collect()


class Block(nn.Module):
    """A part of a model in which Dynamo ends a graph, if asked to."""

    def __init__(self, width: int, broken: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.broken = broken

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(self.norm(x)))
        if self.broken:
            torch._dynamo.graph_break()
        return x + F.dropout(self.down(hidden), 0.1, self.training)


class Net(nn.Module):
    """A few blocks and a loss, with graph breaks in the model or in its blocks."""

    def __init__(self, broken: bool = False, broken_blocks: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(Block(8, broken_blocks) for _ in range(2))
        self.head = nn.Linear(8, CLASSES)
        self.broken = broken

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        if self.broken:
            torch._dynamo.graph_break()
        return F.cross_entropy(self.head(x), labels)


def with_loss(net: nn.Module) -> nn.Module:
    """A class local to a function whose methods close over the model, as many scripts have one."""

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            return self.net(x, labels)

    return WithLoss()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "broken": lambda: Net(broken=True),
    "broken blocks": lambda: Net(broken_blocks=True),
    "of a local class": lambda: with_loss(Net()),
}


def example() -> Batch:
    return torch.randn(SAMPLES, FEATURES), torch.randint(0, CLASSES, (SAMPLES,))


# Ways to plan -----------------------------------------------------------------------------------------


def train(model: nn.Module, batch: Batch, run: Callable[..., Tensor] | None = None) -> None:
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        (model if run is None else run)(*batch).backward()


def apply_ops(model: nn.Module, batch: Batch) -> object:
    solution = lowtide.plan(model, batch, budget="min", profile=False)
    train(lowtide.apply(model, solution), batch)
    return solution


def apply_layers(model: nn.Module, batch: Batch) -> object:
    solution = lowtide.plan(model, batch, method="hong-linear", profile=False)
    train(lowtide.apply(model, solution), batch)
    return solution


def optimize_ops(model: nn.Module, batch: Batch) -> object:
    train(lowtide.optimize(model, budget="min", profile=False), batch)
    return lowtide.plans_of(model)[0]


def optimize_ops_by_evict(model: nn.Module, batch: Batch) -> object:
    train(lowtide.optimize(model, batch, budget="min", method="evict", profile=False), batch)
    return lowtide.plans_of(model)[0]


def optimize_layers(model: nn.Module, batch: Batch) -> object:
    train(lowtide.optimize(model, budget="100%", method="rotor", profile=False), batch)
    return lowtide.plans_of(model)[0]


def apply_with_autocast(model: nn.Module, batch: Batch) -> object:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return apply_ops(model, batch)


def apply_one_plan_after_another(model: nn.Module, batch: Batch) -> object:
    apply_ops(model, batch)
    apply_layers(model, batch)
    return apply_ops(model, batch)


def compile_with_the_backend(model: nn.Module, batch: Batch) -> object:
    options: dict[str, Any] = {"budget": "min", "profile": False}
    train(model, batch, torch.compile(model, backend="lowtide", options=options, dynamic=False))
    return plans_of(options)[0]


def compile_and_reset(model: nn.Module, batch: Batch) -> object:
    try:
        return compile_with_the_backend(model, batch)
    finally:
        torch._dynamo.reset()


def fail_to_fit(model: nn.Module, batch: Batch) -> object:
    with pytest.raises(InfeasibleBudget):
        lowtide.optimize(model, batch, budget="1%", profile=False)
    return None


def fail_to_capture(model: nn.Module, batch: Batch) -> object:
    def loss(output: Tensor) -> Tensor:
        return output if output.item() > 0 else -output

    with pytest.raises(CannotCapture):
        lowtide.plan(model, batch, loss=loss, budget="min", method="ops", profile=False)
    return None


def fail_while_tracing(model: nn.Module, batch: Batch) -> object:
    def loss(output: Tensor) -> Tensor:
        raise ValueError(output.shape)

    for call in (lowtide.fit, lowtide.capture):
        with pytest.raises((CannotCapture, lowtide.BadRequest)):
            call(model, batch, loss)
    return None


def dry_run(model: nn.Module, batch: Batch) -> object:
    return lowtide.dry_run(lambda: model(*batch).backward(), model=model)


def fit(model: nn.Module, batch: Batch) -> object:
    return lowtide.fit(model, batch, optimizer="adamw")


def capture(model: nn.Module, batch: Batch) -> object:
    return lowtide.capture(model, batch)


def saved(model: nn.Module, batch: Batch) -> object:
    return lowtide.saved(model, batch)


def run_in_an_arena(model: nn.Module, batch: Batch) -> object:
    step = lowtide.in_arena(model, batch)
    step()
    return step


def find_the_largest_batch(model: nn.Module, batch: Batch) -> object:
    def batch_of(samples: int) -> Batch:
        return tuple(torch.empty((samples, *part.shape[1:]), dtype=part.dtype) for part in batch)

    return lowtide.largest_batch(model, batch_of, memory="64KiB", profile=False)


PLANNING: Sequence[Way] = (
    apply_layers,
    optimize_ops,
    optimize_ops_by_evict,
    optimize_layers,
    apply_with_autocast,
    apply_one_plan_after_another,
)
LOOKING: Sequence[Way] = (
    fail_to_fit,
    fail_to_capture,
    fail_while_tracing,
    dry_run,
    fit,
    capture,
    saved,
    run_in_an_arena,
    find_the_largest_batch,
)


# What is there ----------------------------------------------------------------------------------------


def used(way: Way, build: Callable[[], nn.Module]) -> list[weakref.ref[Any]]:
    """Everything that belongs to a model which was used that way, and is no longer there."""
    torch.manual_seed(0)
    model, batch = build(), example()
    found = way(model, batch)
    owned = [model, *model.parameters(), *batch]
    owned += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    owned += [thing for thing in (found, getattr(found, "graph", None)) if thing is not None]
    return [weakref.ref(thing) for thing in owned]


def made_by_lowtide() -> Counter[str]:
    """How many there are of everything that lowtide makes, and of the modules that it generates."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        ours = str(kind.__module__).startswith("lowtide.") and not isinstance(thing, Enum)
        if ours or isinstance(thing, torch.fx.GraphModule):
            found["GraphModule" if not ours else kind.__qualname__] += 1
    return found


def bytes_of_tensors() -> int:
    """What all tensors hold that Python knows of, fake ones apart."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


@pytest.fixture(scope="module", autouse=True)
def _made_once() -> None:
    """What is made when it is first wanted, and stays: tables of methods, numbers that were measured."""
    for way in (apply_ops, apply_layers, fit, find_the_largest_batch):
        used(way, Net)


def assert_gone(way: Way, build: Callable[[], nn.Module]) -> None:
    before = made_by_lowtide()
    owned = used(way, build)
    gc.collect()
    assert [type(thing).__name__ for thing in map(_held, owned) if thing is not None] == []
    assert made_by_lowtide() - before == Counter()


def _held(reference: weakref.ref[Any]) -> Any:
    return reference()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_was_planned_takes_everything_with_it(name: str) -> None:
    assert_gone(apply_ops, MODELS[name])


@pytest.mark.parametrize("way", PLANNING, ids=lambda way: way.__name__)
def test_so_does_a_model_that_was_planned_in_another_way(way: Way) -> None:
    assert_gone(way, MODELS["of a local class"])


@pytest.mark.parametrize("way", LOOKING, ids=lambda way: way.__name__)
def test_a_model_that_was_looked_at_takes_everything_with_it(way: Way) -> None:
    assert_gone(way, Net)


@pytest.mark.skipif(hasattr(inspect, "_shadowed_dict_from_mro_tuple"), reason="this Python holds them itself")
@pytest.mark.parametrize("way", [apply_with_autocast, capture, compile_and_reset])
def test_a_class_goes_too_where_python_holds_those_that_were_looked_at(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `inspect.getattr_static` does from Python 3.12.0 to 3.12.3, for the last 128 classes."""
    look, looked_at = inspect._shadowed_dict, set()  # type: ignore[attr-defined]

    @lru_cache
    def look_and_hold(ancestors: tuple[type, ...]) -> Any:
        looked_at.add(ancestors[0].__name__)
        return look(ancestors[0])

    monkeypatch.setattr(inspect, "_shadowed_dict", lambda kind: look_and_hold(kind.__mro__))
    monkeypatch.setattr(inspect, "_shadowed_dict_from_mro_tuple", look_and_hold, raising=False)
    assert_gone(way, lambda: with_loss(with_loss(Net())))
    assert "WithLoss" in looked_at


@pytest.mark.parametrize("name", ["plain", "broken blocks"])
def test_of_a_compiled_model_nothing_is_left_once_dynamo_is_reset(name: str) -> None:
    before = made_by_lowtide()
    owned = used(compile_with_the_backend, MODELS[name])
    gc.collect()
    tensors = [thing for thing in map(_held, owned) if isinstance(thing, Tensor)]
    assert tensors == []
    torch._dynamo.reset()
    assert made_by_lowtide() - before == Counter()
    assert not any(map(_held, owned))


def test_a_plan_from_a_file_is_given_up_with_its_model(tmp_path: Path) -> None:
    """Nothing is planned between two of these models, so nobody has reset Dynamo."""
    lowtide.save_solution(lowtide.plan(Net(True), example(), budget="min", profile=False), tmp_path / "plan")

    def apply_from_file(model: nn.Module, batch: Batch) -> object:
        solution = lowtide.load_solution(tmp_path / "plan")
        train(lowtide.apply(model, solution), batch)
        return solution

    assert_gone(apply_from_file, MODELS["broken"])


def test_a_backward_may_come_when_the_model_is_gone() -> None:
    batch, model = example(), Net(broken_blocks=True)
    plain = copy.deepcopy(model)
    losses = []
    for each in (lowtide.optimize(model, batch, budget="min", profile=False), plain):
        torch.manual_seed(1)
        losses.append(each(*batch))
    weights = [model.stem.weight, plain.stem.weight]
    del model, each
    gc.collect()
    found, expected = (torch.autograd.grad(*pair)[0] for pair in zip(losses, weights, strict=True))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("way", [apply_ops, apply_layers, compile_and_reset], ids=lambda way: way.__name__)
def test_twenty_models_in_a_row_take_the_memory_of_one(way: Way) -> None:
    used(way, Net)
    made, held = made_by_lowtide(), bytes_of_tensors()
    for _ in range(20):
        used(way, Net)
    assert made_by_lowtide() - made == Counter()
    assert bytes_of_tensors() == held


@pytest.mark.parametrize("method", ["auto", "evict"])
def test_a_graph_is_searched_once_and_forgotten_with_its_last_owner(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, searches = import_module(f"lowtide.solvers.ops.{method}"), []
    search = module.explore

    def watched(*given: Any, **options: Any) -> Any:
        searches.append(method)
        return search(*given, **options)

    monkeypatch.setattr(module, "explore", watched)
    # Under a name of its own: an equal graph that is still about would have been searched already.
    graph = replace(lowtide.capture(Net(), example()), name=f"searched by {method}")
    lowest = lowtide.solve(graph, method, "min")
    for part in (0, 1, 2):
        lowtide.solve(graph, method, lowest.peak_bytes + part)
    assert searches == [method]
    gone = weakref.ref(graph)
    del graph, lowest
    assert gone() is None
