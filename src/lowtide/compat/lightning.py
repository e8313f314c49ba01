"""Lightning's modules from within."""

from __future__ import annotations

from typing import Any

from lowtide.compat.private import Private

PRIVATE = (
    Private(
        "lightning.pytorch.LightningModule._compiler_ctx",
        "tells whether a LightningModule was compiled as a whole",
        seen=("2.6",),
    ),
)


def is_compiled(module: Any) -> bool:
    """Whether a LightningModule was compiled as a whole."""
    return module._compiler_ctx is not None
