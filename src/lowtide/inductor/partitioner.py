"""A plan inside of a stock torch.compile: what Inductor asks to cut forward and backward apart.

    torch.compile(model, options={"custom_partitioner_fn": lowtide.Partitioner(budget="8GiB")})

Inductor hands over one graph at a time, forward and backward together and taken apart into what it generates
code for, and gets it back in two: as the plan says, with ops in the backward that run again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from lowtide._version import __version__
from lowtide.aot.codegen import emit
from lowtide.aot.draw import drawn
from lowtide.aot.halves import Halves, results_of
from lowtide.aot.kernels import Kernels
from lowtide.aot.tangents import with_held_tangents
from lowtide.aot.unused_draws import draw_once, name_results_of_unused_draws
from lowtide.compat.dynamo import default_partition
from lowtide.compat.inductor import CustomPartitionerFn, refreshed, retraced, without_repetition
from lowtide.errors import BadRequest, InfeasibleBudget
from lowtide.fusion.fuse import fused
from lowtide.inductor.kinds import kind_of
from lowtide.ir.graph import Graph, Role, Value
from lowtide.solvers import solve
from lowtide.solvers.refereed import SINGLE_OPS
from lowtide.solvers.solution import GraphSolution
from lowtide.text.budget import LOWEST, Budget
from lowtide.text.sizes import parse_bytes


class Partitioner(CustomPartitionerFn):
    """Cuts the graphs of one torch.compile so that what each holds is within a budget.

    `budget` is a size ("8GiB"), or "min" for as little as can be. It holds for each graph with all that is on
    the device when it is compiled; `elsewhere` is what will be there besides, such as the states of an
    optimizer that has made none yet. `solutions` are the plans, in the order in which graphs were compiled;
    what comes from Inductor's caches was planned by another process.

    Not counted: other graphs of the same step, where graphs break (`torch.compile(backend="lowtide")` sees
    all of them), which kernels write over what they read, and the copies that Inductor makes of images and
    weights to have their channels last.

    Raises, inside of Dynamo's error:
        InfeasibleBudget: the graph needs more than the budget.
        BadRequest: sizes are symbols; compile with dynamic=False.
    """

    def __init__(self, budget: str | int = LOWEST, elsewhere: str | int = 0, profile: bool = True) -> None:
        asked = Budget.of_a_peak(budget)
        if str(budget).strip().endswith("%"):
            raise BadRequest(
                f"a partitioner does not know the plain peak, of which {budget} is to be a part. Give a "
                "size, or use lowtide.optimize."
            )
        self._budget_bytes = asked.bytes
        self._elsewhere_bytes = parse_bytes(elsewhere) if isinstance(elsewhere, str) else elsewhere
        self._profile = profile
        self.solutions: list[GraphSolution] = []

    def uuid(self) -> str:
        """What Inductor tells caches of compiled code apart by: equal for partitioners that cut alike."""
        asked = (__version__, torch.__version__, self._budget_bytes, self._elsewhere_bytes, self._profile)
        return hashlib.sha256(repr(asked).encode()).hexdigest()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward of a joint graph, as planned."""
        user_results: int = kwargs["num_fwd_outputs"]
        static: Sequence[int] = kwargs.get("static_lifetime_input_indices") or ()
        if any(isinstance(node.meta.get("val"), torch.SymInt) for node in gm.graph.nodes):
            raise BadRequest(
                "a budget is planned for sizes that are numbers, and Dynamo made some of them symbols. "
                "Compile with dynamic=False; every size is then planned for when it is met."
            )
        joint = without_repetition(gm)
        name_results_of_unused_draws(joint)
        forward, backward = default_partition(joint, joint_inputs, num_fwd_outputs=user_results)
        draw_once(forward, backward)
        refreshed(forward, backward)
        halves = Halves(forward, backward, user_results)
        found = drawn(halves, frozenset(static))
        graph = with_held_tangents(self._beside_others(found.graph))
        solution = self._solved(Kernels.INDUCTOR.with_costs(graph) if self._profile else graph)
        self.solutions.append(solution)
        code = emit(halves, solution.graph, solution.schedule, 0)
        assert code.backward is not None, "a joint graph has a backward"
        planned = retraced(code.forward, [node.meta["val"] for node in halves.given])
        saved = [node.meta["val"] for node in results_of(planned)[user_results:]]
        tangents = [node.meta["val"] for node in halves.tangents]
        return planned, retraced(code.backward, [*saved, *tangents])

    def _beside_others(self, graph: Graph) -> Graph:
        """`graph` with what is on its device besides what it is given."""
        others = self._elsewhere_bytes
        if graph.device.startswith("cuda"):
            known = sum(graph.counted_bytes(value) for value in graph.resident)
            others = max(others, torch.cuda.memory_allocated(graph.device) - known)
        value = Value(len(graph.values), others, Role.OPTIMIZER_STATE, "other tensors", device=graph.device)
        return replace(graph, values=(*graph.values, value)) if others else graph

    def _solved(self, graph: Graph) -> GraphSolution:
        kernels = fused(graph, kind_of, apart=frozenset(range(len(graph.ops))))
        if self._budget_bytes is None:
            return solve(kernels, "auto", LOWEST)
        try:
            return solve(kernels, "auto", self._budget_bytes)
        except InfeasibleBudget as refusal:
            raise InfeasibleBudget(
                refusal.method,
                refusal.budget_bytes,
                refusal.least_bytes,
                refusal.needed_by,
                f'{SINGLE_OPS} Slices need less: lowtide.optimize(..., kernels="inductor", tiles=True).',
            ) from None
