"""What autograd has between captured graphs when a forward is over: it tells one path from another.

Sections say which captured graphs a step runs. On a path that numbers decide more may run that is in none of
them, in a frame that Dynamo leaves to Python; what that keeps for its backward hangs on nodes of autograd.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from lowtide.compat.autograd import nodes_behind
from lowtide.ir.assumptions import NodesBetween
from lowtide.trace.losses import tensors_of

_NO_MORE_OF = ("CompiledFunctionBackward", "torch::autograd::AccumulateGrad")  # graphs, and leaves


def nodes_between(output: Any) -> NodesBetween:
    """The nodes that `output` depends on, but for captured graphs and leaves."""
    names = (node.name() for node in nodes_behind(tensors_of(output)))
    counts = Counter(name for name in names if name not in _NO_MORE_OF)
    return NodesBetween(tuple(sorted(counts.items())))


def beyond(found: NodesBetween, planned: NodesBetween) -> list[str]:
    """The names of the nodes that there are more of than `planned`."""
    return sorted(Counter(dict(found.counts)) - Counter(dict(planned.counts)))
