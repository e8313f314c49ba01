"""Small captured training steps, made up: a network's layers, and the graph of its forward and backward.

    Layer   what it reads, how large and how slow it is, what its backward wants to see again
    joined  layers → Graph: the forward in order, a loss, and the backward in reverse

Nothing here needs torch: these are for judging planners, and small enough for the exact one.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lowtide.ir.graph import Graph, Op, Origin, Phase, Ref, Role, Tensor, Value
from lowtide.ir.validate import validate

BATCH = -1  # the layer that is not one: the batch


@dataclass(frozen=True, slots=True)
class Layer:
    """One forward op, and what its backward reads beside the gradient: its inputs, its output, or both.

    `inputs` are positions of earlier layers, or BATCH. With `apart`, the gradients of inputs and weight
    are ops of their own, as matmul's are; else one op makes all of them, as a convolution's does.
    """

    inputs: tuple[int, ...]
    bytes: int
    seconds: float
    saves_inputs: bool = False
    saves_output: bool = False
    mask_bytes: int = 0  # made beside the output, and saved
    weight_bytes: int = 0
    workspace_bytes: int = 0
    random: bool = False
    apart: bool = False


def joined(name: str, layers: Sequence[Layer], batch_bytes: int, device: str = "cpu") -> Graph:
    """The step that trains `layers`: forward, the loss (a sum of the last output) and backward.

    The loss and the gradients of the weights outlive it.
    """
    return _Joining(device).graph(name, layers, batch_bytes)


class _Joining:
    """A graph that grows op by op. Tensor n is value n seen as a flat row of bytes."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.kept: list[int] = []

    def graph(self, name: str, layers: Sequence[Layer], batch_bytes: int) -> Graph:
        made = {BATCH: self.value("batch", batch_bytes, Role.BATCH)}
        weights: dict[int, int] = {}
        masks: dict[int, int] = {}
        for number, layer in enumerate(layers):
            self.forward(number, layer, made, weights, masks)
        loss = self.value("loss", 4)
        self.op("aten.sum.default", [made[len(layers) - 1]], [loss], seconds=layers[-1].seconds / 4)
        self.kept.append(loss)
        last = self.value("grad", layers[-1].bytes)
        self.op("aten.expand.default", [loss], [last], Phase.BACKWARD, seconds=layers[-1].seconds / 4)
        gradients = {len(layers) - 1: last}
        for number in reversed(range(len(layers))):
            if number in gradients:
                self.backward(number, layers, made, weights, masks, gradients)
        tensors = (Tensor(value.id, value.id, (value.bytes,), (1,), 0, "uint8") for value in self.values)
        return validate(
            Graph(
                name,
                Origin.JOINT,
                self.device,
                tuple(self.ops),
                tuple(self.values),
                tuple(tensors),
                frozenset(self.kept),
            )
        )

    def forward(
        self,
        number: int,
        layer: Layer,
        made: dict[int, int],
        weights: dict[int, int],
        masks: dict[int, int],
    ) -> None:
        reads = [made[source] for source in layer.inputs]
        if layer.weight_bytes:
            weights[number] = self.value(f"{number}.weight", layer.weight_bytes, Role.PARAMETER)
            reads.append(weights[number])
        made[number] = self.value(f"{number}.out", layer.bytes)
        creates = [made[number]]
        if layer.mask_bytes:
            masks[number] = self.value(f"{number}.mask", layer.mask_bytes)
            creates.append(masks[number])
        self.op(
            f"layer{number}.default",
            reads,
            creates,
            seconds=layer.seconds,
            workspace_bytes=layer.workspace_bytes,
            is_random=layer.random,
        )

    def backward(
        self,
        number: int,
        layers: Sequence[Layer],
        made: Mapping[int, int],
        weights: Mapping[int, int],
        masks: Mapping[int, int],
        gradients: dict[int, int],
    ) -> None:
        layer = layers[number]
        saved = [masks[number]] if number in masks else []
        saved += [made[source] for source in layer.inputs] if layer.saves_inputs else []
        saved += [made[number]] if layer.saves_output else []
        sources = [source for source in dict.fromkeys(layer.inputs) if source != BATCH]
        new = {source: self.value(f"{number}.grad.{source}", layers[source].bytes) for source in sources}
        groups: list[tuple[list[int], list[int]]] = []  # what each op creates, and what it reads
        if number in weights:
            weight_gradient = self.value(f"{number}.weight.grad", layer.weight_bytes, Role.GRADIENT)
            self.kept.append(weight_gradient)
            groups.append(([weight_gradient], saved))
        if new and (layer.apart or not groups):
            own = [weights[number]] if layer.apart and number in weights else saved
            groups.append((list(new.values()), own))
        elif new:
            groups[0][0].extend(new.values())
            groups[0][1].append(weights[number])
        for creates, reads in groups:
            self.op(
                f"layer{number}_backward.default",
                [gradients[number], *reads],
                creates,
                Phase.BACKWARD,
                seconds=layer.seconds if len(groups) > 1 else 2 * layer.seconds,
                workspace_bytes=layer.workspace_bytes,
            )
        for source, gradient in new.items():
            if source in gradients:
                total = self.value(f"{source}.grad", layers[source].bytes)
                seconds = layers[source].seconds / 4
                before = gradients[source]
                self.op("aten.add.Tensor", [before, gradient], [total], Phase.BACKWARD, seconds=seconds)
                gradient = total
            gradients[source] = gradient

    def value(self, name: str, count: int, role: Role = Role.INTERMEDIATE) -> int:
        self.values.append(Value(len(self.values), count, role, name, device=self.device))
        return len(self.values) - 1

    def op(
        self,
        target: str,
        reads: Sequence[int],
        creates: Sequence[int],
        phase: Phase = Phase.FORWARD,
        *,
        seconds: float,
        workspace_bytes: int = 0,
        is_random: bool = False,
    ) -> None:
        reads = list(dict.fromkeys(reads))
        self.ops.append(
            Op(
                id=len(self.ops),
                target=target,
                args=tuple(Ref(value) for value in reads),
                kwargs=(),
                outputs=tuple(creates),
                reads=tuple(reads),
                creates=tuple(creates),
                phase=phase,
                module=target.partition(".")[0].removesuffix("_backward"),
                random=is_random,
                workspace_bytes=workspace_bytes,
                seconds=seconds,
            )
        )


