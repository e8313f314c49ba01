"""The graphs that Dynamo captures, run on fake tensors one op at a time.

Every captured graph is a *section* of the step. AOTAutograd traces its forward and backward together and
they are cut apart so that everything the backward wants is kept. Sections are numbered in the order in
which their forwards run; a graph that runs several times (Dynamo compiles equal blocks once) is a
section each time.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias, cast

import torch
from torch import fx, nn

from lowtide.aot.casts import SharedCasts
from lowtide.aot.graph_backend import CapturedGraph, TakenApart
from lowtide.aot.halves import module_stack
from lowtide.aot.kernels import Kernels
from lowtide.aot.known import known_of
from lowtide.aot.mark import Mark
from lowtide.aot.unused_outputs import differentiable_outputs
from lowtide.aot.use_by_use import Entries
from lowtide.compat.dispatch import without_modes
from lowtide.compat.dynamo import CHATTY_LOGGERS, configured, graph_breaks
from lowtide.compat.dynamo_caches import forget_compiled, forget_tracing
from lowtide.compat.fake_kernels import as_kernels_do
from lowtide.compat.gradient_layouts import gradients_told
from lowtide.compat.patches import ONE_THREAD
from lowtide.compat.undo import undone
from lowtide.ir.assumptions import Assumption, GradientLayouts, Layout, NoGradient
from lowtide.ir.graph import Phase
from lowtide.ir.strides import Ints, overlaps
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
    "enable_dynamo_decompositions": False,  # x.addcmul_(y, z, value=0.1) would round in another way
    "optimize_ddp": False,  # it would cut graphs where DDP's buckets end; a plan is for whole ones
}

_Filter: TypeAlias = tuple[str, re.Pattern[str], type[Warning], None, int]
_SAID_BY_DYNAMO: list[_Filter] = [
    ("ignore", re.compile(text), UserWarning, None, 0)
    for text in (
        "The .grad attribute of a Tensor that is not a leaf",  # what goes from one graph into the next
        "Dynamo does not know how to trace",
    )
]

Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

OUTSIDE = -1  # the section of an op that runs eagerly, between or around the captured graphs


def settings() -> dict[str, Any]:
    """Dynamo's configuration under which steps are captured, for `torch._dynamo.config.patch`.

    Graphs break at the same lines as in a capture only if Dynamo is set up like this.
    """
    names = ("debug", "info", "warning", "error", "exception", "critical", "log", "warning_once", "info_once")
    loggers = {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}
    return {**_SETTINGS, "ignore_logger_methods": loggers}


@contextmanager
def compiling(assumptions: Collection[Assumption] = ()) -> Iterator[None]:
    """Dynamo set up so that a capture and what runs later have the same graphs; afterwards it is as before.

    `assumptions` are those of the captured graph.
    """
    chatty = [logging.getLogger(name) for name in CHATTY_LOGGERS]
    for logger in chatty:
        logger.addFilter(_silence)
    try:
        with (
            ONE_THREAD,
            configured(settings()),
            unnoticed_by_transformers(assumptions),
            as_kernels_do(),
            _without_warnings(),
        ):
            yield
    finally:
        forget_tracing()
        for logger in chatty:
            logger.removeFilter(_silence)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Dynamo does not warn while the block runs.

    `warnings.catch_warnings` would have Python forget which of the user's own warnings it has shown.
    """
    filters = cast(list[_Filter], warnings.filters)
    with undone(lambda: _take_out(filters)):
        filters[:0] = _SAID_BY_DYNAMO
        yield


def _take_out(filters: list[_Filter]) -> None:
    for each in _SAID_BY_DYNAMO:
        if each in filters:
            filters.remove(each)


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
            self.only((path, self._modules.current_call(path)))
        return super().place(phase)


@dataclass
class Section:
    """One run of one captured graph."""

    index: int
    module: str  # whose code runs the graph
    call: int
    captured_in: str  # whose code ran it when it was captured: the path that its nodes speak of

    def renamed(self, path: str) -> str:
        """`path` as it was at capture, as it is in this run."""
        if self.module != self.captured_in and f"{path}.".startswith(f"{self.captured_in}."):
            return self.module + path[len(self.captured_in) :]
        return path


