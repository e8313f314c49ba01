"""What a module keeps between calls is changed by its first run alone, and seen as that run saw it.

Running statistics are written in training and never read, so a recomputation is given something else to
write to. Everything else is given back as it was while the module runs again: attributes and buffers that
were assigned, lists and dictionaries that grew, buffers that were written to (copied before that), modes, and
generators of random numbers.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.compat.modules import OWN_ATTRIBUTES, buffers_of, has_hooks, parameters_of, updates_statistics
from lowtide.compat.undo import undone
from lowtide.errors import CannotApply
from lowtide.execute.originals import Original, Originals
from lowtide.execute.streams import Streams

_CONTAINERS = frozenset({dict, list, set, deque, OrderedDict, defaultdict})
_OF_PYTORCH = "torch.nn.modules."  # modules from there keep nothing but buffers


class Attributes:
    """The attributes of some modules as they are now, and what is in those that are containers."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modes = [(module, module.training) for module in modules]
        self.found = [
            (module.__dict__, module.__dict__.copy())
            for module, _ in self.modes
            if not type(module).__module__.startswith(_OF_PYTORCH) or has_hooks(module)
        ]
        self.contents = [
            (thing, thing.copy())
            for _, attributes in self.found
            for name, thing in attributes.items()
            if type(thing) in _CONTAINERS and name not in OWN_ATTRIBUTES
        ]
        self.contents += [(buffers_of(module), buffers_of(module).copy()) for module, _ in self.modes]

    def put_back(self) -> None:
        """Have everything be like that again. It may be begun anew where it was interrupted."""
        for module, training in self.modes:
            module.training = training
        for now, was in self.found:
            now.update(was)
            for name in now.keys() - was.keys():
                del now[name]
        for container, contents in self.contents:
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(contents)

    def things(self) -> Iterator[tuple[Any, Any, object]]:
        """Everything that is kept: the dictionary or list that it is in, where in it, and what it is."""
        for now, was in (*self.found, *self.contents):
            items = was.items() if isinstance(was, dict) else () if isinstance(was, set) else enumerate(was)
            yield from ((now, key, thing) for key, thing in items)


@dataclass(frozen=True)
class Kept:
    """What a unit keeps, as its first run saw it; the tensors among it by where they are.

    `evaluated` are the statistics of norms that were in training before the run, and not after it.
    """

    attributes: Attributes
    tensors: list[tuple[Any, Any, Original]]
    parameters: list[tuple[dict[str, Any], str, Original]]
    streams: Streams
    evaluated: dict[tuple[int, str], Original] = field(default_factory=dict)


class UnitState:
    """What one unit of a plan keeps. It refers to modules weakly: the model refers to it."""

    def __init__(self, path: str, unit: nn.Module, written: Iterable[str]) -> None:
        self._path = path
        self._modules = [weakref.ref(module) for module in unit.modules()]
        known = set(written)
        self._written = [  # buffers that are known to be written to
            (number, buffer)
            for number, (name, module) in enumerate(unit.named_modules())
            for buffer in buffers_of(module)
            if ".".join(filter(None, [path, name, buffer])) in known
        ]
        self._scratch: dict[tuple[int, str], torch.Tensor] = {}

    def is_of(self, unit: nn.Module) -> bool:
        """Whether `unit` is still made of the modules that it was made of."""
        return self._owners() == list(unit.modules())

    def before(self, originals: Originals, draws: bool) -> Kept:
        """What the unit keeps now. `draws` says whether it may draw from the streams that all share."""
        owners = self._owners()
        attributes = Attributes(owners)
        statistics = {id(tensor) for *_, tensor in self._statistics(owners)}
        for *_, tensor in self._statistics(owners):
            originals.before_writing(tensor)
        tensors = [
            (container, key, originals.of(thing))
            for container, key, thing in attributes.things()
            if isinstance(thing, torch.Tensor) and id(thing) not in statistics
        ]
        written = {id(buffers_of(owners[number]).get(name)) for number, name in self._written}
        for *_, original in tensors:
            if id(original.tensor) in written:
                original.keep()
        parameters = [
            (parameters_of(owner), name, Original(parameter))
            for owner in owners
            for name, parameter in parameters_of(owner).items()
            if parameter is not None
        ]
        things = (thing for *_, thing in attributes.things())
        return Kept(attributes, tensors, parameters, Streams(things, shared=draws))

    def check(self, kept: Kept, originals: Originals) -> None:
        """The first run is over. Raise if it has written to something that nobody has kept.

        A parameter that it wrote to (an embedding that is normed whenever it is read) is not looked at again.
        """
        for _, key, original in kept.tensors:
            if original.is_lost():
                raise CannotApply(
                    f"{key} of {self._path} changes when the model runs, but did not when the plan was made, "
                    "and in a way that cannot be heard of. Plan again, with the model in the mode in which "
                    "it trains."
                )
        kept.parameters[:] = [place for place in kept.parameters if not place[2].is_lost()]
        for number, (owner, was_training) in enumerate(kept.attributes.modes):
            if was_training and not owner.training:  # a norm has read what it would have written to
                for name, tensor in buffers_of(owner).items():
                    if tensor is not None:
                        kept.evaluated[number, name] = originals.of(tensor)
        kept.streams.moved()

    def run_again(self, unit: nn.Module, kept: Kept, *args: Any, **kwargs: Any) -> Any:
        """Call `unit` as its first run was called, and leave no trace in it."""
        owners = self._owners()
        now = Attributes(owners)
        with undone(now.put_back):
            kept.attributes.put_back()
            self._give_back(kept)
            for number, name, statistic in list(self._statistics(owners)):
                read = kept.evaluated.get((number, name))
                again = self._something_like(statistic, number, name) if read is None else read.look()
                buffers_of(owners[number])[name] = again
            with kept.streams.again():
                return unit(*args, **kwargs)

    def _give_back(self, kept: Kept) -> None:
        for parameters, name, original in kept.parameters:
            if parameters.get(name) is original.tensor:
                original.look()
        seen: dict[Original, torch.Tensor] = {}
        for container, key, original in kept.tensors:
            if original not in seen:
                seen[original] = original.look()
            container[key] = seen[original]

    def _statistics(self, owners: list[nn.Module]) -> Iterator[tuple[int, str, torch.Tensor]]:
        """What is written in training, and never read."""
        for number, owner in enumerate(owners):
            if updates_statistics(owner):
                for name, tensor in buffers_of(owner).items():
                    if tensor is not None:
                        yield number, name, tensor

    def _something_like(self, statistic: torch.Tensor, number: int, name: str) -> torch.Tensor:
        """Something to write to. It is kept: a new one each time is a kernel each."""
        found = self._scratch.get((number, name))
        if found is None or _kind(found) != _kind(statistic):
            found = self._scratch[number, name] = torch.zeros_like(statistic)
        return found

    def _owners(self) -> list[nn.Module]:
        found = [reference() for reference in self._modules]
        return [module for module in found if module is not None]


def _kind(tensor: torch.Tensor) -> tuple[type, torch.device, torch.dtype, torch.Size]:
    return type(tensor), tensor.device, tensor.dtype, tensor.shape
