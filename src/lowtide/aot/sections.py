"""The graphs that Dynamo captures, run on fake tensors one op at a time.

Every captured graph is a *section* of the step. AOTAutograd traces its forward and backward together and
they are cut apart so that everything the backward wants is kept. Sections are numbered in the order in
which their forwards run; a graph that runs several times (Dynamo compiles equal blocks once) is a
section each time.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch._dynamo
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import graph_break_reasons
from torch._functorch.partitioners import default_partition

from lowtide.aot.eager_kernels import use_eager_kernels
from lowtide.aot.unused_outputs import assumption, cut_off, differentiable_outputs, gradientless
from lowtide.compat.tensors import storage_key, tensors_in
from lowtide.ir.graph import Phase
from lowtide.trace.attribution import Attribution, Place
from lowtide.trace.hf_masks import unnoticed_by_transformers
from lowtide.trace.recorder import Spot
from lowtide.trace.user_lines import described, is_users

# Dynamo as lowtide wants it: every graph there is, each for exactly these sizes, and no silence about it.
_SETTINGS: Mapping[str, Any] = {
    "suppress_errors": False,
    "fail_on_recompile_limit_hit": True,
    "recompile_limit": 1_000_000,  # a block that is used often may need a graph for each of its sizes
    "accumulated_recompile_limit": 1_000_000,
    "capture_scalar_outputs": False,
    "capture_dynamic_output_shape_ops": False,
    "allow_rnn": True,
    "optimize_ddp": False,  # it would cut graphs where DDP's buckets end; a plan is for whole ones
}

# Loggers that print, before an error is raised, what the error itself says better; and one that, before
# torch 2.12, fails to write these settings down. A handler that keeps its report would keep tensors alive.
_CHATTY = (
    "torch._dynamo.exc",
    "torch._dynamo.metrics_context",
    "torch._dynamo.variables.tensor",
    "torch._subclasses.fake_tensor",
)

OUTSIDE = -1  # the section of an op that runs eagerly, between or around the captured graphs


def settings() -> dict[str, Any]:
    """Dynamo's configuration under which steps are captured, for `torch._dynamo.config.patch`.

    Graphs break at the same lines as in a capture only if Dynamo is set up like this.
    """
    names = ("debug", "info", "warning", "error", "exception", "critical", "log", "warning_once", "info_once")
    loggers = {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}
    return {**_SETTINGS, "ignore_logger_methods": loggers}


@contextmanager
def dynamo(assumptions: Collection[str] = ()) -> Iterator[None]:
    """Dynamo set up for a capture; afterwards it is as before, and remembers nothing."""
    with compiling(assumptions):
        try:
            yield
        finally:
            torch._dynamo.reset()


@contextmanager
def compiling(assumptions: Collection[str] = ()) -> Iterator[None]:
    """Dynamo set up as for a capture, so that it captures the same graphs; afterwards it is as before.

    `assumptions` are those of the captured graph.
    """
    chatty = [logging.getLogger(name) for name in _CHATTY]
    for logger in chatty:
        logger.addFilter(_silence)
    try:
        with (
            torch._dynamo.config.patch(settings()),
            unnoticed_by_transformers(assumptions),
            warnings.catch_warnings(),
        ):
            # Dynamo itself looks at what comes out of one graph and goes into the next.
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            yield
    finally:
        for logger in chatty:
            logger.removeFilter(_silence)


def _silence(record: logging.LogRecord) -> bool:
    return False


class Modules:
    """The paths of the user's modules, and how often each was called."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._calls: Counter[str] = Counter()
        self._counted: dict[tuple[int, str], int] = {}

    def running(self) -> tuple[str, bool]:
        """The module whose code is running now, and whether that code is a method from its beginning.

        It is looked for on the Python stack: module hooks would tell it too, but Dynamo would capture
        them. What is left of a method after a graph break is a function with the module among its
        arguments.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            for name in code.co_varnames[: code.co_argcount]:
                thing = frame.f_locals.get(name)
                if isinstance(thing, nn.Module) and id(thing) in self._paths:
                    return self._paths[id(thing)], hasattr(type(thing), code.co_name)
            frame = frame.f_back
        return "", False

    def innermost(self, stack: Sequence[str]) -> tuple[str, str] | None:
        """The innermost module of the model on Dynamo's own stack, and that call's key.

        Keys are written 'id of the module' or, from the second call on, 'id@calls before'.
        """
        for key in reversed(stack):
            identity = key.partition("@")[0]
            path = self._paths.get(int(identity)) if identity.isdigit() else None
            if path is not None:
                return path, key
        return None

    def call(self, path: str, section: int, key: str) -> int:
        """The how-maniest call of `path` it is that `section` knows by `key`."""
        if (section, key) not in self._counted:
            self._counted[section, key] = self.enter(path)
        return self._counted[section, key]

    def enter(self, path: str) -> int:
        """Count a call of `path`."""
        self._calls[path] += 1
        return self._calls[path] - 1

    def current_call(self, path: str) -> int:
        """The how-maniest call of `path` began last."""
        return max(0, self._calls[path] - 1)


class Eagerly(Attribution):
    """Places for ops that run outside of captured graphs."""

    def __init__(self, model: nn.Module, modules: Modules) -> None:
        super().__init__([model])
        self._modules = modules

    def place(self, phase: Phase) -> Place:
        """The module that the op now being dispatched belongs to."""
        if phase is not Phase.BACKWARD:
            path, _ = self._modules.running()
            self._stack = [((path, self._modules.current_call(path)), 0)]
        return super().place(phase)


@dataclass
class Section:
    """One run of one captured graph."""

    index: int
    module: str  # whose code runs the graph
    call: int
    captured_in: str  # whose code ran it when it was captured: the path that its nodes speak of
    saved: frozenset[int] = frozenset()  # storages that the forward handed to the backward
    waiting: bool = True  # for its backward

    def renamed(self, path: str) -> str:
        """`path` as it was at capture, as it is in this run."""
        if self.module != self.captured_in and f"{path}.".startswith(f"{self.captured_in}."):
            return self.module + path[len(self.captured_in) :]
        return path


class Sections:
    """A Dynamo backend: captures graphs and, when they are called, walks through their ops.

    `here` says at any time which op of which section runs; None between graphs.
    """

    def __init__(
        self,
        modules: Modules,
        assumptions: Collection[str] = (),
        is_zero: Callable[[torch.Tensor], bool] = lambda _: False,
    ) -> None:
        self.modules = modules
        self.assumptions = assumptions
        self.is_zero = is_zero
        self.here: Spot | None = None
        self.graphs: list[_Graph] = []
        self.notes: dict[str, None] = {}
        self.count = 0
        self._earlier_breaks = len(graph_break_reasons)

    def backend(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture one of Dynamo's graphs."""
        graph = _Graph(self, differentiable_outputs(module))
        self.graphs.append(graph)
        compile_ = aot_autograd(
            fw_compiler=graph.compile_forward,
            bw_compiler=graph.compile_backward,
            partition_fn=self._partition,
            keep_inference_input_mutations=True,  # updates of buffers become ops of the forward
        )
        cut = gradientless(self.assumptions, len(self.graphs) - 1)
        return cut_off(module, cut, lambda: compile_(module, inputs))

    def found_gradientless(self) -> list[str]:
        """Assumptions for another capture: the outputs that got zeros for gradients in this one."""
        return [
            assumption(number, graph.outputs[position])
            for number, graph in enumerate(self.graphs)
            for position in sorted(graph.zeros or ())
        ]

    def note_breaks(self) -> None:
        """Say where, and why, Dynamo ended a graph before its time."""
        for reason in graph_break_reasons[self._earlier_breaks :]:
            self.notes[_break_note(reason.reason, reason.user_stack)] = None

    def open(self, captured_in: str | None) -> Section:
        """A new section, for a graph that begins to run now."""
        module, entered = self.modules.running()
        call = self.modules.enter(module) if entered else self.modules.current_call(module)
        self.count += 1
        return Section(self.count - 1, module, call, module if captured_in is None else captured_in)

    def spot(self, node: fx.Node, section: Section, phase: Phase) -> Spot:
        """Where `node` runs."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        found = self.modules.innermost(list(stack))
        if found is None:
            return Spot(phase, section.module, section.call, section.index, engine=False)
        path, key = found
        path = section.renamed(path)
        return Spot(phase, path, self.modules.call(path, section.index, key), section.index, engine=False)

    def _partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
        """Cut a joint graph in two, keeping everything: what to recompute is for lowtide to decide."""
        if any(node.meta.get("recompute") is not None for node in joint.graph.nodes):
            self.notes["the model checkpoints activations itself; here they are kept"] = None
        return cut_in_two(joint, inputs, **options)


def cut_in_two(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Forward and backward of a joint graph, with eager's kernels, keeping everything.

    The same joint graph is always cut into the same ops, in the same order.
    """
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
        node.meta.pop("saved_tensor_with_no_vc_check", None)
    use_eager_kernels(joint)
    halves: tuple[Any, Any] = default_partition(joint, inputs, **options)
    return halves


