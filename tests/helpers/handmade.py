"""Small graphs for tests: drawn by hand, with numbers one can add up, or drawn at random, but well formed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypothesis import strategies as st

from lowtide.ir.bounds import least_peak_bytes
from lowtide.ir.graph import Arg, Graph, Op, Origin, Phase, Ref, Role, Tensor, Value
from lowtide.ir.schedule import Compute, Free, Schedule
from lowtide.ir.simulate import simulate
from lowtide.ir.validate import validate
from lowtide.solvers.refereed import extra_seconds
from lowtide.solvers.solution import GraphSolution, Status


class Drawing:
    """A graph being drawn. Tensor n is value n seen as a flat row of bytes."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.values: list[Value] = []
        self.ops: list[Op] = []

    def value(
        self,
        name: str,
        count: int,
        role: Role = Role.INTERMEDIATE,
        *,
        module: str = "",
        device: str | None = None,
    ) -> int:
        """A new value of `count` bytes. It is resident unless an op creates it."""
        number = len(self.values)
        self.values.append(Value(number, count, role, name, module, device or self.device))
        return number

    def op(
        self,
        target: str,
        reads: Sequence[int] = (),
        creates: Sequence[int] = (),
        mutates: Sequence[int] = (),
        *,
        updates: Sequence[int] = (),
        extra: Sequence[Arg] = (),
        keywords: Mapping[str, Arg] | None = None,
        phase: Phase = Phase.FORWARD,
        module: str = "",
        random: bool = False,
        workspace: int = 0,
        seconds: float = 0.0,
    ) -> int:
        """A new op whose arguments are what it reads, mutates and updates, then `extra`."""
        number = len(self.ops)
        looks_at = dict.fromkeys((*reads, *mutates, *updates))
        self.ops.append(
            Op(
                id=number,
                target=target,
                args=(*(Ref(value) for value in looks_at if value not in creates), *extra),
                kwargs=tuple((keywords or {}).items()),
                outputs=tuple(creates),
                reads=tuple(reads),
                creates=tuple(creates),
                mutates=tuple(mutates),
                updates=tuple(updates),
                phase=phase,
                module=module,
                random=random,
                workspace_bytes=workspace,
                seconds=seconds,
            )
        )
        return number

    def graph(self, outputs: Iterable[int] = (), name: str = "handmade") -> Graph:
        """What was drawn so far, validated."""
        tensors = (Tensor(value.id, value.id, (value.bytes,), (1,), 0, "uint8") for value in self.values)
        return validate(
            Graph(
                name,
                Origin.JOINT,
                self.device,
                tuple(self.ops),
                tuple(self.values),
                tuple(tensors),
                frozenset(outputs),
            )
        )


def chain(device: str = "cpu") -> Graph:
    """conv → relu_ → sum and back again. Values, ops, bytes:

    resident   0 conv.weight 400   1 image 100
    op 0 conv  (image, weight) → 2 hidden 1000      workspace 300
    op 1 relu_ (hidden) changes hidden
    op 2 sum   (hidden) → 3 loss 4
    op 3 the loss's backward   (loss) → 4 hidden.grad 1000
    op 4 relu_'s backward      (hidden.grad, hidden) → 5 conv.grad 1000
    op 5 conv's backward       (conv.grad, image, weight) → 6 conv.weight.grad 400      workspace 600
    """
    drawing = Drawing(device)
    weight = drawing.value("conv.weight", 400, Role.PARAMETER, module="conv")
    image = drawing.value("image", 100, Role.BATCH)
    hidden = drawing.value("hidden", 1000, module="conv")
    loss = drawing.value("loss", 4)
    hidden_grad = drawing.value("hidden.grad", 1000, module="relu")
    conv_grad = drawing.value("conv.grad", 1000, module="conv")
    weight_grad = drawing.value("conv.weight.grad", 400, Role.GRADIENT, module="conv")
    drawing.op("aten.convolution.default", [image, weight], [hidden], module="conv", workspace=300)
    drawing.op("aten.relu_.default", [hidden], mutates=[hidden], module="relu")
    drawing.op("aten.sum.default", [hidden], [loss])
    drawing.op("aten.expand.default", [loss], [hidden_grad], phase=Phase.BACKWARD)
    drawing.op(
        "aten.threshold_backward.default",
        [hidden_grad, hidden],
        [conv_grad],
        phase=Phase.BACKWARD,
        module="relu",
    )
    drawing.op(
        "aten.convolution_backward.default",
        [conv_grad, image, weight],
        [weight_grad],
        phase=Phase.BACKWARD,
        module="conv",
        workspace=600,
    )
    return drawing.graph(outputs=[loss, weight_grad], name="chain")


def statistics(random: bool = False) -> Graph:
    """A BatchNorm-like step: op 0 reads `x` and changes the running mean, op 1 reads op 0's output.

    Values: 0 running_mean 8 (buffer)   1 x 64 (batch)   2 normed 64   3 loss 4. With `random`, op 0 draws.
    """
    drawing = Drawing()
    mean = drawing.value("running_mean", 8, Role.BUFFER, module="bn")
    x = drawing.value("x", 64, Role.BATCH)
    normed = drawing.value("normed", 64, module="bn")
    loss = drawing.value("loss", 4)
    drawing.op("aten.batch_norm.default", [x], [normed], [] if random else [mean], module="bn", random=random)
    drawing.op("aten.sum.default", [normed], [loss])
    return drawing.graph(outputs=[loss], name="statistics")


