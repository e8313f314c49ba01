"""What is kept for the backward: to the byte what the referee counts, and what PyTorch itself saves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.cli import main
from lowtide.errors import BadRequest
from lowtide.ir.graph import Phase, Role
from lowtide.ir.schedule import Compute
from lowtide.ir.simulate import CATEGORIES, Category
from lowtide.planner.fit import fit
from lowtide.trace.saved import saved
from lowtide.trace.saved_report import Held, Saved, SavedValue, Saver, Why
from lowtide.zoo.sources.specs import load

# The referees ----------------------------------------------------------------------------------------


def activations_when_the_backward_begins(found: Saved) -> int:
    """Counted once the gradient that every backward begins with has been made."""
    begins = [op.id for op in found.graph.ops if op.target == "aten.ones_like.default"][-1]
    step = found.schedule.steps.index(Compute(begins))
    return int(found.timeline.stack[step, CATEGORIES.index(Category.ACTIVATIONS)])


def bytes_that_torch_saves(step: Callable[[], torch.Tensor], known: list[torch.Tensor]) -> int:
    """What a real forward hands to autograd, each storage once, without those that are there anyway."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        number = step()
    for tensor in known:
        storages.pop(tensor.untyped_storage()._cdata, None)
    del number
    return sum(storage.nbytes() for storage in storages.values())


ZOO = [
    ("vgg11", {"batch": 2, "image": 64}),
    ("resnet18", {"batch": 2, "image": 64}),
    ("unet", {"batch": 1, "image": 64}),
    ("gpt", {"batch": 1, "tokens": 32, "layers": 2, "vocab": 100}),
    ("lstm", {"batch": 2, "tokens": 4}),
    ("hf:bert", {"batch": 2, "tokens": 16, "layers": 2, "vocab": 100}),
]


@pytest.mark.parametrize(("name", "sizes"), ZOO, ids=[name for name, _ in ZOO])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_entries_are_the_timelines_activations_to_the_byte(
    name: str, sizes: dict[str, int], device: str
) -> None:
    setup = load(name, sizes, "meta")
    found = saved(setup.model, setup.example, setup.loss, device=device)
    assert found.total_bytes == activations_when_the_backward_begins(found) > 0
    assert sum(found.by_module.values()) == found.total_bytes
    assert all(entry.bytes % 512 == 0 for entry in found.entries) or device == "cpu"
    assert found.resident
    assert {entry.role for entry in found.resident} <= {Role.PARAMETER, Role.BUFFER, Role.BATCH}


@pytest.mark.parametrize(("name", "sizes"), ZOO[:2], ids=[name for name, _ in ZOO[:2]])
def test_what_has_a_saver_is_what_torch_saves_in_a_real_forward(name: str, sizes: dict[str, int]) -> None:
    setup = load(name, {**sizes, "image": 32}, "cpu")
    assert setup.loss is not None
    assert isinstance(setup.example, tuple)
    found = saved(setup.model, setup.example, setup.loss, device="cpu")
    with_saver = sum(entry.bytes for entry in found.entries if entry.savers)
    known = [*setup.model.parameters(), *setup.model.buffers(), *setup.example]
    real = bytes_that_torch_saves(lambda: setup.loss(setup.model(*setup.example)), known)  # type: ignore[misc]
    labels = sum(
        entry.bytes for entry in found.resident if entry.dtype == "int64"
    )  # the loss closes over them
    assert with_saver == real - labels
    held = {entry.held: entry.bytes for entry in found.entries if entry.held is not None}
    assert set(held) == {Held.LOSS, Held.OUTPUT, Held.BEGINNING}
    assert (held[Held.LOSS], held[Held.BEGINNING]) == (4, 4)


def test_looking_on_changes_nothing_about_the_step() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = saved(model, (torch.ones(16, 4),), torch.sum)
    assert found.timeline.peak_bytes == fit(model, (torch.ones(16, 4),), torch.sum, profile=False).peak_bytes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


# By hand ---------------------------------------------------------------------------------------------


def two_layers(inplace: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(inplace=inplace), nn.Linear(8, 2, bias=False))


def told(entries: tuple[SavedValue, ...]) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(entry.op or entry.name, entry.bytes, entry.reasons) for entry in entries]


