"""Captures: what is in the graph, that it predicts what running it takes, and what is refused."""

from __future__ import annotations

import gc
import random
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import default_partition
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from lowtide.aot.capture import capture
from lowtide.aot.sections import OUTSIDE, compiling
from lowtide.cost.measure import Reading, growth, measure, record_cpu
from lowtide.errors import BadRequest, CannotCapture
from lowtide.ir.graph import Graph, Op, Origin, Phase, Role
from lowtide.ir.recomputable import HANDED_ON, does_nothing
from lowtide.ir.schedule import straight
from lowtide.ir.simulate import Timeline, simulate
from lowtide.ir.validate import validate
from lowtide.planner.fit import fit
from lowtide.trace.profile import profile
from lowtide.zoo import Sizes, workload
from tests.helpers.effort import long_but

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
LOSS_BYTES = 4  # the gradient of the loss: resident for us, made by `backward()` in a real step


# Where a step has several graphs, Dynamo itself looks at the gradients of what passes between them.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


# The referee ----------------------------------------------------------------------------------------


def replayed(graph: Graph) -> Timeline:
    """The graph is well formed and its straight schedule is legal."""
    return simulate(validate(graph), straight(graph))


def targets(graph: Graph, phase: Phase | None = None) -> Counter[str]:
    """How often each op occurs: {'addmm': 2}."""
    return Counter(op.target.split(".")[1] for op in graph.ops if phase in (None, op.phase))


def names(graph: Graph, role: Role) -> list[str]:
    return [value.name for value in graph.values if value.role is role]


def assert_gradients_fit_parameters(graph: Graph, model: nn.Module) -> None:
    """A gradient outlives the step for exactly the parameters that are trained, of the same size."""
    trained = {f"{name}.grad": p for name, p in model.named_parameters() if p.requires_grad}
    found = [value for value in graph.values if value.role is Role.GRADIENT]
    assert sorted(value.name for value in found) == sorted(trained)
    for value in found:
        assert value.bytes == trained[value.name].nbytes
        assert value.id in graph.outputs
        assert value.id not in graph.resident


def assert_everything_is_resident(graph: Graph, model: nn.Module) -> None:
    resident = {graph.values[value].name: graph.values[value].bytes for value in graph.resident}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert resident[name] == tensor.nbytes


# A graph that can be read whole ---------------------------------------------------------------------


def test_a_small_network_gives_exactly_these_ops() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 4))
    graph = capture(model, (torch.randn(5, 8),), lambda output: output.square().mean(), name="small")
    assert (graph.name, graph.origin, graph.device, graph.notes) == ("small", Origin.JOINT, "cpu", ())
    assert [(op.phase.value, op.module, op.target) for op in graph.ops] == [
        ("forward", "0", "aten.addmm.default"),
        ("forward", "1", "aten.relu.default"),
        ("forward", "2", "aten.addmm.default"),
        ("forward", "", "aten.pow.Tensor_Scalar"),
        ("forward", "", "aten.mean.default"),
        ("backward", "", "aten.div.Scalar"),
        ("backward", "", "aten.pow.Tensor_Scalar"),
        ("backward", "", "aten.mul.Scalar"),
        ("backward", "", "aten.mul.Tensor"),
        ("backward", "2", "aten.mm.default"),
        ("backward", "2", "aten.mm.default"),
        ("backward", "2", "aten.sum.dim_IntList"),
        ("backward", "1", "aten.threshold_backward.default"),
        ("backward", "0", "aten.mm.default"),
        ("backward", "0", "aten.sum.dim_IntList"),
    ]
    assert {(op.section, op.call) for op in graph.ops} == {(0, 0)}
    assert names(graph, Role.PARAMETER) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert names(graph, Role.BATCH) == ["input", "gradient of the loss"]
    assert [graph.values[value].module for value in graph.resident[:4]] == ["0", "0", "2", "2"]
    assert_gradients_fit_parameters(graph, model)
    alive = [graph.values[value].name for value in graph.outputs if value not in graph.resident]
    assert sorted(alive) == ["0.bias.grad", "0.weight.grad", "2.bias.grad", "2.weight.grad", "mean"]


def test_views_are_folded_into_what_they_look_at() -> None:
    graph = capture(nn.Linear(8, 4), (torch.randn(5, 8),), lambda output: output.t().reshape(-1).sum())
    assert not {"t", "view", "detach", "expand"} & set(targets(graph))
    weight = next(value.id for value in graph.values if value.name == "weight")
    (product,) = (op for op in graph.ops if op.target == "aten.addmm.default")
    assert weight in product.reads
    assert {tensor.stride for tensor in graph.tensors if tensor.value == weight} == {(1, 8)}  # transposed


