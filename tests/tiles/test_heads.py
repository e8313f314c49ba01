"""Heads and losses in slices of tokens: logits are never there as a whole, and numbers are as exact."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowtide.ir.graph import Phase
from lowtide.tiles.early import early
from lowtide.tiles.region import Region, grown
from lowtide.tiles.tile import tile
from tests.helpers.sliced import results_of
from tests.helpers.sliced_steps import (
    Case,
    Function,
    assert_as_near,
    assert_trains_in_slices,
    captured,
    exactly,
    region_at_the_largest,
    trials,
)

Batch = Mapping[str, Tensor]
SENTENCES, TOKENS, WIDTH, WORDS = 2, 7, 8, 40
TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


PARAMETERS = {"layer": numbers(WIDTH, WIDTH) / 3, "head": numbers(WORDS, WIDTH)}
BATCH = {
    "x": numbers(SENTENCES, TOKENS, WIDTH),
    "labels": torch.arange(SENTENCES * TOKENS).mul(17).remainder(WORDS).view(SENTENCES, TOKENS),
    "advantages": numbers(SENTENCES, TOKENS),
}


def logits(p: nn.ParameterDict, batch: Batch) -> Tensor:
    return exactly((batch["x"] @ p["layer"]) @ p["head"].t())


def cross_entropy(**options: object) -> Function:
    def loss(p: nn.ParameterDict, batch: Batch) -> Tensor:
        return F.cross_entropy(logits(p, batch).flatten(0, 1), batch["labels"].flatten(), **options)  # type: ignore[arg-type]

    return loss


def of_half_precision(p: nn.ParameterDict, batch: Batch) -> Tensor:
    found = (batch["x"] @ p["layer"]) @ p["head"].t()
    return F.cross_entropy(found.flatten(0, 1), batch["labels"].flatten())


def weighted(p: nn.ParameterDict, batch: Batch) -> Tensor:
    weight = torch.arange(WORDS).to(exactly(batch["x"]).dtype) / WORDS
    return F.cross_entropy(logits(p, batch).flatten(0, 1), batch["labels"].flatten(), weight=weight)


def shifted_by_padding(p: nn.ParameterDict, batch: Batch) -> Tensor:
    labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    return F.cross_entropy(logits(p, batch).view(-1, WORDS), labels.view(-1))


def half_padded(p: nn.ParameterDict, batch: Batch) -> Tensor:
    labels = batch["labels"].masked_fill(torch.arange(TOKENS) >= 4, -100)
    return F.cross_entropy(logits(p, batch).view(-1, WORDS), labels.view(-1))


def capped(p: nn.ParameterDict, batch: Batch) -> Tensor:
    found = torch.tanh((batch["x"] @ p["layer"]) @ p["head"].t() / 5.0) * 5.0
    return F.cross_entropy(exactly(found).flatten(0, 1), batch["labels"].flatten())


def with_z_loss(p: nn.ParameterDict, batch: Batch) -> Tensor:
    found = logits(p, batch)
    loss = F.cross_entropy(found.flatten(0, 1), batch["labels"].flatten())
    return loss + 1e-2 * found.logsumexp(-1).square().mean()


def chosen(p: nn.ParameterDict, batch: Batch) -> Tensor:
    return logits(p, batch).log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)


def preferred(p: nn.ParameterDict, batch: Batch) -> Tensor:
    sentences = chosen(p, batch).sum(-1)
    return -F.logsigmoid(0.1 * (sentences[:1] - sentences[1:])).mean()


def of_a_policy(p: nn.ParameterDict, batch: Batch) -> Tensor:
    found = chosen(p, batch)
    ratio = (found - found.detach()).exp()
    advantages = batch["advantages"]
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def from_a_teacher(p: nn.ParameterDict, batch: Batch) -> Tensor:
    teacher = exactly(batch["x"] @ p["head"].t().detach()).log_softmax(-1)
    student = logits(p, batch).log_softmax(-1)
    return F.kl_div(student, teacher, reduction="sum", log_target=True) / (SENTENCES * TOKENS)


def over_items(p: nn.ParameterDict, batch: Batch) -> Tensor:
    labels = batch["labels"].flatten()
    loss = F.cross_entropy(logits(p, batch).flatten(0, 1), labels, reduction="sum", ignore_index=17)
    return loss / (labels != 17).sum()


def over_some(p: nn.ParameterDict, batch: Batch) -> Tensor:
    labels = batch["labels"].flatten()
    each = F.cross_entropy(logits(p, batch).flatten(0, 1), labels, reduction="none")
    return (each * (labels > 9)).sum() / (labels > 9).sum()


def normalised_by_all(p: nn.ParameterDict, batch: Batch) -> Tensor:
    """Each slice needs a sum over all of them."""
    found = logits(p, batch)
    return F.cross_entropy((found / found.detach().abs().mean()).flatten(0, 1), batch["labels"].flatten())


def normalised_by_a_sum(p: nn.ParameterDict, batch: Batch) -> Tensor:
    found = logits(p, batch)
    scaled = found / (found.detach().abs().sum() / 100)
    return F.cross_entropy(scaled.flatten(0, 1), batch["labels"].flatten())


def over_what_is_likely(p: nn.ParameterDict, batch: Batch) -> Tensor:
    found = logits(p, batch).log_softmax(-1)
    return -(found.sin() / (found > -3.0).sum()).sum()


# Losses to which all that their backward makes is proportional: it may run with the forward.
AHEAD: dict[str, Function] = {
    "cross entropy": cross_entropy(),
    "an ignored class": cross_entropy(ignore_index=17),
    "half precision": of_half_precision,
    "class weights": weighted,
    "labels shifted by padding": shifted_by_padding,
    "padded labels": half_padded,
    "capped logits": capped,
    "a teacher": from_a_teacher,
    "a number of items": over_items,
}
TWICE: dict[str, Function] = {
    "some tokens": over_some,
    "label smoothing": cross_entropy(label_smoothing=0.1),
    "z-loss": with_z_loss,
    "preferences": preferred,
    "a policy": of_a_policy,
    "a mean over all": normalised_by_all,
    "a sum over all": normalised_by_a_sum,
    "a count of what is made": over_what_is_likely,
}


@TYPES
@pytest.mark.parametrize("name", [*AHEAD, *TWICE])
def test_the_head_of_a_language_model(name: str, dtype: torch.dtype) -> None:
    function = {**AHEAD, **TWICE}[name]
    assert_trains_in_slices(Case(function, PARAMETERS, BATCH, ahead=name in AHEAD), dtype)


def shifted_by_slicing(p: nn.ParameterDict, batch: Batch) -> Tensor:
    found = logits(p, batch)[..., :-1, :].contiguous()
    return F.cross_entropy(found.view(-1, WORDS), batch["labels"][..., 1:].reshape(-1))


@TYPES
@pytest.mark.parametrize("tokens", [8, 5, 2])
def test_logits_of_which_the_last_is_cut_off(tokens: int, dtype: torch.dtype) -> None:
    """An odd number of them is left of each sentence: along tokens, what makes them stays whole."""
    batch = {**BATCH, "x": numbers(3, tokens, WIDTH), "labels": torch.arange(3 * tokens).view(3, tokens)}
    case = Case(shifted_by_slicing, PARAMETERS, batch)
    graph, given = captured(case, dtype)
    tried = trials(case, dtype, graph, given)
    seed = next(op for op in graph.ops if op.target == "aten._log_softmax.default")
    region = grown(graph, seed.id, (0,))
    assert isinstance(region, Region)
    for count in (2, 3, 7):
        assert_as_near(tile(graph, region, min(count, 3 * (tokens - 1))), tried, dtype)


@TYPES
@pytest.mark.parametrize("tokens", [8, 5, 2])
def test_logits_of_which_the_last_is_cut_off_are_never_whole_along_sentences(
    tokens: int, dtype: torch.dtype
) -> None:
    batch = {**BATCH, "x": numbers(4, tokens, WIDTH), "labels": torch.arange(4 * tokens).view(4, tokens)}
    case = Case(shifted_by_slicing, PARAMETERS, batch)
    graph, given = captured(case, dtype)
    seed = next(op for op in graph.ops if op.target == "aten._log_softmax.default")
    region = grown(graph, seed.id, ((0, 4),))
    assert isinstance(region, Region)
    shapes = {op.id: graph.tensors[op.outputs[0] or 0].shape for op in graph.ops if op.outputs}
    head = next(op for op in graph.ops if shapes[op.id] == (4 * tokens, WORDS))
    assert region.parts == (4,)
    assert head.id in region.ops
    tried = trials(case, dtype, graph, given)
    for ahead in (None, early(graph, region)):
        for count in (2, 3, 4):
            assert_as_near(tile(graph, region, count, ahead), tried, dtype)


# What is beside the table ---------------------------------------------------------------------------------


@TYPES
def test_where_all_labels_are_ignored_the_loss_is_no_number_and_gradients_are_zero(
    dtype: torch.dtype,
) -> None:
    batch = {**BATCH, "labels": torch.full((SENTENCES, TOKENS), -100)}
    graph, given = captured(Case(cross_entropy(), PARAMETERS, batch), dtype)
    region = region_at_the_largest(graph, ())
    ahead = early(graph, region)
    assert ahead is not None
    for way in (None, ahead):
        found = results_of(tile(graph, region, 3, way), given)
        assert found.pop("loss").isnan()
        assert found
        assert not any(gradient.any() for gradient in found.values())
    assert results_of(graph, given)["loss"].isnan()


def test_what_runs_ahead_of_its_gradient_is_made_once_and_scaled_by_any_gradient() -> None:
    case = Case(cross_entropy(), PARAMETERS, BATCH, ahead=True)
    graph, given = captured(case, torch.float32)
    region = region_at_the_largest(graph, ())
    tiled = tile(graph, region, 2, early(graph, region))
    assert sum(op.target == "aten._log_softmax.default" for op in tiled.ops) == 2
    assert {
        op.target for op in tiled.ops if op.phase is Phase.BACKWARD and op.target.endswith("mm.default")
    } == {"aten.mm.default"}
    for scale in (0.0, 1.0, -2.5, 1e4, 1e-6):
        numbers_of = {**given, "gradient of the loss": torch.tensor(scale)}
        found, expected = results_of(tiled, numbers_of), results_of(graph, numbers_of)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6 * abs(scale))


def test_a_forward_that_needs_a_sum_over_all_slices_is_run_again_in_the_backward() -> None:
    """It was once run with what had been added up so far."""
    graph, _ = captured(Case(normalised_by_a_sum, PARAMETERS, BATCH), torch.float32)
    region = region_at_the_largest(graph, ())
    assert early(graph, region) is None
    tiled = tile(graph, region, 2).tiled
    assert tiled is not None
    assert [block.count for block in tiled.blocks] == [2, 2, 2]
