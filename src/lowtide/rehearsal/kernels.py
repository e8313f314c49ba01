"""What CUDA's kernels take beside their results, op by op, by the rules of `lowtide.cost`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowtide.compat.tensors import tensors_in
from lowtide.cost.cublas import multiplies_matrices
from lowtide.cost.cuda_rules import CUBLAS_BYTES, CUBLASLT_BYTES, price, takes_workspace
from lowtide.ir.graph import Origin, Phase, Role
from lowtide.trace.graph_builder import GraphBuilder, target_name


class KernelMemory:
    """The kernels of a process. Its libraries keep what they have taken once, in every thread."""

    def __init__(self) -> None:
        self._kept = {True: 0, False: 0}  # by cuBLAS, in the backward's thread and in the main one

    def taken(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, *, backward: bool
    ) -> tuple[int, tuple[int, ...]]:
        """What this op takes while it runs, and what libraries take now, to keep it."""
        target = target_name(func)
        if not takes_workspace(target) and not self._may_keep_more(target, backward):
            return 0, ()
        builder = GraphBuilder("op", Origin.EAGER, "cuda:0", {"cpu": "cuda:0"})
        for tensor in tensors_in(args, kwargs):
            if builder.value_of(tensor) is None:
                builder.add_value(tensor, Role.INTERMEDIATE, "argument")
        phase = Phase.BACKWARD if backward else Phase.FORWARD
        if builder.add_op(func, args, kwargs, result, phase=phase) is None:
            return 0, ()
        graph = price(builder.finish(()))
        library = sum(value.bytes for value in graph.values if value.role is Role.LIBRARY)
        kept, self._kept[backward] = self._kept[backward], max(library, self._kept[backward])
        parts = (CUBLAS_BYTES if not kept and library else 0, library - max(kept, CUBLAS_BYTES))
        return graph.ops[0].workspace_bytes, tuple(part for part in parts if part > 0)

    def _may_keep_more(self, target: str, backward: bool) -> bool:
        return multiplies_matrices(target) and self._kept[backward] < CUBLAS_BYTES + CUBLASLT_BYTES
