"""Scratch memory that a library takes once, on first use, and keeps: cuBLAS does on CUDA.

It is taken through PyTorch's allocator, so it is part of every later peak. The autograd engine runs the
backward in a thread of its own, with a cuBLAS handle and a workspace of its own. Products with a bias are
cuBLASLt's, which has another workspace in each thread; a backward has some where it runs a forward again.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lowtide.compat.memory import clear_cublas_workspaces
from lowtide.ir.graph import Graph, Op, Origin, Phase, Ref, Role, Value

_MATRIX_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "linear",
        "_addmm_activation",
    )
)


def multiplies_matrices(target: str) -> bool:
    """Whether an op is a product of matrices: cuBLAS does it, and keeps memory from then on."""
    return target.rsplit(".", 1)[0] in _MATRIX_PRODUCTS


def threads_using_matrix_products(graph: Graph) -> tuple[bool, bool]:
    """Whether the step multiplies matrices in the main thread, and in the backward's."""
    phases = {op.phase for op in graph.ops if multiplies_matrices(op.target)}
    return bool(phases & {Phase.FORWARD, Phase.OPTIMIZER}), bool(phases & {Phase.BACKWARD, Phase.RECOMPUTE})


def threads_using_biased_products(graph: Graph) -> tuple[bool, bool]:
    """Whether the step adds a bias to a product in the main thread, and in the backward's."""
    phases = {op.phase for op in graph.ops if _adds_a_bias(graph, op)}
    main = bool(phases & {Phase.FORWARD, Phase.OPTIMIZER})
    again = main and graph.origin is Origin.JOINT  # a plan may run any op of the forward again
    return main, again or bool(phases & {Phase.BACKWARD, Phase.RECOMPUTE})


def _adds_a_bias(graph: Graph, op: Op) -> bool:
    if op.target.rsplit(".", 1)[0] not in ("aten.addmm", "aten._addmm_activation"):
        return False
    bias = next(iter(op.args), None)
    return isinstance(bias, Ref) and len(graph.tensors[bias.tensor].shape) == 1


def with_library(graph: Graph, held_bytes: int) -> Graph:
    """`graph` with what libraries hold, in place of what it said of that before."""
    known = next((value for value in graph.values if value.role is Role.LIBRARY), None)
    if known is not None:
        held = replace(known, bytes=held_bytes)
        return replace(graph, values=(*graph.values[: held.id], held, *graph.values[held.id + 1 :]))
    if not held_bytes:
        return graph
    held = Value(
        len(graph.values), held_bytes, Role.LIBRARY, "workspaces that libraries keep", "", graph.device
    )
    return replace(graph, values=(*graph.values, held))


def library_bytes(graph: Graph, device: torch.device) -> int:
    """Bytes that libraries will hold on `device` once the step has run, found by making them take it."""
    if device.type != "cuda":
        return 0
    main, backward = threads_using_matrix_products(graph)
    if not (main or backward):
        return 0
    taken_main, taken_backward, taken_for_bias = _cublas_bytes(device)
    biased = sum(threads_using_biased_products(graph))
    return taken_main * main + taken_backward * backward + taken_for_bias * biased


def _cublas_bytes(device: torch.device) -> tuple[int, int, int]:
    """What cuBLAS takes in the main thread, in the backward's, and in either for products with a bias."""
    with torch.enable_grad():
        left = torch.ones(64, 64, device=device, requires_grad=True)
        right = torch.ones(64, 64, device=device)
        torch.cuda.synchronize(device)
        clear_cublas_workspaces()
        start = torch.cuda.memory_allocated(device)
        product = left.detach() @ right
        after_main = torch.cuda.memory_allocated(device)
        taken_main = after_main - start - product.untyped_storage().nbytes()
        biased = torch.addmm(right[0], left.detach(), right)
        after_bias = torch.cuda.memory_allocated(device)
        taken_for_bias = after_bias - after_main - biased.untyped_storage().nbytes()
        loss = (left @ right).sum()
        before = torch.cuda.memory_allocated(device)
        loss.backward()
        kept = left.grad.untyped_storage().nbytes() if left.grad is not None else 0
        taken_backward = torch.cuda.memory_allocated(device) - before - kept
    return max(0, taken_main), max(0, taken_backward), max(0, taken_for_bias)
