"""Lightning, really trained, with and without a budget: the whole training_step is planned."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.errors import BadRequest, InfeasibleBudget, MissingExtra
from lowtide.solvers.solution import GraphSolution

lightning = pytest.importorskip("lightning.pytorch")
from lowtide.integrations.lightning import LowtideCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:lowtide. the model meets inputs without a plan:UserWarning"),
    # Lightning's own: of few workers and batches, and of what it still uses of torch and pytree
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*litlogger"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning:lightning"),
]

SAMPLES, BATCH = 20, 8  # the third batch of an epoch is smaller


class Classifier(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """Convolutions, BatchNorm and dropout; the loss is computed, and logged, in training_step."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
        for _ in range(3):
            layers += [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.1)]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
        self.calls = 0
        self.growth: list[int] = []

    def forward(self, images: torch.Tensor) -> Any:
        return self.net(images)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.calls += 1
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log_dict({"right": (logits.argmax(1) == labels).float().mean(), "constant": 3.0})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        """Forward, backward and update; measured in the second epoch, where nothing is planned."""

        def step() -> None:
            super(Classifier, self).optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        if epoch == 0:
            step()
        else:
            self.growth.append(lowtide.measure(step, device="cpu").growth_bytes)


class Spy(lightning.Callback):  # type: ignore[misc, name-defined]
    """The losses of the steps."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *given: Any) -> None:
        self.losses.append(float(outputs["loss"]))


@dataclass
class Training:
    """A training that has been done."""

    trainer: Any
    model: Any
    spy: Spy
    planner: Any

    @property
    def plans(self) -> list[GraphSolution]:
        return list(self.planner.plans)


def batches(samples: int = SAMPLES) -> Any:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(samples, 3, 20, 20, generator=generator)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    data = torch.utils.data.TensorDataset(images, labels)
    return torch.utils.data.DataLoader(data, batch_size=BATCH)


def train(
    planner: Any = None,
    model: Any = None,
    *,
    samples: int = SAMPLES,
    resume: Path | None = None,
    callbacks: tuple[Any, ...] = (),
    **options: Any,
) -> Training:
    torch.manual_seed(0)
    model = Classifier() if model is None else model
    spy = Spy()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=[spy, *([planner] if planner is not None else []), *callbacks],
        **{"max_epochs": 2, "enable_checkpointing": bool(callbacks), **quiet, **options},
    )
    torch.manual_seed(1)
    trainer.fit(model, batches(samples), batches(samples), ckpt_path=resume)
    torch._dynamo.reset()
    gc.collect()
    return Training(trainer, model, spy, planner)


def assert_kept(done: Training) -> None:
    """Every measured step is within the budget, whatever else the process holds."""
    (budget,) = {solution.budget_bytes for solution in done.plans}
    resident = min(solution.timeline.resident_bytes for solution in done.plans)
    assert budget is not None
    assert done.model.growth
    assert max(done.model.growth) <= budget - resident


def assert_same(one: Training, other: Training) -> None:
    for (name, mine), its in zip(
        one.model.state_dict().items(), other.model.state_dict().values(), strict=True
    ):
        assert torch.equal(mine, its), name


# In full precision ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained")


@pytest.fixture(scope="module")
def plain() -> Training:
    return train()


def saving(folder: Path) -> Any:
    return lightning.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=3, save_top_k=-1, enable_version_counter=False
    )


@pytest.fixture(scope="module")
def planned(folder: Path) -> Training:
    return train(LowtideCallback("65%"), callbacks=(saving(folder),))


def test_losses_weights_and_statistics_are_those_without_a_budget_bit_for_bit(
    plain: Training, planned: Training
) -> None:
    assert len(planned.spy.losses) == 6
    assert planned.spy.losses == plain.spy.losses
    assert_same(planned, plain)


def test_what_is_logged_is_logged_once_and_evaluation_is_as_it_was(
    plain: Training, planned: Training
) -> None:
    assert planned.trainer.callback_metrics == plain.trainer.callback_metrics
    assert {"loss_epoch", "right", "constant", "val_loss"} <= set(planned.trainer.callback_metrics)


def test_planning_leaves_the_modules_attributes_as_they_were(plain: Training, planned: Training) -> None:
    assert planned.model.calls == plain.model.calls == 6


def test_every_step_is_within_the_budget_and_clearly_below_a_plain_one(
    plain: Training, planned: Training
) -> None:
    assert len(planned.plans) == 2  # the last batch of an epoch is smaller; its number does not count
    assert_kept(planned)
    assert max(planned.model.growth) < 0.65 * max(plain.model.growth)


def test_the_gradients_of_the_step_before_and_the_optimizers_states_are_counted(planned: Training) -> None:
    values = planned.plans[0].graph.values
    parameters = sum(parameter.nbytes for parameter in planned.model.parameters())
    assert sum(value.bytes for value in values if value.name.endswith("so far")) == parameters
    assert sum(value.bytes for value in values if value.role.value == "optimizer state") >= 2 * parameters


def test_the_plan_is_taken_off_at_the_end(planned: Training) -> None:
    assert not {"training_step", "log", "log_dict", "print", "forward"} & set(vars(planned.model))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning")
def test_a_training_that_is_resumed_goes_on_as_it_does_without_a_budget(
    planned: Training, folder: Path
) -> None:
    """Lightning does not save random streams, so a training that was not interrupted drops out others."""
    middle = folder / "step=3.ckpt"
    plain = train(resume=middle, callbacks=(saving(folder),))
    resumed = train(LowtideCallback("65%"), resume=middle, callbacks=(saving(folder),))
    assert len(resumed.spy.losses) == 3
    assert resumed.spy.losses == plain.spy.losses
    assert_same(resumed, plain)


# Other trainings --------------------------------------------------------------------------------------


class Described(Classifier):
    """The batch as a dict, and a dict returned."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        named = {"images": images, "labels": labels}
        return {"loss": F.cross_entropy(self(named["images"]), named["labels"]), "seen": len(images)}


