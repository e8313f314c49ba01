"""Plans under DistributedDataParallel and FSDP2, with two processes on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.mark.structures import ParameterSet
from torch import nn

import lowtide
from lowtide.distributed import Replicated, Sharded, optimize, plan
from lowtide.distributed.ddp import replicated
from lowtide.distributed.fsdp import hollow
from lowtide.distributed.steps import ReplicatedRehearsal
from lowtide.errors import BadRequest
from lowtide.ir.graph import Role
from tests.helpers.effort import long_but

RANKS = Path(__file__).parents[1] / "helpers" / "ranks.py"
EXAMPLES = Path(__file__).parents[2] / "examples"
PATIENCE_SECONDS = 3600  # a hang is a failure, a slow machine is not
QUICK = (
    "ddp-gpt-plain",
    "ddp-gpt-layers",
    "ddp-gpt-ops",
    "fsdp-plain",
    "fsdp-60",
    "shapes",
    "quarrels",
)
LONG = (
    "ddp-gpt-backend",
    "ddp-gpt-layers-views",
    "ddp-gpt-plain-unused",
    "ddp-gpt-layers-unused",
    "ddp-gpt-ops-unused",
    "ddp-conv-plain",
    "ddp-conv-layers",
    "ddp-conv-ops",
    "reductions-plain",
    "reductions-layers",
    "reductions-ops",
    "reductions-backend",
    "fsdp-35",
    "accelerate-plain",
    "accelerate-60",
    "trainer-plain",
    "trainer-75",
)


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(Path(lowtide.__file__).parent.parent), *sys.path])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}


def torchrun(*arguments: str) -> str:
    """What two ranks print."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "marked as ready twice" not in done.stderr
    return done.stdout


