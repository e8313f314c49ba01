"""In place: what may be overwritten, what may not and why, and that PyTorch's kernels agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from lowtide.arena.batch_norm import FROM_OUTPUT, normalise_from_output
from lowtide.arena.in_place import OVERWRITES, TakeOver, obstacles, overwritable, take_overs
from lowtide.execute.out_variants import writer
from lowtide.ir.graph import Graph, Phase, Ref, Role, Tensor
from lowtide.ir.schedule import Compute, Free, Schedule, straight
from lowtide.ir.validate import validate
from tests.helpers.effort import examples
from tests.helpers.handmade import Drawing, chain, steps
from tests.helpers.layouts import stepped


def reasons(graph: Graph, schedule: Schedule | None = None) -> dict[int, tuple[int | None, str]]:
    """Candidate and reason, by position."""
    found = obstacles(graph, schedule or straight(graph))
    return {obstacle.position: (obstacle.candidate, obstacle.reason) for obstacle in found}


def pointwise(*targets: str, size: int = 8) -> Drawing:
    """x → v1 → v2 …, one op after the other."""
    drawing = Drawing()
    last = drawing.value("x", size, Role.BATCH)
    for number, target in enumerate(targets, 1):
        last, source = drawing.value(f"v{number}", size), last
        drawing.op(target, [source], [last])
    return drawing


# By hand --------------------------------------------------------------------------------------------


def test_a_result_takes_over_what_only_it_still_reads() -> None:
    graph = pointwise("aten.mul.Tensor", "aten.add.Tensor", "aten.exp.default").graph(outputs=[3])
    # steps: 0 1 f1 2 f2
    assert take_overs(graph, straight(graph)) == (TakeOver(1, 2, 1), TakeOver(3, 3, 2))
    assert reasons(graph) == {0: (0, "its input 'x' is resident")}


def test_sigmoid_cannot_be_overwritten_when_its_backward_reads_what_it_made() -> None:
    drawing = pointwise("aten.neg.default", "aten.sigmoid.default", "aten.exp.default")
    gradient = drawing.value("gradient", 8)
    drawing.op("aten.sigmoid_backward.default", [3, 2], [gradient], phase=Phase.BACKWARD, module="gate")
    graph = drawing.graph(outputs=[gradient])
    # steps: 0 1 f1 2 3 f2 f3; the backward overwrites its first argument
    assert take_overs(graph, straight(graph)) == (TakeOver(1, 2, 1), TakeOver(4, 4, 3))
    assert reasons(graph)[3] == (2, "'v2' is still needed by the backward of sigmoid in 'gate'")


def test_of_several_inputs_the_first_that_dies_is_overwritten() -> None:
    drawing = pointwise("aten.neg.default", "aten.neg.default")
    total, last = drawing.value("total", 8), drawing.value("last", 8)
    drawing.op("aten.add.Tensor", [1, 2], [total])
    drawing.op("aten.add.Tensor", [1, total], [last])
    graph = drawing.graph(outputs=[last])
    assert list(overwritable(graph, graph.ops[2])) == [1, 2]
    # steps: 0 1 2 f2 3 f1 f3
    assert take_overs(graph, straight(graph)) == (TakeOver(2, 3, 2), TakeOver(4, 4, 1))
    assert reasons(graph)[1] == (1, "'v1' is still needed by add")


def test_what_was_in_the_way_of_the_first_compute_may_be_gone_at_the_second() -> None:
    drawing = pointwise("aten.neg.default", "aten.exp.default")
    loss = drawing.value("loss", 8)
    drawing.op("aten.mul.Tensor", [1, 2], [loss])
    graph = drawing.graph(outputs=[loss])
    again = steps(0, 1, "f1", "f2", 0, 1, 2, "f1", "f2")
    assert take_overs(graph, again) == (TakeOver(1, 2, 1), TakeOver(6, 3, 1))
    assert reasons(graph, again) == {
        0: (0, "its input 'x' is resident"),
        4: (0, "its input 'x' is resident"),
        5: (1, "'v1' is still needed by mul"),
    }


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("aten.mm.default", "each result of mm needs whole rows and columns of its inputs"),
        ("aten._log_softmax.default", "each result of _log_softmax needs a whole row of its input, which"),
        ("aten.avg_pool2d.default", "each result of avg_pool2d needs a neighbourhood of its input, which"),
        ("aten.sum.default", "sum sums over its input: the result has another shape"),
        ("aten.cat.default", "cat moves elements: it would overwrite some before it reads them"),
        ("aten.roll.default", "roll is not known to read each element before it writes the same one"),
    ],
)
def test_an_op_that_cannot_says_why(target: str, reason: str) -> None:
    graph = pointwise("aten.neg.default", target).graph(outputs=[2])
    candidate, found = reasons(graph)[1]
    assert candidate == 1
    assert found.startswith(reason)


def test_outputs_other_devices_other_sizes_and_lazy_frees_are_in_the_way() -> None:
    kept = pointwise("aten.neg.default", "aten.exp.default").graph(outputs=[1, 2])
    assert reasons(kept)[1] == (1, "'v1' outlives the step")
    lazy = pointwise("aten.neg.default", "aten.exp.default", "aten.exp.default").graph(outputs=[3])
    assert reasons(lazy, steps(0, 1, 2, "f1", "f2"))[1] == (
        1,
        "'v1' is not freed before the next op, though nobody reads it again",
    )
    drawing = Drawing("cuda:0")
    values = [drawing.value("far", 8, device="cpu"), drawing.value("small", 4), drawing.value("sum", 8)]
    drawing.op("aten.ones.default", [], values[:2])
    drawing.op("aten.add.Tensor", values[:2], values[2:])
    apart = drawing.graph(outputs=values[2:])
    assert take_overs(apart, straight(apart)) == ()
    assert reasons(apart)[1] == (values[0], "'far' is on another device")
    narrow = replace(apart, ops=(apart.ops[0], replace(apart.ops[1], args=(Ref(1), Ref(0)))))
    assert reasons(narrow)[1] == (values[1], "sizes differ: 'small' has 4 bytes, the result 8")


def test_an_op_without_inputs_or_one_that_mutates_has_no_candidate_to_overwrite() -> None:
    drawing = Drawing()
    made, other = drawing.value("made", 8), drawing.value("other", 8)
    drawing.op("aten.ones.default", [], [made])
    drawing.op("aten.add.Tensor", [made], [other], [made])
    graph = drawing.graph(outputs=[other])
    assert take_overs(graph, straight(graph)) == ()
    assert reasons(graph) == {
        0: (None, "ones reads no tensor"),
        1: (made, "add changes an input already"),
    }
    assert take_overs(chain(), straight(chain())) == (TakeOver(4, 5, 4),)  # relu_ creates nothing
    assert 1 not in reasons(chain())


# Views ----------------------------------------------------------------------------------------------


def seen_as(argument: Tensor, result: Tensor, other: Tensor | None = None) -> Graph:
    """y = x + x, where the first x, the second x and y are looked at like this."""
    drawing = Drawing()
    batch, x, y = (drawing.value(name, 48) for name in ("batch", "x", "y"))
    drawing.op("aten.relu.default", [batch], [x])
    drawing.op("aten.add.Tensor", [x], [y])
    graph = drawing.graph(outputs=[y])
    views = [replace(argument, id=3, value=x), replace(result, id=4, value=y)]
    views.append(replace(other or argument, id=5, value=x))
    add = replace(graph.ops[1], args=(Ref(3), Ref(5)), outputs=(4,))
    return validate(replace(graph, ops=(graph.ops[0], add), tensors=(*graph.tensors, *views)))


PLAIN = Tensor(0, 0, (3, 4), (4, 1), 0, "float32")


@pytest.mark.parametrize(
    ("argument", "result", "other", "may"),
    [
        (PLAIN, PLAIN, None, True),
        (PLAIN, replace(PLAIN, dtype="int32"), None, True),  # each element still lies where it lay
        (PLAIN, replace(PLAIN, dtype="float16"), None, False),
        (replace(PLAIN, stride=(1, 3)), PLAIN, None, False),  # transposed
        (replace(PLAIN, shape=(2, 4)), PLAIN, None, False),
        (replace(PLAIN, shape=(2, 4), offset=4), replace(PLAIN, shape=(2, 4)), None, False),
        (PLAIN, PLAIN, replace(PLAIN, stride=(0, 1)), False),  # its first row, read with every row
    ],
)
def test_result_and_argument_must_lie_in_memory_alike(
    argument: Tensor, result: Tensor, other: Tensor | None, may: bool
) -> None:
    graph = seen_as(argument, result, other)
    assert take_overs(graph, straight(graph)) == ((TakeOver(1, 2, 1),) if may else ())
    if not may:
        assert reasons(graph)[1] == (1, "the result does not lie in memory as 'x' does")


def test_complex_numbers_are_not_written_over() -> None:
    numbers = replace(PLAIN, shape=(3, 2), stride=(2, 1), dtype="complex64")
    graph = seen_as(numbers, numbers, None)
    assert take_overs(graph, straight(graph)) == ()
    assert reasons(graph)[1] == (
        1,
        "kernels round complex numbers otherwise where they write over them, and 'x' has some",
    )


@pytest.mark.parametrize("target", ["aten.mul.Tensor", "aten.tanh_backward.default"])
def test_a_kernel_for_real_numbers_rounds_alike_wherever_it_writes(target: str) -> None:
    for kind in (torch.float32, torch.float64, torch.bfloat16):
        x, y = torch.randn(2, 4, 33, 17, generator=torch.Generator().manual_seed(0)).to(kind)
        args, over = [x, y.mT.contiguous().mT], x.clone()
        plain = torch.empty_like(x)
        writer(target, "cpu", args).bind(args, {}, [plain])()
        writer(target, "cpu", args).bind([over, args[1]], {}, [over])()
        assert torch.equal(over, plain)


def test_two_results_in_one_value_are_not_written_over_anything() -> None:
    graph = pointwise("aten.neg.default", "aten.exp.default").graph(outputs=[2])
    twice = replace(graph, ops=(graph.ops[0], replace(graph.ops[1], outputs=(2, 2))))
    assert take_overs(twice, straight(twice)) == ()
    assert reasons(twice)[1][1] == "the first result of exp is not a value of its own on the device"


def test_an_argument_that_is_looked_at_but_not_read_is_not_overwritten() -> None:
    drawing = pointwise("aten.neg.default", "aten.exp.default")
    graph = drawing.graph(outputs=[2])
    blind = replace(graph, ops=(graph.ops[0], replace(graph.ops[1], reads=())))
    assert list(overwritable(blind, blind.ops[1])) == []
    assert reasons(blind)[2] == (None, "exp is given no tensor that it could write over")


# Properties -----------------------------------------------------------------------------------------


@settings(max_examples=examples(200))
@given(stepped())
def test_nobody_reads_what_was_taken_over_and_every_other_op_has_a_reason(
    case: tuple[Graph, Schedule],
) -> None:
    graph, schedule = case
    overs = take_overs(graph, schedule)
    for over in overs:
        op = schedule.steps[over.position]
        assert isinstance(op, Compute)
        assert graph.ops[op.op].target in OVERWRITES
        assert graph.values[over.input].bytes == graph.values[over.output].bytes
        after = schedule.steps[over.position + 1 :]
        until = next(i for i, step in enumerate(after) if step == Free(over.input))
        assert not any(isinstance(step, Compute) for step in after[:until])
    explained = [obstacle.position for obstacle in obstacles(graph, schedule)]
    assert len({over.position for over in overs}) == len(overs)
    assert not {over.position for over in overs} & set(explained)
    made = {
        i
        for i, step in enumerate(schedule)
        if isinstance(step, Compute)
        and any(graph.values[v].device == graph.device for v in graph.ops[step.op].creates)
    }
    assert sorted({*explained, *(over.position for over in overs)}) == sorted(made)


# PyTorch agrees -------------------------------------------------------------------------------------

NUMBERS: dict[str, tuple[Any, ...]] = {  # arguments beyond the tensors
    "leaky_relu.default": (0.1,),
    "clamp.default": (-0.5, 0.5),
    "clamp_min.default": (0.1,),
    "clamp_max.default": (0.1,),
    "pow.Tensor_Scalar": (2,),
    **dict.fromkeys(("add.Scalar", "sub.Scalar", "mul.Scalar", "div.Scalar"), (3,)),
    "threshold_backward.default": (0,),
    "leaky_relu_backward.default": (0.1, False),
    "hardtanh_backward.default": (-1, 1),
    "softplus_backward.default": (1, 20),
}
TWO = {target for target, positions in OVERWRITES.items() if 1 in positions}


def example(target: str) -> list[Any]:
    """Arguments to call the op with."""
    torch.manual_seed(0)
    x, y, z = (torch.rand(4, 3, 5) + 0.1 for _ in range(3))
    short = target.removeprefix("aten.")
    special: dict[str, list[Any]] = {
        "where.self": [x > y, x, y],
        "masked_fill.Scalar": [x, x > y, 7.0],
        "native_dropout_backward.default": [x, y > z, 2.0],
        "addcmul.default": [x, y, z],
        "addcdiv.default": [x, y, z],
        "elu_backward.default": [x, 1.0, 1.0, 1.0, False, y - 0.5],
        "native_batch_norm.default": [x, y[0, :, 0], z[0, :, 0], None, None, True, 0.1, 1e-5],
        FROM_OUTPUT: [x, y, *(z[0, :, i] for i in range(4)), [True] * 3],
    }
    return special.get(short) or [x, *([y] if target in TWO else []), *NUMBERS.get(short, ())]


@pytest.mark.parametrize("target", OVERWRITES)
def test_an_op_of_the_table_makes_the_same_when_it_writes_over_its_argument(target: str) -> None:
    bind = writer(target, "cpu", example(target)).bind
    results = [torch.empty(4, 3, 5)]
    if "batch_norm" in target:
        results += [torch.empty(3), torch.empty(3)]
    bind(example(target), {}, results)()
    for position in OVERWRITES[target]:
        args = example(target)
        over = [args[position], *map(torch.empty_like, results[1:])]
        bind(args, {}, over)()
        assert all(torch.equal(mine, plain) for mine, plain in zip(over, results, strict=True)), position


# BatchNorm from its output --------------------------------------------------------------------------


def normalised(training: bool = True) -> Graph:
    """x → neg → BatchNorm → GELU, and back. Values, 64 bytes unless said otherwise:

    resident   0 x   1 weight 8   2 bias 8
    op 0 neg → 3 before   op 1 BatchNorm → 4 normed, 5 mean 8, 6 invstd 8   op 2 GELU (normed) → 7 active
    op 3 GELU's backward (active, normed) → 8 grad   op 4 BatchNorm's (grad, before, …) → 9, 10 8, 11 8
    """
    drawing = Drawing()
    for name in ("x", "weight", "bias", "before", "normed", "mean", "invstd", "active", "grad", "x.grad"):
        drawing.value(name, 8 if name in ("weight", "bias", "mean", "invstd") else 64)
    for name in ("weight.grad", "bias.grad"):
        drawing.value(name, 8)
    drawing.op("aten.neg.default", [0], [3])
    numbers = (None, None, training, 0.1, 1e-5)
    drawing.op("aten.native_batch_norm.default", [3, 1, 2], [4, 5, 6], extra=numbers, module="bn")
    drawing.op("aten.gelu.default", [4], [7])
    drawing.op("aten.gelu_backward.default", [7, 4], [8], phase=Phase.BACKWARD)
    drawing.op("aten.native_batch_norm_backward.default", [8, 3, 1, 5, 6], [9, 10, 11], phase=Phase.BACKWARD)
    graph = drawing.graph(outputs=[9, 10, 11])
    args = (Ref(8), Ref(3), Ref(1), None, None, Ref(5), Ref(6), training, 1e-5, (True, True, False))
    return replace(graph, ops=(*graph.ops[:4], replace(graph.ops[4], args=args)))


def test_a_backward_from_the_output_lets_the_batch_norm_write_over_its_input() -> None:
    graph = normalised()
    # steps: 0 1 2 3 f4 f7 4 …
    assert take_overs(graph, straight(graph)) == (TakeOver(3, 8, 7),)
    assert reasons(graph)[1] == (3, "'before' is still needed by the backward of native_batch_norm")
    rewritten = normalise_from_output(graph)
    op = rewritten.ops[4]
    assert op.target == FROM_OUTPUT
    assert op.args == (Ref(8), Ref(4), Ref(1), Ref(2), Ref(5), Ref(6), (True, True, False))
    assert op.reads == (8, 4, 1, 2, 5, 6)
    assert (op.outputs, op.creates) == (graph.ops[4].outputs, graph.ops[4].creates)
    assert rewritten.ops[:4] == graph.ops[:4]
    overs = take_overs(rewritten, straight(rewritten))  # 0 1 f3 2 3 f7 4 f4 …
    assert overs == (TakeOver(1, 4, 3), TakeOver(4, 8, 7), TakeOver(6, 9, 8))


def test_cudnns_backward_has_its_arguments_elsewhere_and_wants_every_gradient() -> None:
    graph = normalised()
    forward = replace(graph.ops[1], target="aten.cudnn_batch_norm.default")
    args = (Ref(3), Ref(8), Ref(1), None, None, Ref(5), Ref(6), 1e-5)
    backward = replace(graph.ops[4], target="aten.cudnn_batch_norm_backward.default", args=args)
    op = normalise_from_output(replace(graph, ops=(graph.ops[0], forward, *graph.ops[2:4], backward))).ops[4]
    assert op.args == (Ref(8), Ref(4), Ref(1), Ref(2), Ref(5), Ref(6), (True, True, True))


def test_a_batch_norm_that_does_not_train_or_whose_output_is_changed_stays_as_it_is() -> None:
    graph = normalised(training=False)
    assert normalise_from_output(graph) == graph
    graph = normalised()
    changing = replace(graph.ops[2], target="aten.relu_.default", mutates=(4,))
    changed = replace(graph, ops=(*graph.ops[:2], changing, *graph.ops[3:]))
    assert normalise_from_output(changed) == changed
    alone = replace(
        graph, ops=(graph.ops[0], replace(graph.ops[1], target="aten.other.default"), *graph.ops[2:])
    )
    assert normalise_from_output(alone) == alone