def test_the_peak_of_a_small_network_is_counted_by_hand() -> None:
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Tanh(), nn.Linear(100, 100, bias=False))
    timeline = replayed(capture(model, (torch.randn(10, 100),), Tensor.sum))
    assert timeline.resident_bytes == 2 * 40_000 + 4_000 + 4
    # the gradients of both weights, the loss, and what goes in and out of the last product
    assert timeline.growth_bytes == 2 * 40_000 + 4 + 4_000
    assert timeline.peak_op is not None
    assert timeline.peak_op.module == "0"


# Models of every kind -------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding whose weight is also that of the head."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.broken = broken

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens).tanh()
        if self.broken:
            torch._dynamo.graph_break()
        logits: Tensor = self.head(hidden)
        return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


class Lopsided(nn.Module):
    """Parameters that are frozen or not used at all, and a buffer that is only looked at."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.trained = nn.Linear(8, 8)
        self.unused = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.unused.requires_grad_(False)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor, *, times: Tensor) -> dict[str, Tensor]:
        hidden = self.trained(self.frozen(x).relu())
        return {"loss": (hidden * self.scale * times).mean(), "hidden": hidden}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(4, 10, 3, 4, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(query, key, value, is_causal=True).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(self.cells(x)[0]).square().mean()
        return loss


class Mixed(nn.Module):
    """Casts by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 64)
        self.outer = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.outer(self.inner(x).relu())
        return x.float().square().mean()


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.head(checkpoint(self.body, x, use_reentrant=False)).mean()
        return loss


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Broken(nn.Module):
    """Two graph breaks of different kinds: three graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.second = nn.Linear(256, 256)
        self.third = nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        torch._dynamo.graph_break()
        x = self.second(x).tanh()
        print(end="")
        loss: Tensor = self.third(x).square().mean()
        return loss


class BrokenBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.outer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x).relu()
        torch._dynamo.graph_break()
        result: Tensor = x + self.outer(self.inner(hidden))
        return result


class Loop(nn.Module):
    """Dynamo compiles the halves of a block once and uses them again, and cannot capture the loop itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BrokenBlock() for _ in range(4))
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        total: Tensor = self.head(x).sum()
        return total


class Skips(nn.Module):
    """One tensor that several graphs use: its gradients meet outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        shared = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(shared).tanh() + shared
        torch._dynamo.graph_break()
        x = self.third(x).tanh() + shared
        torch._dynamo.graph_break()
        loss: Tensor = (x * shared).mean()
        return loss


@torch.compiler.disable  # type: ignore[untyped-decorator]
def unsupported(x: Tensor) -> Tensor:
    return x.sin() * torch.ones(64)


class Eager(nn.Module):
    """A call that Dynamo may not look into, between two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(64, 64)
        self.after = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = unsupported(self.before(x))
        loss: Tensor = self.after(x).mean()
        return loss


