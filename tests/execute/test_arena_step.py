"""A training step in one planned arena: the numbers of plain training, in the memory that was promised."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide import zoo
from lowtide.cost.measure import growth, record_cpu
from lowtide.errors import BadRequest, CannotRun
from lowtide.execute.arena_step import ArenaStep
from lowtide.trace.step import training_step
from tests.helpers.effort import long_but
from tests.helpers.narrowed import narrowed

NETWORKS = {
    "mlp": {"width": 32},
    "gpt": {"layers": 2, "width": 32, "heads": 2, "tokens": 16, "vocab": 50},
    "resnet18": {"image": 32},
    "vgg11": {"image": 32, "classes": 10},
    "lstm": {"tokens": 6, "width": 16},
}


def workload(name: str) -> zoo.Workload:
    torch.manual_seed(0)
    work = zoo.workload(name, zoo.Sizes(batch=4, **NETWORKS[name]))
    narrowed(work.model)
    return work


def fresh(step: ArenaStep) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        step.model.zero_grad(set_to_none=True)
        return step()

    return run


def assert_trained_alike(plain: nn.Module, found: nn.Module) -> None:
    for (name, expected), parameter in zip(plain.named_parameters(), found.parameters(), strict=True):
        assert expected.grad is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, expected.grad), name
    for (name, buffer), other in zip(plain.named_buffers(), found.buffers(), strict=True):
        assert torch.equal(other, buffer), name


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("name", long_but(NETWORKS, "mlp", "gpt", "resnet18"))
def test_a_step_in_an_arena_is_plain_training_in_the_memory_promised(name: str, budget: str | None) -> None:
    work = workload(name)
    plain, example = copy.deepcopy(work.model), work.kwargs or work.args
    solution = None if budget is None else lowtide.plan(work.model, example, budget=budget, loss=work.loss)
    step = lowtide.in_arena(work.model, example, work.loss, solution=solution, profile=True)
    torch.manual_seed(1)
    loss = step()
    torch.manual_seed(1)
    assert torch.equal(loss, training_step(plain, example, work.loss)())
    assert_trained_alike(plain, work.model)
    fresh(step)()
    blocks, _ = record_cpu(fresh(step))
    report = step.report
    handed_back = 4  # the loss, which is the user's to keep
    assert max(growth(blocks)) == max(report.extra_bytes, handed_back)
    assert report.held_bytes == report.resident_bytes + report.arena_bytes + report.extra_bytes
    assert report.arena_bytes <= 1.05 * report.lower_bound_bytes


def test_a_plan_makes_the_arena_smaller() -> None:
    work = workload("gpt")
    solution = lowtide.plan(work.model, work.args, budget="min", loss=work.loss)
    everything_kept = lowtide.in_arena(work.model, work.args, work.loss)
    planned = lowtide.in_arena(work.model, work.args, work.loss, solution=solution)
    assert planned.report.arena_bytes < 0.8 * everything_kept.report.arena_bytes


def test_steps_go_on_with_other_batches_and_an_optimizer() -> None:
    work = workload("mlp")
    plain = copy.deepcopy(work.model)
    batches = [torch.randn_like(work.args[0]) for _ in range(4)]
    step = lowtide.in_arena(work.model, work.args, work.loss)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, work.model)]
    assert step.inputs == ("x", "target")
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = training_step(plain, (batch,), work.loss)()
        assert torch.equal(step(x=batch), expected)
        for optimizer in optimizers:
            optimizer.step()
    for expected, found in zip(plain.parameters(), work.model.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_every_step_after_the_first_allocates_the_same() -> None:
    work = workload("resnet18")
    step = fresh(lowtide.in_arena(work.model, work.args, work.loss))
    step()
    step()
    first, second = ([block.bytes for block in record_cpu(step)[0]] for _ in range(2))
    assert first == second
    assert sum(first) == sum(block for block in first if block > 0) + sum(b for b in first if b < 0) <= 4


def test_a_report_adds_up_and_says_how_results_are_written() -> None:
    work = workload("resnet18")
    step = lowtide.in_arena(work.model, work.args, work.loss)
    step()
    text = str(step.report)
    assert "resident: parameters, buffers, batch" in text
    assert "results to be moved; no workspaces" in text
    assert "moved by" in text
    assert "convolution_backward" in text.split("moved by")[1]
    assert "relu" in text.split("written by")[1].split("\n")[0]


def test_the_model_is_left_as_it_was() -> None:
    work = workload("mlp")
    keys, kind = list(work.model.state_dict()), type(work.model)
    step = lowtide.in_arena(work.model, work.args, work.loss)
    step()
    assert list(work.model.state_dict()) == keys
    assert type(work.model) is kind
    assert "forward" not in work.model.__dict__


def test_gradients_that_are_still_there_are_not_overwritten() -> None:
    work = workload("mlp")
    step = lowtide.in_arena(work.model, work.args, work.loss)
    step()
    with pytest.raises(BadRequest, match=r"there are gradients already.*zero_grad\(\) first"):
        step()


def test_an_input_of_another_shape_or_name_is_refused() -> None:
    work = workload("mlp")
    step = lowtide.in_arena(work.model, work.args, work.loss)
    with pytest.raises(BadRequest, match=r"'x' was torch.float32 of shape \(4, 784\).* is now .*\(2, 784\)"):
        step(x=work.args[0][:2])
    with pytest.raises(BadRequest, match="the step is given x, target; there is no 'y'"):
        step(y=work.args[0])


def test_a_plan_for_another_model_is_refused() -> None:
    work = workload("mlp")
    other = zoo.workload("mlp", zoo.Sizes(batch=4, width=16))
    solution = lowtide.plan(other.model, other.args, budget="min", loss=other.loss)
    with pytest.raises(BadRequest, match="the plan was made for another model"):
        lowtide.in_arena(work.model, work.args, work.loss, solution=solution)
    layers = lowtide.plan(work.model, work.args, method="chen-sqrt", loss=work.loss)
    with pytest.raises(BadRequest, match="a plan of chen-sqrt is for layers, and an arena holds ops"):
        lowtide.in_arena(work.model, work.args, work.loss, solution=layers)


def test_a_model_without_memory_or_a_loss_is_refused() -> None:
    with torch.device("meta"):
        work = zoo.workload("mlp", zoo.Sizes(batch=4))
    with pytest.raises(BadRequest, match="the meta device"):
        lowtide.in_arena(work.model, work.args, work.loss)
    real = workload("mlp")
    with pytest.raises(BadRequest, match="Give a loss that makes one of it"):
        lowtide.in_arena(real.model, real.args)


class Conjugated(nn.Module):
    """Complex numbers, and what lies in them looked at as its conjugate and its negative."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.rfft(x * self.weight)
        found: torch.Tensor = torch.fft.irfft(z * z.conj(), n=8) + z.imag.sum() * z.conj().imag.sum()
        return found.sum()


