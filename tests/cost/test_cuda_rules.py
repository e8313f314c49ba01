"""CUDA's choices on a machine without it: which kernels are traced, and what they are known to take."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowtide
from lowtide.cost.cublas import threads_using_biased_products
from lowtide.cost.cuda_rules import cuda_rules, price
from lowtide.ir.graph import Graph, Op, Origin, Phase, Ref, Role, Tensor, Value
from lowtide.ir.schedule import Compute, Free
from lowtide.ir.simulate import Category
from lowtide.trace.dry_run import Trace, dry_run
from tests.helpers.handmade import Drawing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a card its own kernels are traced")

MIB = 1 << 20
BATCH, HEADS, TOKENS, WIDTH = 3, 2, 40, 8
SCORES = BATCH * HEADS * TOKENS * TOKENS


def traced(model: nn.Module, *batch: torch.Tensor, device: str = "cuda") -> Trace:
    return dry_run(lambda: model(*batch).sum().backward(), model=model, device=device)


def names(trace: Trace, *phases: Phase) -> list[str]:
    wanted = phases or tuple(Phase)
    return [op.target.split(".")[1] for op in trace.graph.ops if op.phase in wanted]


def op_called(trace: Trace, name: str) -> Op:
    (found,) = (op for op in trace.graph.ops if op.target.split(".")[1] == name)
    return found


def created(trace: Trace, op: Op) -> list[tuple[str, int]]:
    """The dtype and bytes of everything an op makes."""
    tensors = [trace.graph.tensors[output] for output in op.outputs if output is not None]
    return [(tensor.dtype, trace.graph.values[tensor.value].bytes) for tensor in tensors]


def kept_for_backward(trace: Trace) -> list[tuple[str, int]]:
    """Name and bytes of what the forward made and still holds when the first op of the backward runs."""
    alive: list[int] = []
    for step in trace.schedule:
        if isinstance(step, Free):
            alive = [value for value in alive if value != step.value]
            continue
        assert isinstance(step, Compute)
        if trace.graph.ops[step.op].phase is Phase.BACKWARD:
            break
        alive += trace.graph.ops[step.op].creates
    return [(trace.graph.values[value].name, trace.graph.values[value].bytes) for value in alive]


# The graph of a step for CUDA -----------------------------------------------------------------------


def test_a_step_for_cuda_speaks_of_the_card_and_counts_in_its_grains() -> None:
    model = nn.Linear(8, 16)
    trace = traced(model, torch.ones(32, 8))
    assert trace.graph.device == "cuda:0"
    assert {value.device for value in trace.graph.values} == {"cuda:0"}
    assert trace.timeline.resident_bytes == 512 + 512 + 1024  # weight 512, bias 64, batch 1024
    assert trace.timeline.categories[Category.PARAMETERS] == 1024
    assert all(live % 512 == 0 for live in trace.timeline.live_bytes.tolist())
    on_cpu = traced(model, torch.ones(32, 8), device="cpu")
    assert on_cpu.timeline.resident_bytes == 512 + 64 + 1024


# Dropout --------------------------------------------------------------------------------------------


def test_dropout_keeps_a_mask_of_one_byte_an_element() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.25))
    trace = traced(model, torch.ones(32, 8))
    dropout = op_called(trace, "native_dropout")
    assert created(trace, dropout) == [("float32", 32 * 16 * 4), ("bool", 32 * 16)]
    assert dropout.args[1:] == (0.25, True)
    assert dropout.random
    assert kept_for_backward(trace) == [("native_dropout", 32 * 16), ("sum", 4), ("ones_like", 4)]
    assert "native_dropout_backward" in names(trace, Phase.BACKWARD)


def test_on_the_cpu_dropout_keeps_the_noise_itself() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.25))
    trace = traced(model, torch.ones(32, 8), device="cpu")
    assert "native_dropout" not in names(trace)
    assert ("empty_like", 32 * 16 * 4) in kept_for_backward(trace)


@pytest.mark.parametrize(
    ("dropout", "op"),
    [
        (nn.Dropout(0.0), None),
        (nn.Dropout(1.0), "mul"),
        (nn.Dropout(0.5).eval(), None),
        (nn.Dropout(0.5, inplace=True), "bernoulli_"),
    ],
)
def test_dropout_that_cuda_does_not_fuse_is_traced_as_it_is(dropout: nn.Module, op: str | None) -> None:
    trace = traced(nn.Sequential(nn.Linear(8, 16), dropout), torch.ones(32, 8))
    assert "native_dropout" not in names(trace)
    assert op is None or op in names(trace, Phase.FORWARD)


def test_dropout_takes_its_arguments_as_the_plain_function_does() -> None:
    model = nn.Linear(8, 16)
    batch = torch.ones(32, 8)
    for call in (
        lambda: F.dropout(model(batch)),
        lambda: F.dropout(input=model(batch), p=0.5, training=True, inplace=False),
        lambda: F.dropout(model(batch), 0.5, True, False),
    ):
        trace = dry_run(lambda call=call: call().sum().backward(), model=model, device="cuda")  # type: ignore[misc]
        assert op_called(trace, "native_dropout").args[1:] == (0.5, True)


# Attention ------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Queries, keys and values of a batch, and one call of scaled_dot_product_attention."""

    def __init__(
        self, *, shared: int = HEADS, heads: int = HEADS, packed: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.heads = [heads, shared, shared]
        self.project = nn.ModuleList(nn.Linear(16, WIDTH * count) for count in self.heads)
        self.together = nn.Linear(16, 3 * WIDTH * heads)
        self.packed = packed
        self.options = options

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.packed:
            parts = self.together(tokens).chunk(3, dim=-1)
        else:
            parts = [layer(tokens) for layer in self.project]
        split = [
            part.unflatten(-1, (count, WIDTH)).transpose(1, 2)
            for part, count in zip(parts, self.heads, strict=True)
        ]
        return F.scaled_dot_product_attention(*split, **self.options)


def attended(dtype: torch.dtype = torch.float32, device: str = "cuda", **options: Any) -> Trace:
    model = Attention(**options).to(dtype)
    return traced(model, torch.ones(BATCH, TOKENS, 16, dtype=dtype), device=device)


ITEM = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}
EFFICIENT = "_scaled_dot_product_efficient_attention"
CUDNN = "_scaled_dot_product_cudnn_attention"


