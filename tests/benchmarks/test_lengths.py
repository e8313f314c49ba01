"""The benchmark of lengths: what it draws, pads and tells."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.lengths import lengths

SMALL = lengths.Sizes(batches=4, batch=2, layers=1, width=16)


def test_lengths_are_drawn_alike_and_the_model_has_positions_for_all() -> None:
    found = lengths.drawn(200)
    assert found == lengths.drawn(200)
    assert max(found) <= 256
    assert min(found) >= 16
    assert len(set(found)) > 15


def test_padding_changes_no_loss() -> None:
    model = lengths.gpt(SMALL)
    ways = lengths.ways(SMALL, [16, 24], 1 << 30, (16, 32))
    batch, padded = (ways[name].given(24) for name in ("plain", "plans of classes, padded to"))
    assert padded[0].shape == (2, 32)
    torch.testing.assert_close(model(*padded), model(*batch))


def row(way: str, **more: Any) -> dict[str, Any]:
    measured = {"peak_bytes": 3 << 20, "searched": 4, "plans": 9, "planning_seconds": 7.0}
    return {"way": way, "samples_per_second": 50.0, **measured, **more}


def test_a_budget_that_is_not_kept_is_told() -> None:
    facts = ("device", "torch", "python", "commit", "date", "command")
    document = {
        "machine": dict.fromkeys(facts, "known"),
        "sizes": vars(SMALL),
        "lengths": {"16": 3, "24": 1},
        "classes": [24],
        "budget_bytes": 3 << 20,
        "worst": {"worst": {"length": 24, "predicted_peak_bytes": 5 << 20}},
        "rows": [row("plain", samples_per_second=100.0), row("kept"), row("more", peak_bytes=4 << 20)],
    }
    text = lengths.report(document)
    assert "| kept | 3.00 | yes | 4 | 5 | 7 | 0.50 |" in text
    assert "| more | 4.00 | **no** |" in text
    assert "length 24 is the worst, with 5.00 MiB" in text
