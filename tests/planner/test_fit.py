"""Fit: a step small enough to add up by hand, every way a loss may come, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowtide.errors import BadRequest
from lowtide.ir.simulate import Category
from lowtide.planner.fit import Fit, fit
from lowtide.trace.step import OPTIMIZERS, training_step

# 16 rows of 4 floats through 4 → 8 → 2. Bytes: x 256, weights 128 and 64; then
#   forward    hidden 512 (gone after the relu), relu 512, output 128, loss 4, and its own gradient 4
#   backward   gradient of weight 2: 64, of relu 512, of hidden 512, of weight 1: 128
# The peak is the relu's backward: relu, its gradient and the hidden layer's are there together.
PEAK = {
    Category.PARAMETERS: 192,
    Category.BUFFERS: 0,
    Category.OPTIMIZER_STATE: 0,
    Category.GRADIENTS: 64,
    Category.BATCH: 256,
    Category.ACTIVATIONS: 512 + 128 + 4 + 4,
    Category.TEMPORARIES: 512 + 512,
    Category.WORKSPACE: 0,
}
MODULES = {"1": 1024, "2": 64 + 64 + 128 + 512, "": 256 + 4 + 4, "0": 128}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 2, bias=False))


def predict(**options: Any) -> Fit:
    with torch.device("meta"):
        model, batch = mlp(), torch.ones(16, 4)
    return fit(model, (batch,), torch.sum, profile=False, **options)


# A step one can add up -------------------------------------------------------------------------------


def test_the_peak_of_a_small_mlp_is_what_adding_up_by_hand_gives() -> None:
    found = predict()
    assert found.peak_bytes == sum(PEAK.values()) == 2184
    assert found.categories == PEAK
    assert found.modules == MODULES
    assert list(found.modules) == ["1", "2", "", "0"]
    assert found.resident_bytes == 192 + 256
    assert found.peak_op is not None
    assert found.peak_op.label == "1: aten.threshold_backward"


@pytest.mark.parametrize(
    ("optimizer", "states"),
    [("sgd", 0), ("momentum", 192), ("adam", 2 * 192 + 2 * 4), ("adamw", 2 * 192 + 2 * 4)],
)
def test_an_optimizer_adds_its_states(optimizer: str, states: int) -> None:
    found = predict(optimizer=optimizer)
    assert found.categories == {**PEAK, Category.OPTIMIZER_STATE: states}
    # The gradients of the step before are there until zero_grad drops them.
    assert found.resident_bytes == 192 + 256 + 192 + states


def test_on_cuda_every_block_is_rounded_up() -> None:
    found = predict(device="cuda")
    assert found.device == "cuda:0"
    assert found.peak_bytes == 10 * 512  # ten values, the largest of them 512 bytes


def test_on_cuda_the_optimizer_works_on_all_parameters_at_once() -> None:
    ops = [op.target for op in predict(device="cuda", optimizer="adamw").trace.graph.ops]
    assert any(target.startswith("aten._foreach_") for target in ops)
    ops = [op.target for op in predict(device="cpu", optimizer="adamw").trace.graph.ops]
    assert not any(target.startswith("aten._foreach_") for target in ops)


def test_a_budget_is_met_to_the_byte() -> None:
    exact, short = predict(budget=2184), predict(budget=2183)
    assert (exact.fits, exact.margin_bytes) == (True, 0)
    assert (short.fits, short.margin_bytes) == (False, -1)
    assert (predict().fits, predict().margin_bytes, predict().budget_bytes) == (None, None, None)
    assert predict(budget="1KiB").margin_bytes == 1024 - 2184


def test_the_model_and_its_gradients_stay_as_they_were() -> None:
    model, x = mlp(), torch.ones(16, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fit(model, (x,), torch.sum, optimizer="adam", profile=False)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_is_not_known_is_said() -> None:
    (note,) = predict().notes
    assert note.startswith("workspaces are not included")
    assert predict(device="cuda").notes == (note,)


def test_a_peak_that_fits_on_a_card_that_does_not_is_said() -> None:
    card = predict(device="cuda", budget="600MiB")
    assert card.fits
    assert card.card_bytes == (card.reserved_bytes or 0) + (card.context_bytes or 0)
    assert "the peak is within the budget, but a card needs 69" in card.notes[-1]
    assert len(predict(device="cuda", budget="800MiB").notes) == 1


def test_on_cuda_what_the_allocator_reserves_is_predicted_too() -> None:
    assert predict(device="cuda").reserved_bytes == 2 << 20  # one segment for everything up to 1 MiB
    assert predict(device="cpu").reserved_bytes is None


def test_what_the_allocator_may_hand_out_beyond_what_is_asked_for_is_said() -> None:
    found = predict(device="cuda")
    assert found.allocated_bytes == found.peak_bytes
    assert predict(device="cpu").allocated_bytes is None
    little, much = (replace(found, allocated_bytes=found.peak_bytes + more) for more in (4 << 20, 5 << 20))
    assert little.notes == found.notes
    assert any(note.startswith("PyTorch's allocator may count 5.0 MiB more") for note in much.notes)


def test_extrapolated_ops_are_counted_and_said() -> None:
    found = predict()
    ops = tuple(replace(op, extrapolated=op.id in (1, 2)) for op in found.trace.graph.ops)
    graph = replace(found.trace.graph, ops=ops, profiled_on="a test")
    told = replace(found, trace=replace(found.trace, graph=graph), profiled=True)
    assert told.extrapolated == 2
    assert told.notes == ("the workspaces of 2 ops are extrapolated from smaller batches",)


def test_the_prediction_says_where_it_was_made() -> None:
    version = torch.__version__.partition("+")[0]
    assert predict().predicted_on == f"cpu, dry run, torch {version}"


def test_it_prints_without_its_thousands_of_ops() -> None:
    assert repr(predict(name="two layers")).startswith("Fit(model='two layers', predicted_on='cpu, dry run")


def test_json_holds_everything_but_the_trace() -> None:
    document = json.loads(json.dumps(predict(optimizer="sgd", budget=4096, name="two layers").to_json()))
    assert document == {
        "model": "two layers",
        "device": "cpu",
        "optimizer": "sgd",
        "peak_bytes": 2184,
        "resident_bytes": 640,
        "reserved_bytes": None,
        "context_bytes": None,
        "categories": {category.value: count for category, count in PEAK.items()},
        "modules": MODULES,
        "peak_op": {
            "label": "1: aten.threshold_backward",
            "target": "aten.threshold_backward.default",
            "module": "1",
            "phase": "backward",
            "workspace_bytes": 0,
        },
        "predicted_on": predict().predicted_on,
        "profiled": False,
        "workspaces_from": None,
        "extrapolated": 0,
        "budget_bytes": 4096,
        "card": None,
        "fits": True,
        "margin_bytes": 1912,
        "notes": list(predict().notes),
    }


def test_a_profile_adds_workspaces_and_reports_progress(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where costs are kept
    calls: list[tuple[int, int]] = []
    found = fit(mlp(), (torch.ones(16, 4),), torch.sum, progress=lambda done, of: calls.append((done, of)))
    assert found.profiled
    assert "dry run and profile" in found.predicted_on
    assert calls
    assert calls[-1][0] == calls[-1][1]
    assert sum(found.categories.values()) == found.peak_bytes >= 2184


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a device there is no need for rules")
def test_workspaces_on_a_device_that_is_not_here_are_known_by_rule() -> None:
    model = nn.Conv2d(3, 8, 3)
    plain, priced = (
        fit(model, (torch.ones(4, 3, 9, 9),), torch.sum, device="cuda", profile=profile)
        for profile in (False, True)
    )
    assert (plain.profiled, plain.workspaces_from) == (False, None)
    assert (priced.profiled, priced.workspaces_from) == (False, "rules for CUDA")
    assert priced.categories[Category.WORKSPACE] > plain.categories[Category.WORKSPACE] == 0
    assert priced.notes[0].startswith("workspaces are those that CUDA's kernels are known to take")
    assert priced.predicted_on.startswith("cpu, dry run and rules for CUDA, torch ")


# Where the loss comes from ---------------------------------------------------------------------------


class Returning(nn.Module):
    """A model whose output is whatever a function makes of its loss."""

    def __init__(self, wrap: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.wrap = wrap

    def forward(self, x: Tensor) -> object:
        return self.wrap((self.weight * x).sum())


@dataclass
class Output:
    loss: Tensor


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: loss,
        lambda loss: loss.reshape(1),
        lambda loss: {"logits": None, "loss": loss},
        lambda loss: (loss, "more"),
        lambda loss: [loss],
        lambda loss: SimpleNamespace(loss=loss),
        Output,
    ],
    ids=["number", "one element", "dict", "tuple", "list", "attribute", "dataclass"],
)
def test_the_loss_is_found_in_the_output(wrap: Callable[[Tensor], object]) -> None:
    found = fit(Returning(wrap), {"x": torch.ones(3)}, profile=False)
    assert found.categories[Category.PARAMETERS] == 12
    assert found.trace.graph.ops[-1].phase == "backward"


def test_the_training_step_trains() -> None:
    model, x = mlp(), torch.ones(16, 4)
    step = training_step(
        model, (x,), lambda output: output.square().mean(), torch.optim.SGD(model.parameters(), 0.1)
    )
    losses = [float(step()) for _ in range(5)]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


# Refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (lambda loss: loss.expand(2), r"a tensor of shape \(2,\)\) is not a loss and carries none"),
        (lambda loss: {"logits": loss}, r"of type dict\) is not a loss and carries none"),
        (lambda loss: (), r"of type tuple\) is not a loss"),
        (lambda loss: None, r"of type NoneType\) is not a loss"),
        (lambda loss: loss.detach(), "does not depend on anything that requires gradients"),
    ],
)
def test_an_output_without_a_loss_is_refused(wrap: Callable[[Tensor], object], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        fit(Returning(wrap), (torch.ones(3),), profile=False)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"loss": lambda output: output},
            r"must be a tensor of one number, but it is a tensor of shape \(2, 2\)",
        ),
        ({"loss": lambda output: 3.0}, "must be a tensor of one number, but it is of type float"),
        ({"optimizer": "adagrad"}, "no optimizer 'adagrad'. Choose one of sgd, momentum, adam, adamw"),
        ({"budget": "much"}, "cannot read 'much' as a size"),
        ({"device": "gpu"}, "'gpu' is not a device"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        fit(nn.Linear(3, 2), (torch.ones(2, 3),), **{"loss": torch.sum, "profile": False, **options})


def test_a_lone_tensor_is_an_example_of_one_argument() -> None:
    alone = fit(nn.Linear(3, 2), torch.ones(2, 3), torch.sum, profile=False)
    assert alone.peak_bytes == fit(nn.Linear(3, 2), (torch.ones(2, 3),), torch.sum, profile=False).peak_bytes


@pytest.mark.parametrize("example", [[torch.ones(2, 3)], None])
def test_an_example_is_a_tuple_or_a_dict(example: Any) -> None:
    with pytest.raises(BadRequest, match=f"the example is a {type(example).__name__}. Give a tuple"):
        fit(nn.Linear(3, 2), example, torch.sum, profile=False)


def test_a_frozen_model_has_nothing_to_optimize() -> None:
    model = nn.Linear(3, 2).requires_grad_(False)
    with pytest.raises(BadRequest, match="no parameter of the model requires gradients"):
        fit(model, (torch.ones(2, 3),), torch.sum, optimizer="sgd", profile=False)
    with pytest.raises(BadRequest, match="nothing to train"):
        fit(model, (torch.ones(2, 3),), torch.sum, profile=False)


class Clumsy(nn.Module):
    """Raises, like a user's model would."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        raise KeyError("no such head")


