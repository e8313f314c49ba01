"""Every rule beside PyTorch's own derivative: once to the last bit, twice to rounding. None reads more than
it declares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lowtide.autodiff.reverse import Extended, gradient
from lowtide.autodiff.rules import CONSTANT, RULES, needs, slots
from lowtide.errors import NotDifferentiable
from lowtide.ir.calls import is_float
from lowtide.ir.graph import Graph, Op, Phase
from tests.helpers.drawn import Function, drawn, laid_out_otherwise, numbers, with_seed

aten = torch.ops.aten


@dataclass(frozen=True)
class Case:
    """A function, the shapes of its arguments, and how often it can be differentiated."""

    function: Function
    shapes: tuple[tuple[int, ...], ...]
    positive: bool = False
    twice: bool = True
    classes: int = 0  # the last argument holds whole numbers below that
    fixed: int = 0  # so many of the last arguments get no gradient


def case(function: Function, *shapes: tuple[int, ...], **options: Any) -> Case:
    return Case(function, shapes, **options)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-2, -1) * 0.5).masked_fill(mask, -math.inf)
    return torch.softmax(scores, -1) @ v


def _batch_norm(training: bool, x: Tensor, w: Tensor, b: Tensor, mean: Tensor, var: Tensor) -> Any:
    return aten.native_batch_norm(x, w, b, mean, var, training, 0.1, 1e-5)


CASES = {
    "add": case(lambda a, b: a + b, (2, 3), (3,)),
    "add scaled": case(lambda a, b: torch.add(a, b, alpha=2.5), (2, 3), (2, 1)),
    "sub": case(lambda a, b: a - b, (2, 3), (1, 3)),
    "sub scaled": case(lambda a, b: torch.sub(a, b, alpha=3), (2, 3), (2, 3)),
    "number minus": case(lambda a: 3 - a, (2, 3)),
    "rsub": case(lambda a, b: torch.rsub(a, b, alpha=2), (2, 3), (3,)),
    "neg": case(lambda a: -a, (4,)),
    "mul": case(lambda a, b: a * b, (2, 3), (3,)),
    "mul number": case(lambda a: a * 3, (2, 3)),
    "square by mul": case(lambda a: a * a, (2, 3)),
    "div": case(lambda a, b: a / b, (2, 3), (3,), positive=True),
    "div number": case(lambda a: a / 3, (2, 3)),
    "reciprocal": case(torch.reciprocal, (2, 3), positive=True),
    "pow": case(lambda a: a**3, (2, 3)),
    "pow zero": case(lambda a, b: a**0 * b, (3,), (3,)),
    "root": case(lambda a: a**0.5, (2, 3), positive=True),
    "pow of tensors": case(lambda a, b: a**b, (2, 3), (3,), positive=True),
    "mixed types": case(lambda a: (a * a.to(torch.float64)).to(a.dtype), (2, 3)),
    "number to the": case(lambda a: 2.0**a, (2, 3)),
    "sqrt": case(torch.sqrt, (2, 3), positive=True),
    "rsqrt": case(torch.rsqrt, (2, 3), positive=True),
    "exp": case(torch.exp, (2, 3)),
    "log": case(torch.log, (2, 3), positive=True),
    "log1p": case(torch.log1p, (2, 3), positive=True),
    "sin": case(torch.sin, (2, 3)),
    "cos": case(torch.cos, (2, 3)),
    "abs": case(torch.abs, (2, 3)),
    "sign": case(lambda a: torch.sgn(a) * a, (2, 3)),
    "erf": case(torch.erf, (2, 3)),
    "relu": case(torch.relu, (2, 3)),
    "leaky relu": case(F.leaky_relu, (2, 3)),
    "tanh": case(torch.tanh, (2, 3)),
    "sigmoid": case(torch.sigmoid, (2, 3)),
    "silu": case(F.silu, (2, 3)),
    "gelu": case(F.gelu, (2, 3)),
    "gelu by tanh": case(lambda a: F.gelu(a, approximate="tanh"), (2, 3)),
    "where": case(lambda a, b: torch.where(a > b, a * 2, b), (2, 3), (3,)),
    "where or number": case(lambda a: aten.where.ScalarOther(a > 0, a, 2.0), (2, 3)),
    "where number or": case(lambda a: aten.where.ScalarSelf(a > 0, 2.0, a), (2, 3)),
    "masked fill": case(lambda a: a.masked_fill(a > 0, 1.0), (2, 3)),
    "mm": case(torch.mm, (2, 3), (3, 4)),
    "mm by columns": case(lambda a, b: torch.mm(a.t(), b.t()), (3, 2), (4, 3)),
    "addmm": case(torch.addmm, (4,), (2, 3), (3, 4)),
    "addmm scaled": case(lambda a, b, c: torch.addmm(a, b, c, beta=2, alpha=3), (2, 4), (2, 3), (3, 4)),
    "bmm": case(torch.bmm, (2, 3, 4), (2, 4, 5)),
    "baddbmm": case(lambda a, b, c: torch.baddbmm(a, b, c, beta=2, alpha=3), (3, 5), (2, 3, 4), (2, 4, 5)),
    "sum": case(lambda a: a.sum() * a, (2, 3)),
    "sum of dims": case(lambda a: a.sum((0, -1)), (2, 3, 4)),
    "sum of dims kept": case(lambda a: a.sum(1, keepdim=True) * a, (2, 3, 4)),
    "mean": case(lambda a: a.mean(), (2, 3)),
    "mean of dims": case(lambda a: a.mean((-1, -2)), (2, 3, 4)),
    "clone": case(lambda a: a.clone() * a, (2, 3)),
    "cast": case(lambda a: a.to(torch.float16).to(a.dtype), (2, 3)),
    "cat": case(lambda a, b: torch.cat([a, b * b, a], 1), (2, 3), (2, 1)),
    "cat with nothing": case(lambda a: torch.cat([a.new_zeros(0), a * a], 1), (2, 3)),
    "stack": case(lambda a, b: torch.stack([a, b * b], 1), (2, 3), (2, 3)),
    "gather": case(lambda a, i: torch.gather(a * a, 1, i), (2, 5), (2, 3), classes=5),
    "softmax": case(lambda a: torch.softmax(a, 1), (2, 3, 2)),
    "log softmax": case(lambda a: torch.log_softmax(a, 1), (2, 3)),
    "embedding": case(lambda w, i: F.embedding(i, w * w), (5, 2), (3, 2), classes=5),
    "nll loss": case(F.nll_loss, (4, 3), (4,), classes=3),
    "nll loss per item": case(lambda a, i: F.nll_loss(a, i, reduction="none"), (4, 3), (4,), classes=3),
    "nll loss of images": case(F.nll_loss, (2, 3, 2, 2), (2, 2, 2), classes=3),
    "cross entropy": case(F.cross_entropy, (4, 3), (4,), classes=3),
    "mse loss": case(F.mse_loss, (4, 3), (4, 3)),
    "mse loss summed": case(lambda a, b: F.mse_loss(a, b, reduction="sum"), (4, 3), (4, 3)),
    "max pool": case(lambda a: F.max_pool2d(a * a, 2), (2, 3, 4, 4)),
    "max pool padded": case(lambda a: F.max_pool2d(a, 3, 2, padding=1), (2, 3, 5, 5)),
    "avg pool": case(lambda a: F.avg_pool2d(a * a, 3, 2, padding=1), (2, 3, 5, 5)),
    "adaptive avg pool": case(lambda a: F.adaptive_avg_pool2d(a * a, 3), (2, 2, 5, 5)),
    "attention by hand": case(_attention_by_hand, (2, 2, 4, 4), (2, 2, 4, 4), (2, 2, 4, 4)),
    "convolution": case(F.conv2d, (2, 3, 5, 5), (4, 3, 3, 3), (4,), twice=False),
    "convolution without bias": case(lambda x, w: F.conv2d(x, w), (2, 3, 5, 5), (4, 3, 3, 3), twice=False),
    "convolution with options": case(
        lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1, groups=2), (2, 4, 6, 6), (4, 2, 3, 3), (4,),
        twice=False,
    ),
    "convolution with channels inside": case(
        lambda x, w, b: F.conv2d(x.contiguous(memory_format=torch.channels_last), w, b),
        (2, 3, 5, 5), (4, 3, 3, 3), (4,), twice=False,
    ),
    "transposed convolution": case(
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2), (2, 3, 4, 4), (3, 4, 2, 2), (4,), twice=False
    ),
    "batch norm": case(
        lambda *a: _batch_norm(True, *a), (3, 2, 2, 2), (2,), (2,), (2,), (2,), twice=False, positive=True,
        fixed=2,
    ),
    "batch norm of evaluation": case(
        lambda *a: _batch_norm(False, *a), (3, 2, 2, 2), (2,), (2,), (2,), (2,), twice=False, positive=True,
        fixed=2,
    ),
    "layer norm": case(lambda x, w, b: F.layer_norm(x, (4,), w, b), (2, 3, 4), (4,), (4,), twice=False),
    "layer norm of itself": case(lambda x: F.layer_norm(x, (3, 4)), (2, 3, 4), twice=False),
    "group norm": case(lambda x, w, b: F.group_norm(x, 2, w, b), (2, 4, 3, 3), (4,), (4,), twice=False),
    "attention": case(_attention, (2, 2, 4, 4), (2, 2, 4, 4), (2, 2, 4, 4), twice=False),
}  # fmt: skip
TWICE = [name for name, found in CASES.items() if found.twice]
ONCE = [name for name, found in CASES.items() if not found.twice]


def inputs_of(found: Case, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(3)
    made = [torch.randn(shape, dtype=dtype) for shape in found.shapes]
    if found.positive:
        made = [tensor.abs() + 0.5 for tensor in made]
    if found.classes:
        made[-1] = torch.randint(found.classes, found.shapes[-1])
    return made


def differentiated(found: Case) -> slice:
    """The arguments that gradients are asked for by."""
    return slice(len(found.shapes) - found.fixed - (found.classes > 0))


def extended(found: Case, given: list[Tensor]) -> tuple[Extended, tuple[int, ...], torch.Size]:
    """The graph with its gradients, weighed by a seed; what they are by; the shape of the output."""
    graph = drawn(found.function, given)
    seeded, seed = with_seed(graph, graph.output)
    wrt = graph.inputs[differentiated(found)]
    shape = torch.Size(seeded.tensors[graph.output].shape)
    return gradient(seeded, graph.output, wrt, seed=seed), wrt, shape


@pytest.mark.parametrize("name", CASES)
def test_a_derivative_is_autograds_to_the_last_bit(name: str) -> None:
    found = CASES[name]
    given = inputs_of(found, torch.float32)
    more, _, shape = extended(found, given)
    seed = torch.randn(shape)
    mine = numbers(more.graph, given, more.gradients, seed=seed)

    given = inputs_of(found, torch.float32)  # again, for running statistics change
    real = [tensor.requires_grad_() for tensor in given[differentiated(found)]]
    output = found.function(*given)
    output = output[0] if isinstance(output, tuple) else output
    for number, right in zip(mine, torch.autograd.grad(output, real, seed), strict=True):
        assert torch.equal(number.expand_as(right), right)


@pytest.mark.parametrize("name", TWICE)
def test_a_derivative_of_a_derivative_is_autograds(name: str) -> None:
    found = CASES[name]
    given = inputs_of(found, torch.float64)
    more, wrt, shape = extended(found, given)
    seed = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    real = [tensor.requires_grad_() for tensor in given[differentiated(found)]]
    first = torch.autograd.grad(found.function(*given), real, seed, create_graph=True)

    for mine, theirs in zip(more.gradients, first, strict=True):
        if mine is None:
            assert not theirs.any()
            continue
        weighed, weight = with_seed(more.graph, mine, "weight")
        weights = torch.randn(theirs.shape, dtype=torch.float64)
        again = gradient(weighed, mine, [*wrt, "seed"], seed=weight)
        expected = torch.autograd.grad(theirs, [*real, seed], weights, retain_graph=True, allow_unused=True)
        found_again = numbers(again.graph, given, again.gradients, seed=seed.detach(), weight=weights)
        for number, right in zip(found_again, expected, strict=True):
            wanted = torch.zeros((), dtype=torch.float64) if right is None else right
            torch.testing.assert_close(
                number.to(torch.float64).expand_as(wanted), wanted, rtol=1e-9, atol=1e-9
            )


@pytest.mark.parametrize("name", ONCE)
def test_what_can_be_differentiated_once_says_so(name: str) -> None:
    given = inputs_of(CASES[name], torch.float32)
    more, wrt, _ = extended(CASES[name], given)
    first = more.gradients[0]
    assert first is not None
    weighed, weight = with_seed(more.graph, first, "weight")
    with pytest.raises(NotDifferentiable, match=r"there is no rule for aten\..*_backward"):
        gradient(weighed, first, wrt, seed=weight)


@pytest.mark.parametrize("name", CASES)
def test_new_tensors_look_as_torch_makes_them(name: str) -> None:
    given = inputs_of(CASES[name], torch.float32)
    more, _, shape = extended(CASES[name], given)
    by_name = {f"x{position}": tensor for position, tensor in enumerate(given)}
    assert laid_out_otherwise(more.graph, {**by_name, "seed": torch.randn(shape)}) == []


# What is read ------------------------------------------------------------------------------------------


def backward_reads(graph: Graph, more: Graph) -> set[int]:
    """The values of the forward that the backward reads."""
    added = more.ops[len(graph.ops) :]
    assert {op.phase for op in added} <= {Phase.BACKWARD}
    return {value for op in added for value in op.reads if value < len(graph.values)}


def declared(graph: Graph, depending: set[int]) -> set[int]:
    """What the rules say that the backward reads, when gradients by `depending` are handed on."""
    found: set[int] = set()
    for op in graph.ops:
        wanted = [
            slot
            for slot, ref in slots(op)
            if graph.tensors[ref.tensor].value in depending and is_float(graph.tensors[ref.tensor].dtype)
        ]
        if wanted and op.target not in CONSTANT and op.target in RULES:
            found |= {graph.tensors[tensor].value for tensor in needs(op, wanted)}
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("by", ["everything", "the first", "the last"])
def test_a_backward_reads_only_what_its_rule_declares(name: str, by: str) -> None:
    given = inputs_of(CASES[name], torch.float32)
    graph = drawn(CASES[name].function, given)
    real = graph.inputs[differentiated(CASES[name])]
    chosen = {"everything": real, "the first": real[:1], "the last": real[-1:]}[by]
    seeded, seed = with_seed(graph, graph.output)
    more = gradient(seeded, graph.output, chosen, seed=seed)
    depending = {graph.graph.tensors[tensor].value for tensor in chosen}
    for op in graph.graph.ops:
        if op.target not in CONSTANT and not depending.isdisjoint(op.reads):
            depending |= set(op.creates)
    seeds = {seeded.tensors[seed].value}
    assert backward_reads(seeded, more.graph) - seeds <= declared(graph.graph, depending)


@pytest.mark.parametrize(
    ("name", "by", "reads"),
    [
        ("relu", [0], {"relu"}),
        ("tanh", [0], {"tanh"}),
        ("sigmoid", [0], {"sigmoid"}),
        ("exp", [0], {"exp"}),
        ("softmax", [0], {"_softmax"}),
        ("add", [0, 1], set()),
        ("sub", [0, 1], set()),
        ("sum of dims", [0], set()),
        ("mul", [0], {"x1"}),
        ("mul", [1], {"x0"}),
        ("mul", [0, 1], {"x0", "x1"}),
        ("mm", [0], {"x1"}),
        ("mm", [1], {"x0"}),
        ("addmm", [0], set()),
        ("addmm", [2], {"x1"}),
        ("div", [0], {"x1"}),
        ("batch norm", [0], {"x0", "x1", "native_batch_norm"}),
    ],
)
def test_a_backward_depends_on_as_little_as_can_be(name: str, by: list[int], reads: set[str]) -> None:
    given = inputs_of(CASES[name], torch.float32)
    graph = drawn(CASES[name].function, given)
    seeded, seed = with_seed(graph, graph.output)
    more = gradient(seeded, graph.output, [graph.inputs[position] for position in by], seed=seed)
    found = {seeded.values[value].name for value in backward_reads(seeded, more.graph)}
    assert found - {"seed"} == reads


def test_dropout_goes_back_through_its_mask() -> None:
    graph = drawn(lambda a: aten.native_dropout(a, 0.25, True), [torch.ones(64)])
    seeded, seed = with_seed(graph, graph.output)
    more = gradient(seeded, graph.output, graph.inputs, seed=seed)
    last = more.graph.ops[-1]
    assert (last.target, last.args[2]) == ("aten.native_dropout_backward.default", 1 / 0.75)
    (mine,) = numbers(more.graph, [torch.ones(64)], more.gradients, seed=torch.ones(64))
    assert set(mine.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}


def test_dropout_in_evaluation_changes_nothing() -> None:
    graph = drawn(lambda a: aten.native_dropout(a, 0.25, False), [torch.ones(3)])
    seeded, seed = with_seed(graph, graph.output)
    more = gradient(seeded, graph.output, graph.inputs, seed=seed)
    (mine,) = numbers(more.graph, [torch.ones(3)], more.gradients, seed=torch.arange(3.0))
    assert mine.tolist() == [0.0, 1.0, 2.0]


def test_powers_of_zero_do_not_change() -> None:
    graph = drawn(lambda a: (0.0**a).sum(), [torch.ones(3)])
    assert gradient(graph.graph, graph.output, graph.inputs).gradients == (None,)


def test_every_rule_is_for_a_kernel_that_there_is() -> None:
    for target in (*RULES, *CONSTANT):
        _, kernel, overload = target.split(".")
        assert hasattr(getattr(aten, kernel), overload), target


# Refusals ----------------------------------------------------------------------------------------------


def _op(target: str, **fields: Any) -> Op:
    return Op(7, target, (), (), (), (), (), module="head", **fields)


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (_op("aten.sort.default"), "there is no rule for aten.sort.default"),
        (_op("aten.bernoulli.default", random=True), "it draws random numbers"),
    ],
)
def test_an_op_without_a_rule_is_named_with_the_reason(op: Op, reason: str) -> None:
    with pytest.raises(
        NotDifferentiable, match=rf"cannot differentiate op 7 \(head: aten\.\w+\): {reason}\. Ask"
    ):
        needs(op, [])


def test_an_argument_without_a_derivative_is_named() -> None:
    graph = drawn(lambda a, b: torch.where(a > 0, a, b), [torch.ones(2), torch.ones(2)])
    op = next(op for op in graph.graph.ops if op.target == "aten.where.self")
    with pytest.raises(NotDifferentiable, match="its derivative by argument 0 is not known"):
        needs(op, [(0, 0)])


def test_a_sparse_gradient_is_refused() -> None:
    given = [torch.randn(5, 2), torch.tensor([1, 2])]
    graph = drawn(lambda w, i: F.embedding(i, w, sparse=True), given)
    seeded, seed = with_seed(graph, graph.output)
    with pytest.raises(NotDifferentiable, match=r"its gradient is sparse\. Set sparse=False"):
        gradient(seeded, graph.output, graph.inputs[:1], seed=seed)


def test_powers_of_a_negative_number_are_refused() -> None:
    graph = drawn(lambda a: (-2.0) ** a, [torch.ones(2)])
    seeded, seed = with_seed(graph, graph.output)
    with pytest.raises(NotDifferentiable, match=r"powers of -2\.0 are mostly not real numbers"):
        gradient(seeded, graph.output, graph.inputs, seed=seed)


def test_the_backward_of_an_embedding_with_padding_is_refused() -> None:
    graph = drawn(lambda w, i: F.embedding(i, w, padding_idx=0), [torch.randn(5, 2), torch.tensor([1, 0])])
    seeded, seed = with_seed(graph, graph.output)
    first = gradient(seeded, graph.output, graph.inputs[:1], seed=seed)
    assert first.gradients[0] is not None
    weighed, weight = with_seed(first.graph, first.gradients[0], "weight")
    with pytest.raises(NotDifferentiable, match="it leaves out a padding row or scales by frequency"):
        gradient(weighed, first.gradients[0], ["seed"], seed=weight)


def test_a_mask_that_would_need_a_gradient_is_refused() -> None:
    def attend(q: Tensor, mask: Tensor) -> Any:
        return aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, attn_mask=mask)

    graph = drawn(attend, [torch.randn(1, 1, 4, 4), torch.randn(4, 4)])
    seeded, seed = with_seed(graph, graph.output)
    gradient(seeded, graph.output, graph.inputs[:1], seed=seed)
    with pytest.raises(NotDifferentiable, match="its derivative by argument 'attn_mask' is not known"):
        gradient(seeded, graph.output, graph.inputs, seed=seed)
