"""Slices where Lightning or Accelerate trains: one argument, and the gradients of plain training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import lowtide
from lowtide.solvers.solution import GraphSolution
from lowtide.solvers.tiled_summary import families
from tests.helpers.heads import LOGITS_BYTES, Head, batch


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def data() -> Any:
    """Two batches."""
    ids, labels = batch()
    rows = torch.utils.data.TensorDataset(ids.repeat(2), labels.repeat(2))
    return torch.utils.data.DataLoader(rows, batch_size=len(ids))


def trained_plainly() -> Head:
    model = Head()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    for ids, labels in data():
        optimizer.zero_grad()
        model(ids, labels).backward()
        optimizer.step()
    return model


def assert_trained(model: torch.nn.Module, solution: Any) -> None:
    assert isinstance(solution, GraphSolution)
    assert families(solution.graph)[0].spared_bytes == LOGITS_BYTES
    for one, other in zip(model.parameters(), trained_plainly().parameters(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*litlogger")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning:lightning")
def test_a_training_step_of_lightning_runs_in_slices() -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lowtide.integrations.lightning import LowtideCallback

    class Speaker(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = Head()

        def training_step(self, words: list[Tensor], batch_idx: int) -> Any:
            return self.net(*words)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1.0)

    planner = LowtideCallback("min", tiles=True, progress=False)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", enable_model_summary=False, callbacks=[planner], **quiet
    )
    model = Speaker()
    trainer.fit(model, data())
    assert_trained(model.net, planner.plans[0])


def test_a_loop_with_accelerate_runs_in_slices() -> None:
    accelerate = pytest.importorskip("accelerate")
    from lowtide.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    try:
        plain = Head()
        updates = torch.optim.SGD(plain.parameters(), 1.0)
        model, optimizer, loader = prepare(
            accelerator, plain, updates, data(), budget="min", tiles=True, progress=False
        )
        for ids, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(model(ids, labels))
            optimizer.step()
        assert_trained(plain, lowtide.plans_of(accelerator.unwrap_model(model))[0])
    finally:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
