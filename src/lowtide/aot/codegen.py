"""A schedule, written out as code: the forward and backward of one captured graph as it plans them.

    halves    forward and backward as AOTAutograd cuts them apart, nothing recomputed
    schedule  the whole step's; this graph's ops are those of its section
    planned   the same halves with ops where the schedule computes them, and again where it does so again
    slices    ops of blocks, which no node stands for: they are called as the graph says

The generated code drops every tensor after its last use, and takes what it is given from a list that it
empties, so values die where the schedule frees them. Views are no ops: they are made where they are
needed, from the value that they look at, and are never saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from lowtide.aot.eager_kernels import is_drawn_with, without_updates
from lowtide.aot.halves import Halves
from lowtide.compat.dynamo import take_a_list
from lowtide.compat.inductor import BLOCK, WRITTEN, as_block
from lowtide.compat.kernels import rnn_layer_for_training
from lowtide.compat.tensors import leaves, storage_key, tensors_in
from lowtide.cost.op_bench import constant_of, resolve
from lowtide.errors import CannotApply
from lowtide.fusion.fuse import of_ops, steps_of_ops
from lowtide.ir.graph import Arg, Graph, Op, Phase, Ref, Symbol, Tensor, argument_tensors
from lowtide.ir.recomputable import does_nothing
from lowtide.ir.schedule import Compute, Free, Schedule, Step
from lowtide.ir.strides import same
from lowtide.ir.walk import walk
from lowtide.trace.graph_builder import target_name

aten = torch.ops.aten

# The same kernels through quicker doors: an op that is called through `torch.ops` is parsed in Python's own
# way, which takes longer than launching a small kernel. Only where the arguments are the same.
_QUICKER: Mapping[Any, Callable[..., Any]] = {
    aten.add.Tensor: torch.add,
    aten.addmm.default: torch.addmm,
    aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.convolution.default: torch.convolution,
    aten.cudnn_batch_norm.default: torch.cudnn_batch_norm,
    aten.mm.default: torch.mm,
    aten.mul.Tensor: torch.mul,
    aten.native_batch_norm.default: torch.native_batch_norm,
    aten.native_dropout.default: torch.native_dropout,
    aten.permute.default: torch.permute,
    aten.relu.default: torch.relu,
    aten.sigmoid.default: torch.sigmoid,
    aten.sub.Tensor: torch.sub,
    aten.t.default: torch.t,
    aten.tanh.default: torch.tanh,
    aten.transpose.int: torch.transpose,
}
_SCALES = "aten.mul.out"  # outside of blocks: what one has made, scaled
_IN_GRAD_MODE: Mapping[Any, Callable[..., Any]] = {aten.mkldnn_rnn_layer.default: rnn_layer_for_training}
_SAME = (aten.detach.default, aten.alias.default)  # where there is no autograd, these change nothing


@dataclass(frozen=True)
class SectionCode:
    """The code for one section: the forward's results are the user's, then what the backward takes first."""

    forward: HalfCode
    backward: HalfCode | None

    def prepare(self, args: Sequence[Any]) -> None:
        """Do what has to be done before it first runs with arguments like these."""


class HalfCode(Protocol):
    """Half of a section, as it runs."""

    def forward(self, args: list[Any]) -> Any:
        """Its results. Empties `args`."""


@dataclass(frozen=True)
class WrittenCode(SectionCode):
    """The same as graphs, which run op by op."""

    forward: fx.GraphModule
    backward: fx.GraphModule | None


def emit(halves: Halves, graph: Graph, schedule: Schedule, section: int) -> WrittenCode:
    """The code that does what `schedule` plans for `section` of `graph`.

    Raises:
        CannotApply: the ops of `halves` are not those of the section, or sizes in it are not numbers.
    """
    written = frozenset[int]() if graph.fused is None else graph.fused.written
    part = _SectionOps(halves, of_ops(graph), section, written, apart=graph.fused is not None)
    forward_steps, backward_steps = (
        steps_of_ops(graph, steps) for steps in _steps_of(graph, schedule, section)
    )
    forward = _Half(part)
    for node in halves.given:
        forward.add_placeholder(node)
    forward.do_all(forward_steps)
    results = [forward.get(result) for result in halves.made]
    if halves.backward is None:
        return WrittenCode(forward.finish(results), None)
    backward = _Half(part, before=forward)
    for node in halves.tangents:
        backward.add_placeholder(node)
    backward.do_all(backward_steps)
    gradients = [backward.wanted(result) for result in halves.gradients]
    results += backward.saved
    return WrittenCode(forward.finish(results), backward.finish(gradients))


def kind_of(halves: Halves) -> int:
    """What a captured graph does, in one number: equal for one that `emit` takes for a section."""
    return hash(
        tuple(
            (phase, target_name(node.target), *_shapes(node))
            for phase, nodes in zip((Phase.FORWARD, Phase.BACKWARD), halves.ops, strict=True)
            for node in nodes
        )
    )


def kind_of_section(graph: Graph, section: int) -> int:
    """The same for a section of a step."""
    graph = of_ops(graph)
    graph = graph if graph.tiled is None else graph.tiled.plain
    ops = [op for op in graph.ops if op.section == section and not does_nothing(op)]
    return hash(
        tuple(
            (phase, op.target, *_shapes_of(op, graph))
            for phase in (Phase.FORWARD, Phase.BACKWARD)
            for op in ops
            if op.phase is phase
        )
    )


class _SectionOps:
    """A section's nodes and its ops, matched.

    Of a graph with blocks, the ops that are in none have nodes, and so do all values that were there before
    there were blocks.
    """

    def __init__(
        self, halves: Halves, graph: Graph, section: int, written: frozenset[int], *, apart: bool
    ) -> None:
        self.graph = graph
        self.written = written
        self.apart = apart
        # The blocks that are to be functions of their own, by each of their ops.
        tiles = graph.tiled.blocks if apart and graph.tiled is not None else ()
        self.block_of = {op: tile.first for tile in tiles for op in range(tile.first, tile.stop)}
        self._plain = graph if graph.tiled is None else graph.tiled.plain
        self.modules = [half for half in (halves.forward, halves.backward) if half is not None]
        self._nodes = {node.name: node for node in halves.forward.graph.nodes}
        self._node_of: dict[int, fx.Node] = {}  # by the number of an op in the plain graph
        self._value_of: dict[int, int] = {}  # storage -> value
        self.roots: dict[int, tuple[fx.Node, int | None]] = {}  # value -> the op that makes it, which result
        self._shown: dict[
            tuple[int, str], tuple[Tensor, fx.Node]
        ] = {}  # value, dtype -> a node that looks at it
        in_forward, in_backward = halves.ops
        self._match(in_forward, section, Phase.FORWARD)
        self._match(in_backward, section, Phase.BACKWARD)
        self.members: dict[int, list[fx.Node]] = {}  # value -> the nodes that look at it
        for module in self.modules:
            for node in module.graph.nodes:
                for tensor in tensors_in(node.meta.get("val")):
                    value = self._value_of.get(storage_key(tensor))
                    if value is not None:
                        self.members.setdefault(value, []).append(self.canonical(node))
        self.op_nodes = set(self._node_of.values())

    def node_of(self, op: Op) -> fx.Node | None:
        """The node of an op; none for one that is in a block."""
        tiled = self.graph.tiled
        number = op.id if tiled is None else tiled.origin[op.id]
        return None if number < 0 else self._node_of[number]

    def shown(self, tensor: Tensor) -> tuple[Tensor, fx.Node]:
        """A node that looks at the value of `tensor` in the same type, and how it looks at it."""
        return self._shown[tensor.value, tensor.dtype]

    def canonical(self, node: fx.Node) -> fx.Node:
        """The forward's own node for what the backward is given of it."""
        return self._nodes.get(node.name, node) if node.op == "placeholder" else node

    def _match(self, nodes: Sequence[fx.Node], section: int, phase: Phase) -> None:
        graph = self._plain
        ops = [op for op in graph.ops if op.section == section and op.phase is phase and not does_nothing(op)]
        for node, op in zip(nodes, ops, strict=False):
            if target_name(node.target) != op.target or _shapes(node) != _shapes_of(op, graph):
                raise CannotApply(
                    f"the step does not run as it was planned: where {op.label} was, with results of shapes "
                    f"{_shapes_of(op, graph)}, there is now {target_name(node.target)} with "
                    f"{_shapes(node)}. Plan it again, for this model and this batch."
                )
            self._node_of[op.id] = node
            for position, (tensor, number) in enumerate(zip(_made(node), op.outputs, strict=True)):
                if tensor is not None and number is not None:
                    value = graph.tensors[number].value
                    self._value_of[storage_key(tensor)] = value
                    if value in op.creates:
                        self.roots[value] = node, position if _has_several(node) else None
            if self.graph.tiled is not None:
                self._note_looks(op, node)
        if len(nodes) != len(ops):
            raise CannotApply(
                f"the step does not run as it was planned: a graph has {len(nodes)} ops in its {phase}, the "
                f"plan has {len(ops)}. Plan it again, for this model and this batch."
            )

    def _note_looks(self, op: Op, node: fx.Node) -> None:
        """Which nodes the op's arguments are: what a block is handed is looked at through these."""
        given = [
            *_nodes_in(node.args),
            *(each for value in node.kwargs.values() for each in _nodes_in(value)),
        ]
        looked = list(argument_tensors(op))
        if len(given) == len(looked):
            for number, argument in zip(looked, given, strict=True):
                tensor = self._plain.tensors[number]
                self._shown.setdefault((tensor.value, tensor.dtype), (tensor, argument))


