"""Inductor from within: what it takes ops apart into, and a graph made into generated code."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, cast
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import TracingContext, tracing
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.custom_graph_pass import CustomPartitionerFn as CustomPartitionerFn
from torch._inductor.exc import InductorError, InvalidCxxCompiler
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._triton import has_triton

from lowtide._version import __version__
from lowtide.compat.fake import FakeTensor, FakeTensorMode
from lowtide.compat.inductor_order import keep_order
from lowtide.compat.patches import patched
from lowtide.compat.private import Private
from lowtide.compat.views import VIEWS
from lowtide.errors import CannotApply

PRIVATE = (
    Private("torch._C._autograd._get_current_graph_task_keep_graph", "whether a backward may be run again"),
    Private("torch._guards.TracingContext", "what Inductor asks which arguments it may write over"),
    Private("torch._guards.tracing", "sets that context"),
    Private(
        "torch._inductor.compile_fx._recursive_joint_graph_passes",
        "rewrites patterns before code is generated",
    ),
    Private(
        "torch._inductor.compile_fx.compile_fx_inner",
        "makes a function of a graph",
    ),
    Private(
        "torch._inductor.compile_fx.record_original_output_strides",
        "has that function return tensors with the strides that the graph says",
    ),
    Private("torch._functorch.compile_utils.fx_graph_cse", "has equal ops run once"),
    Private("torch._inductor.custom_graph_pass.CustomGraphPass", "is known to caches of generated code"),
    Private("torch._inductor.custom_graph_pass.CustomPartitionerFn", "what cuts a joint graph for Inductor"),
    Private("torch.fx.Node._rename", "gives a node a name that is free"),
    Private("torch.fx.experimental.symbolic_shapes.ShapeEnv", "what is known of sizes that are symbols"),
    Private("torch.fx.passes.fake_tensor_prop.FakeTensorProp", "what the nodes of a graph stand for"),
    Private("torch._inductor.cpp_builder.get_cpp_compiler", "whether there is a C++ compiler"),
    Private("torch._inductor.exc.InductorError", "a graph that no code is generated for"),
    Private("torch._inductor.exc.InvalidCxxCompiler", "there is none"),
    Private("torch._inductor.decomposition.select_decomp_table", "what Inductor takes ops apart into"),
    Private(
        "torch._inductor.lowering.register_lowering",
        "says what Inductor makes of an op of ours",
    ),
    Private("torch._inductor.config", "how code is generated"),
    Private(
        "torch._inductor.graph.GraphLowering.find_nodes_prefer_channels_last",
        "says what is copied to have its channels last",
    ),
    Private("torch.utils._triton.has_triton", "whether there is Triton"),
    Private("torch.fx.experimental.proxy_tensor.make_fx", "takes ops apart"),
)


# Inductor draws as eager PyTorch does, keeps the order, and writes what it is told to, and little else.
_AS_TOLD: Mapping[str, Any] = {
    "fallback_random": True,
    "reorder_for_peak_memory": False,
    "realize_opcount_threshold": 256,
    "realize_acc_reads_threshold": 16,
    "realize_reads_threshold": 16,
}


class Generated(Protocol):
    """A function that Inductor has made, with the code that it has written for it."""

    source_code: str

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Its results. Empties `args`."""


# An op that does nothing but have Inductor write its argument to memory, where it might have left it to each
# reader to compute it anew. It runs nowhere: there is a fake, and a lowering.
_LIBRARY = torch.library.Library("lowtide", "FRAGMENT")
_LIBRARY.define("written(Tensor x) -> Tensor")
WRITTEN = torch.ops.lowtide.written.default