@pytest.mark.parametrize(("inplace", "made_by"), [(True, "0: aten.mm"), (False, "1: aten.relu")])
def test_one_storage_is_counted_once_with_everyone_who_saves_it(inplace: bool, made_by: str) -> None:
    found = saved(two_layers(inplace), (torch.ones(16, 4),), torch.sum)
    assert told(found.entries) == [
        (made_by, 16 * 8 * 4, ("output of 1: ReluBackward0", "input of 2: MmBackward0")),
        ("2: aten.mm", 16 * 2 * 4, ("the model's output, still referred to",)),
        ("aten.sum", 4, ("the loss",)),
        ("aten.ones_like", 4, ("the gradient that the backward begins with",)),
    ]
    assert told(found.resident) == [
        ("batch (16, 4)", 16 * 4 * 4, ("input of 0: MmBackward0",)),
        ("2.weight", 8 * 2 * 4, ("input of 2: MmBackward0",)),
    ]
    assert found.total_bytes == 648
    assert found.by_module == {made_by[0]: 512, "2": 128, "": 8}
    first = found.entries[0]
    assert (first.shape, first.dtype, first.role) == ((16, 8), "float32", Role.INTERMEDIATE)
    assert first.savers == (Saver("ReluBackward0", "1", Why.OUTPUT), Saver("MmBackward0", "2", Why.INPUT))


TEXT = """\
Sequential, on cpu: kept for the backward

  B  values  tensor          made by    line  kept as
512       1  float32[16, 8]  0: mm            output of 1: Relu
                                              input of 2: Mm
128       1  float32[16, 2]  2: mm            the model's output, still referred to
  4       1  float32[]       sum              the loss
  4       1  float32[]       ones_like        the gradient that the backward begins with
648       4  in all

by module                   B
0                         512
2                         128
(the model itself, loss)    8
in all                    648

saved as well, but there anyway: 1 parameter (64 B), the batch (256 B)"""


def test_it_prints_as_a_table_that_adds_up() -> None:
    found = saved(two_layers(), (torch.ones(16, 4),), torch.sum)
    assert str(found) == TEXT
    values, modules = found.tables(most_rows=1, most_modules=1)
    assert values.rows[-1] == ("136", "3", "smaller ones", "", "", "")
    assert modules.rows == (("0", "512"), ("2 others", "136"))


def test_layers_of_a_kind_share_a_row() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh()) for _ in range(5)))
    values, _ = saved(model, (torch.ones(16, 4),), torch.sum).tables()
    assert values.rows[0] == (  # the last one is the output, and no linear layer's input
        "1,024",
        "4",
        "float32[16, 4]",
        "*.1: tanh",
        "",
        "output of *.1: Tanh",
    )
    assert values.rows[1] == ("", "", "", "", "", "input of *.0: Mm")
    assert values.rows[2][1:] == ("1", "float32[16, 4]", "4.1: tanh", "", "output of 4.1: Tanh")


