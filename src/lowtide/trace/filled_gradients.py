"""Gradients that are filled in place: of what was gathered, looked up, sorted or chosen.

Such a backward makes zeros and writes to some of them. For tensor subclasses, which fake tensors are, it
makes a copy that has these written, and needs twice as much. The dry run recognises that and writes to the
zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lowtide.ir.graph import Op, short_name

aten = torch.ops.aten

_ZEROS = frozenset({"new_zeros", "zeros", "zeros_like"})
_IN_PLACE: Mapping[Any, Any] = {
    aten.index_add.default: aten.index_add_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.put.default: aten.put_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter_add.default: aten.scatter_add_.default,
}


def filled_in_place(func: Any, value: int | None, last: Op | None) -> Any:
    """What the engine does with plain tensors where `func` is called with `value` as its first argument.

    `last` is the op before: PyTorch's own backwards write to zeros that they have just made.
    """
    into_zeros = last is not None and short_name(last.target) in _ZEROS and value in last.creates
    return _IN_PLACE.get(func, func) if into_zeros else func
