"""Which kernels run a plan: those that eager PyTorch calls, or those that Inductor generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from lowtide.compat.inductor import is_loss, missing_compiler, reductions_apart
from lowtide.cost.generated import with_generated_costs
from lowtide.cost.price import with_costs
from lowtide.cost.profile import Progress
from lowtide.errors import BadRequest
from lowtide.fusion.fuse import of_ops
from lowtide.ir.graph import Graph


class Kernels(StrEnum):
    """The kernels that a plan is made for, and that it runs with.

    Where stretches run in slices, what is in slices runs by eager's kernels, which have a loss as a whole.
    """

    EAGER = "eager"
    INDUCTOR = "inductor"
    INDUCTOR_IN_SLICES = "inductor in slices"

    @staticmethod
    def named(name: str) -> Kernels:
        """The kernels of this name.

        Raises:
            BadRequest: there are none.
        """
        if name not in _NAMES:
            raise BadRequest(f"kernels is {name!r}; it is one of {', '.join(_NAMES)}.")
        return Kernels(name)

    @staticmethod
    def of(graph: Graph) -> Kernels:
        """Those that a plan of this graph is for."""
        if graph.fused is None:
            return Kernels.EAGER
        is_whole = any(is_loss(op.target) for op in of_ops(graph).ops)
        return Kernels.INDUCTOR_IN_SLICES if is_whole else Kernels.INDUCTOR

    def in_slices(self) -> Kernels:
        """The same where stretches may run in slices."""
        return Kernels.INDUCTOR_IN_SLICES if self is Kernels.INDUCTOR else self

    def check(self, device: str) -> None:
        """Raise BadRequest where these kernels cannot be made for `device`."""
        missing = None if self is Kernels.EAGER else missing_compiler(device)
        if missing is not None:
            raise BadRequest(
                f'kernels="inductor" generates code, and needs {missing} for {device}, which is not here. '
                'Install it, or leave kernels="eager".'
            )

    def with_costs(self, graph: Graph, progress: Progress | None = None) -> Graph:
        """`graph` with what its ops cost beside such kernels; see `lowtide.cost.price`."""
        if self is Kernels.EAGER:
            return with_costs(graph, progress)
        return with_generated_costs(graph, lambda as_run: with_costs(as_run, progress))

    @property
    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Ops that are captured in parts.

        A norm, a softmax, a loss is a reduction and what follows of it element by element; generated code
        computes the second wherever it is wanted, and only the first has to be remembered.
        """
        if self is Kernels.EAGER:
            return {}
        whole = self is Kernels.INDUCTOR_IN_SLICES
        return {op: apart for op, apart in reductions_apart().items() if not (whole and is_loss(str(op)))}


_NAMES = (Kernels.EAGER, Kernels.INDUCTOR)