class Everything(nn.Module):
    """Each reason there is to keep something."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.5)
        self.pool = nn.MaxPool1d(2, return_indices=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.norm(self.embed(words)))
        x = F.max_pool2d(x, 2)  # a line to be found
        return torch.where(x > 0, x.exp(), x).mean()


def one(entries: tuple[SavedValue, ...], why: Why, part: str = "") -> SavedValue:
    (found,) = [
        entry for entry in entries if any(saver.why is why and part in saver.module for saver in entry.savers)
    ]
    return found


def test_statistics_masks_and_indices_are_told_apart() -> None:
    found = saved(Everything(), (torch.zeros(4, 6, dtype=torch.long),))
    statistics = [e for e in found.entries if e.savers and e.savers[0].why is Why.STATISTICS]
    assert [(e.bytes, e.module) for e in statistics] == [(4 * 6 * 4, "norm")] * 2  # mean and deviation
    assert one(found.entries, Why.INDICES).op.endswith("aten.max_pool2d_with_indices")
    dropped = one(found.entries, Why.MASK, "drop")
    assert (dropped.bytes, dropped.dtype) == (4 * 6 * 8 * 4, "float32")
    assert one(tuple(e for e in found.entries if e.dtype == "bool"), Why.MASK).op == "aten.gt"
    assert one(found.resident, Why.INDICES).name == "batch (4, 6)"
    on_cuda = saved(Everything(), (torch.zeros(4, 6, dtype=torch.long),), device="cuda")
    assert one(on_cuda.entries, Why.MASK, "drop").dtype == "bool"  # a fused kernel, whose mask is smaller


def test_the_users_line_is_told() -> None:
    found = saved(Everything(), (torch.zeros(4, 6, dtype=torch.long),))
    line = one(found.entries, Why.INDICES).line
    assert line is not None
    assert line.startswith("test_saved.py:")
    assert line.endswith("in forward: `x = F.max_pool2d(x, 2)  # a line to be found`")


def test_statistics_of_batch_norm_are_kept_and_running_ones_are_there_anyway() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
    found = saved(model, (torch.ones(2, 3, 5, 5),), torch.sum)
    kept = [entry for entry in found.entries if entry.module == "1" and entry.savers]
    assert [(entry.bytes, entry.reasons) for entry in kept] == [
        (16, ("statistics of 1: NativeBatchNormBackward0",))
    ] * 2
    assert {entry.name for entry in found.resident if entry.role is Role.BUFFER} == {
        "1.running_mean",
        "1.running_var",
    }


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y: torch.Tensor = self.inner(self.inner.weight.new_ones(8, 16) + x).float()
        return y.pow(2).sum()


def test_copies_that_autocast_makes_of_weights_are_named() -> None:
    example = torch.ones(8, 16, requires_grad=False)
    found = saved(nn.Sequential(nn.Linear(16, 16, bias=False), Autocast()), (example,))
    names = {entry.name: entry.bytes for entry in found.entries}
    assert names["bfloat16 copy of 1.inner.weight"] == 16 * 8 * 2


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(
            lambda z: self.second(z.sin()).cos(), self.first(x), use_reentrant=False, preserve_rng_state=False
        )
        return y.sum()


def test_what_a_checkpoint_holds_is_not_said_to_be_saved_and_nothing_is_recomputed_by_looking() -> None:
    found = saved(Checkpointed(), (torch.ones(16, 4),))
    assert told(found.entries)[0] == ("first: aten.mm", 512, ("not saved: model or checkpoint holds it",))
    assert [entry.bytes for entry in found.entries if not entry.savers] == [512, 4, 4]
    looked_at = next(op.id for op in found.graph.ops if op.target.startswith("aten.ones_like"))
    assert sum(op.target == "aten.sin.default" for op in found.graph.ops[:looked_at]) == 1
    assert found.total_bytes == activations_when_the_backward_begins(found)


def test_under_a_plan_a_model_keeps_less() -> None:
    model = nn.Sequential(*(part for _ in range(8) for part in (nn.Linear(16, 16), nn.Tanh())))
    example = (torch.ones(64, 16),)
    plain = saved(model, example, torch.sum)
    lowtide.optimize(model, example, loss=torch.sum, profile=False)
    planned = saved(model, example, torch.sum)
    assert planned.total_bytes < plain.total_bytes
    assert planned.total_bytes == activations_when_the_backward_begins(planned)
    lowtide.remove(model)
    assert told(saved(model, example, torch.sum).entries) == told(plain.entries)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.twice = 2 * x  # kept behind autograd's back
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.twice  # type: ignore[no-any-return]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        squared: torch.Tensor = Square.apply(self.inner(x))  # type: ignore[no-untyped-call]
        return squared.sum()


def test_a_function_of_ones_own_is_asked_too() -> None:
    found = saved(Custom(), (torch.ones(16, 4),))
    assert told(found.entries)[:2] == [
        ("inner: aten.mm", 512, ("input of SquareBackward",)),
        ("aten.mul", 512, ("output of SquareBackward",)),
    ]


class Penalised(nn.Module):
    """Its loss contains gradients, so the forward runs a backward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        (inner,) = torch.autograd.grad(hidden.sin().sum(), hidden, create_graph=True)
        (factor,) = torch.autograd.grad(hidden.cos().sum(), hidden, retain_graph=True)
        penalty: torch.Tensor = (factor * inner.pow(2)).sum()
        (self.inner.bias * hidden.detach()).exp().sum().backward()  # leaves a gradient behind
        return penalty


