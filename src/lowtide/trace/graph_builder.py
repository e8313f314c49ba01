"""Torch's tensors and ops, written down as the core's graph.

The dry run and the capture both describe a step to this builder, one op at a time, with fake tensors
that carry shapes, strides and storages. Storages become values; views fold into them by identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from lowtide.compat.dispatch import schema_of
from lowtide.compat.tensors import key_of_storage, leaves, storage_key, tensors_in
from lowtide.errors import CannotTrace
from lowtide.ir.graph import (
    Arg,
    Graph,
    Op,
    Origin,
    Phase,
    Ref,
    Role,
    Signs,
    Symbol,
    Tensor,
    Value,
    short_name,
)

aten = torch.ops.aten

_SYMBOL_KINDS: tuple[tuple[type, str], ...] = (
    (torch.dtype, "dtype"),
    (torch.device, "device"),
    (torch.layout, "layout"),
    (torch.memory_format, "memory_format"),
)

_SIGNS: Mapping[tuple[bool, bool], Signs] = {
    (False, False): Signs.AS_THEY_ARE,
    (True, False): Signs.CONJUGATE,
    (False, True): Signs.NEGATIVE,
    (True, True): Signs.BOTH,
}

# Kernels that change an argument which their schema does not mark: position of the running statistics
# and of the flag that says whether they are updated.
_HIDDEN_MUTATIONS: Mapping[str, tuple[tuple[int, ...], int]] = {
    "aten.native_batch_norm.default": ((3, 4), 5),
    "aten.cudnn_batch_norm.default": ((3, 4), 5),
    "aten.miopen_batch_norm.default": ((3, 4), 5),
}


# Backward kernels that are handed the running statistics and look at them in evaluation only: positions
# of the statistics, and of the flag for training (None: the kernel serves training alone).
_STATISTICS_IGNORED: Mapping[Any, tuple[slice, int | None]] = {
    aten.native_batch_norm_backward.default: (slice(3, 5), 7),
    aten.batch_norm_backward.default: (slice(3, 5), 7),
    aten.cudnn_batch_norm_backward.default: (slice(3, 5), None),
    aten.miopen_batch_norm_backward.default: (slice(3, 5), None),
}


def _ignored(func: Any, args: Sequence[object]) -> Iterator[torch.Tensor]:
    """Arguments that a kernel is handed but does not look at."""
    where, training = _STATISTICS_IGNORED.get(func, (slice(0), None))
    return tensors_in(args[where]) if training is None or args[training] else iter(())


def _hidden_mutations(func: Any, args: Sequence[object]) -> Iterator[torch.Tensor]:
    """Arguments that a kernel changes although its schema does not say so."""
    positions, flag = _HIDDEN_MUTATIONS.get(target_name(func), ((), 0))
    return tensors_in([args[position] for position in positions] if positions and args[flag] else [])


def _is_random(func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call draws random numbers. Attention does only if it drops something out."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    for position, argument in enumerate(schema_of(func).arguments):
        if argument.name == "dropout_p":
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            return given not in (None, 0, 0.0)
    return True


def target_name(func: Any) -> str:
    """'aten.relu.default' for `torch.ops.aten.relu.default`."""
    return str(func)


def symbol_text(found: object) -> str:
    """'float32' for torch.float32, 'cuda:0' for that device."""
    return str(found).removeprefix("torch.")


def is_op(func: Any, known: Sequence[bool]) -> bool:
    """Whether a call is an op of a `Graph`: it makes or changes something, or makes no tensor at all.

    `known` says of each tensor that it returns whether its storage was there before. Other calls are views.
    """
    schema = schema_of(func)
    return (schema is not None and schema.is_mutable) or not known or not all(known)


class GraphBuilder:
    """Collects ops and values; `finish` returns the graph.

    `relabel` maps a device as torch names it to the one the graph shall speak of; it differs from the
    identity only where a step for a device that is absent is traced on another one.
    """

    def __init__(self, name: str, origin: Origin, device: str, relabel: Mapping[str, str]) -> None:
        self.name = name
        self.origin = origin
        self.device = device
        self.relabel = relabel
        self.ops: list[Op] = []
        self.values: list[Value] = []
        self.tensors: list[Tensor] = []
        self.notes: dict[str, None] = {}
        self._tensor_ids: dict[tuple[object, ...], int] = {}
        self._value_ids: dict[int, int] = {}  # live storage -> value
        self.results: dict[str, int] = {}

    def value_of(self, tensor: torch.Tensor) -> int | None:
        """The value behind `tensor`, or None if its storage has not been seen."""
        return self._value_ids.get(storage_key(tensor))

    def value_at(self, key: int) -> int | None:
        """The value behind a storage, by its key."""
        return self._value_ids.get(key)

    def forget(self, key: int) -> int | None:
        """A storage has died: its address may be used again. Returns the value it was."""
        return self._value_ids.pop(key, None)

    def add_value(self, tensor: torch.Tensor, role: Role, name: str, module: str = "") -> int:
        """A new value for the storage behind `tensor`."""
        where = str(tensor.device)
        value = Value(
            id=len(self.values),
            bytes=tensor.untyped_storage().nbytes(),
            role=role,
            name=name,
            module=module,
            device=self.relabel.get(where, where),
        )
        self.values.append(value)
        self._value_ids[storage_key(tensor)] = value.id
        return value.id

    def adopt(self, storage: torch.UntypedStorage, value: Value) -> None:
        """Take over a value from another builder, under a new id."""
        self._value_ids[key_of_storage(storage)] = len(self.values)
        self.values.append(replace(value, id=len(self.values)))

    def add_result(self, name: str, tensor: torch.Tensor) -> None:
        """`tensor` is what the step hands back under this name."""
        self.results[name] = self._tensor(tensor)

    def set_role(self, value: int, role: Role, name: str, module: str) -> None:
        """What a value turned out to be, once more of the step was seen."""
        self.values[value] = replace(self.values[value], role=role, name=name, module=module)

    def add_op(
        self,
        func: Any,
        args: Sequence[object],
        kwargs: Mapping[str, object],
        result: object,
        *,
        phase: Phase,
        module: str = "",
        call: int = 0,
        section: int = 0,
    ) -> Op | None:
        """Write down one call. Returns None for a view, which is folded away.

        Every tensor argument must belong to a value already.
        """
        outputs = [leaf for leaf in leaves(result) if leaf is None or isinstance(leaf, torch.Tensor)]
        made = [tensor for tensor in outputs if tensor is not None]
        mutated = self._mutated(func, args, kwargs)
        updated = self._updated(func, args)
        if not mutated and not is_op(func, [self.value_of(tensor) is not None for tensor in made]):
            return None
        skipped = {*updated, *(self.value_of(tensor) for tensor in _ignored(func, args))}
        known = (self.value_of(tensor) for tensor in tensors_in(args, kwargs))
        reads = tuple(dict.fromkeys(v for v in known if v is not None and v not in skipped))
        short = short_name(target_name(func))
        described = (tuple(map(self._arg, args)), tuple((k, self._arg(v)) for k, v in kwargs.items()))
        creates = [
            self.add_value(tensor, Role.INTERMEDIATE, short, module)
            for tensor in made
            if self.value_of(tensor) is None
        ]
        op = Op(
            id=len(self.ops),
            target=target_name(func),
            args=described[0],
            kwargs=described[1],
            outputs=tuple(None if out is None else self._tensor(out) for out in outputs),
            reads=reads,
            creates=tuple(dict.fromkeys(creates)),
            mutates=tuple(mutated),
            updates=tuple(updated),
            phase=phase,
            module=module,
            call=call,
            section=section,
            random=_is_random(func, args, kwargs),
        )
        self.ops.append(op)
        return op

    def finish(self, outputs: Iterable[int]) -> Graph:
        """The graph as described so far, with what is not on its device and never used left in."""
        return Graph(
            name=self.name,
            origin=self.origin,
            device=self.device,
            ops=tuple(self.ops),
            values=tuple(self.values),
            tensors=tuple(self.tensors),
            outputs=frozenset(outputs),
            results=tuple(self.results.items()),
            notes=tuple(self.notes),
        )

    def _mutated(self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> list[int]:
        written: list[object] = []
        schema = schema_of(func)
        if schema is not None and schema.is_mutable:
            for position, argument in enumerate(schema.arguments):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    given = args[position] if position < len(args) else kwargs.get(argument.name)
                    written.append(given)
        if self.origin is Origin.EAGER:
            written.extend(_hidden_mutations(func, args))
        values = (self.value_of(tensor) for tensor in tensors_in(written))
        return list(dict.fromkeys(value for value in values if value is not None))

    def _updated(self, func: Any, args: Sequence[object]) -> list[int]:
        """What a captured op changes when it first runs and can do without when it runs again."""
        if self.origin is Origin.EAGER:
            return []
        values = (self.value_of(tensor) for tensor in _hidden_mutations(func, args))
        return list(dict.fromkeys(value for value in values if value is not None))

    def _tensor(self, tensor: torch.Tensor) -> int:
        value = self.value_of(tensor)
        if value is None:
            raise CannotTrace(f"a tensor of shape {tuple(tensor.shape)} has no known storage")
        dtype = symbol_text(tensor.dtype)
        signs = _SIGNS[tensor.is_conj(), tensor.is_neg()]
        key = (value, tensor.shape, tensor.stride(), tensor.storage_offset(), dtype, signs)
        found = self._tensor_ids.get(key)
        if found is None:
            found = self._tensor_ids[key] = len(self.tensors)
            offset = int(tensor.storage_offset())
            shape, stride = tuple(tensor.shape), tensor.stride()
            self.tensors.append(Tensor(found, value, shape, stride, offset, dtype, signs))
        return found

    def _arg(self, arg: object) -> Arg:
        if isinstance(arg, torch.Tensor):
            return Ref(self._tensor(arg))
        if arg is None or isinstance(arg, bool | int | float | str):
            return arg
        if isinstance(arg, list | tuple):
            return tuple(self._arg(item) for item in arg)
        for kind, name in _SYMBOL_KINDS:
            if isinstance(arg, kind):
                return Symbol(name, symbol_text(arg))
        return (
            Symbol("complex", str(arg)) if isinstance(arg, complex) else Symbol("object", type(arg).__name__)
        )
