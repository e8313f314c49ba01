"""A plan for a model: tried out by a dry run, and true on the machine."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowtide import zoo
from lowtide.chain.plan import Plan
from lowtide.cost.measure import measure
from lowtide.errors import BadRequest, InfeasibleBudget, UnknownMethod
from lowtide.execute.apply import apply, plans_of, remove
from lowtide.planner.api import optimize, plan
from lowtide.planner.layers import Rehearsal
from lowtide.solvers.solution import Solution, Status
from lowtide.trace.step import Example, training_step
from tests.helpers.effort import long_but
from tests.helpers.narrowed import narrowed

TINY: dict[str, dict[str, int]] = {
    "alexnet": {"batch": 8, "image": 96},
    "resnet18": {"batch": 8, "image": 64},
    "densenet121": {"batch": 4, "image": 64},
    "unet": {"batch": 2, "image": 64},
    "gpt": {"batch": 8, "tokens": 64, "layers": 4, "width": 128, "heads": 4, "vocab": 200},
    "vit": {"batch": 8, "image": 64, "layers": 4, "width": 64, "heads": 4},
}


@pytest.fixture(autouse=True)
def _own_cost_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def rehearsal_of(name: str, *, profile: bool = False) -> Rehearsal:
    torch.manual_seed(0)
    work = zoo.workload(name, zoo.Sizes(**TINY[name]))
    return Rehearsal(narrowed(work.model), work.kwargs or work.args, work.loss, profile=profile)


# The referee: the allocator -----------------------------------------------------------------------------


def measured_growth(rehearsal: Rehearsal) -> int:
    step = training_step(rehearsal.model, rehearsal.example, rehearsal.loss)
    step()
    rehearsal.model.zero_grad()
    return measure(step, device="cpu").growth_bytes


@pytest.mark.parametrize("name", long_but(TINY, "resnet18"))
def test_the_predicted_peak_of_every_applied_plan_is_the_measured_one(name: str) -> None:
    """Within one per cent of the part that is not resident."""
    rehearsal = rehearsal_of(name, profile=True)
    chain = rehearsal.chain()
    resident = rehearsal.plain.timeline.resident_bytes
    found = {
        solution.plan: solution
        for method in ("keep-all", "chen-sqrt", "chen-recursive", "feng-huang", "hong-linear", "rotor")
        for solution in [rehearsal.solve(chain, method)]
    }
    for solution in found.values():
        assert solution.confirmation is not None
        apply(rehearsal.model, solution)
        growth = measured_growth(rehearsal)
        remove(rehearsal.model)
        predicted = solution.confirmation.peak_bytes - resident
        assert predicted == pytest.approx(growth, rel=0.01), (solution.method, str(solution.plan))


@pytest.mark.parametrize("name", ["resnet18", "gpt", "vit", "unet"])
def test_a_budget_holds_and_more_of_it_never_costs_more_time(name: str) -> None:
    rehearsal = rehearsal_of(name)
    chain = rehearsal.chain()
    least = rehearsal.solve(chain, "rotor")
    assert least.confirmation is not None
    most, floor = rehearsal.plain.peak_bytes, least.confirmation.peak_bytes
    extra = []
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        budget = int(floor + part * (most - floor))
        solution = rehearsal.solve(chain, "rotor", budget)
        assert solution.confirmation is not None
        assert solution.confirmation.peak_bytes <= budget == solution.budget_bytes
        extra.append(solution.extra_seconds)
    assert extra == sorted(extra, reverse=True)
    assert extra[-1] == 0.0


# By hand ------------------------------------------------------------------------------------------------


def tanh_chain(depth: int) -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(depth) for layer in (nn.Linear(64, 64), nn.Tanh())])


def square(output: torch.Tensor) -> torch.Tensor:
    return (output**2).sum()


BATCH = torch.randn(512, 64)
TENSOR = 512 * 64 * 4


def planned(model: nn.Module, example: Example, **options: Any) -> Solution:
    """A plan of layers."""
    solution = plan(model, example, **options)
    assert isinstance(solution, Solution)
    return solution


def test_one_line_plans_and_one_applies() -> None:
    model = tanh_chain(8)
    solution = planned(model, BATCH, loss=square, profile=False)
    assert solution.confirmation is not None
    assert solution.status is Status.OPTIMAL
    states = solution.confirmation.peak_bytes - solution.peak_bytes  # random ones, which the chain leaves out
    assert 0 <= states <= (len(solution.checkpoints) + 1) * torch.get_rng_state().numel()
    # Plain training keeps eight tensors; four segments of two keep at most three, and recompute two.
    plain = solution.confirmation.plain_peak_bytes
    assert plain - solution.confirmation.peak_bytes >= 3 * TENSOR
    assert apply(model, solution) is model


def test_a_model_that_has_a_plan_keeps_it_while_another_is_made() -> None:
    model = tanh_chain(8)
    first = planned(model, BATCH, loss=square, profile=False)
    apply(model, first)
    again = planned(model, BATCH, loss=square, profile=False)
    assert again.confirmation == first.confirmation
    assert again.plan == first.plan
    assert plans_of(model) == (first,)


def test_planning_leaves_model_gradients_and_streams_alone() -> None:
    model = nn.Sequential(tanh_chain(2), nn.BatchNorm1d(64), nn.Dropout(0.5))
    square(model(BATCH)).backward()
    before = copy.deepcopy(model.state_dict())
    gradients = [parameter.grad for parameter in model.parameters()]
    stream = torch.get_rng_state()
    planned(model, BATCH, loss=square, profile=False)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(a is b.grad for a, b in zip(gradients, model.parameters(), strict=True))
    assert torch.equal(stream, torch.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_optimizers_states_and_step_are_in_the_budget() -> None:
    model = tanh_chain(8)
    without = planned(model, BATCH, loss=square, profile=False)
    adam = planned(model, BATCH, loss=square, optimizer="adam", profile=False)
    parameters = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert without.confirmation is not None
    assert adam.confirmation is not None
    assert adam.confirmation.peak_bytes - without.confirmation.peak_bytes >= 2 * parameters


def test_extra_time_is_that_of_the_ops_which_are_run_again() -> None:
    model = tanh_chain(8)
    rehearsal = Rehearsal(model, BATCH, square)
    chain = rehearsal.chain("fine")
    solution = rehearsal.solve(chain, "selective")
    assert solution.confirmation is not None
    assert solution.confirmation.recomputed_ops == 7  # the tanhs; the products after them are not run again
    assert 0 < solution.confirmation.extra_seconds < solution.extra_seconds


# Several processes --------------------------------------------------------------------------------------

DISTRIBUTED = textwrap.dedent(
    """
    import sys
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as mp
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from lowtide.planner.api import plan
    from lowtide.execute.apply import apply

    def model():
        torch.manual_seed(0)
        body = [m for _ in range(4) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True))]
        return nn.Sequential(*body, nn.Dropout(0.2), nn.Linear(16, 2))

    def square(output):
        return (output ** 2).mean()

    def train(rank, network):
        wrapped = DistributedDataParallel(network)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
        losses = []
        torch.manual_seed(10 + rank)
        for _ in range(5):
            optimizer.zero_grad()
            loss = square(wrapped(torch.randn(8, 16)))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, {key: value.clone() for key, value in network.state_dict().items()}

    def run(rank, store):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        plain = train(rank, model())
        network = model()
        solution = plan(network, torch.randn(8, 16), loss=square, profile=False, method="chen-recursive",
                        granularity="fine")
        assert solution.confirmation.recomputed_ops > 0
        planned = train(rank, apply(network, solution))
        assert planned[0] == plain[0], (planned[0], plain[0])
        assert all(torch.equal(planned[1][key], plain[1][key]) for key in plain[1])
        dist.destroy_process_group()

    if __name__ == "__main__":
        mp.spawn(run, args=(sys.argv[1],), nprocs=2)
    """
)


@pytest.mark.long
def test_ddp_trains_an_applied_model_to_the_same_losses(tmp_path: Path) -> None:
    script = tmp_path / "distributed.py"
    script.write_text(DISTRIBUTED, encoding="utf-8")
    source = str(Path(__file__).parents[2] / "src")
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        env={"PYTHONPATH": source, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,  # a hang is a failure
    )
    assert result.returncode == 0, result.stderr[-2000:]


# Refusals -----------------------------------------------------------------------------------------------


def test_a_budget_below_the_floor_names_the_floor_and_the_layer() -> None:
    model = tanh_chain(8)
    with pytest.raises(InfeasibleBudget, match=r"no plan of rotor fits in 1\.0 KiB") as caught:
        planned(model, BATCH, loss=square, budget="1KiB", method="rotor", profile=False)
    error = caught.value
    assert error.needed_by in str(error)
    solution = planned(model, BATCH, loss=square, budget=error.least_bytes, method="rotor", profile=False)
    assert solution.confirmation is not None
    assert solution.confirmation.peak_bytes <= error.least_bytes


def test_an_unknown_method_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnknownMethod, match="Did you mean hong-linear"):
        plan(tanh_chain(2), BATCH, loss=square, method="hong-linaer", profile=False)


def test_an_unknown_granularity_is_refused() -> None:
    with pytest.raises(BadRequest, match="there is no granularity 'thin'; it is one of fine, layer, block"):
        plan(tanh_chain(2), BATCH, loss=square, granularity="thin", profile=False)


def test_a_failing_model_keeps_no_plan() -> None:
    model = tanh_chain(4)
    with pytest.raises(BadRequest, match="the training step raised an error"):
        planned(model, torch.randn(4, 63), loss=square, profile=False)
    assert not any(module._forward_hooks for module in model.modules())
    assert planned(model, BATCH, loss=square, method="keep-all", profile=False).plan == Plan()


# Batches and paths that change --------------------------------------------------------------------------


class Depth(nn.Module):
    """How many of its layers run is up to its caller, and from which on to an attribute."""

    first = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8))

    def forward(self, x: torch.Tensor, depth: int = 8) -> torch.Tensor:
        for layer in self.layers[self.first : depth]:
            x = layer(x)
        return x


def planned_growth(model: nn.Module, *args: object) -> int:
    model.zero_grad()
    return measure(training_step(model, args, square), device="cpu").growth_bytes


@pytest.mark.parametrize(
    "others",
    [
        [(torch.randn(size, 64),) for size in (600, 128, 512)],
        pytest.param([(BATCH, 4), (BATCH, 6), (BATCH,)], marks=pytest.mark.long),
    ],
)
def test_under_a_budget_other_inputs_are_planned_for_when_they_are_met(
    others: list[tuple[object, ...]],
) -> None:
    model = Depth()
    plain, budget = copy.deepcopy(model), 70
    resident = sum(parameter.numel() * 4 for parameter in model.parameters())
    optimize(model, BATCH, budget=f"{budget}%", method="rotor", loss=square, profile=False)
    least = Rehearsal(plain, BATCH, square, profile=False).plain.peak_bytes * budget // 100
    with pytest.warns(UserWarning, match="planned for now, under the same budget"):
        planned_growth(model, *others[0])
    for args in others:
        growth = planned_growth(model, *args)
        batch = args[0]
        assert isinstance(batch, torch.Tensor)
        assert resident + batch.numel() * 4 + growth <= least
        planned_growth(plain, *args)
        assert all(
            (one.grad is None and two.grad is None)
            or (one.grad is not None and two.grad is not None and torch.equal(one.grad, two.grad))
            for one, two in zip(model.parameters(), plain.parameters(), strict=True)
        )


def test_a_batch_for_which_no_plan_fits_is_refused_before_it_runs() -> None:
    model = tanh_chain(8)
    optimize(model, BATCH, budget="70%", method="rotor", loss=square, profile=False)
    with (
        pytest.warns(UserWarning, match="They are planned for now"),
        pytest.raises(InfeasibleBudget, match="no plan of rotor fits"),
    ):
        model(torch.randn(10_000, 64))
    square(model(BATCH)).backward()


def test_a_copy_of_an_optimized_model_plans_for_itself() -> None:
    model = tanh_chain(8)
    optimize(model, BATCH, budget="70%", method="rotor", loss=square, profile=False)
    copied = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="They are planned for now"):
        square(copied(torch.randn(100, 64))).backward()
    assert [plan.chain.inputs for plan in plans_of(copied) if isinstance(plan, Solution)] == [
        ("float32[512, 64]",),
        ("float32[100, 64]",),
    ]
    assert plans_of(model) == plans_of(copied)[:1]
    remove(copied)
    assert plans_of(copied) == ()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in copied.parameters())


def test_a_path_with_fewer_layers_needs_no_more_than_the_plan() -> None:
    model = Depth()
    apply(model, planned(model, (BATCH,), loss=square, method="chen-sqrt", profile=False))
    whole = planned_growth(model, BATCH)
    for first in (1, 3, 6):
        model.first = first
        assert planned_growth(model, BATCH) <= whole