class _Graph:
    """One captured graph: makes a section of each of its runs."""

    def __init__(self, sections: Sections, outputs: Sequence[int]) -> None:
        self.outputs = outputs  # those that autograd may hand a gradient to
        self.zeros: set[int] | None = None  # which of these got zeros, whenever a backward ran
        self._sections = sections
        self._runs: list[Section] = []

    def compile_forward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """A callable that walks through the forward."""

        def run(args: list[Any]) -> Any:
            section = self._sections.open(self._runs[0].captured_in if self._runs else None)
            self._runs.append(section)
            results = _Walk(graph, self._sections, section, Phase.FORWARD).boxed_run(args)
            section.saved = frozenset(map(storage_key, tensors_in(results)))
            return results

        return boxed(run)

    def compile_backward(self, graph: fx.GraphModule, _: Sequence[Any]) -> Callable[[list[Any]], Any]:
        """A callable that walks through the backward, for the forward whose tensors it is given."""

        def run(args: list[Any]) -> Any:
            given = set(map(storage_key, tensors_in(args)))
            section = max(self._runs, key=lambda run: (len(run.saved & given), run.waiting, run.index))
            section.waiting = False
            self._look_for_zeros(graph, args)
            return _Walk(graph, self._sections, section, Phase.BACKWARD).boxed_run(args)

        return boxed(run)

    def _look_for_zeros(self, graph: fx.GraphModule, args: Sequence[Any]) -> None:
        given = graph.graph.find_nodes(op="placeholder")
        tangents = [arg for node, arg in zip(given, args, strict=True) if node.name.startswith("tangents")]
        if len(tangents) != len(self.outputs):
            return  # others are among them: of changed inputs, say
        zeros = {position for position, tangent in enumerate(tangents) if self._sections.is_zero(tangent)}
        self.zeros = zeros if self.zeros is None else self.zeros & zeros


class _Walk(fx.Interpreter):
    """Runs a graph node by node, dropping each tensor after its last use, and says where it is."""

    def __init__(self, graph: fx.GraphModule, sections: Sections, section: Section, phase: Phase) -> None:
        super().__init__(graph)
        self._sections = sections
        self._section = section
        self._phase = phase

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function":
            self._sections.here = self._sections.spot(n, self._section, self._phase)
        try:
            return super().run_node(n)
        finally:
            self._sections.here = None


def boxed(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """`run` empties its list of arguments, so that they die at their last use; AOTAutograd must know."""

    def call(args: list[Any]) -> Any:
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _break_note(reason: str, stack: Sequence[Any]) -> str:
    users = [frame for frame in stack if is_users(frame.filename)]
    where = described(users[-1]) if users else "an unknown line"
    return f"a graph ends at {where} ({reason.splitlines()[0]})"