class _Half:
    """One of the two graphs while it is written."""

    def __init__(self, part: _SectionOps, before: _Half | None = None) -> None:
        self.part = part
        self.before = before
        self.graph = fx.Graph()
        self.env: dict[fx.Node, fx.Node] = {}
        self.saved: list[
            fx.Node
        ] = []  # nodes of the forward's code, in the order in which they are handed over
        self._done: set[int] = set() if before is None else set(before._done)
        self._given_up: set[fx.Node] = set()  # what has been freed and not made again
        self._latest: fx.Node | None = None  # the op that has just run
        self._drawn: dict[fx.Node, fx.Node] = {}  # a dropout, and what it made beside the mask
        self._first: fx.Node | None = None  # the placeholder before which further ones are put
        self._slices: dict[int, tuple[Tensor, fx.Node]] = {}  # what blocks have made that is theirs, by value
        self._functions: list[fx.GraphModule] = []  # blocks that are functions of their own

    def add_placeholder(self, node: fx.Node) -> None:
        """`node` is given from outside."""
        made = self.graph.placeholder(node.name)
        self._first = self._first or made
        self.env[node] = made

    def do_all(self, steps: Sequence[Step]) -> None:
        """Write down steps of the schedule; blocks that are to be functions of their own are called."""
        for is_block, together in _by_blocks(steps, self.part.block_of):
            if is_block:
                self._call_block(together)
            else:
                for step in together:
                    self.do(step)

    def _call_block(self, steps: Sequence[Step]) -> None:
        """Steps of one block as a function of what it takes. Whoever compiles this calls it as it is."""
        inner = _BlockCode(self)
        for step in steps:
            if isinstance(step, Free) and step.value not in inner.made:
                continue
            inner.do(step)
        module, looks = inner.taken_out()
        key, function = as_block(module, [(look.shape, look.stride, look.dtype) for look in looks.values()])
        self._functions.append(function)
        made = self.graph.call_function(BLOCK, (key, list(inner.given)))
        for position, (value, look) in enumerate(looks.items()):
            result = self.graph.call_function(operator.getitem, (made, position))
            self._begin_anew(value)
            self._slices[value] = look, result
            self._stand_for(value, result)
        for step in steps:
            if isinstance(step, Free) and step.value not in inner.made:
                self.do(step)

    def do(self, step: Step) -> None:
        """Write down one step of the schedule."""
        match step:
            case Compute(op):
                self._compute(self.part.graph.ops[op])
            case Free(value):
                self._slices.pop(value, None)
                for node in self.part.members.get(value, ()):
                    self.env.pop(node, None)
                    self._given_up.add(node)
            case _:
                raise CannotApply(
                    f"the schedule has a step of kind '{step.kind}', which no code can be written for"
                )

    def _compute(self, op: Op) -> None:
        node = self.part.node_of(op)
        if node is None:
            self._compute_slice(op)
            return
        again = bool(op.updates) and op.id in self._done
        args = without_updates(node) if again else node.args
        for value in op.creates:
            for member in self.part.members.get(value, ()):
                self.env.pop(member, None)
                self._given_up.discard(member)
        drawing = None if op.id in self._done else is_drawn_with(node)
        if drawing is not None and drawing is self._latest and drawing in self._drawn:
            self.env[node] = self._drawn.pop(drawing)
        else:
            self.env[node] = self._call(node, args)
        if op.id in self.part.written:
            self.env[node] = self.graph.call_function(WRITTEN, (self.env[node],))
        self._latest = node
        if node.target is aten.native_dropout.default:
            self._drawn[node] = self.graph.call_function(operator.getitem, (self.env[node], 0))
        self._done.add(op.id)
        for user in node.users:
            if user.target is operator.getitem:
                self.get(user)

    def _compute_slice(self, op: Op) -> None:
        """An op of a block: called as the graph says, for there is no node that does this."""
        for value in op.creates:
            self._begin_anew(value)
        args = tuple(self._real(arg) for arg in op.args)
        if op.target == _SCALES and not self.writes_in_place:
            self._scale(op, args)
            return
        options = {name: self._real(arg) for name, arg in op.kwargs}
        target = resolve(op.target)
        is_plain = not any(isinstance(arg, fx.Node) for arg in options.values())
        quick = (
            _QUICKER.get(target, target) if is_plain and all(_is_node(arg) for arg in args[:2]) else target
        )
        made = self.graph.call_function(quick, args, options)
        self._latest = None
        self._done.add(op.id)
        several = len(op.outputs) > 1
        for position, number in enumerate(op.outputs):
            tensor = None if number is None else self.part.graph.tensors[number]
            if tensor is None or tensor.value not in op.creates:
                continue
            result = self.graph.call_function(operator.getitem, (made, position)) if several else made
            result = self.graph.call_function(as_planned, (result, tensor.shape, tensor.stride))
            self._slices[tensor.value] = tensor, result
            self._stand_for(tensor.value, result)

    @property
    def writes_in_place(self) -> bool:
        """Whether ops may write into tensors that are there: code that is to be compiled makes new ones."""
        return not self.part.apart

    def _scale(self, op: Op, args: tuple[Any, ...]) -> None:
        """What a block has made, scaled into a narrower type: a product, and a cast."""
        (value,) = op.mutates
        tensor = next(self.part.graph.tensors[out] for out in op.outputs if out is not None)
        product = self.graph.call_function(aten.mul.Tensor, args)
        cast = torch.ops.prims.convert_element_type.default
        result = self.graph.call_function(cast, (product, getattr(torch, tensor.dtype)))
        self._done.add(op.id)
        self._slices[value] = tensor, result
        self._stand_for(value, result)

    def _begin_anew(self, value: int) -> None:
        """A value is about to be made: whatever looked at it before does so no longer."""
        for member in self.part.members.get(value, ()):
            self.env.pop(member, None)
            self._given_up.discard(member)

    def _looked_at(self, tensor: Tensor) -> tuple[Tensor, fx.Node]:
        """A node that looks at the value of `tensor`, and how."""
        value = tensor.value
        if value not in self._slices and self.before is not None and self._first is not None:
            held = self.before._slices.get(value)
            if held is not None and value not in self.part.roots:
                self._slices[value] = held[0], self._handed_over(held[1], self._first)
        if value in self._slices:
            return self._slices[value]
        base, shown = self.part.shown(tensor)
        return base, self.get(_itself(shown))

    def _stand_for(self, value: int, made: fx.Node) -> None:
        """What a block has made is what the nodes mean that look at this value."""
        if value not in self.part.roots:
            return
        node, position = self.part.roots[value]
        if position is None:
            self.env[node] = made
            return
        for user in node.users:
            if user.target is operator.getitem and user.args[1] == position:
                self.env[user] = made

    def _real(self, arg: Arg) -> Any:
        """An argument of an op that has no node."""
        if isinstance(arg, tuple):
            return [self._real(item) for item in arg]
        if isinstance(arg, Symbol):
            return torch.device(arg.text) if arg.kind == "device" else constant_of(arg)
        if not isinstance(arg, Ref):
            return arg
        tensor = self.part.graph.tensors[arg.tensor]
        base, node = self._looked_at(tensor)
        if (base.shape, base.stride, base.offset) == (tensor.shape, tensor.stride, tensor.offset):
            return node
        step = tensor.offset - base.offset
        return self.graph.call_function(look, (node, tensor.shape, tensor.stride, step))

    def get(self, node: Any) -> Any:
        """What stands for `node` here: what was computed last, a view made of it, or what was saved."""
        if not isinstance(node, fx.Node):
            return node
        node = self.part.canonical(node)
        if node in self.env:
            return self.env[node]
        is_element = (
            node.target is operator.getitem and self.part.canonical(node.args[0]) in self.part.op_nodes
        )
        if node.op == "placeholder" or node in self.part.op_nodes:
            return self._take(node)
        if is_element and self.part.canonical(node.args[0]) not in self.env:
            return self._take(node)
        if node.op == "get_attr":
            self.env[node] = self.graph.get_attr(str(node.target))
        else:
            self.env[node] = self._call(node, node.args)
        return self.env[node]

    def wanted(self, node: Any) -> Any:
        """What stands for a gradient; none for one that was given up: in the planned step nobody gets it."""
        unwanted = isinstance(node, fx.Node) and self.part.canonical(node) in self._given_up
        return None if unwanted else self.get(node)

    def finish(self, results: Sequence[Any]) -> fx.GraphModule:
        """The graph as a module whose forward takes a list and empties it."""
        self.graph.output(tuple(results))
        for node in reversed(self.graph.nodes):
            if node.target is operator.getitem and not node.users:
                self.graph.erase_node(node)
        for node in self.graph.find_nodes(op="placeholder"):
            assert node.name == node.target, "an argument goes by the name of another node"
        take_a_list(self.graph)
        wanted = {node.target for node in self.graph.find_nodes(op="get_attr")}
        attributes = {
            name: getattr(module, name)
            for name in wanted
            for module in self.part.modules
            if hasattr(module, name)
        }
        module = fx.GraphModule(attributes, self.graph)
        module.__dict__["blocks"] = tuple(
            self._functions
        )  # they are called by their keys, as long as they are there
        return module

    def _is_result_of_another_time(self, node: fx.Node) -> bool:
        """Whether `node` is one of several results of an op that has not run here."""
        if node.target is not operator.getitem:
            return False
        made_by = self.part.canonical(node.all_input_nodes[0])
        return made_by in self.part.op_nodes and made_by not in self.env

    def _take(self, node: fx.Node) -> fx.Node:
        """Something that the forward has at its end, handed over to this backward."""
        if self.before is None or node not in self.before.env or self._first is None:
            raise RuntimeError(f"the schedule uses {node.name}, which is not there. A bug in lowtide.")
        self.env[node] = self._handed_over(self.before.env[node], self._first)
        return self.env[node]

    def _handed_over(self, saved: fx.Node, first: fx.Node) -> fx.Node:
        """What stands here for a node of the forward's code."""
        # A name of its own: fx calls the argument by the name asked for and the node by a free one, and an
        # argument called like another node would be overwritten.
        with self.graph.inserting_before(first):
            found = self.graph.placeholder(f"saved_{len(self.saved)}")
        self.saved.append(saved)
        return found

    def _call(self, node: fx.Node, args: tuple[Any, ...]) -> fx.Node:
        tensors = all(isinstance(arg, fx.Node) for arg in args[:2])  # numbers take another door
        target = _QUICKER.get(node.target, node.target) if tensors or len(args) == 1 else node.target
        target = _IN_GRAD_MODE.get(target, target)
        return self.graph.create_node(
            "call_function", target, self._map(args), self._map(node.kwargs), name=node.name
        )

    def _map(self, args: Any) -> Any:
        return fx.node.map_arg(args, lambda node: self.get(_itself(node)))


