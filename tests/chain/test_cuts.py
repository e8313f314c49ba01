"""Where a model can be cut, and what each layer takes. The referee: the plain step's own record."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowtide import zoo
from lowtide.chain.chain import Kind
from lowtide.chain.cuts import Granularity, RecordedStep
from lowtide.chain.plan import Plan
from lowtide.chain.sizes import chain_of
from lowtide.chain.unroll import replay
from lowtide.errors import BadRequest
from lowtide.trace.dry_run import Trace, dry_run
from lowtide.trace.step import training_step


def square(output: torch.Tensor) -> torch.Tensor:
    return (output**2).sum()


def traced(model: nn.Module, *args: torch.Tensor) -> RecordedStep:
    return as_step(dry_run(training_step(model, args, square), model=model))


def as_step(trace: Trace) -> RecordedStep:
    return RecordedStep(trace.graph, trace.schedule, trace.calls, trace.forward_ops, trace.closed)


def from_zoo(name: str, **sizes: int) -> RecordedStep:
    work = zoo.workload(name, zoo.Sizes(**sizes))
    step = training_step(work.model, work.kwargs or work.args, work.loss)
    return as_step(dry_run(step, model=work.model))


SMALL: dict[str, dict[str, int]] = {
    "alexnet": {"batch": 2, "image": 64},
    "vgg19": {"batch": 2, "image": 32},
    "resnet50": {"batch": 2, "image": 64},
    "preresnet20": {"batch": 2, "image": 32},
    "densenet121": {"batch": 2, "image": 64},
    "inception_v3": {"batch": 2, "image": 299},
    "unet": {"batch": 1, "image": 64},
    "mlp": {"batch": 4},
    "lstm": {"batch": 2, "tokens": 5},
    "gpt": {"batch": 2, "tokens": 16, "layers": 3, "width": 32, "heads": 2, "vocab": 50},
    "vit": {"batch": 2, "image": 32, "layers": 3, "width": 32, "heads": 2},
}


# The referee ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_the_chain_with_nothing_recomputed_peaks_where_the_plain_step_does(name: str) -> None:
    step = from_zoo(name, **SMALL[name])
    plain = as_trace(step).peak_bytes
    for granularity in Granularity:
        chain = chain_of(step, granularity)
        assert replay(chain, Plan()).peak_bytes == plain, granularity


def as_trace(step: RecordedStep) -> Trace:
    return Trace(step.graph, step.schedule)


# Hand-drawn -------------------------------------------------------------------------------------------

WIDTH, BATCH = 16, 8
TENSOR = WIDTH * BATCH * 4
WEIGHTS = (WIDTH * WIDTH + WIDTH) * 4


def tanh_chain(depth: int) -> nn.Sequential:
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


def test_the_numbers_of_linear_and_tanh_are_those_one_can_count() -> None:
    chain = chain_of(traced(tanh_chain(3), torch.randn(BATCH, WIDTH)), Granularity.FINE)
    assert chain.names == ("0", "1", "2", "3", "4", "5")
    assert chain.output_bytes[1:-1] == (TENSOR,) * 5
    # Linear saves its input, which is the output of the tanh before; a tanh saves its own output.
    assert chain.saved_bytes[:5] == (0, TENSOR, 0, TENSOR, 0)
    assert chain.output_saved_by_itself[:5] == (False, True, False, True, False)
    assert chain.output_saved_by_next[:5] == (False, True, False, True, False)
    assert chain.settled_bytes[::2] == (WEIGHTS,) * 3
    assert chain.gradient_bytes[1:5] == (TENSOR,) * 4
    assert chain.kinds == (Kind.HEAVY, Kind.LIGHT) * 3
    # The parameters and the batch; the model's output, the loss and its gradient, which the caller holds.
    assert chain.base_bytes == 3 * WEIGHTS + TENSOR + TENSOR + 4 + 4


def test_a_layer_as_the_literature_counts_begins_with_weights_or_pooling() -> None:
    chain = chain_of(traced(tanh_chain(3), torch.randn(BATCH, WIDTH)), Granularity.LAYER)
    assert chain.names == ("0 … 1", "2 … 3", "4 … 5")
    assert chain.kinds == (Kind.MIXED,) * 3


def test_vgg19_has_the_24_layers_of_the_paper() -> None:
    chain = chain_of(from_zoo("vgg19", batch=2, image=64), Granularity.LAYER)
    names = [name.partition(" ")[0] for name in chain.names]
    assert len(chain) == 24
    assert [k for k, name in enumerate(names, start=1) if name in {f"features.{i}" for i in POOLS}] == [
        3,
        6,
        11,
        16,
        21,
    ]
    assert names[21:] == ["classifier.0", "classifier.3", "classifier.6"]
    fine = chain_of(from_zoo("vgg19", batch=2, image=64), Granularity.FINE)
    assert len(fine) == 27  # a pooling that shrinks nothing and two dropouts are layers of their own


POOLS = (4, 9, 18, 27, 36)


def test_blocks_are_what_repeats() -> None:
    resnet = chain_of(from_zoo("resnet50", batch=2, image=64), Granularity.BLOCK)
    assert resnet.names[0] == "conv1 … maxpool"
    assert resnet.names[1:-1] == tuple(
        f"layer{stage}.{block}" for stage, blocks in enumerate([3, 4, 6, 3], 1) for block in range(blocks)
    )
    gpt = chain_of(from_zoo("gpt", **SMALL["gpt"]), Granularity.BLOCK)
    assert gpt.names[1:4] == ("blocks.0", "blocks.1", "blocks.2")


def test_a_transformer_is_cut_inside_its_blocks_too() -> None:
    gpt = chain_of(from_zoo("gpt", **SMALL["gpt"]), Granularity.LAYER)
    assert gpt.names[1:3] == ("blocks.0.norm1 … blocks.0.attention", "blocks.0.norm2 … blocks.0.narrow")


class Skip(nn.Module):
    """A connection past the middle module: it cannot be cut there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        bias = mask.float() * 2.0  # no parameter has a part in it: it may go past a cut
        x = self.first(x)
        x = torch.tanh(x + self.middle(x)) + bias
        return self.last(x) + bias  # type: ignore[no-any-return]


