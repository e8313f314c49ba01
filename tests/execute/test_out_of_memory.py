"""What is said when a planned step runs out of memory: PyTorch's own error, with what is known of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import lowtide
from lowtide.compat.dispatch import BesideCompiling
from lowtide.execute import out_of_memory
from lowtide.execute.out_of_memory import DeviceMemory, who_holds

MIB = 1 << 20
MESSAGE = "CUDA out of memory. Tried to allocate 3.07 GiB."


@pytest.fixture(autouse=True)
def _nothing_is_left_by_other_tests() -> Iterator[None]:
    gc.collect()
    yield
    torch._dynamo.reset()
    gc.collect()


class Full(BesideCompiling):
    """The first op of this name finds no memory, once `after` of them have found some."""

    def __init__(self, op: str, after: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op = op
        self.left = after
        self.has_raised = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if str(func) == f"aten.{self.op}.default" and not self.has_raised:
            if not self.left:
                self.has_raised = True
                raise torch.OutOfMemoryError(MESSAGE)
            self.left -= 1
        return func(*args, **(kwargs or {}))


def failing(step: Callable[[], object], full: Full) -> tuple[type, str, list[str]]:
    """The class of the error, what it says, its notes. It is let go of: it holds the frames of the step."""
    try:
        with full:
            step()
    except torch.OutOfMemoryError as error:
        return type(error), str(error), list(error.__notes__)
    raise AssertionError("there was memory enough")


def tanhs(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())))


BATCH = torch.linspace(-1, 1, 256 * 64).view(256, 64)


def by_ops(model: nn.Module) -> Callable[[], Any]:
    lowtide.optimize(model, (BATCH,), loss=torch.sum, budget="1MiB", profile=False)
    return lambda: model(BATCH).sum().backward()


def by_layers(model: nn.Module) -> Callable[[], Any]:
    lowtide.optimize(model, (BATCH,), loss=torch.sum, method="chen-sqrt", profile=False)
    return lambda: model(BATCH).sum().backward()


def in_arena(model: nn.Module) -> Callable[[], Any]:
    step = lowtide.in_arena(model, (BATCH,), torch.sum)
    return lambda: step()


def compiled(model: nn.Module) -> Callable[[], Any]:
    run = torch.compile(model, backend="lowtide", options={"budget": "8MiB", "profile": False}, dynamic=False)
    return lambda: run(BATCH).sum().backward()


@pytest.mark.parametrize(
    ("plan", "op", "after", "doing", "planned"),
    [
        (by_ops, "tanh", 2, "the forward", "was planned op by op (auto) within "),
        (by_ops, "tanh_backward", 1, "the backward", "was planned op by op (auto) within "),
        (
            by_layers,
            "tanh",
            2,
            "the forward",
            "was planned layer by layer (chen-sqrt), with a predicted peak of ",
        ),
        (
            by_layers,
            "tanh",
            4,
            "the backward, running a part again,",
            "was planned layer by layer (chen-sqrt)",
        ),
        (in_arena, "tanh", 0, "a run", "runs in one arena, planned ahead."),
        (compiled, "tanh", 2, "the forward", "was planned op by op"),
        (compiled, "tanh_backward", 1, "the backward", "was planned op by op"),
    ],
)
def test_the_error_is_pytorchs_and_says_what_was_planned(
    plan: Callable[[nn.Module], Callable[[], Any]], op: str, after: int, doing: str, planned: str
) -> None:
    model = tanhs()
    step = plan(model)
    kind, said, (note,) = failing(step, Full(op, after))
    assert (kind, said) == (torch.OutOfMemoryError, MESSAGE)
    assert note.startswith(f"lowtide: out of memory in {doing} of a step that {planned}")
    assert "Held on cpu then:" in note
    assert note.endswith("- `lowtide rehearse` shows a whole training on a card, part by part")


@pytest.mark.parametrize("plan", [by_ops, by_layers])
def test_the_model_trains_by_its_plan_afterwards(plan: Callable[[nn.Module], Callable[[], Any]]) -> None:
    model, plain = tanhs(), tanhs()
    step = plan(model)
    in_backward = ("tanh_backward", 1) if plan is by_ops else ("tanh", 5)
    for op, after in (("tanh", 2), in_backward):
        with pytest.raises(torch.OutOfMemoryError), Full(op, after):
            step()
        model.zero_grad()
    step()
    plain(BATCH).sum().backward()
    for parameter, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.grad is not None
        assert wanted.grad is not None
        assert torch.equal(parameter.grad, wanted.grad)
    assert len(lowtide.plans_of(model)) == 1


def test_other_errors_are_left_alone() -> None:
    model = tanhs()
    step = by_layers(model)

    class Broken(Full):
        def __torch_dispatch__(self, func: Any, *rest: Any, **more: Any) -> Any:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as found, Broken("tanh"):
        step()
    assert not hasattr(found.value, "__notes__")


# Who holds what -----------------------------------------------------------------------------------------


def test_everything_on_the_device_is_counted_once_for_who_holds_it() -> None:
    model, other = tanhs(), nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    model(BATCH).sum().backward()
    optimizer.step()
    kept = [model(BATCH).sum() for _ in range(2)]  # with their graphs
    held = who_holds(model, kept[-1].grad_fn._sequence_nr() + 1)
    size = sum(parameter.nbytes for parameter in model.parameters())
    steps = 4 * len(list(model.parameters()))
    assert (held.parameters, held.gradients, held.states) == (size, size, 2 * size + steps)
    assert held.others >= sum(parameter.nbytes for parameter in other.parameters())
    assert "Linear" in held.other_models
    outputs = 4 * 256 * 64 * 4  # of the four hyperbolic tangents, of each run
    assert held.graphs == 2 * outputs + BATCH.nbytes + 2 * 4
    assert held.earlier_graphs == 2


def test_a_graph_that_was_gone_back_through_holds_nothing() -> None:
    model = tanhs()
    loss = model(BATCH).sum()
    loss.backward()
    held = who_holds(model, loss.grad_fn._sequence_nr() + 1)
    assert held.graphs == loss.nbytes


# What is said -------------------------------------------------------------------------------------------


@pytest.fixture
def note(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The note of an error in a planned forward, where the device says this of itself."""

    def noted(memory: DeviceMemory, keep: int = 0, budget: str = "4MiB") -> str:
        monkeypatch.setattr(out_of_memory, "device_memory", lambda device: memory)
        model = tanhs()
        lowtide.optimize(model, (BATCH,), loss=torch.sum, budget=budget, profile=False)
        kept = [tanhs()(BATCH).sum() for _ in range(keep)]
        with pytest.raises(torch.OutOfMemoryError) as found, Full("tanh"):
            model(BATCH)
        del kept
        (text,) = found.value.__notes__
        return str(text)

    return noted


