"""The rules a graph must obey, each with the message that names the op which breaks it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from lowtide.errors import MalformedGraph
from lowtide.ir.graph import Fused, Graph, Op, Tensor, Tiled, Value, argument_tensors

_ITEM_BITS = re.compile(r"(?<!\d)(\d{1,3})(?!\d)")
_ITEM_BYTES = {"bool": 1, "complex64": 8, "complex128": 16, "complex32": 4}


def validate(graph: Graph, *, knows_plain: bool = False) -> Graph:
    """Return `graph` unchanged if it is well formed.

    With `knows_plain` the graph that it was before it was cut into slices has been looked at already.

    Raises:
        MalformedGraph: it is not; the message names the op, value or tensor and the rule.
    """
    _validate_tables(graph)
    created: set[int] = set()
    creators = graph.creator
    for op in graph.ops:
        _validate_op(graph, op)
        for value in (*op.reads, *(set(op.mutates) - set(op.creates))):
            if value in creators and value not in created:
                raise MalformedGraph(
                    f"{_named(op)} reads value {value} before {_named(graph.ops[creators[value]])} creates it"
                )
        for value in op.creates:
            if value in created:
                raise MalformedGraph(f"{_named(op)} creates value {value}, which already exists")
            created.add(value)
    for value in graph.outputs:
        if not 0 <= value < len(graph.values):
            raise MalformedGraph(f"the graph's outputs name value {value}, which is not in the graph")
    for name, tensor in graph.results:
        if not 0 <= tensor < len(graph.tensors):
            raise MalformedGraph(f"the graph's result '{name}' is tensor {tensor}, which is not in the graph")
    if graph.tiled is not None:
        if not knows_plain:
            validate(graph.tiled.plain)
        _validate_tiled(graph, graph.tiled)
    if graph.fused is not None:
        _validate_fused(graph, graph.fused)
    return graph


def item_bytes(dtype: str) -> int:
    """Bytes of one element: 4 for 'float32', 1 for 'float8_e4m3fn', 8 for 'int64'."""
    if dtype in _ITEM_BYTES:
        return _ITEM_BYTES[dtype]
    bits = _ITEM_BITS.search(dtype)
    if bits is None:
        raise MalformedGraph(f"'{dtype}' is not a dtype")
    return max(1, int(bits[1]) // 8)


def extent_bytes(tensor: Tensor) -> int:
    """How far into its value a tensor reaches."""
    if math.prod(tensor.shape) == 0:
        return 0
    last = tensor.offset + sum(
        (size - 1) * step for size, step in zip(tensor.shape, tensor.stride, strict=True)
    )
    return (last + 1) * item_bytes(tensor.dtype)


def _validate_tables(graph: Graph) -> None:
    for table in (graph.ops, graph.values, graph.tensors):
        _validate_ids(table)
    for value in graph.values:
        if value.bytes < 0:
            raise MalformedGraph(f"value {value.id} ('{value.name}') has {value.bytes} bytes")
    for tensor in graph.tensors:
        if not 0 <= tensor.value < len(graph.values):
            raise MalformedGraph(
                f"tensor {tensor.id} looks at value {tensor.value}, which is not in the graph"
            )
        if (
            len(tensor.shape) != len(tensor.stride)
            or min(*tensor.shape, *tensor.stride, tensor.offset, 0) < 0
        ):
            raise MalformedGraph(f"tensor {tensor.id} has an impossible shape, stride or offset")
        value = graph.values[tensor.value]
        if extent_bytes(tensor) > value.bytes and not _is_unwritten(graph, value):
            raise MalformedGraph(
                f"tensor {tensor.id} reaches {extent_bytes(tensor)} bytes into value {value.id} "
                f"('{value.name}'), which has {value.bytes}"
            )


def _is_unwritten(graph: Graph, value: Value) -> bool:
    """Whether no kernel writes this value: it is there inside of kernels alone."""
    return graph.fused is not None and not value.bytes and value.id in graph.fused.plain.made


def _validate_ids(table: Sequence[Op | Value | Tensor]) -> None:
    for position, entry in enumerate(table):
        if entry.id != position:
            kind = type(entry).__name__.lower()
            raise MalformedGraph(f"{kind} {position} carries the id {entry.id}; ids are positions")


def _validate_op(graph: Graph, op: Op) -> None:
    for tensor in (*argument_tensors(op), *(out for out in op.outputs if out is not None)):
        if not 0 <= tensor < len(graph.tensors):
            raise MalformedGraph(f"{_named(op)} names tensor {tensor}, which is not in the graph")
    for value in (*op.reads, *op.creates, *op.mutates, *op.updates):
        if not 0 <= value < len(graph.values):
            raise MalformedGraph(f"{_named(op)} names value {value}, which is not in the graph")
    seen = {graph.tensors[tensor].value for tensor in argument_tensors(op)}
    made = {graph.tensors[tensor].value for tensor in op.outputs if tensor is not None}
    if unseen := set(op.reads) - seen:
        raise MalformedGraph(f"{_named(op)} reads value {min(unseen)}, which none of its arguments look at")
    if unmade := set(op.creates) - made:
        raise MalformedGraph(f"{_named(op)} creates value {min(unmade)}, which is not among its outputs")
    if op.updates and (own := set(op.updates) & {*graph.creator, *op.reads, *op.mutates}):
        raise MalformedGraph(
            f"{_named(op)} updates value {min(own)}, which is not resident, or which it reads or mutates too"
        )
    if strange := {*op.mutates, *op.updates} - seen - made:
        raise MalformedGraph(f"{_named(op)} mutates value {min(strange)}, which is not among its arguments")
    saves = op.workspace_bytes < 0 and graph.fused is None  # generated kernels write over what they read
    if saves or not (op.seconds >= 0 and math.isfinite(op.seconds)):
        raise MalformedGraph(
            f"{_named(op)} costs {op.workspace_bytes} bytes of workspace and {op.seconds} seconds"
        )


def _validate_tiled(graph: Graph, tiled: Tiled) -> None:
    """Whether slices are of the ops of the plain graph, and everything else is as it is there."""
    plain = tiled.plain
    if plain.tiled is not None:
        raise MalformedGraph("what a graph was before it was cut into slices is cut into slices itself")
    if plain.device != graph.device:
        raise MalformedGraph(f"slices on {graph.device} are of a graph on {plain.device}")
    if len(tiled.origin) != len(graph.ops):
        raise MalformedGraph(f"{len(graph.ops)} ops have {len(tiled.origin)} origins")
    _validate_blocks(graph, tiled)
    done = [number for number in tiled.origin if number >= 0]
    sliced = [number for block in tiled.blocks for number in block.ops]
    if sorted(done + sliced) != list(range(len(plain.ops))):
        raise MalformedGraph("not every op of the plain graph is there once, as it is or in slices")
    for op, number in zip(graph.ops, tiled.origin, strict=True):
        if number >= 0 and op.target != plain.ops[number].target:
            raise MalformedGraph(f"{_named(op)} is not {_named(plain.ops[number])}, which it should be")
    for value, old in zip(graph.values, plain.values, strict=False):
        if value is old:
            continue
        if replace(value, bytes=old.bytes) != old or value.bytes not in (0, old.bytes):
            raise MalformedGraph(f"value {old.id} ('{old.name}') is another than before there were slices")
    if len(graph.values) < len(plain.values):
        raise MalformedGraph("values are missing that were there before there were slices")


def _validate_fused(graph: Graph, fused: Fused) -> None:
    """Whether kernels are of the ops of the plain graph, and everything else is as it is there."""
    plain = fused.plain
    if plain.fused is not None or graph.tiled is not None:
        raise MalformedGraph(
            "what a graph was before there were kernels has kernels itself, or slices beside them"
        )
    validate(plain)
    if plain.device != graph.device:
        raise MalformedGraph(f"kernels on {graph.device} are of a graph on {plain.device}")
    if len(fused.members) != len(graph.ops):
        raise MalformedGraph(f"{len(graph.ops)} kernels have {len(fused.members)} lists of ops")
    _validate_members(graph, fused)
    if len(graph.values) != len(plain.values):
        raise MalformedGraph("values are missing, or new, where ops became kernels")
    for value, old in zip(graph.values, plain.values, strict=True):
        if replace(value, bytes=old.bytes) != old or value.bytes not in (0, old.bytes):
            raise MalformedGraph(f"value {old.id} ('{old.name}') is another than before there were kernels")


def _validate_members(graph: Graph, fused: Fused) -> None:
    """Whether each op of the plain graph is in a kernel, and kernels make what the last of their ops does."""
    plain = list(_with_blocks_as_one(fused.plain))
    for op, members in zip(graph.ops, fused.members, strict=True):
        if not members or not all(0 <= member < len(plain) for member in members):
            raise MalformedGraph(
                f"{_named(op)} stands for ops {list(members)}, which are not all in the plain graph"
            )
        if list(members) != sorted(set(members)):
            raise MalformedGraph(f"{_named(op)} stands for ops {list(members)}, which are not in order")
        ends = plain[members[-1]]
        if strange := set(op.creates) - {value for each in ends for value in each.creates}:
            raise MalformedGraph(
                f"{_named(op)} makes value {min(strange)}, which {_named(ends[-1])} of the plain one does not"
            )
    within = {member for members in fused.members for member in members}
    for number, ops in enumerate(plain):
        if number not in within:
            raise MalformedGraph(f"{_named(ops[0])} of the plain graph is in no kernel")
    if strange := {number for number in fused.written if not 0 <= number < len(fused.plain.ops)}:
        raise MalformedGraph(f"op {min(strange)} is to be written, which is not in the plain graph")


def _with_blocks_as_one(plain: Graph) -> Iterator[tuple[Op, ...]]:
    """The ops in their order, those of a block of slices together."""
    blocks = {block.first: block for block in (() if plain.tiled is None else plain.tiled.blocks)}
    number = 0
    while number < len(plain.ops):
        stop = blocks[number].stop if number in blocks else number + 1
        yield plain.ops[number:stop]
        number = stop


def _validate_blocks(graph: Graph, tiled: Tiled) -> None:
    after = 0
    for block in tiled.blocks:
        name = f"the block at op {block.first} ('{block.where}')"
        if not after <= block.first < block.stop <= len(graph.ops):
            raise MalformedGraph(f"{name} ends at op {block.stop}, and the one before it at {after}")
        after = block.stop
        if any(number >= 0 for number in tiled.origin[block.first : block.stop]):
            raise MalformedGraph(f"{name} has an op in it that is not sliced")
        if not 2 <= block.count <= block.extent or block.spared_bytes < 0:
            raise MalformedGraph(
                f"{name} has {block.count} slices of {block.extent}, and spares {block.spared_bytes} bytes"
            )


def _named(op: Op) -> str:
    return f"op {op.id} ({op.label})"
