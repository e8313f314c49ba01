"""The dry run: what it sees, what it leaves as it was, and what it refuses."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lowtide import zoo
from lowtide.errors import BadRequest, CannotTrace
from lowtide.ir.graph import Phase, Role
from lowtide.ir.schedule import Compute
from lowtide.ir.simulate import Category, simulate
from lowtide.ir.validate import validate
from lowtide.trace.dry_run import Trace, dry_run


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def training_step(model: nn.Module, batch: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(batch).sum().backward()

    return step


def targets(trace: Trace, phase: Phase) -> list[str]:
    return [op.target.split(".")[1] for op in trace.graph.ops if op.phase is phase]


# A step drawn by hand -------------------------------------------------------------------------------


def test_a_two_layer_network_is_traced_to_the_byte() -> None:
    model, batch = two_layers(), torch.ones(32, 8)
    trace = dry_run(training_step(model, batch), model=model)
    assert targets(trace, Phase.FORWARD) == ["addmm", "relu", "addmm", "sum", "ones_like"]
    timeline = trace.timeline
    weights = 4 * (8 * 16 + 16 + 16 * 4 + 4)
    assert timeline.categories[Category.PARAMETERS] == weights
    assert timeline.categories[Category.BATCH] == 32 * 8 * 4
    assert timeline.resident_bytes == weights + 32 * 8 * 4
    # The forward leaves relu's output, which the second layer's backward reads, the loss and its gradient.
    # The peak is relu's backward, with the gradient that comes in and the one that goes out.
    assert timeline.peak_op is not None
    assert timeline.peak_op.target == "aten.threshold_backward.default"
    assert timeline.categories[Category.ACTIVATIONS] == 32 * 16 * 4 + 4 + 4
    assert timeline.categories[Category.TEMPORARIES] == 2 * 32 * 16 * 4
    end = int(timeline.live_bytes[-1])
    assert end == timeline.resident_bytes + weights  # gradients stay, everything else is gone


def test_the_trace_is_a_valid_graph_and_its_schedule_replays() -> None:
    model, batch = two_layers(), torch.ones(32, 8)
    trace = dry_run(training_step(model, batch), model=model)
    validate(trace.graph)
    assert simulate(trace.graph, trace.schedule).peak_bytes == trace.peak_bytes
    assert [s.op for s in trace.schedule if isinstance(s, Compute)] == list(range(len(trace.graph.ops)))


def test_every_parameter_gradient_outlives_the_step_under_its_own_name() -> None:
    model, batch = two_layers(), torch.ones(32, 8)
    graph = dry_run(training_step(model, batch), model=model).graph
    gradients = {value.name: value.bytes for value in graph.values if value.role is Role.GRADIENT}
    assert gradients == {f"{name}.grad": p.nbytes for name, p in model.named_parameters()}
    assert {value.id for value in graph.values if value.role is Role.GRADIENT} <= graph.outputs


def test_ops_carry_the_module_they_belong_to_forward_and_backward() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
    batch = torch.ones(2, 3, 8, 8, requires_grad=False)
    graph = dry_run(training_step(model, batch), model=model).graph
    places = {(op.target.split(".")[1], op.phase): op.module for op in graph.ops}
    assert places["convolution", Phase.FORWARD] == places["convolution_backward", Phase.BACKWARD] == "0"
    assert places["native_batch_norm", Phase.FORWARD] == "1"
    assert places["native_batch_norm_backward", Phase.BACKWARD] == "1"
    assert places["threshold_backward", Phase.BACKWARD] == "2"


def test_a_module_called_twice_has_two_calls() -> None:
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"layer": layer})
    batch = torch.ones(2, 4)
    graph = dry_run(lambda: layer(layer(batch)).sum().backward(), model=model).graph
    assert [op.call for op in graph.ops if op.target == "aten.addmm.default"] == [0, 1]


def test_batchnorm_mutates_its_statistics_and_dropout_is_random() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5))
    graph = dry_run(training_step(model, torch.ones(8, 4)), model=model).graph
    norm = next(op for op in graph.ops if op.target == "aten.native_batch_norm.default")
    assert {graph.values[value].name for value in norm.mutates} == {"0.running_mean", "0.running_var"}
    assert [op.target for op in graph.ops if op.random] == ["aten.bernoulli_.float"]


def test_in_place_activations_make_no_value() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))
    graph = dry_run(training_step(model, torch.ones(8, 4)), model=model).graph
    relu = next(op for op in graph.ops if op.target == "aten.relu_.default")
    assert relu.creates == ()
    assert len(relu.mutates) == 1


# Kinds of steps -------------------------------------------------------------------------------------


def test_gradients_that_meet_are_added_in_place_as_the_engine_does() -> None:
    model = nn.Linear(4, 4)
    batch = torch.ones(8, 4)

    def step() -> None:
        hidden = model(batch)
        (hidden.sin() + hidden.cos() + hidden.exp()).sum().backward()

    graph = dry_run(step, model=model).graph
    backward = [op.target for op in graph.ops if op.phase is Phase.BACKWARD]
    assert backward.count("aten.add_.Tensor") == 2
    assert "aten.add.Tensor" not in backward


def test_random_states_that_are_kept_are_counted() -> None:
    model, batch = nn.Linear(8, 8), torch.ones(4, 8)

    def step(states: int) -> None:
        kept = [torch.get_rng_state() for _ in range(states)]
        model(batch).sum().backward()
        del kept

    without = dry_run(lambda: step(0), model=model).timeline.growth_bytes
    assert dry_run(lambda: step(3), model=model).timeline.growth_bytes == without + 3 * 5056
    assert torch.get_rng_state().numel() == 5056
    assert not hasattr(torch.get_rng_state(), "counted")


def test_checkpointing_shows_as_recomputation_and_lowers_the_peak() -> None:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(8))
    batch = torch.ones(256, 64)

    def step(keep: bool) -> None:
        hidden = batch
        for block in blocks:
            hidden = block(hidden) if keep else checkpoint(block, hidden, use_reentrant=False)
        hidden.sum().backward()

    plain = dry_run(lambda: step(True), model=blocks)
    light = dry_run(lambda: step(False), model=blocks)
    assert light.timeline.growth_bytes < 0.6 * plain.timeline.growth_bytes
    again = [op for op in light.graph.ops if op.phase is Phase.RECOMPUTE and op.reads]
    assert {op.module.split(".")[0] for op in again} == {str(index) for index in range(8)}
    assert not [op for op in plain.graph.ops if op.phase is Phase.RECOMPUTE]


def test_several_micro_batches_accumulate_into_one_set_of_gradients() -> None:
    model, batch = two_layers(), torch.ones(32, 8)

    def step() -> None:
        for part in batch.chunk(4):
            model(part).sum().backward()

    graph = dry_run(step, model=model).graph
    gradients = [value for value in graph.values if value.role is Role.GRADIENT]
    assert sum(value.bytes for value in gradients) == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_has_its_state_from_the_second_step_on(foreach: bool) -> None:
    model, batch = two_layers(), torch.ones(32, 8)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    weights = sum(p.nbytes for p in model.parameters())
    first = dry_run(step, model=model, optimizer=optimizer)
    assert not optimizer.state  # nothing leaked into the real one
    second = dry_run(step, model=model, optimizer=optimizer, warmup=1)
    steps = 4 * len(list(model.parameters()))
    state = [v.bytes for v in first.graph.values if v.role is Role.OPTIMIZER_STATE]
    assert sum(state) == 2 * weights + steps
    resident = {second.graph.values[v].role for v in second.graph.resident}
    assert Role.OPTIMIZER_STATE in resident
    assert Role.GRADIENT in resident
    assert second.timeline.resident_bytes - first.timeline.resident_bytes == 3 * weights + steps
    assert Phase.OPTIMIZER in {op.phase for op in second.graph.ops}


def test_autocast_is_followed() -> None:
    model, batch = two_layers(), torch.ones(32, 8)

    def step() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).sum()
        loss.backward()

    graph = dry_run(step, model=model).graph
    made = [graph.tensors[op.outputs[0] or 0] for op in graph.ops if op.target == "aten.addmm.default"]
    assert {tensor.dtype for tensor in made} == {"bfloat16"}


def test_a_gradient_scaler_steps_and_is_left_as_it_was() -> None:
    model, batch = two_layers(), torch.ones(32, 8)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    before = scaler.state_dict()

    def step() -> None:
        scaler.scale(model(batch).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    trace = dry_run(step, model=model, optimizer=optimizer)
    assert Phase.OPTIMIZER in {op.phase for op in trace.graph.ops}
    assert scaler.state_dict() == before
    assert scaler._scale is None
    assert any("had to be assumed" in note for note in trace.graph.notes)


def test_numbers_that_follow_from_the_batch_are_known() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, batch: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.layer(batch)
            if not mask.all():
                hidden = hidden[mask]  # as many rows as the mask says
            return hidden.exp()

    model, batch = Padded(), torch.ones(8, 4)
    mask = torch.tensor([True] * 5 + [False] * 3)
    trace = dry_run(lambda: model(batch, mask).sum().backward(), model=model)
    exp = next(op for op in trace.graph.ops if op.target == "aten.exp.default")
    assert trace.graph.tensors[exp.outputs[0] or 0].shape == (5, 4)
    assert trace.graph.notes == ()


def test_a_meta_model_is_traced_as_if_it_were_real() -> None:
    with torch.device("meta"):
        fake, batch = two_layers(), torch.ones(32, 8)
    real, real_batch = two_layers(), torch.ones(32, 8)
    meta = dry_run(training_step(fake, batch), model=fake)
    plain = dry_run(training_step(real, real_batch), model=real)
    assert meta.peak_bytes == plain.peak_bytes
    assert meta.graph.device == "cpu"


def test_tied_weights_and_shared_storages_count_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4)
            self.head = nn.Linear(4, 10, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return torch.as_tensor(self.head(self.table(ids)))

    model = Tied()
    trace = dry_run(lambda: model(torch.arange(3)).sum().backward(), model=model)
    assert trace.timeline.categories[Category.PARAMETERS] == 10 * 4 * 4


def test_parametrizations_are_followed_and_left_in_place() -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model, batch = nn.Sequential(layer, nn.Tanh()), torch.ones(8, 4)
    names = [name for name, _ in model.named_parameters()]
    trace = dry_run(training_step(model, batch), model=model)
    gradients = {value.name for value in trace.graph.values if value.role is Role.GRADIENT}
    assert gradients == {f"{name}.grad" for name in names}
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.nn.utils.parametrize.is_parametrized(layer)


def test_frozen_parameters_get_no_gradient_and_keep_no_activation() -> None:
    model, batch = two_layers(), torch.ones(32, 8)
    whole = dry_run(training_step(model, batch), model=model)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    frozen = dry_run(training_step(model, batch), model=model)
    gradients = {value.name for value in frozen.graph.values if value.role is Role.GRADIENT}
    assert gradients == {"2.weight.grad", "2.bias.grad"}
    assert frozen.peak_bytes < whole.peak_bytes


def test_hooks_on_parameters_are_not_followed_and_that_is_said() -> None:
    model, batch = two_layers(), torch.ones(32, 8)
    called: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(called.append)
    trace = dry_run(training_step(model, batch), model=model)
    assert called == []
    assert trace.graph.notes == ("the hooks on 4 parameters are not followed: they belong to the real ones",)


@pytest.mark.parametrize("reentrant", [False, True])
def test_both_kinds_of_checkpointing_run(reentrant: bool) -> None:
    model, batch = two_layers(), torch.ones(32, 8, requires_grad=False)

    def step() -> None:
        hidden = model[0](batch)
        checkpoint(model[1:], hidden, use_reentrant=reentrant).sum().backward()

    trace = dry_run(step, model=model)
    again = [op.target for op in trace.graph.ops if op.phase is Phase.RECOMPUTE]
    assert "aten.relu.default" in again


def test_vgg19_at_batch_4096_allocates_nothing() -> None:
    import resource

    with torch.device("meta"):
        work = zoo.workload("vgg19", zoo.Sizes(batch=4096))
    loss = work.loss
    assert loss is not None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trace = dry_run(lambda: loss(work.model(*work.args)).backward(), model=work.model)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert trace.peak_bytes > 300e9
    assert grown < 2 << 30


# The model is left exactly as it was ----------------------------------------------------------------


class Busy(nn.Module):
    """Has everything a step may change: statistics, attributes, containers, modes, gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.recurrent = nn.LSTM(4, 4)
        self.last: Any = None
        self.seen: list[Any] = []

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(batch)
        self.last = hidden
        self.seen.append(hidden)
        self.extra = hidden
        random.random()
        np.random.rand()
        torch.rand(3)
        self.norm.eval()
        output: torch.Tensor = self.recurrent(hidden[None])[0]
        return output