class Narrowing(nn.Module):
    """A block that breaks, for many sizes, with a number that is computed before the break."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width - 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = 1.0 / x.shape[1]
        x = x * scale
        torch._dynamo.graph_break()
        result: Tensor = self.layer(x) * scale
        return result


@dataclass
class Case:
    model: nn.Module
    example: tuple[Any, ...] | dict[str, Any]
    loss: Callable[[Any], Tensor] | None = None


def zoo(name: str, sizes: Sizes) -> Case:
    found = workload(name, sizes)
    return Case(found.model, found.args, found.loss)


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def normalised() -> Case:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))
    return Case(model, (torch.randn(2, 3, 8, 8),), mean_square)


def parametrised() -> Case:
    symmetric = nn.Linear(8, 8)
    parametrize.register_parametrization(symmetric, "weight", Symmetric())
    normal = parametrizations.weight_norm(nn.Linear(8, 8))
    return Case(nn.Sequential(normal, nn.ReLU(), symmetric), (torch.randn(4, 8),), mean_square)


def hf(kind: str) -> Case:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers deprecates its own arguments
        return _hf(transformers, kind)


def _hf(transformers: Any, kind: str) -> Case:
    tokens = torch.randint(0, 100, (4, 32))
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text: dict[str, Any] = {"vocab_size": 100, "bos_token_id": None, "eos_token_id": None, **small}
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=100,
            n_positions=32,
            n_embd=32,
            n_layer=1,
            n_head=4,
            bos_token_id=None,
            eos_token_id=None,
        )
        return Case(transformers.GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens})
    if kind == "llama":
        config = transformers.LlamaConfig(num_key_value_heads=2, **text)
        return Case(transformers.LlamaForCausalLM(config), {"input_ids": tokens, "labels": tokens})
    labels = torch.randint(0, 2, (4,))
    if kind == "bert":
        config = transformers.BertConfig(**text)
        model = transformers.BertForSequenceClassification(config)
        return Case(model, {"input_ids": tokens, "labels": labels})
    config = transformers.ViTConfig(image_size=32, patch_size=8, **small)
    model = transformers.ViTForImageClassification(config)
    return Case(model, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": labels})


CASES: Mapping[str, Callable[[], Case]] = {
    "gpt": lambda: zoo("gpt", Sizes(batch=4, tokens=32, layers=1, width=32, heads=4, vocab=100)),
    "resnet18": lambda: zoo("resnet18", Sizes(batch=2, image=32, classes=10)),
    "unet": lambda: zoo("unet", Sizes(batch=2, image=32, width=8)),
    "lstm": lambda: zoo("lstm", Sizes(batch=8, tokens=3, layers=2, width=32)),
    "hf gpt2": lambda: hf("gpt2"),
    "hf llama": lambda: hf("llama"),
    "hf bert": lambda: hf("bert"),
    "hf vit": lambda: hf("vit"),
    "tied": lambda: Case(Tied(), (torch.randint(0, 50, (4, 6)),)),
    "tied, broken": lambda: Case(Tied(broken=True), (torch.randint(0, 50, (4, 6)),)),
    "normalised": normalised,
    "parametrised": parametrised,
    "attention": lambda: Case(Attention(), (torch.randn(4, 10, 32),)),
    "nn.LSTM": lambda: Case(Recurrent(), (torch.randn(4, 6, 16),)),
    "autocast inside": lambda: Case(Mixed(), (torch.randn(16, 8),)),
    "checkpointed": lambda: Case(Checkpointed(), (torch.randn(16, 8),)),
    "broken": lambda: Case(Broken(), (torch.randn(512, 64),)),
    "loop": lambda: Case(Loop(), (torch.randn(256, 64),)),
    "skips": lambda: Case(Skips(), (torch.randn(256, 64),)),
    "eager": lambda: Case(Eager(), (torch.randn(256, 64),)),
}


@cache
def captured(name: str) -> tuple[Case, Graph]:
    torch.manual_seed(0)
    case = CASES[name]()
    return case, capture(case.model, case.example, case.loss)


@pytest.mark.parametrize("name", long_but(CASES, *(CASES.keys() - {"resnet18", "unet"})))
def test_a_capture_is_well_formed_and_replays(name: str) -> None:
    case, graph = captured(name)
    timeline = replayed(graph)
    assert timeline.growth_bytes > 0
    assert_everything_is_resident(graph, case.model)
    assert_gradients_fit_parameters(graph, case.model)
    assert not [value.name for value in graph.values if value.bytes and value.device != "cpu"]


# What runs is what was predicted --------------------------------------------------------------------


def executed(case: Case) -> Reading:
    """A real step through the same graphs, boxed, keeping everything; measured when it runs again."""
    args, kwargs = ((), case.example) if isinstance(case.example, dict) else (case.example, {})

    def forward() -> Any:
        output = case.model(*args, **kwargs)
        return output if case.loss is None else case.loss(output)

    backend = aot_autograd(fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=default_partition)
    compiled = torch.compile(forward, backend=backend, dynamic=False)

    def step() -> Any:
        output = compiled()
        loss = output if isinstance(output, Tensor) else output.loss
        loss.backward()
        return output

    torch._dynamo.reset()
    try:
        with compiling():
            step()
            case.model.zero_grad(set_to_none=True)
            gc.collect()
            return measure(step, device="cpu")
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("name", ["gpt", "lstm", "hf gpt2", "hf llama", "tied, broken"])
def test_the_straight_schedule_holds_what_running_the_graphs_holds(name: str) -> None:
    case, graph = captured(name)
    predicted = replayed(graph).growth_bytes
    assert executed(case).growth_bytes == pytest.approx(predicted, rel=0.01)


@pytest.mark.skipif(
    TORCH < (2, 13), reason="older engines hold what enters the backward of a graph until it is over"
)
@pytest.mark.parametrize("name", ["broken", "loop", "skips"])
def test_steps_of_many_graphs_are_predicted_to_the_byte(name: str) -> None:
    case, graph = captured(name)
    predicted = replayed(graph).growth_bytes
    assert executed(case).growth_bytes == predicted + LOSS_BYTES


@pytest.mark.parametrize(
    "name", long_but(["resnet18", "unet", "attention", "autocast inside"], "attention", "autocast inside")
)
def test_with_workspaces_from_a_profile_kernels_that_need_them_are_predicted_too(
    name: str, tmp_path: Path
) -> None:
    case, graph = captured(name)
    graph = profile(graph, cache=tmp_path / "costs.sqlite")
    assert executed(case).growth_bytes == pytest.approx(replayed(graph).growth_bytes, rel=0.01)


# Sections -------------------------------------------------------------------------------------------


def sections_in_order(graph: Graph, phase: Phase) -> list[int]:
    """Section numbers in the order in which they begin, for one phase."""
    return list(dict.fromkeys(op.section for op in graph.ops if op.phase is phase and op.section != OUTSIDE))


def test_sections_run_forward_in_order_and_backward_in_reverse() -> None:
    _, graph = captured("broken")
    assert sections_in_order(graph, Phase.FORWARD) == [0, 1, 2]
    assert sections_in_order(graph, Phase.BACKWARD) == [2, 1, 0]
    assert [op.phase for op in graph.ops] == sorted((op.phase for op in graph.ops), reverse=True)
    assert targets(graph)["addmm"] == 3
    assert targets(graph)["mm"] == 5
    assert OUTSIDE not in {op.section for op in graph.ops}


def test_values_flow_across_sections_in_both_directions() -> None:
    case, graph = captured("broken")
    for sender, receiver, phase in [(0, 1, Phase.FORWARD), (1, 2, Phase.FORWARD), (2, 1, Phase.BACKWARD)]:
        made = {v for op in graph.ops if (op.section, op.phase) == (sender, phase) for v in op.creates}
        read = {v for op in graph.ops if (op.section, op.phase) == (receiver, phase) for v in op.reads}
        assert made & read, (sender, receiver, phase)
    assert len(graph.resident) == len(list(case.model.parameters())) + 2  # the batch, the loss's gradient


def test_notes_name_the_line_of_every_graph_break() -> None:
    notes = captured("broken")[1].notes
    assert len(notes) == 2
    assert "test_capture.py" in notes[0]
    assert "in forward: `torch._dynamo.graph_break()`" in notes[0]
    assert 'in forward: `print(end="")`' in notes[1]


def test_notes_speak_of_this_capture_only() -> None:
    try:
        torch.compile(Broken(), backend="eager")(torch.randn(8, 64))
        assert capture(nn.Linear(8, 4), (torch.randn(5, 8),)).notes == ()
    finally:
        torch._dynamo.reset()


def test_what_runs_between_graphs_is_in_the_graph_but_marked_and_noted() -> None:
    _, graph = captured("eager")
    ops = [op for op in graph.ops if op.section == OUTSIDE and not does_nothing(op)]
    outside = [(op.phase.value, op.target.split(".")[1]) for op in ops]
    assert outside == [
        ("forward", "sin"),
        ("forward", "ones"),
        ("forward", "mul"),
        ("backward", "mul"),
        ("backward", "cos"),
        ("backward", "mul"),
    ]
    assert any("runs eagerly" in note and "x.sin() * torch.ones(64)" in note for note in graph.notes)


def test_a_graph_that_is_used_again_is_a_section_each_time_with_its_own_modules() -> None:
    _, graph = captured("loop")
    assert sections_in_order(graph, Phase.FORWARD) == list(range(8))
    assert sections_in_order(graph, Phase.BACKWARD) == list(reversed(range(8)))
    for phase, product in ((Phase.FORWARD, "aten.addmm.default"), (Phase.BACKWARD, "aten.mm.default")):
        places = [(op.section, op.module, op.call) for op in graph.ops if is_product(op, phase, product)]
        expected = [
            place
            for block in range(4)
            for place in (
                (2 * block, f"blocks.{block}.inner", 0),
                (2 * block + 1, f"blocks.{block}.inner", 1),
                (2 * block + 1, f"blocks.{block}.outer", 0),
            )
        ]
        assert sorted(set(places)) == sorted(expected)
    between = {
        (op.module, op.call) for op in graph.ops if op.target in ("aten.relu.default", "aten.add.Tensor")
    }
    assert between == {(f"blocks.{block}", 0) for block in range(4)}  # one call, though it is broken


def test_a_block_of_many_sizes_is_captured_for_each_of_them() -> None:
    model = nn.Sequential(*(Narrowing(width) for width in range(24, 12, -1)))
    graph = capture(model, (torch.randn(4, 24),), mean_square)
    replayed(graph)
    products = [op for op in graph.ops if op.target == "aten.addmm.default"]
    assert [op.module for op in products] == [f"{block}.layer" for block in range(12)]
    assert [graph.tensors[op.outputs[0] or 0].shape[1] for op in products] == list(range(23, 11, -1))
    outside = {op.target for op in graph.ops if op.section == OUTSIDE and op.phase is Phase.FORWARD}
    assert outside <= {HANDED_ON}  # which does nothing: what a block is given, its caller still holds
    assert sections_in_order(graph, Phase.FORWARD) == list(range(25))  # the last one is the loss


def is_product(op: Op, phase: Phase, target: str) -> bool:
    return op.target == target and op.phase is phase and op.section != OUTSIDE


def test_gradients_that_meet_outside_of_graphs_are_added_as_the_engine_adds_them() -> None:
    (_, tied), (_, skips) = captured("tied, broken"), captured("skips")
    (added,) = (op for op in tied.ops if op.section == OUTSIDE)
    assert added.target == "aten.add.Tensor"  # a weight's gradient is a view: its memory is not the engine's
    met = [op for op in skips.ops if op.section == OUTSIDE]
    assert [op.target for op in met] == ["aten.add_.Tensor", "aten.add_.Tensor"]
    assert all(op.mutates and not op.creates for op in met)


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.amount = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() + self.amount


def test_a_gradient_that_somebody_else_holds_is_copied_for_its_parameter() -> None:
    graph = capture(nn.Sequential(nn.Linear(8, 4), Shift()), (torch.randn(5, 8),))
    copies = [(op.target, op.module) for op in graph.ops if op.section == OUTSIDE]
    assert copies == [("aten.new_empty_strided.default", "1"), ("aten.copy_.default", "1")]
    gradient = next(value for value in graph.values if value.name == "1.amount.grad")
    assert graph.ops[graph.creator[gradient.id]].section == OUTSIDE


def test_the_calls_of_a_module_are_counted() -> None:
    case = zoo("lstm", Sizes(batch=2, tokens=3, layers=1, width=8))
    graph = capture(case.model, case.example, case.loss)
    forward = [(op.module, op.call) for op in graph.ops if op.target == "aten.addmm.default"]
    assert forward == [*(("cells.0.input", call) for call in range(3)), ("head", 0)]
    backward = {op.call for op in graph.ops if op.module == "cells.0.hidden" and op.phase is Phase.BACKWARD}
    assert backward == {0, 1, 2}


# Particular ops -------------------------------------------------------------------------------------


def test_running_statistics_are_updated_by_the_normalisation_and_not_read_by_the_backward() -> None:
    _, graph = captured("normalised")
    (norm,) = (op for op in graph.ops if op.updates)
    assert norm.target == "aten.native_batch_norm.default"  # eager's kernel
    assert [graph.values[value].name for value in norm.updates] == ["1.running_mean", "1.running_var"]
    assert not set(norm.updates) & {*norm.reads, *norm.mutates}
    (counted,) = (op for op in graph.ops if op.target == "aten.add_.Tensor")
    assert [graph.values[value].name for value in counted.mutates] == ["1.num_batches_tracked"]
    assert (counted.phase, counted.section, counted.module) == (Phase.FORWARD, 0, "1")
    (backward,) = (op for op in graph.ops if op.target == "aten.native_batch_norm_backward.default")
    assert not set(norm.updates) & set(backward.reads)


def test_in_evaluation_the_backward_of_batch_norm_reads_the_statistics() -> None:
    model = nn.BatchNorm1d(4).eval()
    graph = capture(model, (torch.randn(5, 4),), mean_square)
    (backward,) = (op for op in graph.ops if "batch_norm_backward" in op.target)
    read = {graph.values[value].name for value in backward.reads}
    assert {"running_mean", "running_var"} <= read
    assert not any(op.mutates for op in graph.ops)


def test_dropout_is_random_and_nothing_else() -> None:
    _, graph = captured("normalised")
    assert {op.target.split(".")[1] for op in graph.ops if op.random} == {"native_dropout"}


def test_fused_recurrent_layers_are_captured_whole() -> None:
    _, graph = captured("nn.LSTM")
    assert {op.section for op in graph.ops if op.phase is Phase.FORWARD} == {0}
    if torch.backends.mkldnn.is_available():
        assert targets(graph, Phase.FORWARD)["mkldnn_rnn_layer"] == 2


def test_autocast_around_the_capture_is_part_of_it() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
    plain = capture(model, (torch.randn(16, 8),), mean_square)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = capture(model, (torch.randn(16, 8),), mean_square)
    assert "bfloat16" not in {tensor.dtype for tensor in plain.tensors}
    products = [op for op in cast.ops if op.target in ("aten.addmm.default", "aten.mm.default")]
    results = [cast.tensors[out].dtype for op in products for out in op.outputs if out is not None]
    assert set(results) == {"bfloat16"}
    assert_gradients_fit_parameters(cast, model)
    replayed(cast)


def test_the_models_own_checkpointing_is_left_to_lowtide() -> None:
    _, graph = captured("checkpointed")
    assert targets(graph)["tanh"] == 2  # none of them again in the backward
    assert graph.notes == ("the model checkpoints activations itself; here they are kept",)


def test_hugging_faces_warnings_do_not_break_the_graph() -> None:
    _, graph = captured("hf gpt2")
    assert {op.section for op in graph.ops if op.phase is Phase.FORWARD} == {0}
    assert graph.notes == ()


# Inputs and outputs ---------------------------------------------------------------------------------


def test_keyword_arguments_and_outputs_in_a_dict() -> None:
    model = Lopsided()
    graph = capture(model, {"x": torch.randn(4, 8), "times": torch.randn(8)})
    assert names(graph, Role.BATCH) == ["x", "times", "gradient of the loss"]
    assert names(graph, Role.BUFFER) == ["scale"]
    assert_gradients_fit_parameters(graph, model)
    assert sorted(names(graph, Role.GRADIENT)) == ["trained.bias.grad", "trained.weight.grad"]
    assert_everything_is_resident(graph, model)
    readers = graph.readers
    untouched = [graph.values[value].name for value in graph.resident if value not in readers]
    assert untouched == ["unused.weight", "unused.bias"]


def test_outputs_that_are_not_the_loss_outlive_the_step() -> None:
    model = Lopsided()
    graph = capture(model, {"x": torch.randn(4, 8), "times": torch.randn(8)})
    alive = [graph.values[value] for value in graph.outputs - set(graph.resident)]
    assert sorted(value.name for value in alive if value.role is Role.INTERMEDIATE) == ["addmm", "mean"]


def test_a_tensor_alone_is_an_example() -> None:
    x = torch.randn(4, 8)
    assert capture(nn.Linear(8, 2), x, mean_square) == capture(nn.Linear(8, 2), (x,), mean_square)


def test_without_a_loss_the_gradients_of_the_outputs_are_resident() -> None:
    graph = capture(nn.Linear(8, 4), (torch.randn(5, 8),))
    assert names(graph, Role.BATCH) == ["input", "gradient of output 0"]
    tangent = next(value for value in graph.values if value.name == "gradient of output 0")
    assert tangent.bytes == 5 * 4 * 4
    assert tangent.id in graph.resident
    assert targets(graph) == {"addmm": 1, "mm": 1, "sum": 1}
    replayed(graph)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.layer(x)
        return hidden.mean(), hidden


def test_the_first_of_several_outputs_may_be_the_loss() -> None:
    graph = capture(Pair(), (torch.randn(5, 8),))
    assert "gradient of the loss" in names(graph, Role.BATCH)
    assert_gradients_fit_parameters(graph, Pair())


def closing_over(target: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda output: F.cross_entropy(output, target)


def handed(target: Tensor) -> Callable[[Tensor], Tensor]:
    return partial(F.cross_entropy, target=target)


def held_by(loss: Any) -> object:
    """What such a loss has for a target."""
    return loss.keywords["target"] if isinstance(loss, partial) else loss.__closure__[0].cell_contents


@pytest.mark.parametrize("with_target", [closing_over, handed])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_targets_that_a_loss_closes_over_are_part_of_the_batch(
    with_target: Callable[[Tensor], Callable[[Tensor], Tensor]], device: str
) -> None:
    target = torch.randint(0, 4, (5,)).to(device)
    loss = with_target(target)
    with torch.device(device):
        model, x = nn.Linear(8, 4), torch.randn(5, 8)
    graph = capture(model, (x,), loss)
    assert names(graph, Role.BATCH) == ["target", "input", "gradient of the loss"]
    assert held_by(loss) is target


def test_a_criterion_with_weights_of_its_own_is_resident() -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.rand(4))
    target = torch.randint(0, 4, (5,))
    graph = capture(nn.Linear(8, 4), (torch.randn(5, 8),), lambda output: criterion(output, target))
    assert sorted(names(graph, Role.BUFFER)) == ["weight"]
    replayed(graph)


def test_an_input_that_requires_gradients_gets_one() -> None:
    graph = capture(nn.Linear(8, 4), (torch.randn(5, 8, requires_grad=True),), mean_square)
    assert sorted(names(graph, Role.GRADIENT)) == ["bias.grad", "input.grad", "weight.grad"]


def test_a_model_that_is_compiled_already_is_captured_all_the_same() -> None:
    model = nn.Linear(8, 4)
    x = torch.randn(5, 8)
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert capture(compiled, (x,), mean_square) == capture(model, (x,), mean_square)


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)


class Padded(OneLayer):
    """Looks at its lengths."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        loss: Tensor = self.layer(x[: int(lengths.max())]).mean()
        return loss


