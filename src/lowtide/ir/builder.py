"""A graph that grows: ops, values and ways to look at them, appended to a graph that stays as it is.

Everything old keeps its id, so whatever was known of the old graph still holds in the new one. This is the
one place where bytes, strides and ids of new tensors are worked out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from lowtide.errors import BadRequest, ShapeMismatch
from lowtide.ir.graph import Arg, Graph, Op, Origin, Phase, Ref, Role, Symbol, Tensor, Value, refs
from lowtide.ir.strides import Ints, contiguous, is_dense, like, same, stretched, viewed
from lowtide.ir.validate import item_bytes, validate

_CONTIGUOUS = Symbol("memory_format", "contiguous_format")


@dataclass(frozen=True, slots=True)
class Form:
    """What a new tensor looks like. It is dense, and has a value of its own."""

    shape: Ints
    stride: Ints
    dtype: str


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the step an op belongs."""

    phase: Phase = Phase.FORWARD
    module: str = ""
    call: int = 0
    section: int = 0


def empty(name: str, origin: Origin = Origin.EXPRESSION, device: str = "cpu") -> Graph:
    """A graph without anything in it, to grow from."""
    return Graph(name, origin, device, ops=(), values=(), tensors=())


def dense(shape: Sequence[int], dtype: str) -> Form:
    """A new row-major tensor."""
    return Form(tuple(shape), contiguous(shape), dtype)