@pytest.mark.long
def test_mixed_precision_and_accumulation_are_the_trainers() -> None:
    """Autocast casts a weight once, a plan where it is used: the bits are not the same, the numbers are."""
    options: dict[str, Any] = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "samples": 16}
    torch.manual_seed(0)
    plain = train(model=Described(), **options)
    torch.manual_seed(0)
    planned = train(LowtideCallback("70%"), Described(), **options)
    assert planned.spy.losses == pytest.approx(plain.spy.losses, rel=1e-2)
    assert planned.plans[0].inputs[-1] == "autocast bfloat16"
    assert_kept(planned)
    assert max(planned.model.growth) < 0.75 * max(plain.model.growth)


@pytest.mark.long
def test_a_submodule_can_be_planned_by_itself() -> None:
    torch.manual_seed(0)
    plain = train(model=Classifier(), samples=16, max_epochs=1)
    torch.manual_seed(0)
    planner = LowtideCallback("65%", module="net", loss=lambda logits: logits.logsumexp(1).mean())
    planned = train(planner, Classifier(), samples=16, max_epochs=1)
    assert planned.spy.losses == plain.spy.losses
    assert_same(planned, plain)
    assert "forward" not in vars(planned.model.net)


# Refusals ---------------------------------------------------------------------------------------------


class Failing(Classifier):
    def on_train_batch_end(self, *given: Any) -> None:
        raise RuntimeError("the power is gone")


def test_an_exception_takes_the_plan_off() -> None:
    model = Failing()
    with pytest.raises(RuntimeError, match="the power is gone"):
        train(LowtideCallback("65%"), model, samples=8)
    assert not {"training_step", "log", "log_dict", "print", "forward"} & set(vars(model))


class Deciding(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, labels = batch
        logits = self(images) if batch_idx == 0 else self(images).tanh()
        return F.cross_entropy(logits, labels)


def test_a_step_that_computes_something_else_than_was_planned_is_told() -> None:
    with pytest.warns(UserWarning, match="took another path than the one that was planned"):
        train(LowtideCallback("65%"), Deciding(), samples=16)


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_is_refused() -> None:
    with pytest.raises(BadRequest, match="Manual optimizes manually"):
        train(LowtideCallback("65%"), Manual())


def test_a_submodule_that_is_not_there_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"Classifier has no module 'nets'\. It has: net"):
        train(LowtideCallback("65%", module="nets"))


def test_a_method_for_layers_is_refused() -> None:
    with pytest.raises(BadRequest, match="rotor plans layers"):
        LowtideCallback("65%", method="rotor")


def test_a_loss_without_a_module_is_refused() -> None:
    with pytest.raises(BadRequest, match="training_step returns the loss"):
        LowtideCallback("65%", loss=lambda output: output)


def test_a_budget_that_cannot_be_kept_is_refused_in_the_first_step() -> None:
    model = Classifier()
    with pytest.raises(InfeasibleBudget, match=r"no plan of auto fits in 300\.0 KiB"):
        train(LowtideCallback("300KiB", progress=False), model)
    assert "training_step" not in vars(model)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "lowtide.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    with pytest.raises(MissingExtra, match=r"pip install 'lowtide\[lightning\]'"):
        import lowtide.integrations.lightning  # noqa: F401
