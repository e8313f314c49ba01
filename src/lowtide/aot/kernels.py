"""Which kernels run a plan: those that eager PyTorch calls, or those that Inductor generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from lowtide.compat.inductor import missing_compiler, reductions_apart
from lowtide.errors import BadRequest


class Kernels(StrEnum):
    """The kernels that a plan is made for, and that it runs with."""

    EAGER = "eager"
    INDUCTOR = "inductor"

    @staticmethod
    def named(name: str) -> Kernels:
        """The kernels of this name.

        Raises:
            BadRequest: there are none.
        """
        if name not in list(Kernels):
            raise BadRequest(f"kernels is {name!r}; it is one of {', '.join(Kernels)}.")
        return Kernels(name)

    def check(self, device: str) -> None:
        """Raise BadRequest where these kernels cannot be made for `device`."""
        missing = missing_compiler(device) if self is Kernels.INDUCTOR else None
        if missing is not None:
            raise BadRequest(
                f'kernels="inductor" generates code, and needs {missing} for {device}, which is not here. '
                'Install it, or leave kernels="eager".'
            )

    @property
    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """Ops that are captured in parts.

        A norm, a softmax, a loss is a reduction and what follows of it element by element; generated code
        computes the second wherever it is wanted, and only the first has to be remembered.
        """
        return reductions_apart() if self is Kernels.INDUCTOR else {}
