"""What a real training on the CPU would hold on a card: which tensors, when, and where it runs out."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide
from lowtide.compat.patches import active
from lowtide.compat.tensors import storage_key
from lowtide.cost.cuda_rules import CONTEXT_BYTES, CUBLAS_BYTES, CUBLASLT_BYTES, price
from lowtide.cost.measure import allocator_events, cpu_blocks, growth
from lowtide.ir.cuda_allocator import cached
from lowtide.ir.graph import Role
from lowtide.ir.simulate import Category
from lowtide.rehearsal import watch as watch_module
from lowtide.rehearsal.on_card import CardRehearsal
from lowtide.rehearsal.outcome import Act, ActPeak, Doing, Ended
from lowtide.trace.dry_run import dry_run

MIB = 1 << 20
LIBRARY = 2 * CUBLAS_BYTES + CUBLASLT_BYTES  # both threads multiply; one adds a bias


def on_card(more_bytes: int, **wishes: Any) -> CardRehearsal:
    """A card with so much beside the context and what cuBLAS keeps."""
    return lowtide.card(CONTEXT_BYTES + LIBRARY + more_bytes, **wishes)


def act(rehearsal: CardRehearsal, which: Act) -> ActPeak:
    return next(found for found in rehearsal.found.acts if found.act is which)


def mlp(width: int = 256) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(128, width), nn.Tanh(), nn.Linear(width, 128))


def tanhs() -> nn.Sequential:
    """No matrix products, no kernel that takes anything on the CPU or on CUDA."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(64, 1024))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * self.weight)

    torch.manual_seed(0)
    return nn.Sequential(Scaled(), Scaled(), Scaled())


# The referee --------------------------------------------------------------------------------------------


def test_it_sees_every_allocation_that_the_allocator_of_the_cpu_makes() -> None:
    model, batch = tanhs(), torch.rand(64, 1024)

    def step() -> None:
        model(batch).sum().backward()

    step()  # gradients are there
    with on_card(64 * MIB) as rehearsal:
        step()
        begun = gc.collect()  # nothing waits to be collected, so all that is alive is held
        del begun
    replayed = act(rehearsal, Act.FIRST)
    with allocator_events() as recording:
        step()
    assert recording.profiler is not None
    results = recording.profiler.kineto_results
    assert results is not None
    real = max(growth(cpu_blocks(results.experimental_event_tree())))
    always = 3 * 2 * batch.nbytes + batch.nbytes  # weights, gradients, and the batch itself
    scalars = 4 * 512  # numbers take 512 B on CUDA, and a few bytes on the CPU
    assert 0 <= replayed.allocated_bytes - always - real <= scalars


@pytest.mark.parametrize("make", [mlp, tanhs])
def test_a_step_holds_what_the_dry_run_predicts_for_cuda(make: Callable[[], nn.Module]) -> None:
    model = make()
    shape = (64, 1024) if make is tanhs else (300, 128)
    batch = torch.rand(shape)
    plain, together = (torch.optim.AdamW(model.parameters(), foreach=each) for each in (None, True))

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    predicted = dry_run(lambda: step(together), model=model, optimizer=together, device="cuda", warmup=1)
    graph = price(predicted.graph)
    library = sum(value.bytes for value in graph.values if value.role is Role.LIBRARY)
    expected = cached(predicted.graph, predicted.schedule).allocated_bytes + library
    with lowtide.card("16GiB") as rehearsal:
        for _ in range(3):
            step(plain)
    steps = 512 * len(list(model.parameters()))  # AdamW counts them on the CPU, the dry run on the device
    assert act(rehearsal, Act.TRAINING).allocated_bytes == expected - steps
    assert plain.param_groups[0]["foreach"] is None


# What is on the card ------------------------------------------------------------------------------------


def test_a_data_set_stays_on_the_cpu_and_its_batches_do_not() -> None:
    model = mlp()
    data = TensorDataset(torch.randn(4096, 128), torch.randn(4096, 128))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with on_card(64 * MIB) as rehearsal:
        for x, y in DataLoader(data, batch_size=64):
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    held = act(rehearsal, Act.TRAINING).held
    assert held[Category.PARAMETERS] == sum(parameter.nbytes for parameter in model.parameters())
    assert held[Category.BATCH] <= 3 * 64 * 128 * 4  # the batch, its targets, and the one before


