"""The benchmark of where lowtide stands: its rival computes what it should, rows are told as they are."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.shared.machines import again, command, machine
from benchmarks.shared.subjects import llama
from benchmarks.standing import standing
from benchmarks.standing.chunked_loss import IGNORED, ChunkedHeadLoss
from benchmarks.standing.models import LARGE, SMALL, LossAlone
from benchmarks.standing.report import LOWTIDE, SAME_PEAK, WAYS, cell, report


def small_llama() -> Any:
    torch.manual_seed(0)
    model = llama(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
    ).float()
    return model.train()


# The chunked loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_tokens", [1, 7, 24, 100])
def test_a_chunked_loss_and_its_gradients_are_the_models_own(chunk_tokens: int) -> None:
    model = small_llama()
    ids = torch.randint(0, 50, (2, 12))
    labels = ids.clone()
    labels[0, 3:6] = IGNORED
    plain = LossAlone(model)(ids, labels)
    wanted = torch.autograd.grad(2 * plain, list(model.parameters()))
    chunked = ChunkedHeadLoss(model, chunk_tokens)(ids, labels)
    found = torch.autograd.grad(2 * chunked, list(model.parameters()))
    torch.testing.assert_close(chunked, plain)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


# Rows -------------------------------------------------------------------------------------------------


def row(way: str, **more: Any) -> dict[str, Any]:
    return {
        "subject": "tiny, 2×8",
        "label": way,
        "kind": "peer",
        "commit": "abc",
        "wall_seconds": 1.0,
        **more,
    }


def test_a_cell_has_mib_and_ms_or_says_why_not() -> None:
    assert cell(row("eager", peak_bytes=7840 << 20, ms=411.4)) == "7,840 / 411"
    assert cell(row(SAME_PEAK, error="InfeasibleBudget: no", failure="InfeasibleBudget")) == "does not fit"
    assert cell(row("eager", error="RuntimeError: x", failure="RuntimeError")) == "failed"


def test_the_report_has_every_way_and_the_errors(tmp_path: Path) -> None:
    machine = dict.fromkeys(("device", "torch", "python", "commit", "date", "command"), "x")
    rows = [
        row("eager", peak_bytes=2 << 20, ms=3.0, first_seconds=0.1, library="nobody 1.0"),
        row(SAME_PEAK, error="InfeasibleBudget: too small", failure="InfeasibleBudget"),
    ]
    report({"machine": machine, "rows": rows}, tmp_path / "out.md")
    text = (tmp_path / "out.md").read_text()
    assert "| eager | 2 / 3 |" in text
    assert all(f"\n| {way} | " in text for way in WAYS)
    assert f"- {SAME_PEAK}: InfeasibleBudget: too small" in text
    assert "nobody 1.0" in text


def test_every_way_is_measured_and_a_chunked_loss_only_where_there_is_a_vocabulary() -> None:
    assert LARGE.keys() == SMALL.keys()
    text, image = (
        {way for ways in standing.processes(SMALL[key]) for way in ways} for key in ("llama-1b", "resnet50")
    )
    assert text == set(WAYS)
    assert image == {way for way in WAYS if "chunked" not in way}
    assert set(standing.PEERS) == set(WAYS) - set(LOWTIDE)


def test_a_row_that_fails_is_written_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.json"
    command = ["standing", "measure", "--rows", str(rows), "--small", "--models", "gpt2-medium"]
    monkeypatch.setattr(sys, "argv", [*command, "--alone", "gpt2-medium", SAME_PEAK])
    standing.main()
    (found,) = json.loads(rows.read_text())["rows"]
    assert found["label"] == SAME_PEAK
    assert found["error"].startswith("LookupError: there is no peak to stay within")


def test_a_benchmark_tells_how_it_was_started_and_not_where(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/somebody/benchmarks/x/y.py", "measure", "--small"])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec("benchmarks.x.y", None))
    assert command() == ["python", "-m", "benchmarks.x.y", "measure", "--small"]
    assert machine("abc")["command"] == "python -m benchmarks.x.y measure --small"
    assert again("--alone", "z") == [sys.executable, *command()[1:], "--alone", "z"]
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert command() == ["python", "y.py", "measure", "--small"]