def graph_phase(found: Saved, entry: SavedValue) -> Phase:
    return found.graph.ops[found.graph.creator[entry.value]].phase


def test_a_backward_within_the_forward_is_not_taken_for_the_end_of_it() -> None:
    found = saved(Penalised(), (torch.ones(16, 4),))
    phases = [op.phase for op in found.graph.ops]
    after_it = phases[phases.index(Phase.BACKWARD) :]
    assert after_it.count(Phase.FORWARD) > 1  # not just the gradient that the real one begins with
    (factor,) = [entry for entry in found.entries if graph_phase(found, entry) is Phase.BACKWARD]
    assert (factor.bytes, factor.reasons) == (512, ("input of MulBackward0",))
    assert found.total_bytes == activations_when_the_backward_begins(found) + factor.bytes
    assert {reason for entry in found.entries for reason in entry.reasons} >= {
        "input of CosBackward0",
        "input of PowBackward0",
    }
    assert all(entry.role is Role.INTERMEDIATE for entry in found.entries)


def test_as_json_every_entry_is_there() -> None:
    found = saved(two_layers(), (torch.ones(16, 4),), torch.sum, name="two")
    document = json.loads(json.dumps(found.to_json()))
    assert (document["model"], document["device"], document["total_bytes"]) == ("two", "cpu", 648)
    assert sum(entry["bytes"] for entry in document["entries"]) == 648
    assert document["entries"][0]["savers"][1] == {"node": "MmBackward0", "module": "2", "why": "input"}
    assert document["entries"][1]["held"] == Held.OUTPUT.value
    assert [entry["role"] for entry in document["resident"]] == ["batch", "parameter"]


# The command -----------------------------------------------------------------------------------------

USER_FILE = """
import torch
from torch import nn

def two(batch=16):
    print("building")
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(inplace=True), nn.Linear(8, 2, bias=False))
    return model, (torch.ones(batch, 4),), torch.sum
"""


def run(folder: Path, *arguments: str) -> Result:
    (folder / "mine.py").write_text(USER_FILE)
    return CliRunner().invoke(main, ["saved", *arguments])


def test_the_command_prints_the_same_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(tmp_path, "mine.py:two", "--batch", "16", "--device", "cpu")
    assert (result.exit_code, result.stderr) == (0, "building\n")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines == ["mine.py:two, batch 16, on cpu: kept for the backward", *TEXT.splitlines()[1:]]


def test_the_command_as_json_is_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = json.loads(run(tmp_path, "mine.py:two", "--batch", "8", "--device", "cpu", "--json").stdout)
    assert (document["model"], document["batch"], document["total_bytes"]) == ("mine.py:two", 8, 328)
    assert len(document["entries"]) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["vgg1111"], "error: there is no model called 'vgg1111'. Did you mean"),
        (["mlp", "--batch", "0"], "'--batch': it must be a whole number of at least 1"),
        (["mlp", "--optimizer", "adam"], "No such option"),
    ],
)
def test_a_bad_request_is_one_message(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = run(tmp_path, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys; from lowtide.cli import main\n"
    code += "main(['saved', '--help'], standalone_mode=False)\nprint('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"


# Refusals --------------------------------------------------------------------------------------------


def test_a_step_without_a_loss_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"the model's output \(a tensor of shape \(16, 2\)\) is not a loss"):
        saved(two_layers(), (torch.ones(16, 4),))
    with pytest.raises(BadRequest, match="so there is nothing to train"):
        saved(two_layers().requires_grad_(False), (torch.ones(16, 4),), torch.sum)


def test_what_the_model_raises_is_told_with_the_users_frames() -> None:
    with pytest.raises(BadRequest, match=r"(?s)the training step raised an error.*same reduction dim"):
        saved(two_layers(), (torch.ones(16, 5),), torch.sum)
    with pytest.raises(BadRequest, match="the training step raised an error"):
        saved(two_layers(), (torch.ones(16, 4),), lambda: torch.ones(()))


def test_a_device_that_is_none_is_refused() -> None:
    with pytest.raises(BadRequest, match="'toaster' is not a device"):
        saved(two_layers(), (torch.ones(16, 4),), torch.sum, device="toaster")
