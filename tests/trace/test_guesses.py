"""Numbers that a step reads: what is known of them, what is guessed, and what is bounded."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide.cost.measure import measure
from lowtide.errors import CannotTrace
from lowtide.ir.assumptions import Guess
from lowtide.ir.notation import graph_from_json, graph_to_json
from lowtide.text.documents import Reader
from lowtide.trace.dry_run import Trace, dry_run
from lowtide.trace.profile import profile
from lowtide.trace.ranges import Range

ROWS = torch.ones(8, 4)


class Choosing(nn.Module):
    """Goes one of two ways: `exp` where the condition holds, `tanh` where it does not."""

    def __init__(self, condition: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.condition = condition

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(rows)
        chosen: torch.Tensor = hidden.exp() if self.condition(hidden) else hidden.tanh()
        return chosen


def traced(forward: Callable[[torch.Tensor], torch.Tensor]) -> Trace:
    """A step of one layer, and then of `forward`."""
    layer = nn.Linear(4, 4)
    return dry_run(lambda: forward(layer(ROWS)).sum().backward(), model=layer)


def went(condition: Callable[[torch.Tensor], Any]) -> tuple[bool, tuple[Any, ...]]:
    """Which way a dry run goes, and what it has assumed."""
    model = Choosing(condition)
    trace = dry_run(lambda: model(ROWS).sum().backward(), model=model)
    return any(op.target == "aten.exp.default" for op in trace.graph.ops), trace.graph.assumptions


# Ranges ---------------------------------------------------------------------------------------------

DECIDED = [
    ("lt", 0.0, False), ("lt", 0.5, None), ("lt", 1.0, True), ("le", 1.0, True), ("le", -0.1, False),
    ("ge", 0.0, True), ("ge", 1.0, False), ("ge", 0.5, None), ("gt", 0.0, None), ("gt", 1.0, False),
    ("gt", -1.0, True), ("eq", 1.0, False), ("eq", 0.0, None), ("ne", 2.0, True), ("ne", 0.5, None),
]  # fmt: skip


@pytest.mark.parametrize(("comparison", "other", "expected"), DECIDED)
def test_bounds_decide_a_comparison_or_do_not(comparison: str, other: float, expected: bool | None) -> None:
    assert Range(0.0, 1.0, reached=False).decides(comparison, other) is expected


def test_a_bound_that_can_be_reached_decides_less() -> None:
    coin = Range(0, 1, reached=True)
    assert coin.decides("lt", 1) is None
    assert coin.decides("lt", 2) is True
    assert coin.decides("ge", 1) is None
    assert coin.decides("eq", 1) is None
    assert coin.most == 1
    assert 0.999 < Range(0.0, 1.0, reached=False).most < 1


KNOWN = {
    "a draw below nothing": (lambda _: torch.rand([]) < 0.0, False),
    "a draw in half precision": (lambda _: torch.rand([]).half() > 1.0, False),
    "uniform between others": (lambda _: torch.empty(1).uniform_(2, 3) > 2.5, None),
    "uniform beyond": (lambda _: torch.empty(1).uniform_(2, 3) > 1, True),
    "a die": (lambda _: torch.randint(1, 7, (1,)) > 6, False),
    "an index": (lambda hidden: hidden.topk(2).indices.max() < 4, True),
    "an argument": (lambda hidden: hidden.argmax(1)[0] >= 4, False),
    "a draw that was written over": (lambda _: torch.rand(2).add_(5)[0] < 0.0, None),
    "a constant": (lambda _: torch.tensor(3) > 2, True),
    "ones": (lambda _: torch.ones(3, dtype=torch.int64).sum() == 3, True),
    "a mask of pictures": (lambda _: F.interpolate(torch.ones(4, 1, 192, 192), size=6).sum() == 144, True),
    "floats made of whole numbers": (lambda _: ((1.0 - torch.ones(2, 3)) * -9.0 < 0).any(), False),
    "like another": (lambda hidden: torch.full_like(hidden, 7, dtype=torch.int64).max() == 7, True),
}


@pytest.mark.parametrize(("condition", "expected"), KNOWN.values(), ids=KNOWN)
def test_what_bounds_and_constants_decide_is_no_guess(
    condition: Callable[[torch.Tensor], Any], expected: bool | None
) -> None:
    way, assumed = went(condition)
    assert (way, assumed == ()) == (expected, True) if expected is not None else assumed != ()


def test_what_pytorch_asks_of_a_window_is_taken_to_be_in_order() -> None:
    """`istft` refuses windows that leave something out, and asks by comparing a condition with a one."""
    layer, window = nn.Linear(32, 32), torch.hann_window(8)

    def step() -> None:
        spectrum = torch.stft(layer(torch.ones(3, 32)), 8, 2, window=window, return_complex=True)
        torch.istft(spectrum, 8, 2, window=window).square().sum().backward()

    found = {
        guess.number for guess in dry_run(step, model=layer).graph.assumptions if isinstance(guess, Guess)
    }
    assert found == {"False"}


def test_a_mask_that_is_written_to_through_a_view_is_known_all_the_same() -> None:
    def condition(_: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(2, 3, dtype=torch.bool)
        row = mask[1]
        row.fill_(True)
        return mask.sum() == 3

    assert went(condition) == (True, ())


def test_what_is_written_over_with_unknown_numbers_is_forgotten_in_all_views() -> None:
    def condition(hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(2, 4, dtype=torch.bool)
        mask[1].copy_(hidden[1] > 0)
        return mask.any()

    assert went(condition)[1] != ()


def test_the_numbers_of_the_batch_are_not_written_to() -> None:
    given = torch.zeros(3, dtype=torch.int64)
    went(lambda _: given.add_(1).sum() == 3)
    assert given.tolist() == [0, 0, 0]


# Guesses --------------------------------------------------------------------------------------------


def asserted(hidden: torch.Tensor) -> bool:
    assert hidden.isnan().sum() == 0
    return True


GUESSED = {
    "asserted": (asserted, True),
    "all finite": (lambda hidden: torch.isfinite(hidden).all(), True),
    "not all finite": (lambda hidden: not torch.isfinite(hidden).all(), False),
    "any infinite": (lambda hidden: torch.isinf(hidden).any(), False),
    "any of either": (lambda hidden: torch.isinf(hidden).any() | torch.isnan(hidden).any(), False),
    "none is nan": (lambda hidden: (~torch.isnan(hidden)).all(), True),
    "layer dropped": (lambda _: torch.rand([]) < 0.1, False),
    "layer kept": (lambda _: torch.rand(1).item() > 0.1, True),
    "dropped by Python": (lambda _: random.random() < 0.9, False),
    "dropped by Python between bounds": (lambda _: random.uniform(0, 1) < 0.9, False),
    "dropped by numpy": (lambda _: np.random.uniform(0, 1) < 0.9, False),
    "dropped by numpy's rand": (lambda _: np.random.rand() < 0.9, False),
    "large": (lambda hidden: hidden.abs().max() > 1e4, False),
}


@pytest.mark.parametrize(("condition", "expected"), GUESSED.values(), ids=GUESSED)
def test_what_an_undisturbed_step_would_read_is_guessed_and_recorded(
    condition: Callable[[torch.Tensor], Any], expected: bool
) -> None:
    way, assumed = went(condition)
    assert way is expected
    assert len(assumed) == 1
    (guess,) = assumed
    assert isinstance(guess, Guess)
    assert guess.line.startswith("test_guesses.py:")


def test_python_and_numpy_draw_afterwards_as_if_nothing_had_been() -> None:
    random.seed(3)
    np.random.seed(3)
    went(lambda _: random.random() + np.random.rand() < 0.9)
    drawn = random.random(), np.random.rand()
    random.seed(3)
    np.random.seed(3)
    assert drawn == (random.random(), np.random.rand())


def test_a_guess_is_in_the_file_of_its_graph() -> None:
    model = Choosing(lambda hidden: torch.isinf(hidden).any())
    graph = dry_run(lambda: model(ROWS).sum().backward(), model=model).graph
    assert str(graph.assumptions[0]).startswith("taken to be False: test_guesses.py:")
    assert graph_from_json(Reader(graph_to_json(graph), "graph")).assumptions == graph.assumptions


def test_a_loop_that_waits_for_a_number_to_change_is_refused() -> None:
    def waiting(hidden: torch.Tensor) -> torch.Tensor:
        while torch.rand([]) > 0.5:
            hidden = hidden + 1
        return hidden

    with pytest.raises(CannotTrace, match=r"1000 times at one line.*`while torch.rand.*Bound the loop"):
        traced(waiting)


def test_a_tensor_that_is_handed_to_numpy_is_made_of_zeros_or_of_what_is_known() -> None:
    handed: list[Any] = []

    def counting(hidden: torch.Tensor) -> torch.Tensor:
        handed.extend([np.asarray(hidden.detach()), torch.arange(3).numpy()])
        return hidden

    trace = traced(counting)
    assert handed[0].shape == (8, 4)
    assert handed[1].tolist() == [0, 1, 2]
    assert len(trace.graph.assumptions) == 1
    assert "numpy" not in vars(torch.Tensor)


class Experts(nn.Module):
    """Rows go to experts, who get as many as are counted, as in JetMoE."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.experts = nn.Linear(4, 3), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        chosen = self.layer(rows).argmax(1)
        counts = F.one_hot(chosen, 3).sum(0).tolist()
        parts = rows[chosen.argsort()].split(counts)
        return torch.cat([expert(part).tanh() for expert, part in zip(self.experts, parts, strict=True)])


