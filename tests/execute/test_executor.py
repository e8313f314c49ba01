"""The executor: the same bits in every memory, real memory as promised, refusals with their reasons."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide import zoo
from lowtide.cost.measure import growth, record_cpu
from lowtide.errors import BadRequest, CannotRun
from lowtide.execute.executor import Executor, evaluate
from lowtide.execute.memory import Memory
from lowtide.execute.out_variants import Way
from lowtide.ir.graph import Graph, Op, Origin, Phase, Ref, Role, Symbol, Tensor, Value
from lowtide.ir.schedule import Compute, Free, Schedule, Step, straight
from lowtide.trace.inputs import named_inputs
from tests.helpers.effort import long_but

SMALL = {
    "mlp": {"width": 32},
    "lstm": {"tokens": 4, "width": 16},
    "gpt": {"layers": 2, "width": 32, "heads": 2, "tokens": 16, "vocab": 50},
    "vit": {"image": 32, "layers": 2, "width": 32, "heads": 2},
    "resnet18": {"image": 32},
    "unet": {"image": 32, "width": 8},
    "densenet121": {"image": 32},
}


def flat(number: int, value: int, count: int) -> Tensor:
    return Tensor(number, value, (count,), (1,), 0, "float32")


def doubled() -> Graph:
    """a → b = exp(a) → c = b + b, kept; b is dead then."""
    values = (Value(0, 16, Role.BATCH, "a"), *(Value(n, 16, Role.INTERMEDIATE, "bc"[n - 1]) for n in (1, 2)))
    ops = (
        Op(0, "aten.exp.default", (Ref(0),), (), (1,), (0,), (1,)),
        Op(1, "aten.add.Tensor", (Ref(1), Ref(1)), (("alpha", 1),), (2,), (1,), (2,)),
    )
    tensors = tuple(flat(n, n, 4) for n in range(3))
    return Graph("doubled", Origin.JOINT, "cpu", ops, values, tensors, frozenset([2]), (("c", 2),))


A = torch.tensor([0.0, 1.0, -1.0, 2.0])


@pytest.mark.parametrize("memory", Memory)
def test_a_small_graph_in_every_memory(memory: Memory) -> None:
    (c,) = evaluate(doubled(), {"a": A}, [2], memory)
    assert torch.equal(c, A.exp() + A.exp())


def test_what_is_not_kept_cannot_be_looked_at() -> None:
    with pytest.raises(BadRequest, match="'b' is not there: it is dead at the end of the step"):
        evaluate(doubled(), {"a": A}, [1])


@pytest.mark.parametrize(
    ("memory", "requests", "allocations", "kept"),
    [(Memory.NAIVE, 2, 2, 0), (Memory.POOL, 2, 0, 32), (Memory.STATIC, 0, 0, 64), (Memory.DIRECT, 0, 0, 0)],
)
def test_what_handing_out_memory_takes_from_the_second_step_on(
    memory: Memory, requests: int, allocations: int, kept: int
) -> None:
    """In the arena `c` lies where `b` was: 16 bytes, rounded to 64."""
    executor = Executor(doubled(), {"a": A}, memory=memory)
    executor.run()
    executor.run()
    assert (executor.tally.requests, executor.tally.allocations) == (requests, allocations)
    assert executor.kept_bytes == kept


def test_a_step_in_static_memory_allocates_nothing_and_writes_in_place() -> None:
    executor = Executor(doubled(), {"a": A})
    executor.run()
    blocks, _ = record_cpu(executor.run)
    assert blocks == []
    assert torch.equal(executor.results["c"], A.exp() + A.exp())


def test_another_batch_is_read_from_where_it_is() -> None:
    executor = Executor(doubled(), {"a": A})
    executor.run()
    many = torch.stack([A, A + 1, A + 2])
    executor.bind({"a": many[1]})  # a part of something larger
    executor.run()
    assert torch.equal(executor.results["c"], (A + 1).exp() + (A + 1).exp())
    many[1].zero_()
    executor.run()
    assert executor.results["c"].tolist() == [2.0] * 4


# Real models ------------------------------------------------------------------------------------------


def captured(name: str) -> tuple[zoo.Workload, Graph]:
    torch.manual_seed(0)
    work = zoo.workload(name, zoo.Sizes(batch=2, **SMALL[name]))
    return work, lowtide.capture(work.model, work.kwargs or work.args, work.loss)


def given(work: zoo.Workload, model: nn.Module, graph: Graph) -> dict[str, torch.Tensor]:
    inputs = named_inputs(model, work.kwargs or work.args, work.loss)
    known = {graph.values[value].name for value in graph.resident}
    owned = dict([*model.named_parameters(), *model.named_buffers()])
    found = {**inputs, **owned, "gradient of the loss": torch.ones(())}
    return {name: tensor for name, tensor in found.items() if name in known}


@pytest.mark.parametrize("name", long_but(SMALL, *(set(SMALL) - {"densenet121"})))
def test_every_memory_leaves_the_bits_of_plain_training(name: str) -> None:
    work, graph = captured(name)
    plain = copy.deepcopy(work.model)
    torch.manual_seed(1)
    output = plain(*work.args, **work.kwargs)
    loss = output if work.loss is None else work.loss(output)
    loss.backward()
    for memory in Memory:
        model = copy.deepcopy(work.model)
        executor = Executor(graph, given(work, model, graph), memory=memory)
        torch.manual_seed(1)
        executor.run()
        results = executor.results
        assert torch.equal(results["loss"], loss)
        for key, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(results[f"{key}.grad"], parameter.grad), (memory, key)
        for (key, expected), buffer in zip(plain.named_buffers(), model.buffers(), strict=True):
            assert torch.equal(buffer, expected), (memory, key)


def test_an_op_that_runs_again_does_not_update_its_statistics_again() -> None:
    work, graph = captured("resnet18")
    norm = next(op for op in graph.ops if op.updates)
    steps = list(straight(graph).steps)
    at = steps.index(Compute(norm.id))
    again: list[Step] = [*(Free(value) for value in norm.creates), Compute(norm.id)]
    schedule = Schedule((*steps[: at + 1], *again, *steps[at + 1 :]))
    once, twice = copy.deepcopy(work.model), copy.deepcopy(work.model)
    for model, order in ((once, straight(graph)), (twice, schedule)):
        Executor(graph, given(work, model, graph), schedule=order, memory="pool").run()
    for expected, found in zip(once.buffers(), twice.buffers(), strict=True):
        assert torch.equal(found, expected)


class Normalised(nn.Module):
    """A BatchNorm before a convolution, which holds its result: holding its input as well is a waste."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left: torch.Tensor = self.leave(self.norm(self.enter(x)))
        return left.square().mean()


