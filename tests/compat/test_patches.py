"""Foreign code is replaced for a while: whatever happens, the very same object is there afterwards."""

from __future__ import annotations

import ast
import logging
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch._meta_registrations
import torch.nn.functional as F
import transformers.integrations.moe as experts
import transformers.masking_utils as masks
import transformers.utils.import_utils as utilities
from torch import nn
from torch._dynamo import convert_frame
from torch._functorch._aot_autograd import collect_metadata_analysis, graph_compile, runtime_wrappers
from torch._inductor.graph import GraphLowering
from torch._subclasses import fake_impls, fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.data import DataLoader

import lowtide
from lowtide.aot import capture
from lowtide.cli.quiet import undisturbed
from lowtide.compat.autograd import told_of_functions
from lowtide.compat.composites import _other_ways, as_they_run
from lowtide.compat.cudnn_rnn import recurrent_layers_by_cudnn
from lowtide.compat.draws import filled_as_they_lie
from lowtide.compat.dynamo import nothing_written_over
from lowtide.compat.dynamo_frames import Backends
from lowtide.compat.fake_kernels import as_kernels_do
from lowtide.compat.fake_layouts import laid_out_as_kernels_do
from lowtide.compat.fake_rnn import recurrent_layers_of_cudnn
from lowtide.compat.gradient_layouts import gradients_laid_out, gradients_told
from lowtide.compat.inductor import _inputs_as_they_lie
from lowtide.compat.loggers import FAKE_KERNELS
from lowtide.compat.patches import Patch, active, patched
from lowtide.compat.views import views_as_they_run
from lowtide.cost.cuda_rules import cuda_rules
from lowtide.distributed.fsdp import _ShardedRecorder
from lowtide.ir.assumptions import Finding
from lowtide.ir.graph import Origin
from lowtide.ir.strides import viewed
from lowtide.rehearsal.played import cuda_answers
from lowtide.rehearsal.script import _as_main
from lowtide.rehearsal.training_watch import TrainingWatch
from lowtide.trace import hf_masks
from lowtide.trace.attribution import Attribution
from lowtide.trace.dry_run import _random_states_counted
from lowtide.trace.graph_builder import GraphBuilder
from lowtide.trace.guesses import Guesses
from lowtide.trace.hf_masks import Positions, unnoticed_by_transformers
from lowtide.trace.inputs import over
from lowtide.trace.outside_numbers import _DRAWS, outside_numbers

ABSENT = object()


class Interruption(BaseException):
    """Neither an error nor something that anybody expects."""


class Thing:
    """Something with an attribute of its class, and one of its own."""

    inherited = "of the class"

    def __init__(self) -> None:
        self.own = "of the instance"


def held(owner: Any, name: str) -> object:
    """What `owner` itself has by this name: not what it has inherited."""
    return vars(owner).get(name, ABSENT) if hasattr(owner, "__dict__") else getattr(owner, name)


def interrupt(context: AbstractContextManager[Any], inside: Callable[[], None]) -> None:
    with context:
        inside()
        raise Interruption


def cell_of(function: Any) -> Any:
    return function.__closure__[0]


def loss_over(target: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda output: F.mse_loss(output, target)


LOSS = loss_over(torch.ones(2))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Thing(), "own"),
        (Thing(), "inherited"),
        (Thing, "inherited"),
        (Thing, "__init__"),
        (types, "FunctionType"),
        (cell_of(LOSS), "cell_contents"),
    ],
    ids=["instance", "inherited by an instance", "class", "method", "module", "cell"],
)
def test_what_was_replaced_comes_back_after_any_exception(owner: object, name: str) -> None:
    before, other = held(owner, name), object()

    def inside() -> None:
        assert held(owner, name) is other

    with pytest.raises(Interruption):
        interrupt(patched(owner, name, other, why="a test", since="now"), inside)
    assert held(owner, name) is before


def test_replacements_of_one_name_are_undone_in_reverse() -> None:
    thing = Thing()
    before = thing.own
    with patched(thing, "own", 1, why="first", since="now"):
        with patched(thing, "own", 2, why="second", since="now"):
            assert [patch.why for patch in active()] == ["first", "second"]
        assert held(thing, "own") == 1
        assert [patch.why for patch in active()] == ["first"]
    assert thing.own is before
    assert active() == ()


def test_what_cannot_be_replaced_is_not_entered() -> None:
    with pytest.raises(AttributeError), patched((), "count", 1, why="a test", since="now"):
        pass
    assert active() == ()