def test_parts_whose_sizes_are_guessed_add_up_to_the_whole() -> None:
    model = Experts()
    trace = dry_run(lambda: model(ROWS).sum().backward(), model=model)
    cut = [tensor.shape for tensor in trace.graph.tensors if tensor.shape in ((8, 4), (0, 4))]
    assert (0, 4) in cut
    assert any(str(each).startswith("taken to be all in the first part") for each in trace.graph.assumptions)


def test_parts_that_do_not_add_up_for_another_reason_are_an_error_as_ever() -> None:
    with pytest.raises(RuntimeError, match="split_sizes to sum exactly to 8"):
        traced(lambda hidden: hidden.split([int(hidden.sum()), 2])[0])


# Sizes ----------------------------------------------------------------------------------------------


def labels_of(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.argmax(1)


def ctc(hidden: torch.Tensor) -> torch.Tensor:
    scores = hidden.log_softmax(-1)[:, None].expand(8, 2, 4)
    targets, lengths = torch.ones(2, 3, dtype=torch.int64), torch.tensor([2, 3])
    return F.ctc_loss(scores, targets, torch.full((2,), 8, dtype=torch.int64), lengths)


SIZED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a mask": lambda hidden: hidden[hidden > -9],
    "a mask of rows": lambda hidden: hidden[(hidden > -9).any(-1)].exp(),
    "where": lambda hidden: hidden[torch.where(hidden[:, 0] > -9)[0]].exp(),
    "masked_select": lambda hidden: hidden.masked_select(hidden > -9).exp(),
    "the best of those": lambda hidden: hidden[:, 0][hidden[:, 1] > -9].topk(2)[0],
    "unique": lambda hidden: hidden * hidden.detach().unique().numel(),
    "CTC": ctc,
    "a count": lambda hidden: hidden * torch.bincount(hidden.topk(2, dim=1).indices.flatten(), minlength=4),
}