def test_a_batch_norm_in_place_trains_the_same_up_to_rounding_in_less_memory() -> None:
    torch.manual_seed(0)
    model, images = Normalised(), torch.randn(4, 3, 16, 16)
    nn.init.uniform_(model.norm.weight, 0.5, 2.0)
    nn.init.uniform_(model.norm.bias, -1.0, 1.0)
    graph = lowtide.capture(model, (images,))
    given = {**dict(model.named_parameters()), **dict(model.named_buffers()), "x": images}
    given["gradient of the loss"] = torch.ones(())
    usual = Executor(graph, given)
    usual.run()
    expected = {name: tensor.clone() for name, tensor in usual.results.items()}
    rewritten = Executor(lowtide.normalise_from_output(graph), given)
    rewritten.run()
    assert rewritten.arena_bytes < usual.arena_bytes
    for name, tensor in rewritten.results.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5)


def test_moves_are_counted_by_the_way_results_are_written() -> None:
    work, graph = captured("resnet18")
    executor = Executor(graph, given(work, work.model, graph))
    executor.run()
    written, moved = executor.moves()
    assert (written.way, moved.way) == (Way.WRITTEN, Way.MOVED)
    assert "aten.relu.default" in written.targets
    assert "aten.convolution.default" in moved.targets
    making = [op for op in graph.ops if op.creates]
    assert written.computes + moved.computes == len(making)
    assert written.bytes + moved.bytes == sum(graph.values[v].bytes for op in making for v in op.creates)


