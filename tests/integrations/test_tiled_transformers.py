"""Language models of transformers in slices: a Trainer with one argument, LoRA, packed and padded texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.solvers.solution import GraphSolution
from lowtide.solvers.tiled_summary import families

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from lowtide.integrations.transformers import LowtideCallback  # noqa: E402
from tests.integrations.test_transformers import BATCH, TOKENS, Training, arguments, train  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:lowtide. the model meets inputs without a plan:UserWarning"),
    pytest.mark.filterwarnings(
        "ignore:lowtide. while it trains, the model's output has its loss:UserWarning"
    ),
]

WORDS = 2048
LOGITS_BYTES = BATCH * TOKENS * WORDS * 4


def llama() -> Any:
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": TOKENS}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, use_cache=False))


class Adapted(nn.Module):
    """A layer that stays as it is, and what is learnt beside it: LoRA."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.layer(x), self.up(self.down(x)))


def adapted() -> Any:
    model = llama().requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model


def with_peft() -> Any:
    """The same by peft. Its matrices that begin with zeros do not, so that all of them have gradients."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


class LossAlone(nn.Module):
    """A model that returns its loss, for a loop that needs nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


def batch(kind: str) -> dict[str, Tensor]:
    """Two texts: as they are, padded at the end, or each two sequences in one row."""
    words = torch.randint(2, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    there = (torch.arange(TOKENS) < 50).expand(2, -1)
    restarting = torch.cat([torch.arange(20), torch.arange(TOKENS - 20)]).repeat(2, 1)
    return {
        "as they are": {"input_ids": words, "labels": words},
        "padded": {
            "input_ids": words,
            "labels": words.where(there, -100),
            "attention_mask": there.long().contiguous(),
        },
        "packed": {"input_ids": words, "labels": words, "position_ids": restarting},
    }[kind]


def gradients(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    output = model(**given)
    (output if isinstance(output, Tensor) else output.loss).backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def in_slices(model: nn.Module, given: dict[str, Tensor]) -> GraphSolution:
    lowtide.optimize(model, given, budget="min", tiles=True, profile=False, effort="quick")
    (solution,) = lowtide.plans_of(model)
    assert isinstance(solution, GraphSolution)
    return solution


# Gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (llama, "padded"),
        (adapted, "packed"),
        (with_peft, "padded"),
        *(pytest.param(llama, kind, marks=pytest.mark.long) for kind in ("as they are", "packed")),
        *(pytest.param(adapted, kind, marks=pytest.mark.long) for kind in ("as they are", "padded")),
        *(pytest.param(with_peft, kind, marks=pytest.mark.long) for kind in ("as they are", "packed")),
    ],
)
def test_gradients_are_those_of_plain_training(make: Any, kind: str) -> None:
    given = batch(kind)
    expected = gradients(make(), given)
    model = make()
    solution = in_slices(model, given)
    assert families(solution.graph)[0].spared_bytes == 2 * TOKENS * WORDS * 4
    found = gradients(model, given)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_logits_that_nobody_is_handed_are_held_no_longer() -> None:
    given = batch("as they are")
    with_logits, alone = llama(), LossAlone(llama())
    held = [in_slices(model, given).peak_bytes for model in (with_logits, alone)]
    logits_bytes = 2 * TOKENS * WORDS * 4
    assert logits_bytes <= held[0] - held[1] < 1.2 * logits_bytes  # and nothing that is made of them is
    assert with_logits(**given).logits.shape == (2, TOKENS, WORDS)  # whoever has them returned keeps them


# The Trainer -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[bool | None, Training]:
    """A training without a plan, and at the lowest peak with and without slices."""
    folder = tmp_path_factory.mktemp("trained")
    every: dict[bool | None, Any] = {None: None}
    every |= {tiles: LowtideCallback("min", tiles=tiles, progress=False) for tiles in (False, True)}
    return {
        tiles: train(arguments(folder, eval_strategy="epoch"), callback, model=llama())
        for tiles, callback in every.items()
    }


def test_losses_of_a_training_in_slices_are_those_without_a_plan(
    trained: dict[bool | None, Training],
) -> None:
    assert len(trained[True].losses) == 6
    assert trained[True].losses == pytest.approx(trained[None].losses, rel=1e-5)
    assert trained[True].eval_losses == pytest.approx(trained[None].eval_losses, rel=1e-5)


def test_a_step_holds_less_than_its_logits_when_it_is_measured(trained: dict[bool | None, Training]) -> None:
    growth = {tiles: max(done.growth) for tiles, done in trained.items()}
    assert growth[False] > 2 * LOGITS_BYTES
    assert growth[True] < LOGITS_BYTES