def test_a_patch_says_what_it_replaces_and_why() -> None:
    assert (
        str(Patch(Thing, "inherited", "it is a test", "now")) == "Thing.inherited (since now: it is a test)"
    )
    assert str(Patch(Thing(), "own", "so", "now")) == "Thing.own (since now: so)"
    assert str(Patch(F, "dropout", "so", "now")) == "torch.nn.functional.dropout (since now: so)"


# Those that there are -------------------------------------------------------------------------------

KERNELS = logging.getLogger(FAKE_KERNELS)
PACKED = (masks, "find_packed_sequence_indices")
EXPERTS = (experts, "is_torchdynamo_compiling")
NEVER = EXPERTS, (masks, "is_tracing"), (utilities, "is_fake_tensor"), (masks, "is_torchdynamo_exporting")
ON_CUDA = (
    (F, "dropout"),
    (F, "scaled_dot_product_attention"),
    (F, "cross_entropy"),
    (torch.autocast, "__init__"),
)
ANSWERS = (
    *("empty_cache", "synchronize", "set_device", "memory_allocated", "memory_reserved"),
    *("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"),
)
# By module: what it enters, and what is replaced then.
REAL: dict[str, tuple[Callable[[], AbstractContextManager[Any]], tuple[tuple[object, str], ...]]] = {
    "compat/composites": (
        as_they_run,
        tuple((op, name) for op, _ in _other_ways() for name in ("py_kernels", "_dispatch_cache")),
    ),
    "compat/composites, draws": (
        filled_as_they_lie,
        tuple(
            (op, name)
            for op in (torch.ops.aten.bernoulli_.float, torch.ops.aten.bernoulli_.Tensor)
            for name in ("python_key_table", "_dispatch_cache")
        ),
    ),
    "compat/views": (lambda: views_as_they_run(viewed), ((fake_impls, "op_implementations_dict"),)),
    "cli/quiet": (undisturbed, ((KERNELS, "disabled"),)),
    "compat/dynamo_frames": (
        Backends(print).without_limit,
        ((convert_frame, "exceeds_recompile_limit"),),
    ),
    "compat/fake_kernels": (
        as_kernels_do,
        (
            (torch._meta_registrations, "_meta_grouped_mm_common"),
            (torch.utils, "swap_tensors"),
            (FakeTensorMode, "dispatch"),
            (fake_tensor, "op_implementations_checks"),
        ),
    ),
    "compat/fake_rnn": (recurrent_layers_of_cudnn, ((fake_tensor, "op_implementations_checks"),)),
    "compat/cudnn_rnn": (
        recurrent_layers_by_cudnn,
        tuple((torch._VF, name) for name in ("rnn_relu", "rnn_tanh", "lstm", "gru")),
    ),
    "compat/autograd": (
        lambda: told_of_functions(lambda: None),
        ((torch.autograd.Function, "apply"),),
    ),
    "compat/gradient_layouts": (
        lambda: gradients_told(lambda gradient, strides: None),
        ((runtime_wrappers, "coerce_to_expected_memory_format"),),
    ),
    "compat/gradient_layouts, known": (
        lambda: gradients_laid_out([None]),
        ((collect_metadata_analysis, "coerce_tangent_and_suggest_memory_format"),),
    ),
    "compat/dynamo": (nothing_written_over, ((graph_compile, "collect_bw_donated_buffer_idxs"),)),
    "compat/inductor": (_inputs_as_they_lie, ((GraphLowering, "find_nodes_prefer_channels_last"),)),
    "compat/fake_layouts": (laid_out_as_kernels_do, ((FakeTensorMode, "dispatch"),)),
    "cost/cuda_rules": (cuda_rules, ON_CUDA),
    "distributed/fsdp": (
        lambda: _ShardedRecorder._storages_watched(_ShardedRecorder([nn.ReLU()], None, None)),
        ((torch.UntypedStorage, "resize_"),),
    ),
    "rehearsal/played": (
        lambda: cuda_answers(cast(Any, types.SimpleNamespace(ledger=None))),
        (*((torch.cuda, name) for name in ANSWERS), (torch, "load")),
    ),
    "rehearsal/script": (
        lambda: _as_main(types.ModuleType("__main__"), "script.py", []),
        ((sys, "argv"), (sys, "path")),
    ),
    "rehearsal/training_watch": (
        TrainingWatch(3).watched,
        ((nn.Module, "train"), (torch, "save"), (DataLoader, "__iter__")),
    ),
    "trace/dry_run": (_random_states_counted, ((torch, "get_rng_state"),)),
    "trace/hf_masks": (
        lambda: unnoticed_by_transformers([Finding.UNPACKED]),
        (PACKED, *((owner, name) for owner, name in NEVER if hasattr(owner, name))),
    ),
    "trace/hf_masks, watching": (
        Positions(lambda: GraphBuilder("step", Origin.JOINT, "cpu", {})).watched,
        (PACKED,),
    ),
    "trace/outside_numbers": (
        lambda: outside_numbers(cast(Guesses, None)),
        ((torch.Tensor, "numpy"), *_DRAWS),
    ),
    "trace/inputs": (
        lambda: over(lambda tensor, _: torch.zeros_like(tensor), LOSS),
        ((cell_of(LOSS), "cell_contents"),),
    ),
}
BELOW = {
    "aot/capture",
    "integrations/lightning",
    "integrations/transformers",
}  # those that are no context by themselves


