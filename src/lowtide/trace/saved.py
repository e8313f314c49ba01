"""What a training step keeps from the forward for the backward, and why.

The step runs on fake tensors under the real autograd engine (see `tracing`). When the forward is over, the
autograd graph is walked from the loss and the model's output, and every node is asked what it has saved.
What a node has saved through hooks (checkpointing, offloading) is looked at as it was packed, never unpacked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.compat.autograd import nodes_behind, saved_by
from lowtide.compat.tensors import tensors_in
from lowtide.ir.graph import Graph, Op, Phase, Role, Tensor
from lowtide.ir.simulate import allocator_of
from lowtide.ir.walk import walk
from lowtide.trace.dry_run import StepRecorder, Trace
from lowtide.trace.graph_builder import symbol_text
from lowtide.trace.recorder import Spot
from lowtide.trace.saved_report import Held, Saved, SavedValue, Saver, Why
from lowtide.trace.step import CALLS_USERS_CODE, Example, Loss, declared, loss_of, training_step
from lowtide.trace.training import blaming_the_users_code, empty_gradients
from lowtide.trace.user_lines import line_within

_DRAWS_A_MASK = "aten.bernoulli"


def saved(
    model: nn.Module,
    example: Example,
    loss: Loss | None = None,
    *,
    device: str | torch.device | None = None,
    name: str | None = None,
) -> Saved:
    """List what training `model` on a batch like `example` keeps for the backward, and why.

    `print(lowtide.saved(model, images, loss))` shows the largest values: what made each of them, in which
    line of your code, and which autograd nodes need it. The model is taken as it is: under a plan, or
    checkpointed by its own means, it keeps less. It runs on fake tensors: nothing is allocated, and the
    model stays as it was. The arguments are as in `lowtide.fit`.

    Raises:
        BadRequest: an argument makes no sense, the step has no loss, or the model itself raises.
        CannotTrace: the dry run cannot follow the step.
    """
    example, loss = declared(example, loss)
    witness = _Witness(model, device, name)
    step = training_step(model, example, witness.watched(loss))
    with empty_gradients(model), blaming_the_users_code():
        trace = witness.run(step)
    kept = _activations(trace, witness.forward_ends)
    return Saved(
        model=name or type(model).__name__,
        graph=trace.graph,
        schedule=trace.schedule,
        entries=_largest_first(_entry(witness, trace.graph, value) for value in kept),
        resident=_largest_first(
            _entry(witness, trace.graph, value)
            for value in witness.savings
            if value not in trace.graph.creator
        ),
    )


# Looking on -----------------------------------------------------------------------------------------


class _Saving(NamedTuple):
    """A node has saved a value: as which attribute, and as what tensor."""

    node: str
    module: str
    first_op: int | None  # of those that the node is the backward of
    attribute: str
    shape: tuple[int, ...]
    dtype: str


class _Witness(StepRecorder):
    """Records a step, and asks the autograd graph what it has saved when the forward is over."""

    def __init__(self, model: nn.Module, device: str | torch.device | None, name: str | None) -> None:
        super().__init__([model], device, name)
        self.savings: dict[int, dict[_Saving, None]] = {}  # by value, in the order in which they are found
        self.held: dict[int, Held] = {}
        self.lines: dict[int, str] = {}  # by op
        self.forward_ends = 0  # the op before which the backward is called

    def recorded(self, op: Op, spot: Spot) -> None:
        super().recorded(op, spot)
        line = line_within(CALLS_USERS_CODE) if spot.phase is Phase.FORWARD else None
        if line is not None:
            self.lines[op.id] = line

    def watched(self, loss: Loss | None) -> Callable[[Any], torch.Tensor]:
        """`loss`, with a look at the autograd graph once it is known."""

        def compute(output: Any) -> torch.Tensor:
            number = loss_of(output, loss)
            self._look(number, list(tensors_in(output)))
            return number

        return compute

    def _look(self, loss: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        self.forward_ends = len(self.builder.ops)
        for tensor, held in [*((output, Held.OUTPUT) for output in outputs), (loss, Held.LOSS)]:
            if (value := self.builder.value_of(tensor)) is not None:
                self.held[value] = held
        for node in nodes_behind([loss, *outputs]):
            for attribute, tensor in _saved_by(node):
                if (value := self._value_of(tensor)) is not None:
                    saving = _Saving(
                        node=node.name(),
                        module=self.follow.place_of(node)[0],
                        first_op=self.follow.op_of(node),
                        attribute=attribute,
                        shape=tuple(tensor.shape),
                        dtype=symbol_text(tensor.dtype),
                    )
                    self.savings.setdefault(value, {})[saving] = None

    def _value_of(self, tensor: torch.Tensor) -> int | None:
        twin = self.twins.known(tensor)  # of the batch, autograd knows the real tensor
        return self.builder.value_of(tensor if twin is None else twin)


def _saved_by(node: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a node has saved, by attribute: through PyTorch, or as attributes of a function's own context."""
    for name, packed in saved_by(node):
        yield from ((name, tensor) for tensor in tensors_in(packed))
    own: Mapping[str, object] = getattr(node, "__dict__", {})
    for name, thing in own.items():
        yield from ((name, tensor) for tensor in tensors_in(thing))


