"""A chain and a plan, unrolled into the graph and the schedule that the referee replays.

This is where it is written down what a plan *does*, event by event, as non-reentrant checkpointing does
it. Solvers have formulas for the same thing; the referee compares.
"""

from __future__ import annotations

from lowtide.chain.chain import Chain
from lowtide.chain.plan import Plan, Segment
from lowtide.errors import BadRequest
from lowtide.ir.graph import Graph, Op, Origin, Phase, Role, Value
from lowtide.ir.schedule import Compute, Free, Schedule, Step
from lowtide.ir.simulate import EXACT, Timeline, simulate

# Positions of values and ops in the graph: what is always there first, then a fixed number a layer.
_BASE, _INPUT, _LAST_GRADIENT, _FIRST = 0, 1, 2, 3
_PER_LAYER = 5


def replay(chain: Chain, plan: Plan) -> Timeline:
    """What a step of `chain` under `plan` holds, moment by moment.

    Raises:
        BadRequest: the plan has layers that the chain has not.
    """
    return simulate(unrolled_graph(chain), unrolled_schedule(chain, plan), EXACT)


def unrolled_graph(chain: Chain) -> Graph:
    """Three ops a layer: forward, backward, and handing the gradient on.

    The backward is two ops because what arrives (the saved bytes, a gradient) is given back before what
    leaves (the next gradient, the gradients of the parameters) need all be there; `backward_bytes` is
    the worst moment between.
    """
    values = [
        Value(_BASE, chain.base_bytes, Role.PARAMETER, "base"),
        Value(_INPUT, chain.output_bytes[0], Role.BATCH, "tensor 0"),
        Value(_LAST_GRADIENT, chain.gradient_bytes[-1], Role.INTERMEDIATE, "gradient of the loss"),
    ]
    forwards, backwards = [], []
    n = len(chain)
    own, d, g, w = (array.tolist() for array in (chain.own, chain.d, chain.g, chain.w))
    for k in range(1, n + 1):
        name = chain.names[k - 1] if chain.names else f"layer {k}"
        output, saved, baton, gradient, settled = (_value(k, kind) for kind in range(_PER_LAYER))
        values += [
            Value(output, d[k], Role.INTERMEDIATE, f"tensor {k}", name),
            Value(saved, own[k - 1], Role.INTERMEDIATE, f"saved by layer {k}", name),
            Value(baton, 0, Role.INTERMEDIATE, f"backward of layer {k} done", name),
            Value(gradient, g[k - 1], Role.INTERMEDIATE, f"gradient of tensor {k - 1}", name),
            Value(settled, chain.settled_bytes[k - 1], Role.GRADIENT, f"settled by layer {k}", name),
        ]
        forwards.append(
            _op(
                _forward(k), "forward", name, Phase.FORWARD, (_tensor(k - 1),), (output, saved),
                chain.forward_bytes[k - 1] - own[k - 1] - d[k], chain.forward_seconds[k - 1],
            )
        )  # fmt: skip
        reads = [saved, _gradient(chain, k)]
        held = own[k - 1] + g[k] + w[k]
        if chain.output_saved_by_itself[k - 1]:
            reads.append(output)
            held += d[k]
        if k > 1 and chain.output_saved_by_next[k - 2]:
            reads.append(_tensor(k - 1))
        backwards += [
            _op(
                _backward(chain, k), "backward", name, Phase.BACKWARD, tuple(reads), (baton,),
                chain.backward_bytes[k - 1] - held, chain.backward_seconds[k - 1],
            ),
            _op(
                _backward(chain, k) + 1, "hand on", name, Phase.BACKWARD, (baton,), (gradient, settled),
                0, 0.0,
            ),
        ]  # fmt: skip
    start = _op(_loss(chain), "loss", "", Phase.BACKWARD, (), (_LAST_GRADIENT,), 0, 0.0)
    ops = sorted([*forwards, start, *backwards], key=lambda op: op.id)
    outputs = frozenset(_value(k, 4) for k in range(1, n + 1))
    return Graph(chain.name, Origin.JOINT, "cpu", tuple(ops), tuple(values), (), outputs)


def unrolled_schedule(chain: Chain, plan: Plan) -> Schedule:
    """The computes and frees of a step of `chain` under `plan`.

    Raises:
        BadRequest: the plan has layers that the chain has not.
    """
    if plan.segments and plan.segments[-1].stop > len(chain):
        raise BadRequest(
            f"the plan {plan} recomputes layer {plan.segments[-1].stop}, but {chain.name} has only "
            f"{len(chain)} layers: it was made for another chain."
        )
    writer = _PassWriter(chain)
    n = len(chain)
    if not writer.forward(0, n, plan.segments):
        writer.steps.append(Free(_tensor(n)))
    writer.steps.append(Compute(_loss(chain)))
    writer.backward(0, n, plan.segments)
    return Schedule(tuple(writer.steps))


