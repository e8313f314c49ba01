"""Tensors that stretches use and have not made, as they were when they were used.

A stretch that is run again must see what its first run saw. Most of what it uses stays as it is: weights,
masks, tables. What the model is about to write to is copied first, if a stretch depends on it. What was
written to without anybody hearing of it is an error when the stretch is run again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lowtide.compat.dispatch import is_plain_op, schema_of
from lowtide.compat.tensors import storage_key, tensors_in, version_of
from lowtide.compat.trees import tree_flatten
from lowtide.errors import CannotApply

_NORMS = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}  # what says that they write


class Original:
    """A tensor as it was at one moment: itself while it stays so, a copy once it was written to."""

    __slots__ = ("copied", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.version = version_of(tensor)
        self.copied = False

    def keep(self) -> None:
        """The tensor is about to be written to."""
        self.tensor = copy_of(self.tensor)
        self.copied = True

    def is_lost(self) -> bool:
        """Whether it was written to unnoticed."""
        return not self.copied and version_of(self.tensor) != self.version

    def look(self) -> torch.Tensor:
        """The tensor as it was, to be read and written to.

        Raises:
            CannotApply: it was written to unnoticed.
        """
        if self.copied:
            return copy_of(self.tensor)
        if self.is_lost():
            raise CannotApply(
                f"a tensor of shape {tuple(self.tensor.shape)} was changed in place between the forward that "
                "used it and the backward, which has to run that part again: it would see other numbers. "
                "Change it after the backward, or keep that part out of the plan."
            )
        return self.tensor


class Originals:
    """What the stretches of one call of a model use and have not made, by the memory that it is in."""

    def __init__(self) -> None:
        self._of_storage: defaultdict[int, list[Original]] = defaultdict(list)

    def of(self, tensor: torch.Tensor) -> Original:
        """`tensor` as it is now."""
        known = self._of_storage[storage_key(tensor)]
        version = version_of(tensor)
        for original in known:
            if original.tensor is tensor and original.version == version and not original.copied:
                return original
        known.append(Original(tensor))
        return known[-1]

    def __bool__(self) -> bool:
        return bool(self._of_storage)

    def among(self, module: nn.Module, arguments: Any) -> bool:
        """Whether some of what a call of a module may write to is looked at by a stretch."""
        if not self:
            return False
        given = (leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, torch.Tensor))
        return any(storage_key(tensor) in self._of_storage for tensor in (*module.buffers(), *given))

    def before_writing(self, tensor: torch.Tensor) -> None:
        """`tensor` is about to be written to: copy what depends on it."""
        for original in self._of_storage.get(storage_key(tensor), ()):
            if not original.copied:
                original.keep()


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers in other memory, and as trainable."""
    with torch.no_grad():
        return tensor.clone().requires_grad_(tensor.requires_grad)


def written_by(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """The tensors that a call of a torch function may write to, as its name and arguments tell."""
    yield from tensors_in(kwargs.get("out"))
    if func in _NORMS:
        if kwargs.get(_NORMS[func]):
            yield from tensors_in(*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var"))
    elif is_plain_op(func):
        for position, argument in enumerate(schema_of(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                yield from tensors_in(given)
    elif kwargs.get("inplace") or changes_its_first(func):
        yield from tensors_in(*args[:1])


def changes_its_first(func: Callable[..., Any]) -> bool:
    """Whether a function changes its first argument: `x.add_(1)`, `x += 1`, `x[0] = 1`, `x.data = y`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__") and name.endswith("__"):
        return name in ("__setitem__", "__set__") or (name.startswith("__i") and name in _IN_PLACE)
    return name.endswith("_")


_IN_PLACE = frozenset(
    f"__i{op}__"
    for op in (
        "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
        "matmul", "div",
    )
)  # fmt: skip
