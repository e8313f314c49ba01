"""What is there before a step begins, given by name: parameters, buffers and the batch, where they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from lowtide.errors import BadRequest
from lowtide.execute.memory import Address
from lowtide.ir.graph import Graph, Role


class Residents:
    """The resident values of a graph, and the tensors that stand for them."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._values = residents_by_name(graph)
        self._given: dict[int, torch.Tensor] = {}
        self._unsettled: set[int] = set()  # values whose new place may not be known wherever it is used

    def take(self, given: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, Address]]:
        """Use these tensors from now on: the values that are somewhere else than before, and where."""
        for value, tensor in self._checked(given):
            place, before = self._place(value, tensor), self._given.get(value)
            if before is None or not place.is_at(self._place(value, before)):
                self._unsettled.add(value)
            self._given[value] = tensor.detach()
            if value in self._unsettled:
                yield value, place
                self._unsettled.discard(value)

    def copy(self, given: Mapping[str, torch.Tensor]) -> None:
        """Copy these tensors to where those in use are. Only a batch can be: all else is the model's."""
        for value, tensor in self._checked(given):
            if self._place(value, tensor).is_at(self._place(value, self._given[value])):
                continue
            if self.graph.values[value].role is not Role.BATCH:
                name = self.graph.values[value].name
                raise BadRequest(
                    f"'{name}' has moved since the step was recorded. Make and record a new one."
                )
            self._given[value].copy_(tensor)

    def complete(self) -> Iterator[tuple[int, Address]]:
        """What is empty needs no one to give it; anything else that the graph reads and was not given is
        an error."""
        for name, value in self._values.items():
            if value in self._given or not self.graph.readers.get(value):
                continue
            if self.graph.values[value].bytes:
                raise BadRequest(
                    f"'{name}' is there before the step begins, and was not given. "
                    f"The graph needs: {', '.join(self._values)}."
                )
            yield value, Address(torch.empty(0, dtype=torch.uint8, device=self.device()).untyped_storage())

    def device(self) -> torch.device:
        """Where all of them lie."""
        found = {tensor.device for tensor in self._given.values()}
        if len(found) > 1:
            raise BadRequest(f"what is given lies on several devices: {', '.join(sorted(map(str, found)))}")
        return found.pop() if found else torch.device(self.graph.device)

    def _checked(self, given: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
        for name, tensor in given.items():
            value = self._values.get(name)
            if value is None:
                raise BadRequest(
                    f"the graph has nothing resident called '{name}'. It has: {', '.join(self._values)}."
                )
            known = self._given.get(value)
            if known is not None and _looks(known) != _looks(tensor):
                raise BadRequest(f"'{name}' was {_looks(known)}, and is now {_looks(tensor)}")
            yield value, tensor

    def _place(self, value: int, tensor: torch.Tensor) -> Address:
        """Where a value begins: the tensor may be all of its storage, or a dense part of one."""
        found, storage = self.graph.values[value], tensor.untyped_storage()
        if storage.nbytes() == found.bytes:
            return Address(storage)
        if tensor.is_contiguous() and tensor.nbytes == found.bytes:
            return Address(storage, int(tensor.storage_offset()) * tensor.element_size())
        raise BadRequest(
            f"'{found.name}' has {found.bytes} bytes in the graph; what is given for it is {_looks(tensor)}, "
            f"over {storage.nbytes()} bytes"
        )


def _looks(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}"


def residents_by_name(graph: Graph) -> dict[str, int]:
    """The resident values by name. The same name twice is told apart by a number: 'constant (3,) #1'."""
    found: dict[str, int] = {}
    for value in graph.resident:
        name, count = graph.values[value].name, 0
        while name in found:
            count += 1
            name = f"{graph.values[value].name} #{count}"
        found[name] = value
    return found