class Sections:
    """Captures graphs for Dynamo and, when they are called, walks through their ops.

    `here` says at any time which op of which section runs; None between graphs.
    """

    def __init__(
        self,
        modules: Modules,
        assumptions: Collection[Assumption] = (),
        is_zero: Callable[[torch.Tensor], bool] = lambda _: False,
        returned: Callable[[int, Sequence[Any]], None] = lambda _, __: None,
        kernels: Kernels = Kernels.EAGER,
    ) -> None:
        self.kernels = kernels
        self.modules = modules
        self.assumptions = assumptions
        self.is_zero = is_zero
        self.returned = returned
        self.here: Spot | None = None
        self.entries = Entries()
        self.casts = SharedCasts()
        self.graphs: list[_WalkedGraph] = []
        self.constants: list[torch.Tensor] = []  # which the graphs have, as the user's code writes them
        self.notes: dict[str, None] = {}
        self.count = 0
        self._earlier_breaks = len(graph_breaks())
        self._arrived: list[tuple[Layout | None, Ints | None]] = []

    @contextmanager
    def captured(self) -> Iterator[Backend]:
        """A backend that captures, and Dynamo set up for it; afterwards it remembers nothing of that."""
        backend = self.compile  # the very same object each time: Dynamo tells backends apart by that
        with compiling(self.assumptions), gradients_told(self._arrive):
            try:
                yield backend
            finally:
                forget_compiled(backend)

    def compile(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Capture one of Dynamo's graphs."""
        graph = _WalkedGraph(self, self.count, differentiable_outputs(module))
        self.graphs.append(graph)
        watched, noted = self.entries.watch(graph.number, module), self.casts.watch(module, inputs)
        return noted(watched(graph.compile(module, inputs, known_of(graph.number, self.assumptions))))

    def taken_apart(self) -> list[TakenApart]:
        """The graphs, for a backend that is to run them now. This one is done with them."""
        return [graph.apart for graph in self.graphs if graph.apart.identity is not None]

    def found_gradientless(self) -> list[NoGradient]:
        """Assumptions for another capture: the outputs that got zeros for gradients in this one."""
        return [
            NoGradient(graph.number, graph.outputs[position])
            for graph in self.graphs
            for position in sorted(graph.zeros or ())
        ]

    def found_layouts(self) -> list[GradientLayouts]:
        """Assumptions for another capture: how gradients lie that this one took to lie otherwise."""
        return [GradientLayouts(graph.number, graph.layouts) for graph in self.graphs if graph.layouts]

    def _arrive(self, gradient: torch.Tensor, taken: Ints | None) -> None:
        """A gradient is about to enter a backward. One that repeats itself is copied as ever."""
        shape, strides = tuple(gradient.shape), gradient.stride()
        is_known = taken is not None and not overlaps(shape, strides)
        self._arrived.append(((shape, strides) if is_known else None, taken))

    def arrived(self) -> list[tuple[Layout | None, Ints | None]]:
        """How gradients lie that enter the backward that now begins, and the strides that were expected."""
        found, self._arrived = self._arrived, []
        return found

    def note_breaks(self) -> None:
        """Say where, and why, Dynamo ended a graph before its time."""
        for reason in graph_breaks()[self._earlier_breaks :]:
            self.notes[_break_note(reason.reason, reason.user_stack)] = None

    def open(self, captured_in: str | None) -> Section:
        """A new section, for a graph that begins to run now."""
        module, entered = self.modules.running()
        call = self.modules.enter(module) if entered else self.modules.current_call(module)
        self.count += 1
        return Section(self.count - 1, module, call, module if captured_in is None else captured_in)

    def spot(self, node: fx.Node, section: Section, phase: Phase) -> Spot:
        """Where `node` runs."""
        found = self.modules.innermost(list(module_stack(node)))
        if found is None:
            return Spot(phase, section.module, section.call, section.index, engine=False)
        path, key = found
        path = section.renamed(path)
        return Spot(phase, path, self.modules.call(path, section.index, key), section.index, engine=False)


class _WalkedGraph(CapturedGraph):
    """One captured graph: makes a section of each of its runs."""

    def __init__(self, sections: Sections, number: int, outputs: Sequence[int]) -> None:
        super().__init__(sections.kernels)
        self.number = number  # the section that comes next: Dynamo may compile several, and run the last
        self.outputs = outputs  # those that autograd may hand a gradient to
        self.zeros: set[int] | None = None  # which of these got zeros, whenever a backward ran
        self.layouts: tuple[Layout | None, ...] | None = None  # of gradients, if other than they were taken
        self._sections = sections
        self._runs: dict[int, Section] = {}

    def partition(self, joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
        if any(node.meta.get("recompute") is not None for node in joint.graph.nodes):
            self._sections.notes["the model checkpoints activations itself; here they are kept"] = None
        return super().partition(joint, inputs, **options)

    def run_forward(self, args: list[Any]) -> tuple[Sequence[Any], torch.Tensor]:
        first = next(iter(self._runs.values()), None)
        section = self._sections.open(None if first is None else first.captured_in)
        self._runs[section.index] = section
        results = _Walk(self.halves.forward, self._sections, section, Phase.FORWARD).boxed_run(args)
        self._sections.returned(section.index, results[: self.halves.user_results])
        with without_modes():  # the mark is no tensor of the step
            return results, Mark(None, section.index).write()

    def run_backward(self, mark: Mark, args: list[Any]) -> Any:
        backward = self.halves.backward
        assert backward is not None, "only a forward with a backward leaves a mark"
        self._look_for_zeros(args[len(args) - len(self.halves.tangents) :])
        self._look_at_layouts(self._sections.arrived())
        return _Walk(backward, self._sections, self._runs[mark.section], Phase.BACKWARD).boxed_run(args)

    def _look_for_zeros(self, tangents: Sequence[Any]) -> None:
        if len(tangents) != len(self.outputs):
            return  # others are among them: of changed inputs, say
        zeros = {position for position, tangent in enumerate(tangents) if self._sections.is_zero(tangent)}
        self.zeros = zeros if self.zeros is None else self.zeros & zeros

    def _look_at_layouts(self, arrived: Sequence[tuple[Layout | None, Ints | None]]) -> None:
        """Whether the gradients lie as they were taken to; the first backward tells."""
        if self.layouts is not None or len(arrived) != len(self.halves.tangents):
            return
        as_taken = all(layout is None or layout[1] == taken for layout, taken in arrived)
        self.layouts = () if as_taken else tuple(layout for layout, _ in arrived)


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

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = super().get_attr(target, args, kwargs)
        if isinstance(found, torch.Tensor):
            self._sections.constants.append(found)
        return found


def _break_note(reason: str, stack: Sequence[Any]) -> str:
    users = [frame for frame in stack if is_users(frame.filename)]
    where = described(users[-1]) if users else "an unknown line"
    return f"a graph ends at {where} ({reason.splitlines()[0]})"