def test_whole_numbers_of_the_example_may_decide_and_the_notes_say_so() -> None:
    graph = capture(Padded(), (torch.randn(5, 8), torch.tensor([2, 3])))
    (product,) = (op for op in graph.ops if op.target == "aten.addmm.default")
    assert [graph.tensors[out].shape for out in product.outputs if out is not None] == [(3, 4)]
    assert any(note.startswith("decided by the numbers in the example: ") for note in graph.notes)
    with pytest.raises(CannotCapture, match="only exists when it runs"):
        capture(Padded(), (torch.randn(5, 8), torch.tensor([2, 3], device="meta")))


# Nothing is computed, nothing is changed ------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt", "resnet18"])
def test_a_model_on_the_meta_device_gives_the_same_graph(name: str) -> None:
    with torch.device("meta"):
        case = CASES[name]()
    assert all(parameter.is_meta for parameter in case.model.parameters())
    assert capture(case.model, case.example, case.loss) == captured(name)[1]


def test_a_step_far_larger_than_this_machine_can_be_captured() -> None:
    with torch.device("meta"):
        model, x = nn.Linear(200_000, 200_000), torch.randn(100_000, 200_000)
    assert replayed(capture(model, (x,), mean_square)).peak_bytes > 400 * 10**9


def test_nothing_is_allocated_at_its_real_size() -> None:
    model = nn.Sequential(nn.Linear(100, 1000), nn.ReLU(), nn.Linear(1000, 100))
    wide = torch.zeros(1, 100).expand(100_000, 100)
    graphs: list[Graph] = []
    blocks, _ = record_cpu(lambda: graphs.append(capture(model, (wide,), mean_square)))
    assert replayed(graphs[0]).growth_bytes > 800 * 10**6
    assert max(growth(blocks)) < 100_000


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a capture might disturb, by identity where that matters."""
    modules = dict(model.named_modules())
    return {
        "parameters": [id(p) for p in model.parameters()],
        "numbers": [t.detach().clone() for t in (*model.parameters(), *model.buffers())],
        "gradients": [id(p.grad) for p in model.parameters()],
        "versions": [t._version for t in (*model.parameters(), *model.buffers())],
        "attributes": {path: sorted(module.__dict__) for path, module in modules.items()},
        "modes": {path: module.training for path, module in modules.items()},
        "hooks": {path: len(module._forward_hooks) for path, module in modules.items()},
        "random": (
            torch.get_rng_state(),
            np.random.get_state(legacy=False)["state"]["key"],
            random.getstate(),
        ),
        "dynamo": torch._dynamo.config.get_config_copy(),
        "grad mode": torch.is_grad_enabled(),
    }


def assert_same_state(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for key in before:
        if key == "numbers":
            assert all(torch.equal(x, y) for x, y in zip(before[key], after[key], strict=True))
        elif key == "random":
            assert torch.equal(before[key][0], after[key][0])
            assert np.array_equal(before[key][1], after[key][1])
            assert before[key][2] == after[key][2]
        else:
            assert before[key] == after[key], key


class Stateful(nn.Module):
    """Counts its calls, keeps what it computed, draws random numbers, and may refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.calls = 0
        self.refuse = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.norm(F.dropout(self.layer(x)))
        if self.refuse and self.last.sum().item() > 0:
            raise AssertionError("not reached")
        loss: Tensor = self.last.mean()
        return loss


