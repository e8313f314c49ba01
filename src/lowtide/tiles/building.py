"""A graph with blocks while it is built: ops, values and tensors beside those that there were."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from lowtide.ir.graph import Arg, Graph, Op, Phase, Role, Signs, Symbol, Tensor, Tile, Value, refs
from lowtide.ir.strides import Ints

HALF = ("float16", "bfloat16")
_Looks: TypeAlias = tuple[int, Ints, Ints, int, str, Signs]  # a tensor but for its id


class Building:
    """What there is so far of the graph that `old` becomes."""

    def __init__(self, old: Graph) -> None:
        self.old = old
        self.tensors: list[Tensor] = []
        self._tensor_ids: dict[_Looks, int] = {}
        self.values = list(old.values)
        self.ops: list[Op] = []
        self.origin: list[int] = []
        self.blocks: list[Tile] = []

    def op(
        self,
        like: Op,
        target: str,
        args: tuple[Arg, ...],
        *,
        options: tuple[tuple[str, Arg], ...] = (),
        outputs: tuple[int | None, ...] = (),
        creates: tuple[int, ...] = (),
        mutates: tuple[int, ...] = (),
        part: float = 0.0,
        phase: Phase | None = None,
        random: bool = False,
    ) -> Op:
        """A new op where `like` was. It reads every value that it is handed."""
        handed = refs((*args, *(arg for _, arg in options)))
        reads = tuple(dict.fromkeys(self.tensors[tensor].value for tensor in handed))
        return replace(
            like,
            id=len(self.ops),
            target=target,
            args=args,
            kwargs=options,
            outputs=outputs,
            reads=reads,
            creates=creates,
            mutates=mutates,
            phase=like.phase if phase is None else phase,
            random=random,
            seconds=like.seconds * part,
            workspace_bytes=int(like.workspace_bytes * part),
            extrapolated=True,
        )

    def add(self, op: Op, origin: int = -1) -> None:
        """Append an op, which is in a block unless it has an origin."""
        self.ops.append(op if op.id == len(self.ops) else replace(op, id=len(self.ops)))
        self.origin.append(origin)

    def value(self, size: int, like: int) -> int:
        """A new value, named like an old one."""
        old = self.values[like]
        number = len(self.values)
        self.values.append(Value(number, size, Role.INTERMEDIATE, old.name, old.module, old.device))
        return number

    def look(self, tensor: Tensor) -> int:
        """The id of a tensor; equal looks are one tensor."""
        key = (tensor.value, tensor.shape, tensor.stride, tensor.offset, tensor.dtype, tensor.signs)
        found = self._tensor_ids.setdefault(key, len(self.tensors))
        if found == len(self.tensors):
            self.tensors.append(Tensor(found, *key))
        return found

    def empty(self, op: Op, tensor: Tensor, phase: Phase) -> None:
        """Append what makes room for a tensor."""
        self.add(
            self.op(
                op,
                "aten.empty_strided.default",
                (tensor.shape, tensor.stride),
                options=options_of(tensor.dtype, self.old),
                outputs=(self.look(tensor),),
                creates=(tensor.value,),
                phase=phase,
            )
        )


def options_of(dtype: str, graph: Graph) -> tuple[tuple[str, Arg], ...]:
    """How a new tensor is asked for, on the device of a graph."""
    return (
        ("dtype", Symbol("dtype", dtype)),
        ("layout", Symbol("layout", "strided")),
        ("device", Symbol("device", graph.device)),
        ("pin_memory", False),
    )