@pytest.mark.parametrize("forward", SIZED.values(), ids=SIZED)
def test_sizes_that_depend_on_numbers_are_as_large_as_they_can_be(
    forward: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """The numbers of this batch choose everything."""
    layer, rows = nn.Linear(4, 4), torch.randn(8, 4)

    def step() -> None:
        forward(layer(rows)).sum().backward()

    trace = profile(dry_run(step, model=layer), cache=tmp_path / "costs.sqlite")
    assert measure(step, device="cpu").growth_bytes <= trace.timeline.growth_bytes


def test_a_mask_that_is_known_to_choose_fewer_is_profiled_as_such(tmp_path: Path) -> None:
    layer, rows = nn.Linear(4, 4), torch.randn(8, 4)
    mask = torch.tensor([True] * 3 + [False] * 5)

    def step() -> None:
        layer(rows)[mask].exp().sum().backward()

    trace = profile(dry_run(step, model=layer), cache=tmp_path / "costs.sqlite")
    assert trace.graph.assumptions == ()
    chosen = next(op for op in trace.graph.ops if op.target == "aten.index.Tensor")
    assert [trace.graph.values[value].bytes for value in chosen.creates] == [3 * 4 * 4]


def test_a_count_of_what_topk_chose_is_as_long_as_there_are_choices() -> None:
    def counted(hidden: torch.Tensor) -> torch.Tensor:
        return hidden * torch.bincount(hidden.topk(2, dim=1).indices.flatten(), minlength=4)

    assert traced(counted).graph.assumptions == ()


def test_a_ctc_loss_whose_lengths_are_known_needs_no_guess() -> None:
    assert traced(ctc).graph.assumptions == ()


def test_a_size_that_nothing_bounds_is_refused_with_the_users_line_and_a_way_out() -> None:
    match = r"nothing bounds it: test_guesses\.py:\d+, in repeated: `return .*output_size"

    def repeated(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.repeat_interleave(labels_of(hidden), dim=0)

    with pytest.raises(CannotTrace, match=match):
        traced(repeated)


# Parts of a mask of choices ------------------------------------------------------------------------------


class SharedOut(nn.Module):
    """Every token has two experts, which are gone through one after the other, `times` over."""

    def __init__(self, times: int = 1, one_hot: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(16, 16)) for _ in range(4))
        self.times, self.one_hot = times, one_hot
        self.found: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = self.router(x).softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen, 4) if self.one_hot else (chosen.unsqueeze(-1).repeat(1, 1, 4) > 1).long()
        out = torch.zeros_like(x)
        self.found = []
        for _ in range(self.times):
            for number, weight in enumerate(self.weights):
                tokens, place = torch.where(mask[:, :, number])
                self.found.append(tokens.shape[0])
                out.index_add_(0, tokens, (x[tokens] @ weight).tanh() * shares[tokens, place, None])
        return out


