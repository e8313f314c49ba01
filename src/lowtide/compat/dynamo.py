"""Dynamo and AOTAutograd from within: captured graphs, how they are cut, and how they are called."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd as _aot_autograd
from torch._dynamo.utils import counters as _counters
from torch._dynamo.utils import graph_break_reasons as _graph_break_reasons
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch._functorch._aot_autograd import graph_compile
from torch._functorch.partitioners import default_partition as _default_partition
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.graph import _BoxedCodeGen

from lowtide.compat.loggers import FAKE_KERNELS
from lowtide.compat.patches import patched
from lowtide.compat.private import Private

PRIVATE = (
    Private(
        "torch._dynamo.backends.common.aot_autograd",
        "makes a backend that is given forward and backward",
    ),
    Private(
        "torch._functorch.partitioners.default_partition",
        "cuts a joint graph and keeps everything that the backward wants",
        parameters=("num_fwd_outputs",),
    ),
    Private("torch._dynamo.utils.counters", "tells how often code was compiled"),
    Private("torch._dynamo.utils.graph_break_reasons", "tells where and why graphs ended before their time"),
    Private("torch._dynamo.config.patch", "sets Dynamo up for a capture, and puts it back"),
    Private(
        "torch._inductor.config.fallback_random",
        "random ops whose results nobody uses stay in captured graphs where it is on",
    ),
    Private("torch._inductor.config.patch", "switches that on, and off again"),
    Private(
        "torch._functorch.config.backward_pass_autocast",
        "backward formulas are traced under the autocast of the forward where it does not say otherwise",
    ),
    Private("torch._functorch.config.patch", "has it say otherwise, and puts it back"),
    Private(
        "torch._functorch._aot_autograd.graph_compile.collect_bw_donated_buffer_idxs",
        "what a backward may write over: where that is anything, it refuses to be run again",
    ),
    Private(
        "torch._functorch.config.activation_memory_budget",
        "which part of what it would save for the backward a compiled graph may save",
    ),
    Private(
        "torch._dynamo.variables.user_defined.UserDefinedObjectVariable._supported_random_functions",
        "which of Python's random functions Dynamo follows: it looks once, and remembers",
    ),
    Private("torch._dynamo.exc", "a logger goes by this name that repeats what errors say"),
    Private("torch._dynamo.metrics_context", "a logger goes by this name that fails before torch 2.12"),
    Private("torch._dynamo.variables.tensor", "a logger goes by this name that repeats what errors say"),
    Private("torch.fx.graph._BoxedCodeGen", "generated functions that take a list of arguments and empty it"),
    Private("torch.amp.autocast_mode._enter_autocast", "begins a block of autocast in a captured graph"),
    Private("torch.amp.autocast_mode._exit_autocast", "ends one"),
    Private(
        "torch._dynamo.eval_frame.OptimizedModule._orig_mod", "the module that torch.compile has wrapped"
    ),
    Private("torch.nn.Module._compiled_call_impl", "what a module's own compile method has made of it"),
    Private(
        "torch._functorch._aot_autograd.utils.make_boxed_func._boxed_call",
        "marks a function that AOTAutograd is to hand its arguments in a list",
    ),
    Private(
        "torch._functorch._aot_autograd.runtime_wrappers.CompiledFunction._double_backward",
        "is called for a backward that is to be differentiated itself",
    ),
)

# Loggers that print, before an error is raised, what the error itself says better; and one that, before
# torch 2.12, fails to write Dynamo's settings down. A handler that keeps its report would keep tensors alive.
CHATTY_LOGGERS = (
    "torch._dynamo.exc",
    "torch._dynamo.metrics_context",
    "torch._dynamo.variables.tensor",
    FAKE_KERNELS,
)

BEGINS_AUTOCAST, ENDS_AUTOCAST = _enter_autocast, _exit_autocast  # calls in a captured graph

_FRAMES_TO_AUTOGRAD = 16  # from a function that runs a backward: those of lowtide, and AOTAutograd's own

Run = Callable[[list[Any]], Any]  # takes its arguments in a list, and empties it


def aot_autograd(**options: Any) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """A backend for torch.compile that traces forward and backward of a graph together."""
    backend: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]] = _aot_autograd(**options)
    return backend


def default_partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Forward and backward of a joint graph; the forward keeps everything that the backward wants."""
    halves: tuple[Any, Any] = _default_partition(joint, inputs, **options)
    return halves


def graph_breaks() -> Sequence[Any]:
    """Why graphs ended before their time, in this process so far: each with a `reason` and a `user_stack`."""
    breaks: Sequence[Any] = _graph_break_reasons
    return breaks


def frames_compiled() -> int:
    """How many frames Dynamo has compiled, or tried to, in this process so far."""
    return int(_counters["frames"]["total"])


def configured(settings: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Dynamo with these settings for as long as the block lasts."""
    change: AbstractContextManager[None] = torch._dynamo.config.patch(dict(settings))
    return change


def drawing_as_eager() -> AbstractContextManager[None]:
    """While the block runs, graphs are captured with every draw in them, also those that nobody looks at."""
    change: AbstractContextManager[None] = torch._inductor.config.patch(fallback_random=True)
    return change


def autocast_left_before_backward() -> AbstractContextManager[None]:
    """While the block runs, backwards are captured as they run where autocast is around the forward alone."""
    change: AbstractContextManager[None] = torch._functorch.config.patch(backward_pass_autocast="off")
    return change


def nothing_written_over() -> AbstractContextManager[None]:
    """Backwards that are compiled while the block runs may be run again (`retain_graph=True`)."""
    why = "generated backwards write over nothing that was saved, or look whether they will be run again"
    return patched(
        graph_compile, "collect_bw_donated_buffer_idxs", lambda *_: [], why=why, since="torch 2.11"
    )


def activation_budget(part: float) -> AbstractContextManager[None]:
    """Graphs that are compiled in the block save this part of the bytes that they would save otherwise."""
    change: AbstractContextManager[None] = torch._functorch.config.patch(activation_memory_budget=part)
    return change


def look_at_random_functions() -> None:
    """Have Dynamo look at the functions of `random`, which are about to be replaced."""
    UserDefinedObjectVariable._supported_random_functions()


def take_a_list(graph: fx.Graph) -> None:
    """Have code generated for `graph` that takes its arguments in a list, and empties it."""
    graph.set_codegen(_BoxedCodeGen())


def boxed(run: Run) -> Run:
    """`run` empties its list of arguments, so that they die at their last use; AOTAutograd must know."""

    def call(args: list[Any]) -> Any:
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def is_to_be_differentiated() -> bool:
    """Asked in a backward that AOTAutograd calls: whether that backward is to be differentiated itself.

    AOTAutograd calls it through a function of its own then; autograd itself cannot be asked.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES_TO_AUTOGRAD):
        frame = None if frame is None else frame.f_back
        if frame is not None and frame.f_code.co_name == "_double_backward":
            return True
    return False


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has `model`, or its own compile method was called."""
    return uncompiled(model) is not model or model._compiled_call_impl is not None


def uncompiled(model: nn.Module) -> nn.Module:
    """`model`, or what torch.compile has wrapped in it."""
    found: nn.Module = getattr(model, "_orig_mod", model)
    return found