class Found:
    """What each rank has left behind, by case. One launch runs the quick cases, another the long ones."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launches: dict[tuple[str, ...], bool] = {}  # and whether all went well

    def __call__(self, case: str) -> list[Mapping[str, Any]]:
        together = QUICK if case in QUICK else LONG
        if together not in self.launches:
            self.launches[together] = False
            torchrun(str(RANKS), str(self.folder), *together)
            self.launches[together] = True
        if not self.launches[together]:
            pytest.skip("the ranks have failed; the first test that asked for them says how")
        return [json.loads((self.folder / f"{case}.{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("ranks"))


# With an engine ---------------------------------------------------------------------------------------

PLANNED = {
    "ddp-gpt-layers": "ddp-gpt-plain",
    "ddp-gpt-layers-views": "ddp-gpt-plain",
    "ddp-gpt-ops": "ddp-gpt-plain",
    "ddp-gpt-backend": "ddp-gpt-plain",
    "ddp-gpt-layers-unused": "ddp-gpt-plain-unused",
    "ddp-gpt-ops-unused": "ddp-gpt-plain-unused",
    "ddp-conv-layers": "ddp-conv-plain",
    "ddp-conv-ops": "ddp-conv-plain",
    "fsdp-60": "fsdp-plain",
    "fsdp-35": "fsdp-plain",
    "accelerate-60": "accelerate-plain",
    "trainer-75": "trainer-plain",
}
PROMISING = sorted(case for case in PLANNED if not case.startswith(("accelerate", "trainer")))


def cases(names: Iterable[str]) -> list[ParameterSet]:
    return long_but(sorted(names), *(case for case in names if case in QUICK))


@pytest.mark.parametrize("case", cases(PLANNED))
def test_losses_gradients_and_weights_are_those_of_the_engine_without_a_plan(case: str, found: Found) -> None:
    for ours, plain in zip(found(case), found(PLANNED[case]), strict=True):
        for what in ("losses", "gradients", "weights"):
            assert ours[what] == plain[what], what
    assert found(case)[0]["losses"] != found(case)[1]["losses"]  # each rank has a batch of its own


@pytest.mark.parametrize("case", cases(PLANNED))
def test_a_rank_holds_less_than_without_a_plan(case: str, found: Found) -> None:
    for ours, plain in zip(found(case), found(PLANNED[case]), strict=True):
        assert ours["measured_bytes"] < (0.8 if "trainer" in case else 0.7) * plain["measured_bytes"]


@pytest.mark.long
def test_in_a_trainer_the_budget_is_kept_beside_the_copies_that_ddp_makes_of_outputs(found: Found) -> None:
    for rank in found("trainer-75"):
        assert rank["measured_bytes"] <= rank["budget_bytes"]


@pytest.mark.parametrize("case", cases(PROMISING))
def test_every_rank_holds_what_was_predicted_and_keeps_its_budget(case: str, found: Found) -> None:
    for ours in found(case):
        assert ours["measured_bytes"] == pytest.approx(ours["predicted_bytes"], rel=0.001)
        assert ours["measured_bytes"] <= ours["budget_bytes"]


@pytest.mark.long
@pytest.mark.parametrize("how", ["plain", "layers", "ops", "backend"])
def test_one_number_is_reduced_when_ddp_has_made_its_buckets_anew(how: str, found: Found) -> None:
    # NCCL lets go of the old ones when it is given something new to do; or else a step would hold both.
    once = 0 if how == "plain" else 1
    for rank in found(f"reductions-{how}"):
        first, second, third, fourth = rank["counts"]
        assert (second - third, third - fourth) == (once, 0), (first, second, third, fourth)


@pytest.mark.parametrize("case", cases(PROMISING))
def test_all_ranks_have_the_same_plan_to_the_last_byte(case: str, found: Found) -> None:
    first, second = found(case)
    assert first["plan"] == second["plan"]


@pytest.mark.parametrize("case", cases(["fsdp-60", "fsdp-35"]))
def test_recomputing_whole_blocks_gathers_no_weights_again(case: str, found: Found) -> None:
    # six blocks in the forward and in the backward, and once what is left of the model
    assert [rank["gathers"] for rank in found("fsdp-plain")] == [13, 13]
    assert [rank["gathers"] for rank in found(case)] == [13, 13]


def test_a_new_shape_that_all_ranks_meet_is_planned_for_by_all_of_them(found: Found) -> None:
    for rank in found("shapes"):
        assert len(rank["losses"]) == 3
        told = [text for text in rank["warnings"] if text.startswith("lowtide: the model meets inputs")]
        assert told == [
            "lowtide: the model meets inputs without a plan (int64[4, 64] instead of int64[8, 64]). They are "
            "planned for now, under the same budget, and remembered; so are others from now on."
        ]


def test_every_rank_hears_of_the_largest_number(found: Found) -> None:
    assert [rank["the largest number"] for rank in found("quarrels")] == [["10"], ["10"]]


# Ranks that cannot agree -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("another model", "rank 1 has a model GPT ("),
        ("an unequal batch", "rank 1 has inputs int64[7, 64], rank 0 has int64[8, 64]. Give every rank"),
        ("another budget", "rank 1 has a budget of 61%, rank 0 has 60%."),
    ],
)
def test_ranks_that_differ_are_told_so_on_every_rank(cause: str, words: str, found: Found) -> None:
    for rank in found("quarrels"):
        kind, text = rank[cause]
        assert kind == "RanksDisagree"
        assert text.startswith("the ranks cannot share a plan: ")
        assert words in text


def test_where_the_first_rank_cannot_plan_the_others_are_told_why(found: Found) -> None:
    first, second = (rank["an impossible budget"] for rank in found("quarrels"))
    assert first[0] == "InfeasibleBudget"
    assert second == ["RanksDisagree", f"rank 0 could not plan: {first[1]}"]


def ranks_without_a_launcher(case: str, folder: Path) -> list[int]:
    """Exit codes of two ranks that nobody stops when one of them fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    running = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(folder), case],
            env={**environment(), **meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(2)
    ]
    try:
        return [process.wait(PATIENCE_SECONDS) for process in running]
    finally:
        for process in running:
            process.kill()


def test_a_rank_that_has_gone_is_an_error_on_the_other_and_no_hang(tmp_path: Path) -> None:
    assert ranks_without_a_launcher("left-1", tmp_path) == [0, 3]
    (told,) = json.loads((tmp_path / "left-1.0.json").read_text())["told"]
    assert told.startswith("RanksDisagree: rank 1 did not answer within 3 s: it has failed or gone")


def test_a_first_rank_that_has_gone_is_an_error_on_the_other_and_no_hang(tmp_path: Path) -> None:
    assert ranks_without_a_launcher("left-0", tmp_path) == [3, 0]
    (told,) = json.loads((tmp_path / "left-0.1.json").read_text())["told"]
    assert told.startswith("RanksDisagree: rank 1 has lost the store that the process group was made with")


@pytest.mark.long
def test_a_rank_that_meets_a_new_shape_alone_is_an_error_on_both_and_no_hang(tmp_path: Path) -> None:
    ranks_without_a_launcher("alone", tmp_path)
    waiting, alone = (json.loads((tmp_path / f"alone.{rank}.json").read_text())["told"] for rank in range(2))
    assert alone[0].startswith("RanksDisagree: rank 0 did not answer within 30 s")
    assert len(waiting) == 1  # it waits for gradients, and the process group says that nobody sends them
    assert waiting[0].startswith(("RuntimeError: ", "DistBackendError: "))


# The parts ---------------------------------------------------------------------------------------------


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False))