def test_a_slice_of_something_that_stays_on_the_cpu_counts_as_the_slice() -> None:
    model, data = mlp(), torch.randn(4096, 128)
    with on_card(64 * MIB) as rehearsal:
        for start in range(0, 4096, 64):
            model(data[start : start + 64]).sum().backward()
    assert act(rehearsal, Act.FIRST).held[Category.BATCH] == 64 * 128 * 4


def test_what_counted_as_a_slice_may_count_as_a_whole_later_and_counts_once() -> None:
    model, data = mlp(), torch.randn(4096, 128)
    with on_card(64 * MIB) as rehearsal:
        model(data[:64]).sum().backward()
        model(data).sum().backward()
        stand: Any = rehearsal._stand
        held = sum(claim.blocks[0].size for claim in stand._ledger._claims.values())
        assert held == stand._ledger.replay.allocator.allocated_bytes
    assert act(rehearsal, Act.FIRST).held[Category.BATCH] == data.nbytes


def test_a_storage_at_the_address_of_one_that_died_in_the_same_op_is_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch_module, "is_plain_op", lambda func: True)
    with on_card(64 * MIB) as rehearsal:
        stand: Any = rehearsal._stand
        given, made = torch.zeros(MIB, device="cuda"), torch.zeros(MIB, device="cuda")

        class Op:
            namespace = "aten"

            def __call__(self, *args: Any) -> torch.Tensor:
                stand._watch.died(storage_key(made))  # of an older one, and then there is this
                return made

        stand._watch.__torch_dispatch__(Op(), (), (given,))
        assert torch.cuda.memory_allocated() == 2 * 4 * MIB


def test_a_script_that_names_cuda_says_what_is_on_the_card() -> None:
    beside = mlp()
    with on_card(64 * MIB) as rehearsal:
        beside(torch.randn(500, 128)).sum().backward()  # on the CPU, as it says nothing else
        model = mlp().to("cuda")
        mask = torch.ones(16, 128, device="cuda:0")
        loss = (model(torch.randn(16, 128).cuda()) * mask).sum()
        loss.backward()
        kept = loss.detach().cpu(), loss.detach().to("cpu")
    found = act(rehearsal, Act.FIRST)
    assert found.held[Category.PARAMETERS] == sum(parameter.nbytes for parameter in model.parameters())
    assert found.held[Category.BATCH] == 16 * 128 * 4
    assert any("names CUDA" in note for note in rehearsal.found.notes)
    assert kept[0] == kept[1] == loss
    assert beside[0].weight.grad is not None


def test_what_is_brought_back_to_the_cpu_is_not_held_any_longer() -> None:
    model = mlp()
    with on_card(64 * MIB) as rehearsal, torch.no_grad():
        kept = [model(torch.randn(256, 128)).cpu() for _ in range(50)]
    assert len(kept) == 50
    assert rehearsal.found.peak_reserved_bytes < LIBRARY + 24 * MIB


def test_a_number_may_stay_on_the_cpu() -> None:
    scale, model = torch.tensor(2.0), mlp()
    with on_card(64 * MIB) as rehearsal:
        model(torch.randn(4, 128) * scale).mul(scale).sum().backward()
        stand: Any = rehearsal._stand
        assert not stand._watch.knows(scale)


def test_in_a_backward_nothing_comes_from_the_cpu() -> None:
    class Copied(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x + 1

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            made = torch.empty(gradients[0].shape)  # names no device, as compiled code here does not
            return made.copy_(gradients[0])

    weight = nn.Parameter(torch.randn(64, 64))
    with on_card(64 * MIB) as rehearsal:
        (Copied.apply(weight) * weight.detach()).sum().backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        stand: Any = rehearsal._stand
        assert stand._watch.knows(weight.grad)


def test_where_cuda_is_named_to_cpu_means_the_cpu() -> None:
    data = torch.randn(MIB)
    with on_card(64 * MIB):
        there = data.to("cuda")
        assert data.to("cpu") is data
        assert torch.cuda.memory_allocated() == 4 * MIB
        back = there.to("cpu")
        del there
        assert torch.cuda.memory_allocated() == 0
    assert torch.equal(back, data)


def test_torch_cuda_tells_of_the_card_and_gives_back_its_cache() -> None:
    with on_card(64 * MIB):
        torch.cuda.reset_peak_memory_stats()
        made = torch.zeros(MIB, device="cuda")
        assert torch.cuda.memory_allocated() == 4 * MIB
        del made
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 4 * MIB)
        assert torch.cuda.memory_reserved() == 20 * MIB
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0