class _BlockCode(_Half):
    """The function of one block while it is written, inside of a half."""

    def __init__(self, half: _Half) -> None:
        super().__init__(half.part)
        self._half = half
        self.given: dict[fx.Node, fx.Node] = {}  # nodes of the half -> what stands for them here
        self.made: set[int] = set()

    @property
    def writes_in_place(self) -> bool:
        """Nobody compiles what is in a block."""
        return True

    def do(self, step: Step) -> None:
        if step.runs is not None:
            self.made.update(self.part.graph.ops[step.runs].creates)
        super().do(step)

    def _looked_at(self, tensor: Tensor) -> tuple[Tensor, fx.Node]:
        if tensor.value in self._slices:
            return self._slices[tensor.value]
        base, node = self._half._looked_at(tensor)
        if node not in self.given:
            before = next(reversed(self.given.values()), None)
            with self.graph.inserting_before() if before is None else self.graph.inserting_after(before):
                self.given[node] = self.graph.placeholder(f"given_{len(self.given)}")
        return base, self.given[node]

    def _stand_for(self, value: int, made: fx.Node) -> None:
        """Here no nodes of the halves are looked at: everything is called as the graph says."""

    def taken_out(self) -> tuple[fx.GraphModule, dict[int, Tensor]]:
        """The function, and what it leaves behind: values, with how its results look at them."""
        left = {value: self._slices[value] for value in sorted(self._slices)}
        module = self.finish([node for _, node in left.values()])
        return module, {value: look for value, (look, _) in left.items()}