def steps(*codes: int | str) -> Schedule:
    """A schedule in short: 3 computes op 3, 'f3' frees value 3."""
    return Schedule(
        tuple(Compute(code) if isinstance(code, int) else Free(int(code.removeprefix("f"))) for code in codes)
    )


def three_layers() -> Graph:
    """Three layers and their backward, with times. Values, ops, bytes, seconds:

    resident   0 weight 50   1 image 100
    op 0 stem      (image, weight) → 2 wide 1000     1 s
    op 1 layers.0  (wide) → 3 middle 400             2 s
    op 2 layers.1  (middle) → 4 narrow 300           4 s
    op 3 sum       (narrow) → 5 loss 4
    op 4 backward of layers.1  (loss, narrow) → 6 narrow.grad 300      8 s
    op 5 backward of the rest  (narrow.grad, middle, wide) → 7 weight.grad 50      workspace 7, 5 s
    """
    drawing = Drawing()
    weight = drawing.value("weight", 50, Role.PARAMETER, module="stem")
    image = drawing.value("image", 100, Role.BATCH)
    wide = drawing.value("wide", 1000, module="stem")
    middle = drawing.value("middle", 400, module="layers.0")
    narrow = drawing.value("narrow", 300, module="layers.1")
    loss = drawing.value("loss", 4)
    narrow_grad = drawing.value("narrow.grad", 300, module="layers.1")
    weight_grad = drawing.value("weight.grad", 50, Role.GRADIENT, module="stem")
    drawing.op("aten.mm.default", [image, weight], [wide], module="stem", seconds=1.0)
    drawing.op("aten.relu.default", [wide], [middle], module="layers.0", seconds=2.0)
    drawing.op("aten.relu.default", [middle], [narrow], module="layers.1", seconds=4.0)
    drawing.op("aten.sum.default", [narrow], [loss])
    back = Phase.BACKWARD
    drawing.op("aten.mul.Tensor", [loss, narrow], [narrow_grad], phase=back, module="layers.1", seconds=8.0)
    drawing.op(
        "aten.mm.default",
        [narrow_grad, middle, wide],
        [weight_grad],
        phase=back,
        module="stem",
        workspace=7,
        seconds=5.0,
    )
    return drawing.graph(outputs=[loss, weight_grad], name="three layers")


def solved(graph: Graph, schedule: Schedule, **fields: Any) -> GraphSolution:
    """A solution as the referee would see it, for a schedule drawn by hand."""
    known: dict[str, Any] = {
        "method": "by hand",
        "status": Status.FEASIBLE,
        "peak_bytes": simulate(graph, schedule).peak_bytes,
        "lower_bound_bytes": least_peak_bytes(graph)[0],
        "extra_seconds": float(extra_seconds(graph, schedule)),
        "planning_seconds": 0.0015,
    }
    return GraphSolution(graph=graph, schedule=schedule, **{**known, **fields})


# Drawn at random ------------------------------------------------------------------------------------

BYTES = st.sampled_from([0, 1, 4, 100, 511, 512, 513, 1000, 4096])
MODULES = st.sampled_from(["", "a", "a.b", "c"])
NO_ARGS: st.SearchStrategy[list[Arg]] = st.builds(list)
NO_TIME = st.just(0.0)


@st.composite
def graphs(
    draw: st.DrawFn,
    max_ops: int = 6,
    names: st.SearchStrategy[str] = MODULES,
    args: st.SearchStrategy[list[Arg]] = NO_ARGS,
    seconds: st.SearchStrategy[float] = NO_TIME,
) -> Graph:
    """Any small well-formed graph: ops that create several values or none, change old ones or their own,
    draw random numbers, take workspace, in any phase, with some values on another device."""
    drawing = Drawing(draw(st.sampled_from(["cpu", "cuda:0"])))
    devices = st.sampled_from([drawing.device, drawing.device, drawing.device, "elsewhere"])

    def new_value() -> int:
        role = draw(st.sampled_from([Role.INTERMEDIATE, Role.INTERMEDIATE, Role.INTERMEDIATE, *Role]))
        return drawing.value(draw(names), draw(BYTES), role, module=draw(names), device=draw(devices))

    def some(found: Sequence[int], most: int) -> list[int]:
        if not found:
            return []
        return draw(st.lists(st.sampled_from(found), max_size=most, unique=True))

    for _ in range(draw(st.integers(0, 3))):
        new_value()
    for _ in range(draw(st.integers(0, max_ops))):
        old = range(len(drawing.values))
        created = [new_value() for _ in range(draw(st.sampled_from([1, 1, 1, 2, 0])))]
        drawing.op(
            draw(st.sampled_from(["aten.add.Tensor", "aten.relu_.default", "aten.mm.default"])),
            some(old, 3),
            created,
            some([*old, *created], 1) if draw(st.booleans()) else [],
            extra=draw(args),
            keywords={draw(names): arg for arg in draw(args)},
            phase=draw(st.sampled_from(Phase)),
            module=draw(names),
            random=draw(st.integers(0, 5)) == 5,
            workspace=draw(st.sampled_from([0, 0, 7, 2000])),
            seconds=draw(seconds),
        )
    return drawing.graph(outputs=some(range(len(drawing.values)), 2), name=draw(names))