def test_a_checkpoint_can_be_loaded_to_the_card(tmp_path: Path) -> None:
    torch.save(torch.zeros(MIB), tmp_path / "saved.pt")
    with on_card(64 * MIB):
        loaded = torch.load(tmp_path / "saved.pt", map_location="cuda")
        assert torch.cuda.memory_allocated() == loaded.nbytes


def test_autocast_for_cuda_casts_on_the_cpu() -> None:
    model = mlp()
    with on_card(64 * MIB), torch.autocast("cuda", torch.bfloat16):
        assert model(torch.randn(4, 128)).dtype is torch.bfloat16


def test_a_model_and_its_optimizer_that_were_there_before_are_there_from_the_beginning() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 128)).sum().backward()
    optimizer.step()
    with on_card(64 * MIB) as rehearsal:
        model(torch.randn(4, 128))
    held = rehearsal.found.acts[0].held
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert held[Category.GRADIENTS] == parameters
    assert held[Category.OPTIMIZER_STATE] == 2 * parameters


# Where it runs out --------------------------------------------------------------------------------------


def trained(model: nn.Module, batch: int, validated: int, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(batch, 128)).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        model(torch.randn(validated, 128))
    model.train()


def test_everything_fits_on_a_card_that_is_large_enough() -> None:
    with on_card(64 * MIB) as rehearsal:
        trained(mlp(), 64, 64)
    found = rehearsal.found
    assert rehearsal.fits
    assert found.ended is Ended.WHOLE
    assert found.steps == 3
    assert [(each.act, each.times, each.fits) for each in found.acts] == [
        (Act.SETUP, 1, True),
        (Act.FIRST, 1, True),
        (Act.TRAINING, 2, True),
        (Act.VALIDATION, 1, True),
    ]
    assert "fits: " in str(rehearsal)


def test_a_validation_with_too_large_a_batch_is_found_with_its_line() -> None:
    with on_card(44 * MIB) as rehearsal:
        trained(mlp(), 64, 30_000)
    short = rehearsal.found.shortfall
    assert short is not None
    assert [each.act for each in rehearsal.found.acts if not each.fits] == [Act.VALIDATION]
    assert (short.moment.steps, short.moment.doing) == (3, Doing.FORWARD)
    assert "in trained: `model(torch.randn(validated, 128))`" in short.moment.line
    assert str(short.moment) == "validation after step 3, forward"
    assert short.asked_bytes == 30_000 * 256 * 4
    assert sum(short.held.values()) == short.allocated_bytes
    told = str(rehearsal)
    assert "would run out of memory in validation after step 3, forward, at aten.addmm" in told
    assert "optimizer state" in told


def test_the_states_of_the_optimizer_are_found_where_they_appear() -> None:
    with on_card(26 * MIB) as rehearsal:
        trained(mlp(width=8192), 4, 4)
    short = rehearsal.found.shortfall
    assert short is not None
    assert (short.moment.steps, short.moment.doing) == (0, Doing.UPDATE)
    assert "optimizer.step()" in short.moment.line


def test_the_copy_of_a_model_that_is_saved_is_found(tmp_path: Path) -> None:
    model = mlp(width=8192)
    with on_card(30 * MIB) as rehearsal:
        model(torch.randn(4, 128)).sum().backward()
        torch.save(copy.deepcopy(model).state_dict(), tmp_path / "saved.pt")
    short = rehearsal.found.shortfall
    assert short is not None
    assert "copy.deepcopy(model)" in short.moment.line
    assert act(rehearsal, Act.SAVING).times == 1


# The world around it ------------------------------------------------------------------------------------


