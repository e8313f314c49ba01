"""Graphs to learn from, ready made."""

from __future__ import annotations

from lowtide.autodiff.expression import graph_of, linear, ln, nll_loss, sigmoid, softmax, var
from lowtide.ir.builder import Growing
from lowtide.ir.graph import Graph, Role
from lowtide.ir.names import tensor_called


def two_layer_mlp(batch: int = 32, width: int = 256, classes: int = 10) -> tuple[Graph, int, tuple[int, ...]]:
    """The forward of a network of two layers: input, fc, sigmoid, fc, softmax, cross entropy against labels.

    The input has `width` features, as has the layer in between. Returns the graph, the loss and the four
    parameters, as tensors: what `gradient` takes.
    """
    x = var("input", (batch, width))
    label = var("label", (batch,), dtype="int64")
    shapes = {"w1": (width, width), "b1": (width,), "w2": (classes, width), "b2": (classes,)}
    w1, b1, w2, b2 = (var(name, shape, role=Role.PARAMETER) for name, shape in shapes.items())
    hidden = sigmoid(linear(x, w1, b1).named("fc1")).named("sigmoid")
    odds = softmax(linear(hidden, w2, b2).named("fc2")).named("softmax")
    loss = nll_loss(ln(odds).named("log"), label).named("loss")
    graph = graph_of(loss, name="two-layer MLP")
    output, *wrt = (tensor_called(Growing(graph), name).tensor for name in ("loss", *shapes))
    return graph, output, tuple(wrt)