class Offsets(nn.Module):
    """Looks at a storage from an offset in it, to read and to write."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12))
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(x).sin()
        hidden.as_strided((2, 2), (4, 1), 5).mul_(2)
        weight = self.weight.as_strided((2, 4), (4, 1), 3)
        return (hidden @ weight.T).sin().sum()


class Counting(nn.Module):
    """Assigns to one buffer, and counts in another."""

    mean: torch.Tensor
    steps: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        self.steps += 1
        return (hidden - self.mean).sin().sum()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.norm(self.linear(x))
        found: torch.Tensor = first.sin() * self.norm(self.linear(2 * x))
        return found.sum()


class Turned(nn.Module):
    """A norm over places that lie in another order, which PyTorch's variant adds to what lies there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.norm(self.linear(x).transpose(1, 2)).sin()
        return F.mse_loss(found, torch.ones_like(found))


class Written(nn.Module):
    """Changes parts of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(x).sin()
        hidden[:, ::2] *= 2
        hidden[0].mul_(3)
        hidden.diagonal().add_(1)
        return hidden.square().sum()


class WrittenOut(nn.Module):
    """Numbers that stand in the code: tensors, and one that is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(x) * x.new_tensor([1.5]) + torch.tensor([2.5])
        hidden[:, 0] = 0.5
        found: torch.Tensor = (torch.fft.fft(hidden) * 2j).imag
        return found.sin().sum()


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Conjugated(), torch.randn(3, 8)),
        (Offsets(), torch.randn(3, 4)),
        (Counting(), torch.randn(3, 4)),
        (Twice().double(), torch.randn(6, 4).double()),
        (Turned(), torch.randn(3, 5, 4)),
        (Written(), torch.randn(4, 4)),
        (WrittenOut(), torch.randn(3, 4)),
    ],
    ids=[
        "conjugates",
        "offsets in a storage",
        "a buffer that is assigned",
        "a norm called twice in float64",
        "a norm over turned places",
        "parts that are written",
        "numbers that stand in the code",
    ],
)
@pytest.mark.parametrize("planned", [False, True], ids=["everything kept", "planned"])
def test_any_step_in_an_arena_is_plain_training(model: nn.Module, x: torch.Tensor, planned: bool) -> None:
    plain = copy.deepcopy(model)
    solution = lowtide.plan(model, (x,), budget="min", profile=False) if planned else None
    step = fresh(lowtide.in_arena(model, (x,), solution=solution))
    for _ in range(2):
        plain.zero_grad()
        expected = plain(x)
        expected.backward()
        assert torch.equal(step(), expected)
        assert_trained_alike(plain, model)


def test_parts_are_written_without_a_copy_of_the_arena() -> None:
    step = fresh(arena := lowtide.in_arena(Written(), (torch.randn(99, 4),), profile=True))
    step()
    blocks, _ = record_cpu(step)
    assert max(growth(blocks)) <= max(arena.report.extra_bytes, 4)