# Making sense of it -----------------------------------------------------------------------------------


def _activations(trace: Trace, forward_ends: int) -> Iterator[int]:
    """What was made before the backward and is there when it begins; a forward may run one of its own."""
    graph = trace.graph
    alive: dict[int, None] = {}
    for event in walk(graph, trace.schedule):
        op = event.op
        if op is not None and op.id >= forward_ends and op.phase is not Phase.FORWARD:
            break
        alive.update(dict.fromkeys(event.born))
        for value in event.died:
            alive.pop(value, None)
    return (value for value in alive if graph.values[value].role is Role.INTERMEDIATE)


def _entry(witness: _Witness, graph: Graph, number: int) -> SavedValue:
    value = graph.values[number]
    maker = graph.ops[graph.creator[number]] if number in graph.creator else None
    savings = sorted(witness.savings.get(number, ()), key=lambda saving: saving.first_op or 0)
    savers = dict.fromkeys(
        Saver(saving.node, saving.module, _why(graph, number, saving)) for saving in savings
    )
    seen_as = savings[0] if maker is None else _made(graph, maker, number)
    return SavedValue(
        value=number,
        name=value.name if maker is None else _copied(graph, maker) or value.name,
        role=value.role,
        bytes=allocator_of(graph.device).held(graph.counted_bytes(number)),
        shape=seen_as.shape,
        dtype=seen_as.dtype,
        module="" if maker is None else maker.module,
        op="" if maker is None else maker.label,
        line=None if maker is None else witness.lines.get(maker.id),
        savers=tuple(savers),
        held=None if savers else _held(witness, maker, number),
    )


def _made(graph: Graph, maker: Op, value: int) -> Tensor:
    """The tensor as which an op has made a value."""
    outputs = (graph.tensors[out] for out in maker.outputs if out is not None)
    return next(tensor for tensor in outputs if tensor.value == value)


def _why(graph: Graph, value: int, saving: _Saving) -> Why:
    maker = graph.creator.get(value)
    own = maker is not None and saving.first_op is not None and maker >= saving.first_op
    if maker is None or not (own or saving.attribute.startswith(("result", "output"))):
        return _why_an_input(graph, value, saving.dtype)
    outputs = (out for out in graph.ops[maker].outputs if out is not None)
    if not own or graph.tensors[next(outputs)].value == value:
        return Why.OUTPUT
    if any(word in saving.attribute for word in ("rng", "philox", "seed")):
        return Why.RANDOM
    return _by_type(saving.dtype, Why.STATISTICS)


def _why_an_input(graph: Graph, value: int, dtype: str) -> Why:
    # Dropout on the CPU multiplies by a mask of its own, which a random op has filled.
    readers = (graph.ops[op] for op in graph.readers.get(value, ()))
    drawn = any(op.target.startswith(_DRAWS_A_MASK) and value in op.mutates for op in readers)
    return Why.MASK if drawn else _by_type(dtype, Why.INPUT)


def _by_type(dtype: str, number: Why) -> Why:
    if dtype == "bool":
        return Why.MASK
    return Why.INDICES if dtype in ("int32", "int64") else number


def _copied(graph: Graph, maker: Op) -> str:
    """What an autocast has made a copy of: 'bfloat16 copy of 0.weight'. Empty for anything else."""
    read = [graph.values[value] for value in maker.reads]
    if maker.target != "aten._to_copy.default" or [value.role for value in read] != [Role.PARAMETER]:
        return ""
    return f"{_made(graph, maker, maker.creates[0]).dtype} copy of {read[0].name}"


def _held(witness: _Witness, maker: Op | None, value: int) -> Held:
    if maker is not None and maker.id >= witness.forward_ends:
        return Held.BEGINNING
    return witness.held.get(value, Held.REFERRED)


def _largest_first(entries: Iterable[SavedValue]) -> tuple[SavedValue, ...]:
    return tuple(sorted(entries, key=lambda entry: (-entry.bytes, entry.value)))