def test_a_model_that_raises_is_shown_with_its_own_frames_only() -> None:
    with pytest.raises(BadRequest) as caught:
        fit(Clumsy(), (torch.ones(2, 3),), torch.sum, profile=False)
    message = str(caught.value)
    assert message.startswith("the training step raised an error.\nTraceback (your frames only):")
    assert 'raise KeyError("no such head")' in message
    assert "torch/nn/modules" not in message
    assert "lowtide/fitting.py" not in message
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_loss_that_takes_nothing_is_the_users_error_too() -> None:
    with pytest.raises(BadRequest, match="takes 0 positional arguments but 1 was given"):
        fit(mlp(), (torch.ones(2, 4),), lambda: torch.ones(()), profile=False)


def test_a_bug_of_our_own_is_not_blamed_on_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lowtide.trace.graph_builder.GraphBuilder.add_op", lambda self: None)
    with pytest.raises(TypeError, match="lambda"):
        predict()


def test_every_optimizer_is_built_as_torch_builds_it() -> None:
    model = mlp()
    built = {name: build(model.parameters()) for name, build in OPTIMIZERS.items()}
    assert {name: type(optimizer).__name__ for name, optimizer in built.items()} == {
        "sgd": "SGD",
        "momentum": "SGD",
        "adam": "Adam",
        "adamw": "AdamW",
    }
    assert built["momentum"].defaults["momentum"] == 0.9