def seen_by(model: SharedOut, x: torch.Tensor) -> tuple[Trace, list[int]]:
    """A dry run, and how many tokens each expert had in it."""
    found: list[int] = []

    def step() -> None:
        model(x).square().sum().backward()
        found.extend(model.found)

    return dry_run(step, model=model), found


def test_tokens_that_are_shared_out_are_taken_to_go_to_the_first() -> None:
    model, x = SharedOut(), torch.randn(256, 16)
    trace, found = seen_by(model, x)
    assert found == [512, 0, 0, 0]
    assert {guess.number for guess in trace.graph.assumptions if isinstance(guess, Guess)} == {
        "all in the first part"
    }

    def step() -> None:
        model(x).square().sum().backward()

    step()
    assert sum(model.found) == 512
    model.zero_grad()
    measured = measure(step, device="cpu").growth_bytes
    assert measured <= trace.timeline.growth_bytes <= 1.4 * measured


def test_a_mask_that_is_gone_through_again_is_shared_out_again() -> None:
    assert seen_by(SharedOut(times=2), torch.randn(8, 16))[1] == [16, 0, 0, 0, 16, 0, 0, 0]


def test_a_mask_that_may_choose_everything_in_each_part_is_taken_to() -> None:
    assert seen_by(SharedOut(one_hot=False), torch.randn(8, 16))[1] == [16, 16, 16, 16]