def largest_bytes(trace: Trace) -> int:
    return max(value.bytes for value in trace.graph.values)


def test_attention_in_32_bits_with_dropout_keeps_no_scores() -> None:
    trace = attended(dropout_p=0.1)
    attention = op_called(trace, EFFICIENT)
    output = BATCH * HEADS * TOKENS * WIDTH * 4
    sums = BATCH * HEADS * 64 * 4  # one number a query, their count rounded up to 32
    assert created(trace, attention) == [("float32", output), ("float32", sums), ("int64", 8), ("int64", 8)]
    assert attention.args[3:] == (None, True, 0.1)  # no mask, a backward will follow
    assert attention.random
    assert f"{EFFICIENT}_backward" in names(trace, Phase.BACKWARD)
    assert largest_bytes(trace) < SCORES
    assert largest_bytes(attended(dropout_p=0.1, device="cpu")) == SCORES * 4  # as the CPU does


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision_is_cudnns(dtype: torch.dtype) -> None:
    trace = attended(dtype)
    attention = op_called(trace, CUDNN)
    output, sums = BATCH * HEADS * TOKENS * WIDTH * 2, BATCH * HEADS * TOKENS * 4
    name = str(dtype).removeprefix("torch.")
    assert created(trace, attention) == [(name, output), ("float32", sums), ("int64", 8), ("int64", 8)]
    assert attention.args[3:] == (None, True)
    assert f"{CUDNN}_backward" in names(trace, Phase.BACKWARD)


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, EFFICIENT), (torch.bfloat16, CUDNN)])
def test_what_attention_is_told_reaches_the_kernel(dtype: torch.dtype, kernel: str) -> None:
    attention = op_called(attended(dtype, is_causal=True, dropout_p=0.2, scale=0.5), kernel)
    assert attention.args[4:7] == (True, 0.2, True)
    assert attention.kwargs == (("scale", 0.5),)


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, EFFICIENT), (torch.bfloat16, CUDNN)])
def test_a_boolean_mask_becomes_one_of_numbers_and_is_not_spread(dtype: torch.dtype, kernel: str) -> None:
    trace = attended(dtype, attn_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool))
    mask = op_called(trace, "zeros_like")
    assert [size for _, size in created(trace, mask)] == [TOKENS * TOKENS * ITEM[dtype]]
    assert op_called(trace, "masked_fill_").mutates == mask.creates
    bias = mask_of(trace, kernel)
    assert (bias.value, bias.shape) == (mask.creates[0], (BATCH, HEADS, TOKENS, TOKENS))
    assert bias.stride == (0, 0, TOKENS, 1)
    assert largest_bytes(trace) < SCORES