def test_buckets_are_as_large_as_the_gradients_and_always_there() -> None:
    model = two_layers()
    trace = lowtide.fit(model, torch.randn(16, 4), torch.sum, profile=False).trace
    grown = replicated(trace, model, as_views=False)
    assert grown.peak_bytes == trace.peak_bytes + 4 * (4 * 8 + 8)
    assert grown.timeline.resident_bytes == trace.timeline.resident_bytes + 4 * (4 * 8 + 8)


def test_a_gradient_that_is_a_view_takes_its_place_in_the_bucket() -> None:
    model = two_layers()
    trace = lowtide.fit(model, torch.randn(16, 4), torch.sum, profile=False).trace
    grown = replicated(trace, model, as_views=True)
    assert grown.timeline.resident_bytes == trace.timeline.resident_bytes + 4 * (4 * 8 + 8)
    # once all gradients are there, they are the buckets
    assert grown.timeline.live_bytes[-1] == trace.timeline.live_bytes[-1]
    places = [value for value in grown.graph.values if value.name.startswith("DDP's buckets")]
    assert [(value.bytes, value.role) for value in places] == [(32, Role.GRADIENT), (128, Role.GRADIENT)]


def test_where_unused_parameters_are_looked_for_outputs_are_copied_and_then_dropped() -> None:
    model, batch = nn.Linear(16, 4096, bias=False), torch.randn(8, 16)
    growth = []
    for unused in (False, True):
        engine = Replicated(find_unused_parameters=unused)
        trace = ReplicatedRehearsal(model, batch, torch.sum, profile=False, engine=engine).plain
        growth.append([int(live) - trace.timeline.resident_bytes for live in trace.timeline.live_bytes])
    output = 8 * 4096 * 4
    assert growth[0][:2] == [output, output + 4]  # and the sum of it
    assert growth[1][:4] == [output, 2 * output, output, output + 4]
    assert growth[1][4:] == growth[0][2:]
    assert not model._forward_hooks


def test_frozen_parameters_have_no_bucket() -> None:
    model = two_layers()
    model[0].requires_grad_(False)
    trace = lowtide.fit(model, torch.randn(16, 4), torch.sum, profile=False).trace
    assert replicated(trace, model, as_views=False).peak_bytes == trace.peak_bytes + 4 * 8


def test_a_hollow_copy_has_the_same_names_and_shapes_ties_included_and_no_memory() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    copied = hollow(model)
    assert isinstance(copied, nn.Sequential)
    assert copied[2].weight is copied[0].weight
    assert all(tensor.is_meta for tensor in copied.state_dict().values())
    assert [(name, tuple(tensor.shape)) for name, tensor in copied.state_dict().items()] == [
        (name, tuple(tensor.shape)) for name, tensor in model.state_dict().items()
    ]
    assert [parameter.requires_grad for parameter in copied.parameters()] == [
        parameter.requires_grad for parameter in model.parameters()
    ]
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


# Refusals ----------------------------------------------------------------------------------------------


def test_without_a_process_group_it_says_what_to_do() -> None:
    with pytest.raises(BadRequest, match=r"no process group.*torchrun.*use lowtide\.optimize"):
        plan(two_layers(), torch.randn(2, 4), engine=Replicated(), budget="60%", loss=torch.sum)


def test_an_engine_is_one_of_the_two() -> None:
    with pytest.raises(BadRequest, match=r"the engine is 'ddp'; it is Replicated\(\)"):
        plan(two_layers(), torch.randn(2, 4), engine="ddp", budget="60%")  # type: ignore[arg-type]


def test_shards_are_planned_by_layers_and_cut_where_they_are_wrapped() -> None:
    engine = Sharded(lambda model: model)
    with pytest.raises(BadRequest, match="auto plans op by op, and FSDP2 gathers weights module by module"):
        plan(two_layers(), torch.randn(2, 4), engine=engine, budget="60%", method="auto")
    with pytest.raises(BadRequest, match="a sharded one is cut around the modules that `shard` wraps"):
        plan(two_layers(), torch.randn(2, 4), engine=engine, budget="60%", modules=["0"])
    model = two_layers()
    with pytest.raises(BadRequest, match="an optimizer for shards is made once the model is sharded"):
        plan(model, torch.randn(2, 4), engine=engine, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(BadRequest, match="planned before it is sharded, and that needs an example"):
        optimize(two_layers(), engine=engine, budget="60%")
    with pytest.raises(BadRequest, match="on_new_shape is 'guess'; it is one of plan, error"):
        optimize(two_layers(), engine=engine, budget="60%", on_new_shape="guess")


# Examples ----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_the_example_trains_on_two_ranks_within_its_budget(name: str) -> None:
    printed = torchrun(str(EXAMPLES / f"{name}.py"))
    assert printed.count("step 3: loss") == 2
    assert "every rank holds" in printed