@pytest.mark.parametrize("refuse", [False, True])
def test_the_model_is_left_as_it_was(refuse: bool) -> None:
    model = Stateful()
    model.layer.register_forward_hook(lambda module, args, output: None)
    model(torch.randn(4, 8)).sum().backward()
    model.refuse = refuse
    x = torch.randn(4, 8)
    before = state_of(model)
    if refuse:
        with pytest.raises(CannotCapture):
            capture(model, (x,))
    else:
        capture(model, (x,))
    assert_same_state(before, state_of(model))
    assert model.calls == 1
    assert x.grad is None


def test_the_model_can_be_compiled_and_trained_afterwards() -> None:
    model, x = Broken(), torch.randn(8, 64)
    capture(model, (x,))
    assert torch._dynamo.eval_frame._debug_get_cache_entry_list(Broken.forward.__code__) == []
    compiled = torch.compile(model, backend="aot_eager")
    try:
        loss = compiled(x)
        loss.backward()
    finally:
        torch._dynamo.reset()
    assert torch.equal(loss, model(x))
    assert all(type(p.grad) is Tensor for p in model.parameters())


def test_gradients_of_an_earlier_step_play_no_part() -> None:
    model, x = nn.Linear(8, 4), torch.randn(5, 8)
    first = capture(model, (x,), mean_square)
    mean_square(model(x)).backward()
    assert capture(model, (x,), mean_square) == first


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_the_mode_around_the_capture_does_not_matter(around: Callable[[], Any]) -> None:
    model, x = nn.Linear(8, 4), torch.randn(5, 8)
    with around():
        found = capture(model, (x,), mean_square)
    assert found == capture(model, (x,), mean_square)