def test_every_length_that_is_met_is_planned_in_slices(trained: dict[bool | None, Training]) -> None:
    assert len(trained[True].plans) == 2  # the last batch of an epoch is smaller
    for solution in trained[True].plans:
        assert solution.graph.tiled is not None
    for solution in trained[False].plans:
        assert solution.graph.tiled is None


class Texts(torch.utils.data.Dataset[Any]):
    """Random words, in texts of many lengths."""

    lengths = (34, 27, 60, 19, 43, 38, 22, 64, 30, 45, 58, 21, 50, 16, 62, 39)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        generator = torch.Generator().manual_seed(index)
        words: list[int] = torch.randint(2, WORDS, (self.lengths[index],), generator=generator).tolist()
        return {"input_ids": words, "labels": words}


def padded_to_the_longest(texts: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    rows = [torch.tensor(text["input_ids"]) for text in texts]
    pad = nn.utils.rnn.pad_sequence
    there = pad([torch.ones_like(row) for row in rows], batch_first=True)
    words = pad(rows, batch_first=True)
    return {"input_ids": words, "attention_mask": there, "labels": words.where(there > 0, -100)}


@pytest.mark.parametrize("how", ["padded", "flattened"])
def test_texts_of_many_lengths_are_trained_in_slices(how: str, tmp_path: Path) -> None:
    """Padded to the longest of a batch, or one after the other in a single row, as its own collator does."""
    collator = {"padded": padded_to_the_longest, "flattened": transformers.DataCollatorWithFlattening()}[how]
    args = arguments(tmp_path, num_train_epochs=1)
    plain = train(args, model=llama(), data=Texts(), collator=collator)
    callback = LowtideCallback("min", tiles=True, progress=False)
    sliced = train(args, callback, model=llama(), data=Texts(), collator=collator)
    assert sliced.losses == pytest.approx(plain.losses, rel=1e-5)
    assert len(sliced.plans) == len(sliced.losses) == 2
    assert all(solution.graph.tiled is not None for solution in sliced.plans)


def test_lora_by_peft_is_trained_in_slices(tmp_path: Path) -> None:
    plain = train(arguments(tmp_path), model=with_peft())
    callback = LowtideCallback("min", tiles=True, progress=False)
    sliced = train(arguments(tmp_path), callback, model=with_peft())
    assert sliced.losses == pytest.approx(plain.losses, rel=1e-5)
    assert max(plain.growth) > 2 * LOGITS_BYTES
    assert max(sliced.growth) < LOGITS_BYTES
    learnt = {name for name, each in sliced.model.named_parameters() if each.requires_grad}
    assert learnt
    assert all("lora_" in name for name in learnt)
    for (name, one), other in zip(sliced.model.named_parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=name)


def test_afterwards_the_model_returns_logits_as_it_did(trained: dict[bool | None, Training]) -> None:
    model = trained[True].model
    assert "forward" not in vars(model)
    assert model.train()(**batch("as they are")).logits is not None


def test_logits_are_left_out_where_there_is_a_loss_and_only_while_it_trains(tmp_path: Path) -> None:
    model, callback = llama(), LowtideCallback("min", tiles=True, progress=False)
    given = batch("as they are")
    with pytest.warns(UserWarning, match="the model's output has its loss and no logits"):
        callback.on_train_begin(arguments(tmp_path), transformers.TrainerState(), None, model=model)
    lowtide.remove(model)  # without a plan, for it is about what is returned
    trains = model.train()(**given)
    assert (trains.logits, trains["loss"].shape) == (None, ())
    assert "logits" not in trains
    assert model(input_ids=given["input_ids"]).logits is not None
    assert model.eval()(**given).logits is not None
    with torch.no_grad():
        assert model.train()(**given).logits is not None
    callback.on_train_end(None, None, None, model=model)
    assert "forward" not in vars(model)


def test_without_tiles_logits_are_returned_as_ever(tmp_path: Path) -> None:
    model, callback = llama(), LowtideCallback("min", progress=False)
    callback.on_train_begin(arguments(tmp_path), transformers.TrainerState(), None, model=model)
    lowtide.remove(model)
    assert model.train()(**batch("as they are")).logits is not None


def test_a_training_that_an_error_ended_does_not_wrap_the_next(tmp_path: Path) -> None:
    model, callback = llama(), LowtideCallback("min", tiles=True, progress=False)
    for _ in range(2):
        callback.on_train_begin(arguments(tmp_path), transformers.TrainerState(), None, model=model)
    callback.on_train_end(None, None, None, model=model)
    assert "forward" not in vars(model)