def test_there_is_no_cut_where_two_values_go_past() -> None:
    chain = chain_of(
        traced(Skip(), torch.randn(BATCH, WIDTH), torch.ones(BATCH, WIDTH, dtype=torch.bool)),
        Granularity.FINE,
    )
    assert chain.names == ("first", "middle", "last", "(in the model's own forward)")
    assert chain.base_bytes >= 2 * TENSOR  # the mask's bias is held throughout, with the batch


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.two(self.act(self.one(x))))  # type: ignore[no-any-return]


def test_a_value_that_is_changed_in_place_is_cut_after_the_change() -> None:
    chain = chain_of(traced(InPlace(), torch.randn(BATCH, WIDTH)), Granularity.FINE)
    assert chain.names == ("one … act", "two … act")
    named = chain_of(traced(InPlace(), torch.randn(BATCH, WIDTH)), modules=["two"])
    assert named.names == ("one … act", "two … act")


def test_named_modules_are_cut_around() -> None:
    step = traced(tanh_chain(4), torch.randn(BATCH, WIDTH))
    chain = chain_of(step, modules=["2", "5"])
    assert chain.places[1:-1] == (2, 3, 5, 6)
    assert chain.names == ("0 … 1", "2", "3 … 4", "5", "6 … 7")


class Branching(nn.Module):
    """Which layers run depends on the numbers in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        for position, layer in enumerate(self.layers):
            if not (bool(skip[0]) and position % 2):
                x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize(("skip", "layers"), [(0, [0, 1, 2, 3, 4, 5]), (1, [0, 2, 4])])
def test_a_model_with_branches_is_cut_along_the_path_it_took(skip: int, layers: Sequence[int]) -> None:
    chain = chain_of(traced(Branching(), torch.randn(BATCH, WIDTH), torch.tensor([skip])), Granularity.LAYER)
    assert chain.names == tuple(f"layers.{layer}" for layer in layers)


def test_seconds_are_the_profiles_or_nominal() -> None:
    chain = chain_of(traced(tanh_chain(2), torch.randn(BATCH, WIDTH)), Granularity.LAYER)
    assert not chain.timed
    assert all(seconds > 0 for seconds in chain.forward_seconds)


def test_buffers_that_the_forward_changes_are_named() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
    chain = chain_of(traced(model, torch.randn(BATCH, WIDTH)))
    assert chain.changed_buffers == ("1.num_batches_tracked", "1.running_mean", "1.running_var")


# Refusals -----------------------------------------------------------------------------------------------


def test_a_module_that_is_not_called_cannot_be_cut_around() -> None:
    with pytest.raises(BadRequest, match="calls no module '9'"):
        chain_of(traced(tanh_chain(2), torch.randn(BATCH, WIDTH)), modules=["9"])


class Bypassed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return F.relu(x + torch.tanh(self.inner(torch.sigmoid(x))))


def test_a_module_that_something_goes_past_cannot_be_cut_around() -> None:
    with pytest.raises(BadRequest, match="cannot be cut around inner: more than one value goes past"):
        chain_of(traced(Bypassed(), torch.randn(BATCH, WIDTH)), modules=["inner"])


def test_a_step_without_a_backward_has_no_chain() -> None:
    model = tanh_chain(1)
    trace = dry_run(lambda: model(torch.randn(BATCH, WIDTH)), model=model)
    with pytest.raises(BadRequest, match="the step has no backward"):
        chain_of(as_step(trace))


def test_a_step_that_calls_the_model_twice_has_no_chain() -> None:
    model, x = tanh_chain(1), torch.randn(BATCH, WIDTH)
    trace = dry_run(lambda: (model(x).sum() + model(x).sum()).backward(), model=model)
    with pytest.raises(BadRequest, match="calls the model 2 times"):
        chain_of(as_step(trace))


def test_naming_no_module_is_refused() -> None:
    with pytest.raises(BadRequest, match="no module is named to cut around"):
        chain_of(traced(tanh_chain(2), torch.randn(BATCH, WIDTH)), modules=[])