def _by_blocks(steps: Sequence[Step], block_of: Mapping[int, int]) -> Iterator[tuple[bool, list[Step]]]:
    """The steps in stretches: those of one block, and those of none. What is freed belongs to what ran."""
    block: int | None = None
    together: list[Step] = []
    for step in steps:
        of = block if step.runs is None else block_of.get(step.runs)
        if of != block and together:
            yield block is not None, together
            together = []
        block = of
        together.append(step)
    if together:
        yield block is not None, together


def look(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int], step: int) -> torch.Tensor:
    """Another look at what `tensor` looks at, from `step` elements after its first one."""
    return tensor.as_strided(shape, stride, tensor.storage_offset() + step)


def as_planned(tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """`tensor`, copied if a kernel has laid it out otherwise than the graph says, for its strides."""
    if same(shape, tensor.stride(), stride):
        return tensor
    return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _is_node(thing: Any) -> bool:
    return isinstance(thing, fx.Node)


def _nodes_in(args: Any) -> Iterator[fx.Node]:
    """The nodes among arguments, in order."""
    if isinstance(args, fx.Node):
        yield args
    elif isinstance(args, list | tuple):
        for each in args:
            yield from _nodes_in(each)


def _has_several(node: fx.Node) -> bool:
    """Whether a node stands for several results."""
    return isinstance(node.meta.get("val"), list | tuple)


def _itself(node: fx.Node) -> fx.Node:
    """What `node` is another name for."""
    while node.target in _SAME:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _steps_of(graph: Graph, schedule: Schedule, section: int) -> tuple[list[Step], list[Step]]:
    """What the schedule does in the forward and in the backward of a section.

    An op that runs again belongs where the next op that runs for the first time does. What is freed when
    a half is over is freed by whoever holds it then: the user, or autograd.
    """
    halves: dict[Phase, list[Step]] = {Phase.FORWARD: [], Phase.BACKWARD: []}
    current = halves[Phase.FORWARD]
    waiting: list[Step] = []
    done: set[int] = set()
    for _, step, op, born, died in walk(graph, schedule):
        if op is None:
            makers = (graph.ops[graph.creator[value]] for value in (*born, *died) if value in graph.creator)
            if any(maker.section == section for maker in makers):
                (waiting or current).append(step)
        elif op.section == section:
            if not does_nothing(op):
                waiting.append(step)
            if op.id not in done:
                done.add(op.id)
                current = halves[op.phase]
                current.extend(waiting)
                waiting.clear()
    for steps in halves.values():
        while steps and isinstance(steps[-1], Free):
            steps.pop()
    return halves[Phase.FORWARD], halves[Phase.BACKWARD]


def _made(node: fx.Node) -> Iterator[torch.Tensor | None]:
    """What an op makes, as a `Graph` lists it."""
    for leaf in leaves(node.meta.get("val")):
        if leaf is None or isinstance(leaf, torch.Tensor):
            yield leaf


def _shapes(node: fx.Node) -> list[tuple[int, ...] | None]:
    return [None if tensor is None else tuple(tensor.shape) for tensor in _made(node)]


def _shapes_of(op: Op, graph: Graph) -> list[tuple[int, ...] | None]:
    return [None if number is None else graph.tensors[number].shape for number in op.outputs]