# Networks -------------------------------------------------------------------------------------------


def perceptron(depth: int, width: int = 64, batch: int = 256) -> Graph:
    """Linear layers with a ReLU after each but the last; a ReLU's backward reads its output."""
    layers: list[Layer] = []
    for number in range(depth):
        before = len(layers) - 1
        layers.append(_linear((before,), batch, width, width))
        if number < depth - 1:
            layers.append(_elementwise((before + 1,), batch * width, saves_output=True))
    return joined(f"perceptron {depth}", layers, 4 * batch * width)


def unet(levels: int, channels: int = 8, side: int = 64) -> Graph:
    """Convolutions down, a quarter of the pixels at each level, and up again with skips across."""
    layers: list[Layer] = []
    skips: list[int] = []
    last = BATCH
    for level in range(levels):
        pixels, width = (side >> level) ** 2, channels << level
        layers.append(_convolution((last,), pixels, width))
        skips.append(len(layers) - 1)
        layers.append(_elementwise((skips[-1],), pixels // 4 * width, mask=True))  # pooling
        last = len(layers) - 1
    for level in reversed(range(levels)):
        pixels, width = (side >> level) ** 2, channels << level
        layers.append(_elementwise((last, skips[level]), 2 * pixels * width))  # enlarge, put together
        layers.append(_convolution((len(layers) - 1,), pixels, width))
        last = len(layers) - 1
    return joined(f"unet {levels}", layers, 4 * channels * side**2)


def gru(steps: int, width: int = 32, batch: int = 64) -> Graph:
    """A gated recurrence, unrolled: a gate, a candidate, and their mixture at each step."""
    layers: list[Layer] = []
    state = BATCH
    for _ in range(steps):
        gate = len(layers)
        layers.append(_linear((state,), batch, width, width, saves_output=True))
        layers.append(_linear((gate, state), batch, width, width, saves_output=True))
        layers.append(_elementwise((gate, gate + 1, state), batch * width, saves_inputs=True))
        state = gate + 2
    return joined(f"gru {steps}", layers, 4 * batch * width)


def residual(blocks: int, width: int = 64, batch: int = 128) -> Graph:
    """Linear, GELU and a sum with what went in, over and over."""
    layers = [_linear((BATCH,), batch, width, width)]
    for _ in range(blocks):
        start = len(layers) - 1
        layers.append(_linear((start,), batch, width, 2 * width))
        layers.append(_elementwise((start + 1,), 2 * batch * width, saves_inputs=True))
        layers.append(_linear((start + 2,), batch, 2 * width, width))
        layers.append(_elementwise((start, start + 3), batch * width))
    return joined(f"residual {blocks}", layers, 4 * batch * width)


def hourglass() -> Graph:
    """Ten layers by hand: wide at both ends, cheap where it is wide, with one skip across the waist."""
    sizes = (8000, 8000, 4000, 2000, 1000, 1000, 2000, 4000, 8000, 8000)
    costs = (1, 2, 8, 6, 4, 4, 6, 8, 2, 1)
    layers = [
        Layer(
            (number - 1, 2) if number == 7 else (number - 1,),
            size,
            cost * 1e-3,
            saves_inputs=number % 2 == 0,
            saves_output=number % 2 == 1,
            weight_bytes=500 if number % 2 == 0 else 0,
        )
        for number, (size, cost) in enumerate(zip(sizes, costs, strict=True))
    ]
    return joined("hourglass", layers, 8000)


def drawn(seed: int, depth: int) -> Graph:
    """A network at random: a chain with skips and branches, sizes within a factor of eight."""
    numbers = random.Random(seed)
    layers: list[Layer] = []
    for number in range(depth):
        inputs = {number - 1}
        if number > 1 and numbers.random() < 0.35:
            inputs.add(numbers.randrange(max(BATCH, number - 5), number - 1))
        heavy = numbers.random() < 0.5
        size = int(2 ** numbers.uniform(10, 13))
        saves_inputs = heavy or numbers.random() < 0.3
        layers.append(
            Layer(
                inputs=tuple(sorted(inputs)),
                bytes=size,
                seconds=round(size * numbers.uniform(0.5, 8.0 if heavy else 1.0) * 1e-7, 7),
                saves_inputs=saves_inputs,
                saves_output=not saves_inputs and numbers.random() < 0.6,
                mask_bytes=size // 4 if numbers.random() < 0.15 else 0,
                weight_bytes=int(2 ** numbers.uniform(6, 10)) if heavy else 0,
                workspace_bytes=int(size * numbers.random()) if heavy and numbers.random() < 0.3 else 0,
                random=not heavy and numbers.random() < 0.1,
                apart=numbers.random() < 0.4,
            )
        )
    return joined(f"drawn {seed}/{depth}", layers, 4096)


def bank() -> tuple[Graph, ...]:
    """Steps of up to 40 ops: networks that people train, one by hand, and 24 at random."""
    networks = (perceptron(4), perceptron(6), perceptron(8), unet(2), unet(4), gru(2), gru(3), residual(3))
    return (*networks, hourglass(), *(drawn(seed, depth) for depth in (8, 11, 14) for seed in range(8)))


def _linear(
    inputs: tuple[int, ...], batch: int, width_in: int, width: int, *, saves_output: bool = False
) -> Layer:
    return Layer(
        inputs,
        4 * batch * width,
        len(inputs) * batch * width_in * width * 1e-9,
        saves_inputs=True,
        saves_output=saves_output,
        weight_bytes=4 * width_in * width,
        apart=True,
    )


def _convolution(inputs: tuple[int, ...], pixels: int, width: int) -> Layer:
    seconds = pixels * width * width * 9 * 1e-9
    size = 4 * pixels * width
    return Layer(inputs, size, seconds, True, weight_bytes=36 * width * width, workspace_bytes=size // 2)


def _elementwise(
    inputs: tuple[int, ...],
    count: int,
    *,
    saves_inputs: bool = False,
    saves_output: bool = False,
    mask: bool = False,
) -> Layer:
    return Layer(
        inputs,
        4 * count,
        count * len(inputs) * 1e-8,
        saves_inputs=saves_inputs,
        saves_output=saves_output,
        mask_bytes=count if mask else 0,
    )
