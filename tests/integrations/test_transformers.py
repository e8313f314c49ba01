"""Hugging Face's Trainer, really trained, with and without a budget."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lowtide
from lowtide.errors import BadRequest, InfeasibleBudget, MissingExtra
from lowtide.solvers.solution import GraphSolution

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from transformers.training_args import ParallelMode  # noqa: E402

from lowtide.integrations.transformers import LowtideCallback, _engine  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:lowtide. the model meets inputs without a plan:UserWarning")

TOKENS, VOCABULARY, SAMPLES, BATCH = 64, 97, 20, 8  # the third batch of an epoch is smaller


class Sentences(torch.utils.data.Dataset[Any]):
    """Random words."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


def gpt() -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": TOKENS}
    words = {"bos_token_id": 0, "eos_token_id": 1, "use_cache": False, "attn_implementation": "eager"}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **words))


@dataclass
class Training:
    """A training that has been done."""

    trainer: Any
    model: Any
    callback: Any = None
    growth: list[int] = field(default_factory=list)  # of the second epoch's steps, where nothing is planned

    @property
    def plans(self) -> list[GraphSolution]:
        return list(self.callback.plans)

    @property
    def losses(self) -> list[float]:
        return [entry["loss"] for entry in self.trainer.state.log_history if "loss" in entry]

    @property
    def eval_losses(self) -> list[float]:
        return [entry["eval_loss"] for entry in self.trainer.state.log_history if "eval_loss" in entry]


def arguments(folder: Path, **options: Any) -> Any:
    quiet = {"report_to": [], "disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
    return transformers.TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": BATCH,
            "num_train_epochs": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            **quiet,
            **options,
        },
    )


def train(
    args: Any,
    callback: Any = None,
    resume: Path | None = None,
    model: Any = None,
    data: Any = None,
    collator: Any = None,
) -> Training:
    done = Training(None, gpt() if model is None else model, callback)
    trainer = transformers.Trainer(
        done.model,
        args,
        data_collator=collator,
        train_dataset=data or Sentences(),
        eval_dataset=Sentences(),
        callbacks=[] if callback is None else [callback],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    done.trainer, step = trainer, trainer.training_step

    def measured(*given: Any, **named: Any) -> Any:
        if trainer.state.epoch < 1:
            return step(*given, **named)
        results: list[Any] = []
        reading = lowtide.measure(lambda: results.append(step(*given, **named)), device="cpu")
        done.growth.append(reading.growth_bytes)
        return results[0]

    trainer.training_step = measured
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    torch._dynamo.reset()
    gc.collect()
    return done


def assert_kept(done: Training) -> None:
    """Every measured step is within the budget, whatever else the process holds."""
    budgets = {solution.budget_bytes for solution in done.plans}
    resident = min(solution.timeline.resident_bytes for solution in done.plans)
    (budget,) = budgets
    assert budget is not None
    assert done.growth
    assert max(done.growth) <= budget - resident


# In full precision ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


SAVING = {"save_strategy": "steps", "save_steps": 4, "eval_strategy": "epoch"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return train(arguments(tmp_path_factory.mktemp("plain"), eval_strategy="epoch"))


@pytest.fixture(scope="module")
def planned(folder: Path) -> Training:
    return train(arguments(folder, **SAVING), LowtideCallback("60%"))


def assert_same_weights(one: Training, other: Training) -> None:
    for (name, mine), its in zip(
        one.model.state_dict().items(), other.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, its), name


def test_losses_and_weights_are_those_without_a_budget_bit_for_bit(
    plain: Training, planned: Training
) -> None:
    assert len(planned.losses) == 6
    assert planned.losses == plain.losses
    assert planned.eval_losses == plain.eval_losses
    assert_same_weights(planned, plain)


def test_every_step_is_within_the_budget_and_clearly_below_a_plain_one(
    plain: Training, planned: Training
) -> None:
    assert len(planned.plans) == 2  # the last batch of an epoch is smaller
    assert_kept(planned)
    assert max(planned.growth) < 0.62 * max(plain.growth)


def test_the_trainers_own_optimizer_is_counted(planned: Training) -> None:
    solution = planned.plans[0]
    states = [value.bytes for value in solution.graph.values if value.role.value == "optimizer state"]
    parameters = sum(parameter.nbytes for parameter in planned.model.parameters())
    assert sum(states) >= 2 * parameters  # two moments; it is AdamW


def test_the_plan_is_taken_off_at_the_end(planned: Training) -> None:
    assert planned.plans
    assert "forward" not in vars(planned.model)


@pytest.mark.long
def test_a_training_that_is_resumed_goes_on_as_if_it_had_not_been_interrupted(
    planned: Training, folder: Path
) -> None:
    resumed = train(arguments(folder, **SAVING), LowtideCallback("60%"), resume=folder / "checkpoint-4")
    assert resumed.losses == planned.losses
    assert_same_weights(resumed, planned)


# Mixed precision, accumulation ------------------------------------------------------------------------


@pytest.mark.long
def test_mixed_precision_and_accumulation_are_known_from_the_trainers_arguments(tmp_path: Path) -> None:
    """Autocast casts a weight once, a plan where it is used: the bits are not the same, the numbers are."""
    options = {"bf16": True, "gradient_accumulation_steps": 2, "dataloader_drop_last": True}
    plain = train(arguments(tmp_path, **options))
    planned = train(arguments(tmp_path, **options), LowtideCallback("75%"))
    assert planned.losses == pytest.approx(plain.losses, rel=1e-3)
    inputs = {text for solution in planned.plans for text in solution.inputs}
    assert (
        "num_items_in_batch=int64[]" in inputs
    )  # the Trainer tells the model how many words there are in all
    names = {value.name for value in planned.plans[0].graph.values}
    assert any(name.endswith("so far") for name in names)
    assert_kept(planned)
    assert max(planned.growth) < 0.8 * max(plain.growth)


# Refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_checkpointing": True}, "gradient_checkpointing=True: both would recompute"),
        ({"torch_compile": True}, "torch_compile=True: a plan is itself compiled"),
    ],
)
def test_what_does_not_go_together_with_a_plan_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    args = arguments(tmp_path, **options)
    model = gpt()
    with pytest.raises(BadRequest, match=message):
        LowtideCallback("60%").on_train_begin(args, transformers.TrainerState(), None, model=model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("processes", "device", "replicated"), [(2, "cuda", True), (1, "cuda", False), (1, "cpu", True)]
)
def test_buckets_are_counted_where_accelerate_makes_some(
    processes: int, device: str, replicated: bool
) -> None:
    args = SimpleNamespace(
        parallel_mode=ParallelMode.DISTRIBUTED,
        world_size=processes,
        device=torch.device(device),
        ddp_find_unused_parameters=None,
    )
    assert (_engine(args) is not None) == replicated


def test_a_budget_that_cannot_be_kept_is_refused_in_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(InfeasibleBudget, match=r"no plan of auto fits in 300\.0 KiB"):
        train(arguments(tmp_path), LowtideCallback("300KiB", progress=False))


def test_a_loss_that_the_trainer_computes_has_to_be_told(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="give a loss"):
        train(arguments(tmp_path, label_smoothing_factor=0.1), LowtideCallback("60%"))


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lowtide.integrations.transformers")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'lowtide\[transformers\]'"):
        import lowtide.integrations.transformers  # noqa: F401
