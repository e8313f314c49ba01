"""Trainers on texts of many lengths: the worst batch is named, and settles the budget, before a step."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from lowtide.errors import BadRequest
from lowtide.integrations.epoch import EpochAhead, by_keyword
from lowtide.ir.graph import Graph, Role
from lowtide.zoo.gpt import GPT
from tests.helpers.searches import watched

LENGTHS = (9, 33, 12, 17, 21, 9, 30, 14)
BATCH = 2


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    return watched(monkeypatch)


class Texts(Dataset[Any]):
    """Texts of some lengths; reading one draws a random number, as augmentation does."""

    def __init__(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int) -> dict[str, Any]:
        torch.rand(1)
        words = torch.arange(self.lengths[place]) % 20
        return {"input_ids": words, "labels": words}


def collated(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    fill = {"input_ids": 0, "labels": -100}
    return {
        name: pad_sequence([sample[name] for sample in samples], True, value) for name, value in fill.items()
    }


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(Texts(), **{"batch_size": BATCH, "collate_fn": collated, **options})


def widths(graphs: list[Graph]) -> set[int]:
    """How long the texts are that graphs are of."""
    ids = (
        tensor
        for graph in graphs
        for tensor in graph.tensors
        if graph.values[tensor.value].role is Role.BATCH and len(tensor.shape) == 2
    )
    return {tensor.shape[1] for tensor in ids}


# What is known ahead --------------------------------------------------------------------------------------


def test_the_worst_batch_is_made_of_the_longest_samples() -> None:
    epoch = EpochAhead.of(loader(), "input_ids", (17, 33))
    assert epoch.worst.length == 33
    assert epoch.worst.samples == (1, 6)
    assert epoch.worst.classes == (17, 33)
    assert "has 2 samples of up to 33 tokens" in str(epoch.worst)


def test_a_batch_of_each_class_is_like_the_one_that_came_first_and_draws_nothing() -> None:
    foreseen = EpochAhead.of(loader(), "input_ids", (17, 33)).foreseen(by_keyword)
    state = torch.get_rng_state()
    first = {"input_ids": torch.ones(2, 5, dtype=torch.long), "scale": 0.5}
    for length in (17, 33):
        example, loss = foreseen.inputs_of(length, (), first)
        assert loss is None
        assert list(example.kwargs) == ["input_ids", "scale"]
        assert example.kwargs["input_ids"].shape == (2, length)
        assert example.kwargs["scale"] == 0.5
    assert torch.get_rng_state().equal(state)


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_streams_are_refused_and_so_are_calls_by_position() -> None:
    with pytest.raises(BadRequest, match="this loader streams them"):
        EpochAhead.of(DataLoader(Streamed()), "input_ids", None)
    with pytest.raises(BadRequest, match=r"have no 'length'\. They have: input_ids, labels"):
        EpochAhead.of(loader(), "length", None)
    with pytest.raises(BadRequest, match="is not called with what the data loader's batches have by name"):
        by_keyword({"input_ids": 1}, (1,), {})


# Hugging Face ---------------------------------------------------------------------------------------------


def hf_trainer(folder: Path, callback: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 20, "n_positions": 40}
    words = {"bos_token_id": 0, "eos_token_id": 1, "use_cache": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **words))
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    callbacks = [] if callback is None else [callback]
    trainer = transformers.Trainer(
        model, args, data_collator=collated, train_dataset=Texts(), callbacks=callbacks
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_trainer_settles_the_budget_on_its_worst_batch(tmp_path: Path, searches: list[Graph]) -> None:
    pytest.importorskip("transformers")
    from lowtide.integrations.transformers import LowtideCallback

    callback = LowtideCallback("90%", length_key="input_ids", classes=2, progress=False)
    trainer = hf_trainer(tmp_path, callback)
    with pytest.warns(UserWarning, match="lowtide: the longest batch that an epoch can bring has 2 samples"):
        trainer.train()
    assert callback.worst is not None
    assert (callback.worst.length, callback.worst.samples) == (33, (1, 6))
    assert {plan.budget_bytes for plan in callback.plans} == {callback.plans[0].budget_bytes}
    assert widths(searches) == {33, *callback.worst.classes}
    plain = hf_trainer(tmp_path, None)
    plain.train()
    assert losses(trainer) == losses(plain)


# Lightning ------------------------------------------------------------------------------------------------

pytest.importorskip("lightning.pytorch")


def test_lightning_settles_the_budget_on_its_worst_batch(searches: list[Graph]) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from lowtide.integrations.lightning import LowtideCallback

    class Writer(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = GPT(layers=1, width=16, heads=2, vocab=20, context=40)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            logits = self.net(batch["input_ids"])
            return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-2)

    callback = LowtideCallback("90%", length_key="input_ids", classes=(17, 33), progress=False)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer.fit(Writer(), loader())
    assert any("has 2 samples of up to 33 tokens" in str(each.message) for each in told)
    (budget,) = {plan.budget_bytes for plan in callback.plans}
    assert budget is not None
    assert budget >= max(plan.peak_bytes for plan in callback.plans)
    assert widths(searches) == {17, 33}
    with pytest.raises(BadRequest, match="Leave one of the two out"):
        LowtideCallback("75%", length_key="input_ids", module="net")


# Accelerate -----------------------------------------------------------------------------------------------


def test_accelerate_plans_for_classes_of_lengths(searches: list[Graph]) -> None:
    accelerate = pytest.importorskip("accelerate")
    from lowtide.integrations.accelerate import prepare

    torch.manual_seed(0)
    model: nn.Module = GPT(layers=1, width=16, heads=2, vocab=20, context=40)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    accelerator = accelerate.Accelerator(cpu=True)
    model, optimizer = prepare(
        accelerator,
        model,
        optimizer,
        budget="75%",
        loss=torch.mean,
        example_of=lambda length: torch.ones(BATCH, length, dtype=torch.long),
        lengths=LENGTHS,
        classes=(17, 33),
        progress=False,
    )
    searched = len(searches)
    assert searched
    for length in (12, 33, 17):
        accelerator.backward(model(torch.ones(BATCH, length, dtype=torch.long)).mean())
        optimizer.step()
        optimizer.zero_grad()
    assert len(searches) == searched
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