class CheckpointedRecurrence(nn.Module):
    """A recurrent layer that is taken apart as it runs, and turns its result in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.RNN(4, 3, batch_first=True, bidirectional=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(lambda x: self.layer(x)[0], x, use_reentrant=False)
        return found.square().sum()


def test_a_tensor_that_is_turned_in_place_is_turned_once() -> None:
    torch.manual_seed(0)
    model, x = CheckpointedRecurrence(), torch.randn(3, 5, 4)
    plain = copy.deepcopy(model)
    step = lowtide.in_arena(model, (x,))
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad(set_to_none=True)
        expected = plain(x)
        expected.backward()
        assert torch.equal(step(), expected)
        assert_trained_alike(plain, model)


class Phases(nn.Module):
    """What comes in is turned round, and lies in memory otherwise than the gradient of what goes out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(torch.polar(torch.ones_like(x.mT), x.mT.contiguous())).sum(-1).mT


class Frequencies(nn.Module):
    """The kernels that write where they are told compute elsewhere, and in another order of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there = torch.fft.rfft(x * self.weight, dim=1)
        found: torch.Tensor = torch.fft.irfft(there * there.abs(), n=x.shape[1], dim=1).square().sum()
        return found


def test_transforms_in_an_arena_take_what_the_report_says() -> None:
    model = Frequencies()
    step = fresh(arena := lowtide.in_arena(model, (torch.randn(16, 6, 8),), profile=True))
    step()
    blocks, _ = record_cpu(step)
    assert max(growth(blocks)) <= arena.report.extra_bytes


def test_complex_numbers_in_an_arena_are_rounded_as_in_plain_training() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), Phases(), nn.Linear(8, 8)), torch.randn(3, 8, 8)
    plain = copy.deepcopy(model)
    expected = plain(x).square().sum()
    expected.backward()
    assert torch.equal(lowtide.in_arena(model, (x,), lambda found: found.square().sum())(), expected)
    assert_trained_alike(plain, model)


def test_half_precision_in_an_arena_is_plain_training_under_autocast() -> None:
    """Norms have their means in full precision, and their backward asks for them so."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    plain, x = copy.deepcopy(model), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        step = lowtide.in_arena(model, (x,), loss=lambda found: found.square().sum())
        expected = plain(x).square().sum()
    expected.backward()
    assert torch.equal(step(), expected)
    assert_trained_alike(plain, model)


class Choosing(nn.Module):
    """Chooses by a number: of what it has just made, or how many rows of the batch there are."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.how = how

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.linear(x)
        if self.how == "branch":
            hidden = hidden.sin() if hidden.mean() > 0 else hidden.cos()
        if self.how == "draw":
            hidden = hidden * random.uniform(0.5, 1.5)
        if self.how == "number":
            hidden = hidden * float(hidden.detach().mean())
        if self.how == "batch":
            hidden = hidden[: int(rows.max())]
        return hidden.sum()


@pytest.mark.parametrize("how", ["branch", "draw"])
def test_a_step_that_may_take_another_path_next_time_is_refused(how: str) -> None:
    model, example = Choosing(how), (torch.randn(3, 4), torch.tensor([2]))
    with pytest.raises(CannotRun, match=r"follows from a number .*test_arena_step.py:\d+, in forward: `"):
        lowtide.in_arena(model, example)
    solution = lowtide.plan(model, example, budget="min", profile=False)
    with pytest.raises(CannotRun, match=r"lowtide.optimize follows every path"):
        lowtide.in_arena(model, example, solution=solution)


def test_a_step_of_which_there_is_no_graph_is_refused_by_the_line_that_is_in_the_way() -> None:
    model, example = Choosing("number"), (torch.randn(3, 4), torch.tensor([2]))
    with pytest.warns(UserWarning, match="layer by layer"):
        solution = lowtide.plan(model, example, budget="min", profile=False)
    with pytest.raises(CannotRun, match=r"test_arena_step.py:\d+, in forward: `.*lowtide.apply puts"):
        lowtide.in_arena(model, example, solution=solution)


def test_a_path_that_was_decided_by_one_batch_is_not_taken_with_another() -> None:
    model, x, rows = Choosing("batch"), torch.randn(3, 4), torch.tensor([2])
    step = lowtide.in_arena(model, (x, rows))
    assert torch.equal(step(), model(x, rows))
    model.zero_grad()
    with pytest.raises(BadRequest, match=r"this one was decided by the numbers in the example: .*int\(rows"):
        step(rows=torch.tensor([1]))


def test_a_recurrent_layer_in_an_arena_leaves_what_its_backward_needs() -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(4, 4, batch_first=True), torch.randn(3, 5, 4)
    plain = copy.deepcopy(model)
    step = lowtide.in_arena(model, (x,), loss=lambda found: found[0].square().sum())
    expected = plain(x)[0].square().sum()
    expected.backward()
    assert torch.equal(step(), expected)
    assert_trained_alike(plain, model)


def test_a_buffer_that_becomes_another_kind_of_tensor_is_refused() -> None:
    model = Counting()
    model.mean = torch.zeros(())
    with pytest.raises(BadRequest, match=r"the buffer 'mean': float32 of shape \(4,\) in place of .*\(\)"):
        lowtide.in_arena(model, (torch.randn(3, 4),))
