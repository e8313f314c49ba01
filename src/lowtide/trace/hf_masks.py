"""The paths that transformers takes in eager PyTorch, taken when its models are traced as well.

Traced, transformers builds attention masks that it does without in eager, because whether it can depends
on numbers; with a mask attention takes slower kernels, and other ones for grouped heads. Without
padding it need not look at numbers at all. Whether sequences are packed follows from the positions of the
tokens: where these do not come from the batch, the dry run has seen the answer, and it is always the same.
Models that ask themselves take other ops where they are traced: Mamba scans in another order, say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch

from lowtide.compat.patches import patched
from lowtide.ir.assumptions import Assumption, Finding
from lowtide.ir.graph import Role
from lowtide.trace.graph_builder import GraphBuilder

_MODELS = ("transformers.models.", "transformers_modules.")  # those that come with a checkpoint as well


class Positions:
    """Watches, in a dry run, how transformers looks for packed sequences."""

    def __init__(self, builder: Callable[[], GraphBuilder]) -> None:
        self._builder = builder
        self._answers: list[bool] = []

    @property
    def assumptions(self) -> tuple[Finding, ...]:
        """What the dry run found to be so whatever the batch."""
        return (Finding.UNPACKED,) if self._answers and all(self._answers) else ()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch while the block runs."""
        masks = sys.modules.get("transformers.masking_utils")
        look = getattr(masks, "find_packed_sequence_indices", None)
        if look is None:
            yield
            return

        def watch(positions: torch.Tensor) -> Any:
            packed = look(positions)
            value = self._builder().value_of(positions)
            self._answers.append(packed is None and value is not None and not self._is_of_the_batch(value))
            return packed

        why = "the dry run watches whether sequences are packed"
        with patched(masks, "find_packed_sequence_indices", watch, why=why, since="transformers 5"):
            yield

    def _is_of_the_batch(self, value: int) -> bool:
        builder = self._builder()
        maker = {made: op for op in builder.ops for made in op.creates}
        pending, seen = [value], {value}
        while pending:
            found = pending.pop()
            if found in maker:
                pending.extend(set(maker[found].reads) - seen)
                seen.update(maker[found].reads)
            elif builder.values[found].role not in (Role.PARAMETER, Role.BUFFER):
                return True
        return False


@contextmanager
def unnoticed_by_transformers(assumptions: Collection[Assumption] = ()) -> Iterator[None]:
    """Keep transformers from taking other paths because tensors are fake, or because Dynamo looks on."""
    eager = partial(patched, why="the path that is taken in eager PyTorch", since="transformers 5")
    with ExitStack() as patches:
        utilities = sys.modules.get("transformers.utils.import_utils")
        if hasattr(utilities, "is_fake_tensor"):
            patches.enter_context(eager(utilities, "is_fake_tensor", _is_never_fake))
        masks = sys.modules.get("transformers.masking_utils")
        if hasattr(masks, "is_tracing"):
            patches.enter_context(eager(masks, "is_tracing", _depends_on_numbers))
        if hasattr(masks, "is_torchdynamo_exporting"):  # asked by later versions, and Dynamo says yes
            patches.enter_context(eager(masks, "is_torchdynamo_exporting", _is_never_exported))
        experts = sys.modules.get("transformers.integrations.moe")
        if hasattr(experts, "is_torchdynamo_compiling"):  # asked whether to group experts in a product
            patches.enter_context(eager(experts, "is_torchdynamo_compiling", _is_never_traced))
        for model, asks, answer in asking():
            patches.enter_context(eager(model, asks, answer))
        if Finding.UNPACKED in assumptions and hasattr(masks, "find_packed_sequence_indices"):
            patches.enter_context(eager(masks, "find_packed_sequence_indices", _nothing_is_packed))
        yield


def asking() -> list[tuple[ModuleType, str, Callable[..., bool]]]:
    """The models' own modules that ask whether they are traced: by which name, and what they are told."""
    answers = {"is_torchdynamo_compiling": _is_never_traced, "is_tracing": _depends_on_numbers}
    models = [module for name, module in list(sys.modules.items()) if name.startswith(_MODELS)]
    return [(module, name, answers[name]) for module in models for name in answers if name in vars(module)]


def _is_never_fake(_: object) -> bool:
    return False


def _is_never_exported() -> bool:
    return False


def _is_never_traced() -> bool:
    return False


def _depends_on_numbers(mask: object = None) -> bool:
    """Whether a mask can be skipped is known beforehand without padding; with it, its numbers decide."""
    return mask is not None and torch.compiler.is_compiling()


def _nothing_is_packed(_: object) -> None:
    return None