def photographed(model: nn.Module) -> dict[str, Any]:
    modules = dict(model.named_modules())
    return {
        "tensors": {
            name: (id(t), t.clone()) for name, t in (*model.named_parameters(), *model.named_buffers())
        },
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "modes": {name: module.training for name, module in modules.items()},
        "attributes": {name: sorted(module.__dict__) for name, module in modules.items()},
        "hooks": {name: (len(m._forward_hooks), len(m._backward_hooks)) for name, m in modules.items()},
        "streams": (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
    }


def assert_same(before: Any, after: Any) -> None:
    if isinstance(before, dict):
        assert before.keys() == after.keys()
        for key in before:
            assert_same(before[key], after[key])
    elif isinstance(before, tuple):
        for left, right in zip(before, after, strict=True):
            assert_same(left, right)
    elif isinstance(before, torch.Tensor):
        assert torch.equal(before, after)
    else:
        assert before == after


@pytest.mark.parametrize("raises", [False, True])
def test_the_model_is_left_as_it_was_also_after_an_error(raises: bool) -> None:
    model = Busy()
    batch = torch.randn(8, 4)
    model(batch).sum().backward()
    model.train()
    model.last, model.seen = None, []
    del model.extra
    before = photographed(model)

    def step() -> None:
        model.zero_grad(set_to_none=False)
        model(batch).sum().backward()
        if raises:
            raise ArithmeticError("from the user's own code")

    if raises:
        with pytest.raises(ArithmeticError, match="from the user's own code"):
            dry_run(step, model=model)
    else:
        dry_run(step, model=model)
    assert_same(before, photographed(model))
    assert model.last is None
    assert model.seen == []
    model(batch).sum().backward()  # and it still trains


def test_the_real_optimizer_keeps_its_state_and_groups() -> None:
    model, batch = two_layers(), torch.ones(32, 8)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step() -> None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    step()
    before = copy.deepcopy(optimizer.state_dict())
    counted = schedule.last_epoch
    dry_run(step, model=model, optimizer=optimizer)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    assert schedule.last_epoch == counted
    for index, state in before["state"].items():
        assert all(torch.equal(thing, after["state"][index][key]) for key, thing in state.items())
    assert all(type(p) is nn.Parameter for p in optimizer.param_groups[0]["params"])


# Refusals -------------------------------------------------------------------------------------------


def test_an_op_whose_fake_alone_fails_is_told_from_one_that_the_step_calls_wrongly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("there is no such thing")

    monkeypatch.setattr("lowtide.compat.fake_kernels._grouped_product", failing)
    model, batch = nn.Linear(4, 4), torch.ones(8, 4)
    ends = torch.tensor([3, 8], dtype=torch.int32)
    match = r"the fake of aten\._grouped_mm.*\(there is no such thing\).*`lambda: F\.grouped_mm.*of PyTorch 2"
    with pytest.raises(CannotTrace, match=match):
        dry_run(
            lambda: F.grouped_mm(model(batch), torch.ones(2, 4, 4), offs=ends).sum().backward(), model=model
        )
    with pytest.raises(RuntimeError, match="must have same reduction dim"):
        dry_run(lambda: (model(batch) @ batch).sum().backward(), model=model)


def test_an_op_without_a_fake_is_for_its_maker_to_complete() -> None:
    @torch.library.custom_op("lowtide_tests::thrice", mutates_args=())
    def thrice(rows: torch.Tensor) -> torch.Tensor:
        return rows * 3

    model, batch = nn.Linear(4, 4), torch.ones(8, 4)
    with pytest.raises(
        CannotTrace, match=r"the fake of lowtide_tests\.thrice.*torch\.library\.register_fake"
    ):
        dry_run(lambda: (model(batch) + thrice(batch)).sum().backward(), model=model)


def test_an_error_after_a_guess_says_what_was_guessed() -> None:
    model, batch = nn.Linear(4, 4), torch.ones(8, 4)
    with pytest.raises(RuntimeError) as caught:
        dry_run(lambda: model(batch).view(int(model(batch).sum()), 7).sum().backward(), model=model)
    assert "was taken to be 1" in caught.value.__notes__[0]


def test_a_module_may_be_converted_to_what_it_is() -> None:
    model, batch = nn.Linear(4, 4), torch.ones(8, 4)
    trace = dry_run(lambda: model.to(torch.float32)(batch).sum().backward(), model=model)
    assert trace.timeline.categories[Category.PARAMETERS] == 4 * (16 + 4)


def test_a_parameter_of_another_model_is_refused() -> None:
    model, other, batch = nn.Linear(4, 4), nn.Linear(4, 4), torch.ones(8, 4)
    with pytest.raises(CannotTrace, match=r"Pass every module that is used: model=\[model, other\]"):
        dry_run(lambda: other(model(batch)).sum().backward(), model=model)
    assert all(p.grad is None for p in other.parameters())
    both = dry_run(lambda: other(model(batch)).sum().backward(), model=[model, other])
    assert both.timeline.categories[Category.PARAMETERS] == 2 * 4 * (16 + 4)


def test_sparse_tensors_are_refused_with_their_names() -> None:
    words, chosen = nn.Embedding(9, 4, sparse=True), torch.arange(3)
    with pytest.raises(CannotTrace, match=r"makes a sparse tensor.*in the backward of .*with sparse=False"):
        dry_run(lambda: words(chosen).sum().backward(), model=words)
    layer, edges = nn.Linear(4, 4), torch.eye(3).to_sparse()
    with pytest.raises(CannotTrace, match=r"a sparse tensor, and what is made of one .*\.to_dense\(\)"):
        dry_run(lambda: (edges @ layer(torch.ones(3, 4))).sum().backward(), model=layer)
    layer.register_buffer("edges", edges)
    with pytest.raises(CannotTrace, match="'edges' is a sparse tensor"):
        dry_run(lambda: layer(torch.ones(3, 4)).sum().backward(), model=layer)


def test_an_impossible_device_is_refused() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(BadRequest, match="'toaster' is not a device"):
        dry_run(lambda: F.relu(model(torch.ones(1, 4))), model=model, device="toaster")


def test_no_model_is_refused() -> None:
    with pytest.raises(BadRequest, match="at least one model"):
        dry_run(lambda: None, model=[])