# Refusals -------------------------------------------------------------------------------------------


class Branches(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        if x.sum().item() > 0:
            x = x * 2
        return x.mean()


class Counts(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        for _ in range(int(x.max().item())):
            x = x * 2
        return x.mean()


class Selects(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x[x > 0].mean()


class Misfits(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return (x @ x).mean()


class Raises(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("five is right out")


class Twice(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(self.layer(x).sin().sum(), x, create_graph=True)
        return slope.square().mean()


@pytest.mark.parametrize(
    ("model", "line", "why"),
    [
        (Branches, "in forward: `if x.sum().item() > 0:`", "Choose with torch.where"),
        (Counts, "in forward: `for _ in range(int(x.max().item())):`", "only exists when it runs"),
        (Selects, "in forward: `return x[x > 0].mean()`", "only exists when it runs"),
        (
            Misfits,
            "in forward: `return (x @ x).mean()`",
            "RuntimeError: a and b must have",
        ),
        (Raises, 'in forward: `raise ValueError("five is right out")`', "ValueError: five is right out"),
        (Twice, "", "double backward"),
    ],
)
def test_a_refusal_names_the_users_line_and_the_reason(model: type[nn.Module], line: str, why: str) -> None:
    with pytest.raises(CannotCapture) as refusal:
        capture(model(), (torch.randn(5, 8),))
    assert line in str(refusal.value)
    assert why in str(refusal.value)
    if line:
        assert "test_capture.py:" in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


def test_arguments_that_the_model_does_not_take_are_refused() -> None:
    with pytest.raises(CannotCapture, match="takes 2 positional arguments but 3 were given"):
        capture(nn.Linear(8, 4), (torch.randn(5, 8), torch.randn(5, 8)))


def test_an_example_of_another_kind_is_refused() -> None:
    with pytest.raises(BadRequest, match="the example is a list"):
        capture(nn.Linear(8, 4), [torch.randn(5, 8)])  # type: ignore[arg-type]


def test_a_loss_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"must return a tensor of one number, not one of shape \(5, 4\)"):
        capture(nn.Linear(8, 4), (torch.randn(5, 8),), lambda output: output * 2)


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(BadRequest, match="there is nothing to train"):
        capture(nn.Linear(8, 4).requires_grad_(False), (torch.randn(5, 8),), mean_square)


def test_where_dynamo_can_capture_nothing_the_reason_is_given() -> None:
    with pytest.raises(CannotCapture, match=r"captured nothing: not captured, runs eagerly: .* in forward"):
        capture(Uncapturable(), (torch.randn(5, 8),))


class Uncapturable(OneLayer):
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x).mean()
        return loss


def test_a_trained_tensor_that_belongs_to_nobody_is_refused() -> None:
    with pytest.raises(CannotCapture, match="belongs neither to the model nor to the loss"):
        capture(Strays(), (torch.randn(5, 8),))


STRAY = torch.ones(4, requires_grad=True)


class Strays(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.layer(x) * STRAY).mean()
        return loss


def test_dynamo_switched_off_is_an_error_and_not_an_empty_capture() -> None:
    with torch._dynamo.config.patch(disable=True), pytest.raises(CannotCapture, match="captured nothing"):
        capture(nn.Linear(8, 4), (torch.randn(5, 8),), mean_square)


class RecurrentOfCudnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shapes = [(32, 8), (32, 8), (32,), (32,)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(1, x.shape[1], 8)
        how: tuple[Any, ...] = (2, 8, 0, 1, False, 0.0, True, False, [], None)
        layer = torch.ops.aten._cudnn_rnn.default
        found: torch.Tensor = layer(x, list(self.weights), 4, None, state, state, *how)[0]
        return found


def test_a_recurrent_layer_of_cudnn_is_predicted_and_not_captured() -> None:
    with torch.device("meta"):
        model, x = RecurrentOfCudnn(), torch.empty(5, 3, 8)
    graph = fit(model, (x,), torch.sum, device="cuda", profile=False).trace.graph
    kept = 4 * 5 * 3 * 8 * 5 + 256
    assert kept in [value.bytes for value in graph.values]
    with pytest.raises(
        CannotCapture, match=r"is a recurrent layer of cuDNN.*Plan by layers \(method='rotor'\)"
    ):
        capture(model, (x,), torch.sum, device="cuda")