@pytest.fixture(autouse=True)
def _no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which models of transformers ask whether they are traced depends on what other tests have loaded."""
    monkeypatch.setattr(hf_masks, "asking", list)


@pytest.mark.parametrize(("enter", "targets"), REAL.values(), ids=REAL)
def test_foreign_code_is_the_same_after_an_exception(
    enter: Callable[[], AbstractContextManager[Any]], targets: tuple[tuple[object, str], ...]
) -> None:
    before = [held(*target) for target in targets]

    def inside() -> None:
        assert {(id(patch.owner), patch.name) for patch in active()} == {(id(o), name) for o, name in targets}
        assert all(held(*target) is not old for target, old in zip(targets, before, strict=True))

    with pytest.raises(Interruption):
        interrupt(enter(), inside)
    assert all(held(*target) is old for target, old in zip(targets, before, strict=True))
    assert active() == ()


@pytest.mark.parametrize("own", [False, True], ids=["of the class", "of its own"])
def test_a_forward_that_is_captured_is_the_same_after_an_exception(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.ReLU()
    if own:
        model.forward = model.forward  # type: ignore[method-assign]
    before = held(model, "forward")

    def compiled(*_: object, **__: object) -> Callable[..., None]:
        def forward(*args: object) -> None:
            assert [patch.name for patch in active()] == ["forward"]
            assert held(model, "forward") is not before
            raise Interruption

        return forward

    monkeypatch.setattr(torch, "compile", compiled)
    with pytest.raises(Interruption):
        capture._step_around_forward(None, model, None, (torch.ones(2),), {})
    assert held(model, "forward") is before


def test_a_lightning_module_is_the_same_after_an_exception() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lowtide.integrations.lightning import LowtideCallback

    callback, module = LowtideCallback("1GiB"), lightning.LightningModule()
    module.log = module.log  # one that is its own already
    before = dict(vars(module))
    for name in ("log", "training_step"):
        callback._stand_in(module, name, print)
        assert held(module, name) is print
    callback.on_exception(None, module, Interruption())
    assert vars(module).keys() == before.keys()
    assert all(held(module, name) is old for name, old in before.items())


def test_a_trainers_model_is_the_same_after_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    from lowtide.integrations import transformers as integration

    model = nn.Linear(2, 2)
    before = dict(vars(model))

    def interrupted(found: nn.Module, *_: object, **__: object) -> None:
        assert held(found, "forward") is not ABSENT
        raise Interruption

    monkeypatch.setattr(integration, "optimize_where_it_trains", interrupted)
    callback = integration.LowtideCallback("1GiB", progress=False, tiles=True)
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(Interruption), pytest.warns(UserWarning, match="logits"):
        callback.on_train_begin(args, transformers.TrainerState(), None, model=model)
    assert vars(model).keys() == before.keys()


def test_every_module_that_replaces_foreign_code_is_tested_here() -> None:
    package = Path(lowtide.__file__).parent
    users = {
        file.relative_to(package).with_suffix("").as_posix()
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module == "lowtide.compat.patches"
        if any(alias.name == "patched" for alias in node.names)
    }
    assert users == {name.partition(",")[0] for name in REAL} | BELOW


def test_global_hooks_are_gone_after_an_exception() -> None:
    places: tuple[dict[int, Any], ...] = (
        modules._global_forward_hooks,
        modules._global_forward_pre_hooks,
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    )
    before = [dict(place) for place in places]

    def inside() -> None:
        assert all(len(place) == len(old) + 1 for place, old in zip(places, before, strict=True))

    with pytest.raises(Interruption):
        interrupt(Attribution([]).following([]), inside)
    assert [dict(place) for place in places] == before