def test_what_one_op_takes_beside_the_arena_is_what_is_measured() -> None:
    torch.manual_seed(0)
    work = zoo.workload("resnet18", zoo.Sizes(batch=2, image=32))
    graph = lowtide.profile(lowtide.capture(work.model, work.args, work.loss))
    executor = Executor(graph, given(work, work.model, graph))
    executor.run()
    executor.run()
    blocks, _ = record_cpu(executor.run)
    assert max(growth(blocks)) == executor.extra_bytes() > 0


# Refusals ---------------------------------------------------------------------------------------------


def test_something_resident_that_is_missing_unknown_or_of_another_size_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"'a' is there before the step begins, and was not given"):
        Executor(doubled(), {})
    with pytest.raises(BadRequest, match="nothing resident called 'z'"):
        Executor(doubled(), {"a": A, "z": A})
    with pytest.raises(BadRequest, match=r"'a' has 16 bytes in the graph; what is given .* over 20"):
        Executor(doubled(), {"a": torch.zeros(5)})
    executor = Executor(doubled(), {"a": A})
    with pytest.raises(BadRequest, match=r"'a' was torch.float32 of shape \(4,\).* and is now torch.float64"):
        executor.bind({"a": A.double()})


def test_an_unknown_memory_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"no memory called 'heap'\. There are: naive, pool, static, direct"):
        Executor(doubled(), {"a": A}, memory="heap")


def test_a_layout_is_for_static_memory() -> None:
    layout = lowtide.lay_out(doubled())
    with pytest.raises(BadRequest, match="a layout is for static memory, and pool was asked for"):
        Executor(doubled(), {"a": A}, memory="pool", layout=layout)


def test_only_a_step_on_cuda_can_be_recorded() -> None:
    executor = Executor(doubled(), {"a": A})
    executor.run()
    with pytest.raises(BadRequest, match="only a step that has run in static memory on CUDA"):
        executor.record()


def test_an_op_that_cannot_be_called_is_named() -> None:
    graph = doubled()
    strange = replace(graph.ops[0], args=(Ref(0), Symbol("object", "Generator")))
    with pytest.raises(CannotRun, match=r"op 0 \(aten.exp\) takes an argument of type Generator"):
        Executor(replace(graph, ops=(strange, graph.ops[1])), {"a": A})
    update = Op(2, "lowtide.optimizer.step", (), (), (), (), (), phase=Phase.OPTIMIZER, module="optimizer")
    with pytest.raises(CannotRun, match=r"op 2 \(optimizer: lowtide.optimizer\) stands for something"):
        Executor(replace(graph, ops=(*graph.ops, update)), {"a": A})


def test_a_part_of_a_tensor_that_is_written_by_offset_is_refused() -> None:
    tensors = (
        Tensor(0, 0, (2,), (1,), 2, "float32"),
        Tensor(1, 1, (2,), (1,), 0, "float32"),
        Tensor(2, 2, (2,), (1,), 2, "float32"),
    )
    args = (Ref(0), Ref(1), (2,), (1,), 1)
    op = Op(0, "aten.as_strided_scatter.default", args, (), (2,), (0, 1), (2,))
    values = tuple(Value(n, size, Role.BATCH, "abc"[n]) for n, size in enumerate((16, 8, 16)))
    graph = Graph("beside", Origin.JOINT, "cpu", (op,), values, tensors, frozenset([2]))
    with pytest.raises(CannotRun, match="may look at what lies beside the tensor"):
        evaluate(graph, {"a": A, "b": A[:2]}, [2])
