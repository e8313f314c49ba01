"""Which ops of a captured graph may run more than once, and where.

repeatable   computed again it makes the same values, and disturbs nothing
stretch      ops of one captured graph in one phase, next to each other: an op runs again only in a
             stretch of its own graph, for that is the code that is generated
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.ir.graph import Graph, Op, Phase, Ref, short_name

BETWEEN_GRAPHS = -1  # the section of ops that run eagerly between captured graphs
_TURNED = frozenset({"as_strided_", "t_", "transpose_", "unsqueeze_"})  # in place
HANDED_ON = "lowtide.handed_on"  # an op that needs what others look at as well, and does nothing


def between_graphs(
    target: str,
    phase: Phase,
    looks: Mapping[int, int] | None = None,
    *,
    module: str = "",
    workspace_bytes: int = 0,
    seconds: float = 0.0,
) -> Op:
    """An op outside all captured graphs that makes nothing. Its id is still to be given.

    `looks` are the values that it needs, each with a tensor that looks at it.
    """
    needed = looks or {}
    return Op(
        id=0,
        target=target,
        args=tuple(map(Ref, needed.values())),
        kwargs=(),
        outputs=(),
        reads=tuple(needed),
        creates=(),
        phase=phase,
        module=module,
        section=BETWEEN_GRAPHS,
        workspace_bytes=workspace_bytes,
        seconds=seconds,
    )


def does_nothing(op: Op) -> bool:
    """Whether there is no kernel to be called: `op` only stands for something else that needs its values, or
    changes how a tensor lies in memory, which every look at it says by itself."""
    stands_for_something = op.target.startswith("lowtide.") and not (op.creates or op.mutates)
    return stands_for_something or short_name(op.target) in _TURNED


def repeatable(graph: Graph) -> frozenset[int]:
    """The ops that may be computed again, with the same result.

    Left out are those that draw random numbers, change what they did not make, make what another op
    changes, what outlives the step or what passes to another captured graph, run between captured
    graphs, or read what is changed later.
    """
    writers = _writers(graph)

    def is_repeatable(op: Op) -> bool:
        return (
            bool(op.creates)
            and not op.random
            and op.section != BETWEEN_GRAPHS
            and set(op.mutates) <= set(op.creates)
            and not any(_leaves(graph, op, value) for value in op.creates)
            and all(writer <= op.id for value in op.reads for writer in writers.get(value, ()))
        )

    return frozenset(op.id for op in graph.ops if is_repeatable(op))


def stretches(graph: Graph) -> tuple[int, ...]:
    """For each op the number of its stretch.

    Op r may run again right before op u (u > r) if both are of the same section; so what is moved to
    another place than right before its use must stay within the stretch of that use.
    """
    found: list[int] = []
    number = -1
    before: tuple[object, ...] | None = None
    for op in graph.ops:
        here = (op.section, op.phase)
        number += here != before
        before = here
        found.append(number)
    return tuple(found)


def _writers(graph: Graph) -> Mapping[int, Sequence[int]]:
    """The ops that change each value after it was made."""
    found: dict[int, list[int]] = {}
    for op in graph.ops:
        for value in {*op.mutates, *op.updates} - set(op.creates):
            found.setdefault(value, []).append(op.id)
    return found


def _leaves(graph: Graph, op: Op, value: int) -> bool:
    """Whether what `op` creates is not its graph's own business: changed, held or read by others."""
    readers = (graph.ops[reader] for reader in graph.readers.get(value, ()))
    return value in graph.outputs or any(
        reader.section != op.section or (value in reader.mutates and reader.id != op.id) for reader in readers
    )