class _PassWriter:
    """Writes the steps of one pass over a stretch of layers, and of its way back.

    The tensor that a stretch starts from belongs to whoever started it: it is not freed here.
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.steps: list[Step] = []

    def forward(self, start: int, stop: int, segments: tuple[Segment, ...]) -> bool:
        """Run layers start + 1 … stop, saving except in `segments`; whether the backward needs the output."""
        saving = False  # whether the layer before saved
        for item in _items(start, stop, segments):
            if isinstance(item, Segment):
                self._pass_through(item)
                saving = False
                continue
            self.steps.append(Compute(_forward(item)))
            if item - 1 > start and not (self._by_next(item - 1) or (saving and self._by_itself(item - 1))):
                self.steps.append(Free(_tensor(item - 1)))
            saving = True
        return saving and self._by_itself(stop)

    def _pass_through(self, segment: Segment) -> None:
        for k in range(segment.start + 1, segment.stop + 1):
            self.steps += [Compute(_forward(k)), Free(_value(k, 1))]
            if k - 1 > segment.start:
                self.steps.append(Free(_tensor(k - 1)))

    def backward(self, start: int, stop: int, segments: tuple[Segment, ...]) -> None:
        """The way back over layers stop … start + 1, recomputing each of `segments` when it is reached."""
        items = list(_items(start, stop, segments))
        for position in range(len(items) - 1, -1, -1):
            item = items[position]
            before_saved = position > 0 and not isinstance(items[position - 1], Segment)
            if isinstance(item, Segment):
                if not self.forward(item.start, item.stop, item.inside):
                    self.steps.append(Free(_tensor(item.stop)))
                self.backward(item.start, item.stop, item.inside)
                first, needed = item.start, True
            else:
                self._backward_of(item)
                first = item - 1
                needed = self._by_next(first)
            if first > start and needed and not (before_saved and self._by_itself(first)):
                self.steps.append(Free(_tensor(first)))

    def _backward_of(self, k: int) -> None:
        self.steps += [
            Compute(_backward(self.chain, k)),
            Free(_value(k, 1)),
            Free(_gradient(self.chain, k)),
        ]
        if self._by_itself(k):
            self.steps.append(Free(_tensor(k)))
        self.steps += [Compute(_backward(self.chain, k) + 1), Free(_value(k, 2))]

    def _by_itself(self, k: int) -> bool:
        return self.chain.output_saved_by_itself[k - 1]

    def _by_next(self, k: int) -> bool:
        return k > 0 and self.chain.output_saved_by_next[k - 1]


def _items(start: int, stop: int, segments: tuple[Segment, ...]) -> list[int | Segment]:
    """The segments and, between them, the single layers, in order."""
    items: list[int | Segment] = []
    for segment in segments:
        items += [*range(start + 1, segment.start + 1), segment]
        start = segment.stop
    return [*items, *range(start + 1, stop + 1)]


def _value(k: int, kind: int) -> int:
    """0: output of layer k, 1: what it saves beside, 2: baton, 3: gradient of its input, 4: settled."""
    return _FIRST + (k - 1) * _PER_LAYER + kind


def _tensor(k: int) -> int:
    return _INPUT if k == 0 else _value(k, 0)


def _gradient(chain: Chain, k: int) -> int:
    """The gradient of tensor k."""
    return _LAST_GRADIENT if k == len(chain) else _value(k + 1, 3)


def _forward(k: int) -> int:
    return k - 1


def _loss(chain: Chain) -> int:
    """The op that makes the first gradient."""
    return len(chain)


def _backward(chain: Chain, k: int) -> int:
    n = len(chain)
    return _loss(chain) + 1 + 2 * (n - k)


def _op(
    number: int, target: str, module: str, phase: Phase, reads: tuple[int, ...], creates: tuple[int, ...],
    workspace_bytes: int, seconds: float,
) -> Op:  # fmt: skip
    return Op(
        id=number,
        target=f"chain.{target}.default",
        args=(),
        kwargs=(),
        outputs=(),
        reads=reads,
        creates=creates,
        phase=phase,
        module=module,
        workspace_bytes=workspace_bytes,
        seconds=seconds,
    )