@pytest.mark.parametrize(("dtype", "kernel"), [(torch.float32, EFFICIENT), (torch.bfloat16, CUDNN)])
def test_a_mask_of_numbers_is_used_as_it_is(dtype: torch.dtype, kernel: str) -> None:
    trace = attended(dtype, attn_mask=torch.zeros(BATCH, 1, TOKENS, TOKENS, dtype=dtype))
    bias = mask_of(trace, kernel)
    assert bias.value in trace.graph.resident
    assert (bias.shape, bias.stride) == (
        (BATCH, HEADS, TOKENS, TOKENS),
        (TOKENS * TOKENS, 0, TOKENS, 1),
    )
    assert "zeros_like" not in names(trace)


def mask_of(trace: Trace, kernel: str) -> Tensor:
    given = op_called(trace, kernel).args[3]
    assert isinstance(given, Ref)
    return trace.graph.tensors[given.tensor]


def test_shared_keys_and_values_are_cudnns_in_half_precision_and_plain_otherwise() -> None:
    half = attended(torch.bfloat16, heads=4, shared=2, enable_gqa=True)
    attention = op_called(half, CUDNN)
    shapes = [half.graph.tensors[arg.tensor].shape for arg in attention.args if isinstance(arg, Ref)]
    assert shapes == [(BATCH, 4, TOKENS, WIDTH), (BATCH, 2, TOKENS, WIDTH), (BATCH, 2, TOKENS, WIDTH)]
    whole = attended(heads=4, shared=2, enable_gqa=True, dropout_p=0.1)
    assert not {EFFICIENT, CUDNN} & set(names(whole))
    assert largest_bytes(whole) == 4 * BATCH * TOKENS * TOKENS * 4  # there the scores are kept


def test_attention_without_gradients_leaves_nothing_for_a_backward() -> None:
    model = Attention()
    tokens = torch.ones(BATCH, TOKENS, 16)

    def step() -> None:
        with torch.no_grad():
            model(tokens)
        model.together(tokens).sum().backward()

    trace = dry_run(step, model=model, device="cuda")
    attention = op_called(trace, EFFICIENT)
    assert attention.args[4] is False
    assert created(trace, attention)[1] == ("float32", 0)


def test_any_of_query_key_and_value_may_be_what_is_trained() -> None:
    for trained in range(3):
        model = Attention()
        for number, layer in enumerate(model.project):
            layer.requires_grad_(number == trained)
        attention = op_called(traced(model, torch.ones(BATCH, TOKENS, 16)), EFFICIENT)
        assert attention.args[4] is True


def test_attention_over_three_dimensions_is_left_as_it_is() -> None:
    layer = nn.Linear(8, 8)
    tokens = torch.ones(4, TOKENS, 8)

    def step() -> None:
        states = layer(tokens)
        F.scaled_dot_product_attention(states, states, states, dropout_p=0.1).sum().backward()

    trace = dry_run(step, model=layer, device="cuda")
    assert not {EFFICIENT, CUDNN} & set(names(trace))


