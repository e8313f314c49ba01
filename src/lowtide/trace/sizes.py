"""How large results are whose size depends on numbers: as they are, or as large as they can be.

Where the numbers are known, the size is. Where they are not, a mask chooses everything and all elements of a
tensor are different: a step that does so needs no less memory than one that chooses fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from lowtide.trace.graph_builder import target_name
from lowtide.trace.known_values import Shadows

aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)
Sized: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], Any]


class ResultSizes:
    """Fake results of ops whose size depends on numbers."""

    def __init__(self, shadows: Shadows) -> None:
        self._shadows = shadows
        self._rules: Mapping[str, Sized] = {
            "aten.index.Tensor": self._index,
            "aten.nonzero.default": self._nonzero,
            "aten.nonzero_numpy.default": self._nonzero_in_columns,
            "aten.masked_select.default": self._masked_select,
            "aten.bincount.default": self._bincount,
            "aten._unique2.default": self._unique,
            "aten.unique_dim.default": self._unique_slices,
            "aten.unique_consecutive.default": self._unique_in_a_row,
            "aten._ctc_loss.Tensor": self._ctc_loss,
        }

    def is_known(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the size of a result follows from numbers that are known, or from their bounds."""
        if func is aten.index.Tensor:
            masks = [each for each in args[1] if each is not None and each.dtype in _MASKS]
            return all(self._shadows.known(mask) is not None for mask in masks)
        if func is aten.bincount.default:  # of what an op chose among as many: their number
            between = self._shadows.ranges.of(args[0])
            return between is not None and between.most < _counting(args, kwargs)[2]
        return target_name(func) == "aten._ctc_loss.Tensor" and self._shadows.known(args[3]) is not None

    def result(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The fake result of an op, as large as it can be; None if nothing bounds it."""
        rule = self._rules.get(target_name(func))
        return None if rule is None else rule(args, kwargs)

    def _chosen(self, mask: torch.Tensor) -> int:
        known = self._shadows.chosen(mask)
        return mask.numel() if known is None else known

    def _index(self, args: tuple[Any, ...], _: Mapping[str, Any]) -> Any:
        positions: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in _MASKS:
                positions.append(index)
            else:
                count = self._chosen(index)
                found = [torch.empty(count, dtype=torch.int64, device=index.device)] * index.dim()
                positions += found
        return aten.index.Tensor(args[0], positions)

    def _nonzero(self, args: tuple[Any, ...], _: Mapping[str, Any]) -> Any:
        given = args[0]
        return _like(given, (self._chosen(given), given.dim()), torch.int64)

    def _nonzero_in_columns(self, args: tuple[Any, ...], _: Mapping[str, Any]) -> Any:
        count = self._chosen(args[0])
        return [_like(args[0], (count,), torch.int64) for _ in range(args[0].dim())]

    def _masked_select(self, args: tuple[Any, ...], _: Mapping[str, Any]) -> Any:
        given, mask = args
        whole = torch.broadcast_shapes(given.shape, mask.shape)
        if mask.shape == whole:
            return _like(given, (self._chosen(mask),), given.dtype)
        return _like(given, (whole.numel(),), given.dtype)

    def _bincount(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As many as there are values; none, if nothing is known of these."""
        given, weights, least = _counting(args, kwargs)
        between = self._shadows.ranges.of(given)
        if between is None:
            return None
        kinds = {torch.float32: torch.float32}
        dtype = torch.int64 if weights is None else kinds.get(weights.dtype, torch.float64)
        return _like(given, (max(least, int(between.most) + 1),), dtype)

    def _unique(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given, _, inverse, counts = _completed(args, True, False, False)
        return self._differing(given, given.numel(), (), inverse, counts, kwargs)

    def _unique_in_a_row(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given, inverse, counts, dim = _completed(args, False, False, None)
        if kwargs.get("dim", dim) is not None:
            return None
        return self._differing(given, given.numel(), (), inverse, counts, kwargs)

    def _unique_slices(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        given, dim, _, inverse, counts = _completed(args, 0, True, False, False)
        return self._differing(given, given.shape[dim], given.shape, inverse, counts, kwargs)

    def _differing(
        self,
        given: torch.Tensor,
        count: int,
        shape: tuple[int, ...],
        inverse: bool,
        counts: bool,
        kwargs: Mapping[str, Any],
    ) -> Any:
        inverse, counts = kwargs.get("return_inverse", inverse), kwargs.get("return_counts", counts)
        where = ((count,) if shape else given.shape) if inverse else (0,)
        return (
            _like(given, shape or (count,), given.dtype),
            _like(given, where, torch.int64),
            _like(given, (count,) if counts else (0,), torch.int64),
        )

    def _ctc_loss(self, args: tuple[Any, ...], _: Mapping[str, Any]) -> Any:
        """The second result has a row for each symbol of the longest target, and the blanks around it."""
        scores, targets, _input_lengths, lengths = args[:4]
        known = self._shadows.largest(lengths)
        longest = targets.shape[-1] if known is None else known
        steps, batch = (scores.shape[0], scores.shape[1]) if scores.dim() == 3 else (scores.shape[0], 1)
        return (
            _like(scores, (batch,) if scores.dim() == 3 else (), scores.dtype),
            _like(scores, (batch, steps, 2 * longest + 1), scores.dtype),
        )


def _counting(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any, int]:
    """What `bincount` counts, with which weights, and how many it returns at least."""
    given, weights, least = _completed(args, None, 0)
    return given, kwargs.get("weights", weights), kwargs.get("minlength", least)


def _completed(args: tuple[Any, ...], *defaults: Any) -> tuple[Any, ...]:
    """The first argument, and the others or what they are unless given."""
    return (*args, *defaults[len(args) - 1 :])


def _like(given: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=given.device)