def test_what_is_reserved_in_vain_and_what_others_hold_is_told(note: Callable[..., str]) -> None:
    text = note(DeviceMemory(6 * MIB, 10 * MIB, 1 * MIB, 64 * MIB))
    assert "\n     4.0 MiB  reserved by PyTorch and not in use: its cache, and gaps\n" in text
    assert "\n    53.0 MiB  other processes, and the CUDA context of this one\n" in text
    assert "- set PYTORCH_ALLOC_CONF=expandable_segments:True" in text
    assert "within 4.0 MiB, with a predicted peak of " in text
    assert "this process cannot get more" not in text


def test_a_budget_above_what_there_is_to_get_is_told(note: Callable[..., str]) -> None:
    text = note(DeviceMemory(2 * MIB, 2 * MIB, 1 * MIB, 64 * MIB))
    assert "- plan within less than 3.0 MiB: this process cannot get more while others hold the rest" in text
    assert "expandable_segments" not in text


def test_graphs_of_earlier_steps_are_found_and_what_to_do_about_them(note: Callable[..., str]) -> None:
    text = note(DeviceMemory(6 * MIB, 6 * MIB, 1 * MIB, 8 * MIB), keep=5)
    assert "autograd graphs from before this forward (5), with results" in text
    assert "- let go of what earlier steps have made: keep losses as numbers (loss.item())" in text