def test_torchs_own_attention_layer_chooses_as_on_cuda() -> None:
    layer = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
    tokens = torch.ones(BATCH, TOKENS, 16)
    step = lambda: layer(tokens, tokens, tokens, need_weights=False)[0].sum().backward()  # noqa: E731
    trace = dry_run(step, model=layer, device="cuda")
    assert op_called(trace, EFFICIENT).args[5] == 0.1


# Autocast and cross entropy -------------------------------------------------------------------------


def scored(dtype: torch.dtype, **options: Any) -> Trace:
    model = nn.Linear(8, 16)
    batch, labels = torch.ones(32, 8), torch.zeros(32, dtype=torch.int64)

    def step() -> None:
        with torch.autocast("cuda", dtype=dtype):
            loss = F.cross_entropy(model(batch), labels, **options)
        loss.sum().backward()

    return dry_run(step, model=model, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_for_cuda_multiplies_in_half_precision(dtype: torch.dtype) -> None:
    trace = scored(dtype)
    assert created(trace, op_called(trace, "addmm")) == [(str(dtype).removeprefix("torch."), 32 * 16 * 2)]


def test_autocast_for_cuda_is_in_16_bit_floats_unless_told_otherwise() -> None:
    model = nn.Linear(8, 16)

    def step(**options: Any) -> None:
        with torch.autocast("cuda", **options):
            model(torch.ones(32, 8)).sum().backward()

    assert created(*_addmm(dry_run(step, model=model, device="cuda")))[0][0] == "float16"
    off = dry_run(lambda: step(enabled=False), model=model, device="cuda")
    assert created(*_addmm(off))[0][0] == "float32"
    on_cpu = dry_run(lambda: step(dtype=torch.bfloat16), model=model, device="cuda")
    assert created(*_addmm(on_cpu))[0][0] == "bfloat16"


def _addmm(trace: Trace) -> tuple[Trace, Op]:
    return trace, op_called(trace, "addmm")


def test_cross_entropy_under_autocast_takes_logarithms_in_half_precision() -> None:
    trace = scored(torch.bfloat16, reduction="sum", ignore_index=3)
    assert created(trace, op_called(trace, "_log_softmax")) == [("bfloat16", 32 * 16 * 2)]
    assert op_called(trace, "nll_loss_forward").args[3:] == (2, 3)


@pytest.mark.parametrize(
    "entropy",
    [
        lambda scores, labels: F.cross_entropy(scores, labels, label_smoothing=0.1),
        lambda scores, labels: F.cross_entropy(scores, labels, weight=torch.ones(16)),
        lambda scores, labels: F.cross_entropy(scores, labels, torch.ones(16)),
        lambda scores, labels: F.cross_entropy(scores, F.one_hot(labels, 16).float()),
    ],
)
def test_another_kind_of_cross_entropy_is_left_as_it_is(
    entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    model = nn.Linear(8, 16)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            entropy(model(torch.ones(32, 8)), torch.zeros(32, dtype=torch.int64)).backward()

    trace = dry_run(step, model=model, device="cuda")
    assert created(trace, op_called(trace, "_log_softmax")) == [("float32", 32 * 16 * 4)]


def test_cross_entropy_of_a_model_that_is_in_half_precision_itself_stays_in_it() -> None:
    model = nn.Linear(8, 16, dtype=torch.bfloat16)
    batch, labels = torch.ones(32, 8, dtype=torch.bfloat16), torch.zeros(32, dtype=torch.int64)
    trace = dry_run(lambda: F.cross_entropy(model(batch), labels).backward(), model=model, device="cuda")
    assert created(trace, op_called(trace, "nll_loss_forward"))[0] == ("bfloat16", 2)
    assert "_to_copy" not in names(trace)


def test_cross_entropy_without_autocast_or_of_one_sample_is_left_as_it_is() -> None:
    model = nn.Linear(8, 16)

    def step(batch: torch.Tensor, labels: torch.Tensor, enabled: bool) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=enabled):
            F.cross_entropy(model(batch), labels).backward()

    plain = dry_run(
        lambda: step(torch.ones(32, 8), torch.zeros(32, dtype=torch.int64), False), model=model, device="cuda"
    )
    assert created(plain, op_called(plain, "_log_softmax"))[0][0] == "float32"
    single = dry_run(lambda: step(torch.ones(8), torch.tensor(1), True), model=model, device="cuda")
    assert created(single, op_called(single, "_log_softmax"))[0][0] == "float32"


# Checkpointing, and what is put back ----------------------------------------------------------------


def test_what_is_recomputed_in_the_backward_chooses_as_on_cuda_too() -> None:
    model = nn.Sequential(Attention(dropout_p=0.1), nn.Dropout(0.5))
    tokens = torch.ones(BATCH, TOKENS, 16)

    def step() -> None:
        checkpoint(model, tokens, use_reentrant=False).sum().backward()

    trace = dry_run(step, model=model, device="cuda")
    for phase in (Phase.FORWARD, Phase.RECOMPUTE):
        assert {EFFICIENT, "native_dropout"} <= set(names(trace, phase))
    assert largest_bytes(trace) < SCORES


def functions() -> tuple[object, ...]:
    return F.dropout, F.scaled_dot_product_attention, F.cross_entropy, torch.autocast.__init__


def test_functions_are_put_back_also_after_an_error() -> None:
    before = functions()
    seen: list[tuple[object, ...]] = []
    model = nn.Linear(2, 2)

    def step(fails: bool) -> None:
        seen.append(functions())
        if fails:
            raise KeyError("mine")
        model(torch.ones(2, 2)).sum().backward()

    dry_run(lambda: step(False), model=model, device="cuda")
    assert functions() == before
    with pytest.raises(KeyError, match="mine"):
        dry_run(lambda: step(True), model=model, device="cuda")
    assert functions() == before
    assert len(seen) == 2
    assert all(inside[number] is not before[number] for inside in seen for number in range(4))
    dry_run(lambda: step(False), model=model, device="cpu")
    assert seen[2] == before  # for the CPU nothing is replaced


def test_inside_the_rules_functions_still_compute() -> None:
    torch.manual_seed(0)
    numbers = torch.randn(4, 8)
    with cuda_rules():
        dropped = F.dropout(numbers, 0.5)
        assert torch.equal(F.dropout(numbers, 0.5, training=False), numbers)
        assert not F.dropout(numbers, 1.0).any()
    assert torch.equal(dropped, torch.where(dropped == 0, 0, numbers * 2))
    assert dropped.any()


# Prices ---------------------------------------------------------------------------------------------

DENSE = "contiguous"
LAST = "channels last"


def image(number: int, shape: tuple[int, ...], order: str = DENSE, dtype: str = "float32") -> Tensor:
    like = torch.empty(shape, device="meta")
    if order == LAST:
        like = like.to(memory_format=torch.channels_last)
    return Tensor(number, number, shape, like.stride(), 0, dtype)


def on_card(target: str, phase: Phase, given: list[Tensor], made: list[Tensor]) -> Graph:
    """One op on a card. Values are as large as they need be for any of these tensors."""
    tensors = tuple(sorted((*given, *made), key=lambda one: one.id))
    values = tuple(Value(one.id, 1 << 20, Role.INTERMEDIATE, f"v{one.id}", "", "cuda:0") for one in tensors)
    op = Op(
        id=0,
        target=target,
        args=tuple(Ref(one.id) for one in given),
        kwargs=(),
        outputs=tuple(one.id for one in made),
        reads=tuple(one.id for one in given),
        creates=tuple(one.id for one in made),
        phase=phase,
    )
    return Graph("one op", Origin.EAGER, "cuda:0", (op,), values, tensors)


def forward(data: Tensor, weight: Tensor, output: Tensor) -> int:
    graph = on_card("aten.convolution.default", Phase.FORWARD, [data, weight, image(3, (4,))], [output])
    return price(graph).ops[0].workspace_bytes


def backward(gradient: Tensor, data: Tensor, weight: Tensor) -> int:
    made = [image(3, data.shape), image(4, weight.shape)]
    graph = on_card("aten.convolution_backward.default", Phase.BACKWARD, [gradient, data, weight], made)
    return price(graph).ops[0].workspace_bytes


DATA, OUTPUT, HALVED = (2, 3, 8, 8), (2, 4, 8, 8), (2, 4, 4, 4)  # 1,536, 2,048 and 512 bytes
WIDE, POINT = (4, 3, 3, 3), (4, 3, 1, 1)  # 432 and 48 bytes


@pytest.mark.parametrize(
    ("data", "weight", "output", "expected"),
    [
        (image(0, DATA), image(1, WIDE), image(2, OUTPUT), 4096),  # 1536 + 2048 + 432 = 4016
        (image(0, DATA, LAST), image(1, WIDE), image(2, OUTPUT), 2560),  # 2048 + 432
        (image(0, DATA, LAST), image(1, WIDE), image(2, OUTPUT, LAST), 512),  # 432
        (image(0, DATA), image(1, WIDE), image(2, HALVED), 2560),  # 1536 + 512 + 432 = 2480
        (image(0, DATA), image(1, POINT), image(2, OUTPUT), 0),  # a matrix product
        (image(0, DATA), image(1, POINT), image(2, HALVED), 2560),  # of stride two: 1536 + 512 + 48 = 2096
        (
            image(0, DATA, dtype="bfloat16"),
            image(1, WIDE, dtype="bfloat16"),
            image(2, OUTPUT, dtype="bfloat16"),
            2048,  # 768 + 1024 + 216 = 2008
        ),
        (image(0, (2, 1, 8, 8)), image(1, (4, 1, 3, 3)), image(2, OUTPUT), 3072),  # 512 + 2048 + 144 = 2704
        (image(0, DATA), image(1, (4, 3, 1, 3)), image(2, OUTPUT), 4096),  # 1×3: 1536 + 2048 + 144 = 3728
        (image(0, (2, 32, 8, 8), LAST), image(1, (4, 32, 1, 1)), image(2, HALVED), 1024),  # 512 + 512
        (image(0, (2, 2, 8, 8), LAST), image(1, (4, 2, 3, 3)), image(2, OUTPUT, LAST), 512),  # 288
        (image(0, (2, 3, 1, 8), LAST), image(1, (4, 3, 1, 3)), image(2, (2, 4, 1, 8)), 512),  # 256 + 144
        # of one channel every order is channels-last, and copied all the same
        (
            Tensor(0, 0, (2, 1, 8, 8), (64, 1, 8, 1), 0, "float32"),
            image(1, (4, 1, 3, 3)),
            image(2, OUTPUT),
            3072,
        ),
        # a slice of something larger is copied without the rest: as the first
        (Tensor(0, 0, DATA, (1000, 64, 8, 1), 500, "float32"), image(1, WIDE), image(2, OUTPUT), 4096),
        (Tensor(0, 0, (2, 3, 8), (24, 8, 1), 0, "float32"), image(1, (4, 3, 3)), image(2, (2, 4, 8)), 1024),
        (Tensor(0, 0, (2, 3, 8), (24, 1, 3), 0, "float32"), image(1, (4, 3, 3)), image(2, (2, 4, 8)), 512),
    ],
)
def test_a_convolution_copies_input_output_and_weight(
    data: Tensor, weight: Tensor, output: Tensor, expected: int
) -> None:
    assert forward(data, weight, output) == expected


@pytest.mark.parametrize(
    ("gradient", "data", "weight", "expected"),
    [
        (image(0, OUTPUT), image(1, DATA), image(2, WIDE), 4608),  # 2048 + 1536 + 2·432 = 4448
        (image(0, OUTPUT, LAST), image(1, DATA), image(2, WIDE), 2560),  # 1536 + 864 = 2400
        (image(0, OUTPUT), image(1, DATA, LAST), image(2, WIDE), 3072),  # 2048 + 864 = 2912
        (image(0, OUTPUT), image(1, DATA), image(2, POINT), 2048),  # half of 2048 + 1536 + 96 = 3680
        (image(0, HALVED), image(1, DATA), image(2, POINT), 2560),  # all of 512 + 1536 + 96 = 2144
    ],
)
def test_a_convolutions_backward_copies_gradient_input_and_weight_twice(
    gradient: Tensor, data: Tensor, weight: Tensor, expected: int
) -> None:
    assert backward(gradient, data, weight) == expected


def test_prices_of_a_traced_step_are_those_drawn_by_hand() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
    images = torch.ones(DATA)
    graph = price(traced(model, images).graph)
    prices = {op.target.split(".")[1]: op.workspace_bytes for op in graph.ops if op.workspace_bytes}
    assert prices == {"convolution": 4096, "convolution_backward": 4608}
    assert graph.profiled_on == "rules for CUDA"
    assert all(op.seconds == 0 for op in graph.ops)
    assert not any(value.role is Role.LIBRARY for value in graph.values)  # no matrix product
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    last = traced(model, images.to(memory_format=torch.channels_last))
    prices = {
        op.target.split(".")[1]: op.workspace_bytes for op in price(last.graph).ops if op.workspace_bytes
    }
    assert prices == {"convolution": 512, "convolution_backward": 1024}


@pytest.mark.parametrize("packed", [False, True])
def test_cudnns_attention_backward_sums_the_queries_gradients_in_32_bits(packed: bool) -> None:
    graph = price(attended(torch.bfloat16, packed=packed).graph)
    (back,) = (op for op in graph.ops if op.target.split(".")[1] == f"{CUDNN}_backward")
    queries = BATCH * HEADS * TOKENS * WIDTH
    assert back.workspace_bytes == 8704 == -(-(queries * 4 + BATCH * HEADS * TOKENS * 4) // 512) * 512


@pytest.mark.parametrize(("shared", "expected"), [(2, 4096 + 512), (1, 4096 + 2 * 2048 + 512)])
def test_cudnns_attention_backward_takes_no_more(shared: int, expected: int) -> None:
    query = [image(number, (1, 2, 64, 8), dtype="bfloat16") for number in range(5)]
    for number in (2, 3):
        query[number] = image(number, (1, shared, 64, 8), dtype="bfloat16")
    sums = image(5, (1, 2, 64, 1))
    graph = on_card(f"aten.{CUDNN}_backward.default", Phase.BACKWARD, [*query, sums], [])
    assert price(graph).ops[0].workspace_bytes == expected


def test_gradients_of_shared_keys_and_values_are_held_once_a_query_head() -> None:
    graph = price(attended(torch.bfloat16, heads=4, shared=2, enable_gqa=True).graph)
    (back,) = (op for op in graph.ops if op.target.split(".")[1] == f"{CUDNN}_backward")
    queries = BATCH * 4 * TOKENS * WIDTH  # 3,840
    assert back.workspace_bytes == 32768 == -(-(queries * 4 + 2 * queries * 2 + 1920) // 512) * 512


def test_other_ops_keep_the_workspace_they_have() -> None:
    drawing = Drawing("cuda:0")
    drawing.value("a", 8)
    drawing.value("b", 8)
    drawing.op("aten.relu.default", [0], [1], workspace=77, seconds=0.5)
    graph = drawing.graph()
    priced = price(graph)
    assert priced == replace(graph, profiled_on="rules for CUDA")


def multiplying(*phases: Phase, target: str = "aten.mm.default") -> Graph:
    drawing = Drawing("cuda:0")
    drawing.value("x", 8)
    for phase in phases:
        drawing.op(target, [0], [drawing.value("product", 8)], phase=phase)
    return drawing.graph()


def library_bytes(graph: Graph) -> list[int]:
    return [value.bytes for value in graph.values if value.role is Role.LIBRARY]


@pytest.mark.parametrize(
    ("phases", "threads"),
    [
        ([], 0),
        ([Phase.FORWARD], 1),
        ([Phase.FORWARD, Phase.FORWARD, Phase.OPTIMIZER], 1),
        ([Phase.OPTIMIZER], 1),
        ([Phase.BACKWARD], 1),
        ([Phase.RECOMPUTE], 1),
        ([Phase.RECOMPUTE, Phase.BACKWARD], 1),
        ([Phase.FORWARD, Phase.RECOMPUTE], 2),
        ([Phase.FORWARD, Phase.BACKWARD, Phase.BACKWARD, Phase.OPTIMIZER], 2),
    ],
)
def test_cublas_holds_a_workspace_for_each_thread_that_multiplies(phases: list[Phase], threads: int) -> None:
    priced = price(multiplying(*phases))
    assert library_bytes(priced) == ([threads * 32 * MIB] if threads else [])
    assert library_bytes(price(priced)) == library_bytes(priced)  # not once more
    for value in priced.values:
        assert value.device == "cuda:0"


@pytest.mark.parametrize(
    ("target", "threads"),
    [
        ("aten.addmm.default", 1),
        ("aten.bmm.default", 1),
        ("aten.baddbmm.default", 1),
        ("aten.linear.default", 1),
        ("aten.mm.out", 1),
        ("aten.mul.Tensor", 0),
        ("aten.convolution_overrideable.default", 0),
    ],
)
def test_only_matrix_products_make_cublas_take_memory(target: str, threads: int) -> None:
    assert len(library_bytes(price(multiplying(Phase.FORWARD, target=target)))) == threads


@pytest.mark.parametrize(("bias", "library"), [(False, 64 * MIB), (True, 65 * MIB)])
def test_library_memory_is_part_of_the_peak_from_the_beginning(bias: bool, library: int) -> None:
    trace = traced(nn.Linear(8, 16, bias), torch.ones(32, 8))
    priced = replace(trace, graph=price(trace.graph))
    assert priced.timeline.resident_bytes == trace.timeline.resident_bytes + library
    assert priced.timeline.categories[Category.WORKSPACE] == library
    assert priced.peak_bytes == trace.peak_bytes + library


def test_products_with_a_bias_have_a_workspace_in_each_thread_that_may_run_them() -> None:
    def threads(model: nn.Module) -> tuple[bool, bool]:
        return threads_using_biased_products(traced(model, torch.ones(32, 8)).graph)

    class Again(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            run = lambda x: torch.tanh(F.linear(x, self.weight, self.bias))  # noqa: E731
            return checkpoint(run, x, use_reentrant=False)  # type: ignore[no-any-return]

    assert threads(nn.Linear(8, 16, bias=False)) == (False, False)
    assert threads(nn.Linear(8, 16)) == (True, False)
    assert threads(nn.Sequential(Again(8, 16), nn.Linear(16, 4))) == (True, True)
    joint = lowtide.capture(nn.Linear(8, 16), (torch.ones(32, 8),), loss=torch.sum)
    assert threads_using_biased_products(joint) == (True, True)  # a plan may run it again


def test_a_process_whose_first_capture_is_for_cuda_learns_what_pytorch_can_override() -> None:
    code = (
        "from torch.overrides import get_overridable_functions\n"
        "import torch.nn.functional as F\n"
        "from lowtide.cost.cuda_rules import cuda_rules\n"
        "own = F.cross_entropy\n"
        "with cuda_rules():\n"
        "    print(own in get_overridable_functions()[F])\n"  # as Dynamo asks
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(lowtide.__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def test_a_model_that_enters_autocast_for_cuda_itself_is_captured_without_a_gpu() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                hidden: torch.Tensor = self.layer(x)
            return hidden.float().sum()

    graph = lowtide.capture(Half(), (torch.ones(2, 4),), device="cuda")
    (product,) = (op for op in graph.ops if op.target == "aten.addmm.default")
    assert {graph.tensors[tensor].dtype for tensor in product.outputs if tensor is not None} == {"bfloat16"}
