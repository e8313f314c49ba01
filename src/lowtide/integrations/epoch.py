"""What a trainer's data loader will bring: its longest batch, and one for each class of lengths."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from lowtide.compat.trees import tree_leaves, tree_map
from lowtide.compat.undo import undone
from lowtide.errors import BadRequest
from lowtide.planner.by_classes import Foreseen, chosen_classes
from lowtide.planner.lengths import length_of
from lowtide.trace.put_back import random_streams
from lowtide.trace.step import Arguments

# How a batch that was collated becomes what the model is called with, from what it was called with first.
GivenOf: TypeAlias = Callable[[Any, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class WorstBatch:
    """The longest batch that a data loader can bring: so many tokens, and the places of its samples."""

    length: int
    samples: tuple[int, ...]
    classes: tuple[int, ...]

    def __str__(self) -> str:
        padded = ", ".join(map(str, self.classes))
        return (
            f"the longest batch that an epoch can bring has {len(self.samples)} samples of up to "
            f"{self.length} tokens. The budget is settled on it, and plans are made for batches of {padded} "
            "tokens before the first step."
        )


@dataclass(frozen=True)
class EpochAhead:
    """The batches that a data loader makes of its longest samples, those within a class or all of them."""

    loader: Any
    lengths: tuple[int, ...]  # of each sample
    classes: tuple[int, ...]

    @classmethod
    def of(cls, loader: Any, length_key: str, classes: int | Sequence[int] | None) -> EpochAhead:
        """What `loader` will bring. Every sample of its dataset is looked at once, for its length.

        Raises:
            BadRequest: samples have no such key, or batches no size.
        """
        if not hasattr(getattr(loader, "dataset", None), "__len__") or _batch_size(loader) is None:
            raise BadRequest(
                "lengths are looked up in a dataset whose samples have places, and this loader streams them, "
                "or makes batches of no known size. Leave length_key out, and pad to few lengths."
            )
        with undone(random_streams()):
            samples = (loader.dataset[place] for place in range(len(loader.dataset)))
            lengths = tuple(length_of(sample, length_key) for sample in samples)
        return cls(loader, lengths, chosen_classes(dict(sorted(Counter(lengths).items())), classes))

    @property
    def worst(self) -> WorstBatch:
        """The longest batch."""
        return WorstBatch(max(self.lengths), self._longest_within(max(self.lengths)), self.classes)

    def foreseen(self, given_of: GivenOf) -> Foreseen:
        """The same for `lowtide.optimize`, which plans when the model meets its first batch."""

        def inputs_of(length: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Arguments, None]:
            with undone(random_streams()):
                chosen = [self.loader.dataset[place] for place in self._longest_within(length)]
                batch = self.loader.collate_fn(chosen)
            return Arguments(*given_of(_moved(batch, (args, kwargs)), args, kwargs)), None

        return Foreseen(self.classes, inputs_of)

    def _longest_within(self, length: int) -> tuple[int, ...]:
        """The places of as many samples as a batch has, the longest that are no longer than that."""
        fitting = [place for place, found in enumerate(self.lengths) if found <= length]
        fitting.sort(key=lambda place: -self.lengths[place])
        return tuple(fitting[: _batch_size(self.loader)])


def look_ahead(
    loader: Any, length_key: str | None, classes: int | Sequence[int] | None, given_of: GivenOf
) -> tuple[WorstBatch | None, dict[str, Any]]:
    """The worst batch, which a warning names, and what `lowtide.optimize` is told of those that will come.

    Nothing where nobody says under which key samples have their length.
    """
    if length_key is None:
        return None, {}
    epoch = EpochAhead.of(loader, length_key, classes)
    warnings.warn(f"lowtide: {epoch.worst}", stacklevel=3)
    return epoch.worst, {"example": epoch.foreseen(given_of)}


def by_keyword(
    batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch with names, for a model that is called with these names."""
    if args or not isinstance(batch, Mapping):
        raise BadRequest(
            "the model is not called with what the data loader's batches have by name, so nobody knows what "
            "it is given for other lengths. Leave length_key out."
        )
    return args, {name: batch.get(name, given) for name, given in kwargs.items()}


def _batch_size(loader: Any) -> int | None:
    found: int | None = getattr(loader, "batch_size", None)
    return found or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)


def _moved(batch: Any, given: Any) -> Any:
    """`batch` where the tensors are that the model has met."""
    where = next((leaf.device for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor)), None)
    return tree_map(lambda leaf: leaf.to(where) if isinstance(leaf, torch.Tensor) else leaf, batch)