def _as_large(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


torch.library.register_fake("lowtide::written", _as_large, lib=_LIBRARY)


# A function of ours that Inductor is to call, and not to look into: slices must not be put together again.
_LIBRARY.define("block(str key, Tensor[] given) -> Tensor[]")
BLOCK = torch.ops.lowtide.block.default
_blocks: WeakValueDictionary[str, fx.GraphModule] = WeakValueDictionary()
_LOOKS = "lowtide_looks"  # the attribute of such a function that says what it makes


def as_block(function: fx.GraphModule, made: Sequence[tuple[Any, Any, str]]) -> tuple[str, fx.GraphModule]:
    """The key by which `BLOCK` calls a function that makes tensors of these shapes, strides and types.

    It can be called for as long as what is returned is there: this function, or one that does the same.
    """
    key = hashlib.sha256(f"{function.code} {made}".encode()).hexdigest()
    setattr(function, _LOOKS, made)
    return key, _blocks.setdefault(key, function)


def _run_block(key: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(_blocks[key].forward(list(given)))


def _block_of_fakes(key: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
    return [
        torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device=given[0].device)
        for shape, stride, dtype in getattr(_blocks[key], _LOOKS)
    ]


_LIBRARY.impl("block", _run_block, "CompositeExplicitAutograd")
torch.library.register_fake("lowtide::block", _block_of_fakes, lib=_LIBRARY)


@cache
def reductions_apart() -> Mapping[Any, Callable[..., Any]]:
    """What Inductor takes normalisations, softmaxes and losses apart into."""
    from torch._inductor.decomposition import select_decomp_table

    return {op: apart for op, apart in select_decomp_table().items() if _is_reduction_and_more(str(op))}


def _is_reduction_and_more(name: str) -> bool:
    return name.startswith("aten.") and ("_norm" in name or is_loss(name))


def is_loss(name: str) -> bool:
    """Whether an op of this name is a softmax, or the loss that is computed of one."""
    return "softmax" in name or "nll_loss" in name


def missing_compiler(device: str) -> str | None:
    """What Inductor needs to generate code for a device that is here, and is not installed; None: nothing."""
    if device.startswith("cuda"):
        return None if not torch.cuda.is_available() or has_triton() else "Triton"
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (g++ or clang++)"
    return None


def fake_mode() -> FakeTensorMode:
    """A world of tensors without numbers, for shapes that are what they are."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())  # caches of code want one


def generated(
    graph: fx.GraphModule,
    args: Sequence[Any],
    *,
    is_backward: bool,
    handed_out: int,
    given_up: Sequence[int] = (),
) -> Generated:
    """What Inductor makes of `graph`, for arguments like these: takes them in a list, and empties it.

    The first results, as many as are `handed_out`, have the strides that the graph says. The arguments at the
    places that are `given_up` are nobody else's, and may be written over. Ops run in the order of the graph,
    but for those that Inductor fuses.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what Inductor itself imports
        from torch._inductor import config
        from torch._inductor.compile_fx import (
            _recursive_joint_graph_passes,
            compile_fx_inner,
            record_original_output_strides,
        )

    _lower_ours()
    mode = fake_mode()
    with mode:
        fakes = [without_numbers(arg) for arg in args]
    with ExitStack() as around:
        around.enter_context(torch.no_grad())
        around.enter_context(config.patch(**_AS_TOLD))
        around.enter_context(_inputs_as_they_lie())
        with mode:
            apart = _taken_apart(graph, fakes)
        told = _Told(tuple(given_up), config.post_grad_custom_post_pass)
        around.enter_context(config.patch(post_grad_custom_post_pass=told))
        context = TracingContext(mode)
        context.fw_metadata = _GivenUp(list(given_up))
        around.enter_context(tracing(context))
        apart = _recursive_joint_graph_passes(apart) or apart
        record_original_output_strides(apart)
        (output,) = apart.graph.find_nodes(op="output")
        seen = range(min(handed_out, len(output.args[0])))
        output.meta["user_visible_output_idxs"] = [
            at for at in seen if isinstance(output.args[0][at], fx.Node)
        ]
        try:
            found: Any = compile_fx_inner(apart, fakes, is_backward=is_backward)
        except InductorError as error:
            what = " ".join(str(error).split())
            raise CannotApply(
                f"Inductor cannot generate code for a part of this step ({what:.300}). That is a fault of "
                f'PyTorch {torch.__version__}, or of the step: leave kernels="eager" for it.'
            ) from error
    return cast(Generated, found)


def without_numbers(arg: Any) -> Any:
    """A tensor that lies as `arg` does, of the mode of fakes that is on; anything else is itself."""
    if not isinstance(arg, torch.Tensor):
        return arg
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device)


@contextmanager
def _inputs_as_they_lie() -> Iterator[None]:
    """What a graph is given is copied to have its channels last where that is wanted, not at the beginning.

    Inductor makes such copies of all weights at once, which are then there until each is used.
    """
    from torch._inductor.graph import GraphLowering

    find = GraphLowering.find_nodes_prefer_channels_last

    def but_for_inputs(self: Any) -> Any:
        found: Any = find(self)
        found.difference_update([node for node in found if node.op == "placeholder"])
        return found

    why = "copies all weights at the beginning"
    with patched(
        GraphLowering, "find_nodes_prefer_channels_last", but_for_inputs, why=why, since="torch 2.0"
    ):
        yield


@dataclass
class _GivenUp:
    """What Inductor wants to know of the step whose graph it is given."""

    bw_donated_idxs: list[int]  # arguments that it may write over


class _Told(CustomGraphPass):
    """Changes nothing: caches look at this, but not at what code writes over, nor at lowerings of ours."""

    def __init__(self, given_up: tuple[int, ...], own: Any) -> None:
        self._given_up = given_up
        self._own = own  # what the user has there

    def __call__(self, graph: fx.Graph) -> None:
        if self._own is not None:
            self._own(graph)

    def uuid(self) -> str | None:
        """None, so that nothing is cached, where the user's own pass has none."""
        if self._own is None:
            return f"{__version__} {self._given_up}"
        known = self._own.uuid() if isinstance(self._own, CustomGraphPass) else None
        return None if known is None else f"{__version__} {self._given_up} {known!r}"


def is_to_be_run_again() -> bool:
    """Whether the backward that runs now leaves what it needs for another one (`retain_graph=True`)."""
    found: bool = torch._C._autograd._get_current_graph_task_keep_graph()
    return found


def _taken_apart(graph: fx.GraphModule, fakes: Sequence[Any]) -> fx.GraphModule:
    """`graph` in the ops that Inductor generates code for."""
    from torch._inductor.decomposition import select_decomp_table

    walk = _Reshaping(graph)
    trace = make_fx(lambda *args: walk.run(*args), decomposition_table=select_decomp_table())
    found: fx.GraphModule = trace(*fakes)
    found.graph.eliminate_dead_code()
    found.recompile()
    return found


class _Reshaping(fx.Interpreter):
    """Runs a graph whose tensors may lie otherwise than when it was captured: views become reshapes."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return super().call_function(
            torch.ops.aten.reshape.default if target in VIEWS else target, args, kwargs
        )


def without_repetition(joint: fx.GraphModule) -> fx.GraphModule:
    """`joint` with equal ops run once, without what nobody wants, and with no op marked to run again."""
    joint.graph.eliminate_dead_code()
    joint.graph = fx_graph_cse(joint.graph)
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
        node.meta.pop("saved_tensor_with_no_vc_check", None)
    joint.recompile()
    return joint


def refreshed(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Have the tensors that nodes stand for share memory where views do: rewriting graphs forgets that."""
    vals: dict[str, Any] = {}
    for half in (forward, backward):
        given = [
            vals.get(node.name, node.meta.get("val")) for node in half.graph.find_nodes(op="placeholder")
        ]
        mode = next(val.fake_mode for val in given if isinstance(val, FakeTensor))
        FakeTensorProp(half, mode).propagate_dont_convert_inputs(*given)
        vals |= {node.name: node.meta.get("val") for node in half.graph.nodes}


def retraced(graph: fx.GraphModule, fakes: Sequence[Any]) -> fx.GraphModule:
    """`graph` in ops that Inductor knows, with what each node stands for; arguments keep their names."""
    _lower_ours()
    mode = next(fake.fake_mode for fake in fakes if isinstance(fake, FakeTensor))
    walk = _Reshaping(graph)
    with torch.no_grad(), mode:
        found: fx.GraphModule = make_fx(lambda *args: walk.run(*args))(*fakes)
    names = [node.target for node in graph.graph.find_nodes(op="placeholder")]
    for node, name in zip(found.graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = name
        node._rename(str(name))
    found.__dict__["blocks"] = graph.__dict__.get("blocks", ())
    found.recompile()
    return found


@cache
def _lower_ours() -> None:
    """Tell Inductor what to make of the ops that are ours. Where one of them is, a plan has set the order."""
    from torch._inductor.lowering import register_lowering

    def write(x: Any) -> Any:
        keep_order()
        x.realize()
        return x

    register_lowering(WRITTEN, type_promotion_kind=None)(write)