def test_everything_is_as_it_was_afterwards_also_after_an_error() -> None:
    functions = nn.Module.train, torch.save, F.dropout, torch.cuda.memory_allocated, DataLoader.__iter__
    with pytest.raises(ZeroDivisionError), on_card(MIB, steps=3) as rehearsal:
        1 / 0  # noqa: B018
    assert rehearsal.found.ended is Ended.FAILED
    assert not active()
    now = nn.Module.train, torch.save, F.dropout, torch.cuda.memory_allocated, DataLoader.__iter__
    assert now == functions
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_losses_are_those_of_a_training_that_nobody_watches() -> None:
    def losses() -> list[float]:
        torch.manual_seed(1)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for _ in range(3):
            loss = model(torch.randn(8, 128)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    plain = losses()
    with on_card(64 * MIB):
        watched = losses()
    assert watched == pytest.approx(plain, rel=1e-5)  # AdamW works on all parameters at once, as on CUDA


def test_so_many_steps_end_passes_over_data_and_the_block() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(64, 128)), batch_size=4)
    validated = 0
    with on_card(64 * MIB, steps=2) as rehearsal:
        for _ in range(10):
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
            model.eval()
            with torch.no_grad():
                for (x,) in loader:
                    model(x)
                    validated += 1
            model.train()
    assert rehearsal.found.ended is Ended.ENOUGH
    assert (rehearsal.found.steps, validated) == (4, 2)


def test_so_many_steps_end_a_loop_without_a_loader() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with on_card(64 * MIB, steps=3) as rehearsal:
        while True:
            model(torch.randn(4, 128)).sum().backward()
            optimizer.step()
    assert (rehearsal.found.ended, rehearsal.found.steps) == (Ended.ENOUGH, 3)


def test_a_long_training_does_not_grow() -> None:
    model = mlp(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with on_card(64 * MIB) as rehearsal:
        for _ in range(3_0 * 10):
            model(torch.randn(2, 128)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        stand: Any = rehearsal._stand
        assert len(stand._watch._watched) == len(stand._ledger._claims) - 3 < 20  # cuBLAS has three
    assert len(rehearsal.found.timeline) <= 2_048


def test_a_planned_model_holds_less_in_a_rehearsal() -> None:
    def peak(budget: str | None) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh(), nn.Tanh())))
        batch = torch.randn(2048, 64)
        if budget is not None:
            lowtide.optimize(model, (batch,), loss=torch.sum, budget=budget, profile=False)
        with on_card(64 * MIB) as rehearsal:
            for _ in range(3):
                model.zero_grad()
                model(batch).sum().backward()
        assert budget is None or len(lowtide.plans_of(model)) == 1
        found = act(rehearsal, Act.FIRST)
        return found.allocated_bytes - found.held[Category.WORKSPACE]

    assert peak("60%") <= 0.6 * peak(None)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.long)])
def test_a_model_can_be_planned_within_a_rehearsal(device: str) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)  # with attention, and dropout
    model, batch = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), torch.randn(8, 128, 64)
    with on_card(64 * MIB) as rehearsal:
        model, batch = model.to(device), batch.to(device)
        lowtide.optimize(model, (batch,), loss=torch.mean, budget="85%", profile=False)
        for _ in range(2):
            model(batch).mean().backward()
            model.zero_grad()
    (plan,) = lowtide.plans_of(model)
    found = act(rehearsal, Act.FIRST)
    held = found.allocated_bytes - found.held[Category.WORKSPACE]
    assert plan.peak_bytes * 0.85 < held <= plan.peak_bytes


# Refusals -----------------------------------------------------------------------------------------------


def test_a_card_that_the_context_fills_is_refused() -> None:
    with pytest.raises(lowtide.BadRequest, match=r"a card of 693\.0 MiB leaves PyTorch nothing"):
        lowtide.card("693MiB")


def test_what_others_hold_counts() -> None:
    with pytest.raises(lowtide.BadRequest, match="of it held by others leaves PyTorch nothing"):
        lowtide.card("1GiB", reserve="512MiB")


def test_no_steps_are_refused() -> None:
    with pytest.raises(lowtide.BadRequest, match="a rehearsal of 0 steps shows nothing"):
        lowtide.card("1GiB", steps=0)


def test_a_rehearsal_runs_one_block() -> None:
    rehearsal = on_card(MIB)
    with rehearsal:
        pass
    with pytest.raises(lowtide.BadRequest, match="a rehearsal runs one block"), rehearsal:
        pass
