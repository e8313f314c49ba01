"""Trainers in a rehearsal: their own loops, validations and checkpoints are told apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lowtide
from lowtide.rehearsal.outcome import Act, Ended, Rehearsed

DATA = TensorDataset(torch.randn(40, 64), torch.randint(0, 10, (40,)))


def times(found: Rehearsed) -> dict[Act, int]:
    return {act.act: act.times for act in found.acts}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("steps", [None, pytest.param(2, marks=pytest.mark.long)])
def test_lightning_trains_validates_and_saves(steps: int | None, tmp_path: Path) -> None:
    lightning: Any = pytest.importorskip("lightning.pytorch")

    class Classifier(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", default_root_dir=tmp_path, **quiet)
    loader = DataLoader(DATA, batch_size=8)
    with lowtide.card("2GiB", steps=steps) as rehearsal:
        trainer.fit(Classifier(), loader, loader)
    found = rehearsal.found
    assert found.fits
    assert found.steps == (10 if steps is None else 4)
    assert found.ended is (Ended.WHOLE if steps is None else Ended.ENOUGH)
    assert {Act.FIRST, Act.TRAINING, Act.VALIDATION, Act.SAVING} <= times(found).keys()
    if steps is None:
        assert times(found)[Act.TRAINING] == 9


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_hugging_face_trains_validates_and_saves(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 500, "n_positions": 64}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    texts = [{name: torch.randint(0, 500, (64,)) for name in ("input_ids", "labels")} for _ in range(16)]
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
    )
    with lowtide.card("2GiB") as rehearsal:
        transformers.Trainer(model, arguments, train_dataset=texts, eval_dataset=texts[:8]).train()
    found = rehearsal.found
    assert (found.fits, found.steps) == (True, 8)
    assert {Act.FIRST, Act.TRAINING, Act.VALIDATION, Act.SAVING} <= times(found).keys()
    peak = next(act for act in found.acts if act.act is Act.TRAINING).moment
    assert peak is not None
    assert "test_rehearsed_trainers.py" in peak.line  # the user's own line, not one of a library
    assert "test_rehearsed_trainers.py" not in peak.maker