class Growing:
    """Appends to `graph`; `finish` returns the grown graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops = list(graph.ops)
        self.values = list(graph.values)
        self.tensors = list(graph.tensors)
        self._ids = {_identity(tensor): tensor.id for tensor in graph.tensors}
        self._given = {graph.values[value].name for value in graph.resident}
        self._place = Place()

    def finish(self, outputs: Iterable[int] = (), results: Mapping[str, int] | None = None) -> Graph:
        """The grown graph. `outputs` are values and `results` tensors that come on top of the old ones.

        Raises:
            MalformedGraph: what was appended breaks a rule of graphs.
        """
        return validate(
            replace(
                self.graph,
                ops=tuple(self.ops),
                values=tuple(self.values),
                tensors=tuple(self.tensors),
                outputs=self.graph.outputs | frozenset(outputs),
                results=(*self.graph.results, *(results or {}).items()),
            )
        )

    # What is there ------------------------------------------------------------------------------------

    def shape(self, tensor: Ref) -> Ints:
        """The shape of a tensor."""
        return self.tensors[tensor.tensor].shape

    def dtype(self, tensor: Ref) -> str:
        """The dtype of a tensor, as torch prints it."""
        return self.tensors[tensor.tensor].dtype

    def name(self, tensor: Ref) -> str:
        """The name of the value that a tensor looks at."""
        return self.values[self.tensors[tensor.tensor].value].name

    def like(self, tensor: Ref, dtype: str | None = None) -> Form:
        """A new tensor with the layout of an old one, as far as that is dense."""
        old = self.tensors[tensor.tensor]
        return Form(old.shape, like(old.shape, old.stride), dtype or old.dtype)

    def owns(self, tensor: Ref) -> bool:
        """Whether a tensor shows every element of its value exactly once."""
        old = self.tensors[tensor.tensor]
        whole = math.prod(old.shape) * item_bytes(old.dtype) == self.values[old.value].bytes
        return whole and is_dense(old.shape, old.stride)

    # New values ---------------------------------------------------------------------------------------

    def resident(
        self, name: str, shape: Sequence[int], dtype: str = "float32", role: Role = Role.BATCH
    ) -> Ref:
        """A row-major tensor over a new value that is there before the step begins.

        Raises:
            BadRequest: a value of that name is there already, for resident values are given by their names.
        """
        if name in self._given:
            raise BadRequest(f"there is a value called '{name}' already. Choose another name.")
        self._given.add(name)
        return self._new(dense(shape, dtype), name, role, module="")

    def call(
        self,
        target: str,
        args: Sequence[Arg],
        form: Form,
        kwargs: Mapping[str, Arg] | None = None,
        *,
        name: str | None = None,
    ) -> Ref:
        """Append an op that makes one tensor, and return that."""
        made = self.calls(target, args, [form], kwargs, name=name)[0]
        assert made is not None
        return made

    def calls(
        self,
        target: str,
        args: Sequence[Arg],
        forms: Sequence[Form | None],
        kwargs: Mapping[str, Arg] | None = None,
        *,
        name: str | None = None,
    ) -> tuple[Ref | None, ...]:
        """Append an op that makes tensors of these forms, and return them; None is an output left out.

        The op reads every value that it is handed. New values are called `name`, or like the kernel.
        """
        options = tuple((kwargs or {}).items())
        handed = [*refs(tuple(args)), *refs(tuple(option for _, option in options))]
        known = name or target.split(".")[1]
        place = self._place
        made = [
            None if form is None else self._new(form, known, Role.INTERMEDIATE, place.module)
            for form in forms
        ]
        op = Op(
            id=len(self.ops),
            target=target,
            args=tuple(args),
            kwargs=options,
            outputs=tuple(None if ref is None else ref.tensor for ref in made),
            reads=tuple(dict.fromkeys(self.tensors[tensor].value for tensor in handed)),
            creates=tuple(self.tensors[ref.tensor].value for ref in made if ref is not None),
            phase=place.phase,
            module=place.module,
            call=place.call,
            section=place.section,
        )
        self.ops.append(op)
        return tuple(made)

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Ops that are appended meanwhile belong to `place`."""
        before, self._place = self._place, place
        try:
            yield
        finally:
            self._place = before

    def rename(self, tensor: Ref, name: str, role: Role) -> None:
        """Say what the value behind a tensor turned out to be."""
        value = self.tensors[tensor.tensor].value
        self.values[value] = replace(self.values[value], name=name, role=role)

    def _new(self, form: Form, name: str, role: Role, module: str) -> Ref:
        count = math.prod(form.shape) * item_bytes(form.dtype)
        value = Value(len(self.values), count, role, name, module, self.graph.device)
        self.values.append(value)
        return self.look(value.id, form.shape, form.stride, 0, form.dtype)

    # New ways to look at old values ---------------------------------------------------------------------

    def look(self, value: int, shape: Ints, stride: Ints, offset: int, dtype: str) -> Ref:
        """`value`, seen like this. Equal looks are the same tensor."""
        tensor = Tensor(len(self.tensors), value, shape, stride, offset, dtype)
        found = self._ids.setdefault(_identity(tensor), tensor.id)
        if found == tensor.id:
            self.tensors.append(tensor)
        return Ref(found)

    def _other(self, tensor: Ref, shape: Sequence[int], stride: Sequence[int], offset: int = 0) -> Ref:
        old = self.tensors[tensor.tensor]
        return self.look(old.value, tuple(shape), tuple(stride), old.offset + offset, old.dtype)

    def permuted(self, tensor: Ref, order: Sequence[int]) -> Ref:
        """The dimensions in another order."""
        old = self.tensors[tensor.tensor]
        return self._other(tensor, [old.shape[dim] for dim in order], [old.stride[dim] for dim in order])

    def transposed(self, tensor: Ref, first: int = -2, second: int = -1) -> Ref:
        """Two dimensions exchanged."""
        order = list(range(len(self.shape(tensor))))
        order[first], order[second] = order[second], order[first]
        return self.permuted(tensor, order)

    def expanded(self, tensor: Ref, shape: Sequence[int]) -> Ref:
        """Repeated, without a copy, where `shape` is larger."""
        old = self.tensors[tensor.tensor]
        return self._other(tensor, shape, stretched(old.shape, old.stride, shape))

    def unsqueezed(self, tensor: Ref, dims: Iterable[int]) -> Ref:
        """With new dimensions of one element, at these positions of the new shape."""
        old = self.tensors[tensor.tensor]
        shape, stride = list(old.shape), list(old.stride)
        for dim in sorted(dims):
            stride.insert(dim, shape[dim] * stride[dim] if dim < len(shape) else 1)
            shape.insert(dim, 1)
        return self._other(tensor, shape, stride)

    def sliced(self, tensor: Ref, dim: int, start: int, stop: int) -> Ref:
        """The elements from `start` up to, not including, `stop` of a dimension."""
        old = self.tensors[tensor.tensor]
        dim %= len(old.shape)
        shape = (*old.shape[:dim], stop - start, *old.shape[dim + 1 :])
        return self._other(tensor, shape, old.stride, start * old.stride[dim])

    def stepped(self, tensor: Ref, dim: int, step: int) -> Ref:
        """Every `step`-th element of a dimension."""
        old = self.tensors[tensor.tensor]
        shape, stride = list(old.shape), list(old.stride)
        shape[dim], stride[dim] = -(-shape[dim] // step), stride[dim] * step
        return self._other(tensor, shape, stride)

    def selected(self, tensor: Ref, dim: int, index: int) -> Ref:
        """One element of a dimension, which is gone then."""
        one = self.tensors[self.sliced(tensor, dim, index, index + 1).tensor]
        dim %= len(one.shape)
        shape, stride = (numbers[:dim] + numbers[dim + 1 :] for numbers in (one.shape, one.stride))
        return self._other(Ref(one.id), shape, stride)

    def reshaped(self, tensor: Ref, shape: Sequence[int]) -> Ref:
        """The same elements in another shape, copied first if they have to be moved for it.

        Raises:
            ShapeMismatch: the new shape has another number of elements.
        """
        old = self.tensors[tensor.tensor]
        if math.prod(old.shape) != math.prod(shape):
            raise ShapeMismatch("reshape", [(self.name(tensor), old.shape), ("the new shape", tuple(shape))])
        stride = viewed(old.shape, old.stride, shape)
        if stride is not None:
            return self._other(tensor, shape, stride)
        return self._other(self.packed(tensor), shape, contiguous(shape))

    def packed(self, tensor: Ref) -> Ref:
        """The tensor itself if it is row-major, or a copy of it that is."""
        old = self.tensors[tensor.tensor]
        row_major = same(old.shape, old.stride, contiguous(old.shape))
        return tensor if row_major else self.copied(tensor)

    def copied(self, tensor: Ref) -> Ref:
        """A row-major copy."""
        form = dense(self.shape(tensor), self.dtype(tensor))
        layout = {"memory_format": _CONTIGUOUS}
        return self.call("aten.clone.default", [tensor], form, layout)


def _identity(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.value, tensor.shape, tensor.stride, tensor.offset, tensor.dtype, tensor.signs)
