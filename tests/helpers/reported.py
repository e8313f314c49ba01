"""Plans for tests of reports: drawn by hand, with numbers one can add up, or as tall as asked for."""

from __future__ import annotations

import base64
import gzip
import json
import re
from typing import Any

from lowtide.ir.graph import Graph, Phase, Role
from lowtide.ir.schedule import Schedule, in_order
from lowtide.solvers.solution import GraphSolution
from tests.helpers.handmade import Drawing, solved, steps, three_layers

EVIL = "</script><script>alert(1)"

# The moments of `small()`, and what is held there: see the graph for sizes.
SMALL_TOTALS = [1150, 1550, 850, 854, 1154, 1854, 1911]


def small() -> GraphSolution:
    """Three layers of which the first is made again: 'wide' is freed early and computed a second time.

    step    0 1 2  3 4 5 6  7 8 9  10 11
            0 1 f2 2 3 4 f4 0 5 f6 f3 f2
    moment  0 1    2 3 4    5 6
    """
    schedule = steps(0, 1, "f2", 2, 3, 4, "f4", 0, 5, "f6", "f3", "f2")
    return solved(three_layers(), schedule, budget_bytes=2000)


def tower(layers: int, evil: bool = False) -> Graph:
    """A step of that many layers: weight 1 KiB each, 4 to 8 KiB handed on, a backward with workspace."""
    drawing = Drawing()
    weights = [
        drawing.value(f"layers.{n}.weight", 1024, Role.PARAMETER, module=_module(n, evil))
        for n in range(layers)
    ]
    made = [drawing.value("image", 4096, Role.BATCH)]
    for n, weight in enumerate(weights):
        made.append(drawing.value(f"x{n + 1}", 4096 * (1 + n % 2), module=_module(n, evil)))
        drawing.op(
            "aten.mm.default",
            [made[-2], weight],
            [made[-1]],
            module=_module(n, evil),
            seconds=1e-3 * (1 + n % 3),
        )
    loss = drawing.value("loss", 4)
    gradient = drawing.value("loss.grad", 4)
    drawing.op("aten.sum.default", [made[-1]], [loss])
    drawing.op("aten.ones_like.default", [loss], [gradient], phase=Phase.BACKWARD)
    outputs = [loss]
    for n in reversed(range(layers)):
        module = _module(n, evil)
        new = drawing.value(f"x{n}.grad", drawing.values[made[n]].bytes, module=module)
        outputs.append(drawing.value(f"layers.{n}.weight.grad", 1024, Role.GRADIENT, module=module))
        drawing.op(
            "aten.mm_backward.default",
            [gradient, made[n], made[n + 1], weights[n]],
            [new, outputs[-1]],
            phase=Phase.BACKWARD,
            module=module,
            workspace=512,
            seconds=2e-3,
        )
        gradient = new
    return drawing.graph(outputs, name=EVIL if evil else "tower")


def _module(number: int, evil: bool) -> str:
    return EVIL if evil and number == 1 else f"layers.{number}"


def every_second_again(graph: Graph, layers: int) -> Schedule:
    """Every second layer of a tower is run again right before its backward, from what the one before made."""
    order = list(range(layers + 2))
    for back, layer in enumerate(reversed(range(layers))):
        order += [*([layer] if layer % 2 else []), layers + 2 + back]
    return in_order(graph, order)


def embedded_in(page: str) -> Any:
    """The data that a page carries."""
    found = re.search(r'id="data">([^<]*)</script>', page)
    assert found is not None
    return json.loads(gzip.decompress(base64.b64decode(found[1])))
