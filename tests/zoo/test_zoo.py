"""The zoo: exact parameter counts, names in order, real training steps, and refusals."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lowtide.zoo import BadSize, Sizes, UnknownModel, Workload, known_as, names, workload
from lowtide.zoo.gpt import GPT
from lowtide.zoo.inception import InceptionOutput
from lowtide.zoo.lstm import LSTM
from lowtide.zoo.preresnet import BasicBlock, Bottleneck, layout
from lowtide.zoo.sources.specs import load
from tests.helpers.effort import long_but

PUBLISHED = {
    "alexnet": 61_100_840,
    "vgg11": 132_863_336,
    "vgg13": 133_047_848,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vgg11_bn": 132_868_840,
    "vgg13_bn": 133_053_736,
    "vgg16_bn": 138_365_992,
    "vgg19_bn": 143_678_248,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "densenet121": 7_978_856,
    "densenet161": 28_681_000,
    "densenet169": 14_149_480,
    "densenet201": 20_013_928,
    "inception_v3": 27_161_264,
    "gpt": 124_439_808,
    "vit": 86_567_656,
}

TINY = {
    "alexnet": Sizes(batch=2, image=63, classes=5),
    "gpt": Sizes(batch=2, tokens=8, layers=2, width=32, heads=4, vocab=50),
    "inception_v3": Sizes(batch=2, classes=5),  # its smallest image is its usual one
    "lstm": Sizes(batch=2, tokens=4, layers=2, width=16),
    "mlp": Sizes(batch=2, width=16),
    "unet": Sizes(batch=2, image=32, width=4),
    "vit": Sizes(batch=2, image=32, layers=2, width=32, heads=4, classes=5),
}

NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")

# The smallest image that reaches the end of the network, for those that pool without padding.
LEAST = {
    "alexnet": 63,
    "vgg11": 32,
    "vgg19_bn": 32,
    "densenet121": 29,
    "densenet201": 29,
    "inception_v3": 299,
}


class Recorder(TorchDispatchMode):
    """Notes every operation that runs and every device that a result lives on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []
        self.devices: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append(str(func))
        self.devices |= {leaf.device.type for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        return out


def on_meta(name: str, sizes: Sizes | None = None) -> Workload:
    with torch.device("meta"):
        return workload(name, sizes or Sizes(batch=2))


def parameters(name: str, sizes: Sizes | None = None) -> int:
    return sum(parameter.numel() for parameter in on_meta(name, sizes).model.parameters())


def loss_of(work: Workload) -> Tensor:
    assert work.loss is not None
    return work.loss(work.model(*work.args, **work.kwargs))


def target_of(work: Workload) -> Tensor:
    assert isinstance(work.loss, partial)
    target = work.loss.keywords["target"]
    assert isinstance(target, Tensor)
    return target


def keys(name: str) -> list[str]:
    return list(on_meta(name).model.state_dict())


def owners(name: str, depth: int, under: str = "") -> list[str]:
    """The first `depth` parts of every key below a prefix, each once, in order."""
    return list(
        dict.fromkeys(".".join(key.split(".")[:depth]) for key in keys(name) if key.startswith(under))
    )


# ---------------------------------------------------------------------------------------- parameter counts


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_the_model_has_exactly_the_published_number_of_parameters(name: str, count: int) -> None:
    assert parameters(name) == count


@pytest.mark.parametrize(("width", "classes"), [(4096, 10), (7, 3)])
def test_the_mlp_has_two_weights_and_two_biases(width: int, classes: int) -> None:
    expected = (784 + 1) * width + (width + 1) * classes
    assert parameters("mlp", Sizes(batch=1, width=width, classes=classes)) == expected


@pytest.mark.parametrize(("layers", "width", "classes"), [(2, 512, 10), (3, 5, 4)])
def test_an_lstm_layer_has_two_square_weights_and_a_bias_for_each_of_four_gates(
    layers: int, width: int, classes: int
) -> None:
    expected = layers * 4 * (2 * width * width + width) + (width + 1) * classes
    assert parameters("lstm", Sizes(batch=1, layers=layers, width=width, classes=classes)) == expected


@pytest.mark.parametrize(("width", "classes"), [(64, 2), (4, 7)])
def test_the_unet_count_follows_from_its_double_convolutions_and_upsamplings(
    width: int, classes: int
) -> None:
    def double(channels: int, out: int) -> int:
        return 9 * channels * out + 2 * out + 9 * out * out + 2 * out

    expected = double(3, width) + (width + 1) * classes
    for high in (width, 2 * width, 4 * width, 8 * width):
        low = 2 * high
        expected += double(high, low) + (4 * low * high + high) + double(low, high)
    assert parameters("unet", Sizes(batch=1, width=width, classes=classes)) == expected


@pytest.mark.parametrize("depth", [8, 20, 110])
def test_a_shallow_preresnet_counts_as_basic_blocks(depth: int) -> None:
    def block(channels: int, width: int) -> int:
        projection = 0 if channels == width else channels * width
        return 2 * channels + 9 * channels * width + 2 * width + 9 * width * width + projection

    count = (depth - 2) // 6
    expected = 3 * 16 * 9 + 2 * 64 + (64 + 1) * 10
    for channels, width in ((16, 16), (16, 32), (32, 64)):
        expected += block(channels, width) + (count - 1) * block(width, width)
    assert parameters(f"preresnet{depth}") == expected


@pytest.mark.parametrize("depth", [164, 1001])
def test_a_deep_preresnet_counts_as_bottlenecks(depth: int) -> None:
    def block(channels: int, width: int) -> int:
        projection = 0 if channels == 4 * width else channels * 4 * width
        norms = 2 * channels + 2 * width + 2 * width
        return norms + channels * width + 9 * width * width + width * 4 * width + projection

    count = (depth - 2) // 9
    expected = 3 * 16 * 9 + 2 * 256 + (256 + 1) * 10
    for channels, width in ((16, 16), (64, 32), (128, 64)):
        expected += block(channels, width) + (count - 1) * block(4 * width, width)
    assert parameters(f"preresnet{depth}") == expected


# --------------------------------------------------------------------------------------------- state dicts


def test_alexnet_and_vgg_number_their_layers_as_published_weights_do() -> None:
    assert keys("alexnet")[:4] == [
        "features.0.weight",
        "features.0.bias",
        "features.3.weight",
        "features.3.bias",
    ]
    assert owners("alexnet", 2) == [
        *(f"features.{index}" for index in (0, 3, 6, 8, 10)),
        *(f"classifier.{index}" for index in (1, 4, 6)),
    ]
    assert owners("vgg11", 2) == [
        *(f"features.{index}" for index in (0, 3, 6, 8, 11, 13, 16, 18)),
        *(f"classifier.{index}" for index in (0, 3, 6)),
    ]
    assert keys("vgg19")[-1] == "classifier.6.bias"
    assert keys("vgg11_bn")[2:7] == [f"features.1.{leaf}" for leaf in NORM]


def test_resnet_keys_come_in_the_published_order() -> None:
    stages = [f"layer{index}" for index in (1, 2, 3, 4)]
    assert owners("resnet50", 1) == ["conv1", "bn1", *stages, "fc"]
    assert owners("resnet50", 4, "layer1.0.") == [
        "layer1.0.conv1.weight",
        *(f"layer1.0.bn1.{leaf}" for leaf in NORM),
        "layer1.0.conv2.weight",
        *(f"layer1.0.bn2.{leaf}" for leaf in NORM),
        "layer1.0.conv3.weight",
        *(f"layer1.0.bn3.{leaf}" for leaf in NORM),
        "layer1.0.downsample.0",
        "layer1.0.downsample.1",
    ]
    assert "layer1.0.downsample.0.weight" in keys("resnet50")
    assert owners("resnet18", 3, "layer2.0.") == [
        f"layer2.0.{part}" for part in ("conv1", "bn1", "conv2", "bn2", "downsample")
    ]
    assert "layer1.0.downsample.0.weight" not in keys("resnet18")


def test_densenet_keys_come_in_the_published_order() -> None:
    middle = [f"features.{part}{index}" for index in (1, 2, 3) for part in ("denseblock", "transition")]
    ends = ["classifier.weight", "classifier.bias"]
    assert owners("densenet121", 2) == [
        "features.conv0",
        "features.norm0",
        *middle,
        "features.denseblock4",
        "features.norm5",
        *ends,
    ]
    layer = "features.denseblock1.denselayer1"
    assert owners("densenet121", 4, f"{layer}.") == [
        f"{layer}.{p}" for p in ("norm1", "conv1", "norm2", "conv2")
    ]
    assert owners("densenet121", 3, "features.transition1") == [
        "features.transition1.norm",
        "features.transition1.conv",
    ]


def test_inception_keys_come_in_the_published_order() -> None:
    assert owners("inception_v3", 1) == [
        *("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3"),
        *("Mixed_5b", "Mixed_5c", "Mixed_5d", "Mixed_6a", "Mixed_6b", "Mixed_6c", "Mixed_6d", "Mixed_6e"),
        *("AuxLogits", "Mixed_7a", "Mixed_7b", "Mixed_7c", "fc"),
    ]
    assert keys("inception_v3")[:2] == ["Conv2d_1a_3x3.conv.weight", "Conv2d_1a_3x3.bn.weight"]
    assert owners("inception_v3", 2, "Mixed_5b.") == [
        f"Mixed_5b.branch{part}"
        for part in ("1x1", "5x5_1", "5x5_2", "3x3dbl_1", "3x3dbl_2", "3x3dbl_3", "_pool")
    ]
    assert owners("inception_v3", 2, "Mixed_7b.") == [
        f"Mixed_7b.branch{part}"
        for part in (
            "1x1",
            "3x3_1",
            "3x3_2a",
            "3x3_2b",
            "3x3dbl_1",
            "3x3dbl_2",
            "3x3dbl_3a",
            "3x3dbl_3b",
            "_pool",
        )
    ]
    assert owners("inception_v3", 2, "AuxLogits.") == ["AuxLogits.conv0", "AuxLogits.conv1", "AuxLogits.fc"]


# ------------------------------------------------------------------------------------------------ training


QUICK = [name for name in names() if not name.startswith(("vgg", "densenet"))]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Resnet18", "resnet18"),
        ("ResNet-50", "resnet50"),
        ("VGG16-BN", "vgg16_bn"),
        ("PreResNet20", "preresnet20"),
    ],
)
def test_a_name_is_known_however_it_is_written(written: str, name: str) -> None:
    assert known_as(written) == name
    assert load(written, {}).name == name


def test_names_in_other_libraries_as_well() -> None:
    pytest.importorskip("transformers")
    assert load("HF:GPT2", {"layers": 1}).name == "hf:gpt2"


TRAINED = [*names(), "preresnet8", "preresnet164"]


@pytest.mark.parametrize("name", long_but(TRAINED, *QUICK, "vgg11", "densenet121", "preresnet8"))
def test_a_training_step_gives_a_finite_loss_and_a_finite_gradient_for_every_parameter(name: str) -> None:
    torch.manual_seed(0)
    work = workload(name, TINY.get(name, Sizes(batch=2, image=32, classes=5)))
    assert work.name == name
    assert all(module.training for module in work.model.modules())
    loss = loss_of(work)
    loss.backward()
    assert loss.shape == ()
    assert loss.isfinite()
    for key, parameter in work.model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("name", [*sorted(PUBLISHED.keys() - {"gpt", "vit"}), "preresnet20", "unet", "mlp"])
def test_every_relu_of_a_training_step_works_in_place(name: str) -> None:
    work = on_meta(name)
    with Recorder() as recorder:
        loss_of(work)
    assert "aten.relu_.default" in recorder.operations
    assert "aten.relu.default" not in recorder.operations


@pytest.mark.parametrize("name", [*names(), "preresnet20"])
def test_on_the_meta_device_neither_building_nor_running_allocates_anything(name: str) -> None:
    with Recorder() as recorder:
        loss_of(on_meta(name))
    assert recorder.devices == {"meta"}


def test_inception_adds_two_fifths_of_the_auxiliary_loss_and_drops_the_head_in_eval_mode() -> None:
    work = workload("inception_v3", Sizes(batch=2, classes=5))
    logits, aux = torch.randn(2, 5), torch.randn(2, 5)
    target = target_of(work)
    assert work.loss is not None
    expected = F.cross_entropy(logits, target) + 0.4 * F.cross_entropy(aux, target)
    assert torch.equal(work.loss(InceptionOutput(logits, aux)), expected)
    with torch.no_grad():
        assert work.model.eval()(torch.randn(1, 3, 75, 75)).shape == (1, 5)


def test_the_gpt_target_is_the_input_moved_by_one_token() -> None:
    work = workload("gpt", TINY["gpt"])
    tokens = work.args[0]
    assert tokens.shape == target_of(work).shape == (2, 8)
    assert torch.equal(tokens[:, 1:], target_of(work)[:, :-1])


def test_the_gpt_does_not_see_later_tokens() -> None:
    model = GPT(layers=2, width=16, heads=2, vocab=11, context=6).eval()
    tokens = torch.randint(11, (1, 6))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 11
    before, after = model(tokens), model(changed)
    assert torch.allclose(before[:, :-1], after[:, :-1])
    assert not torch.allclose(before[:, -1], after[:, -1])


def test_gpt_dropout_is_off_unless_asked_for() -> None:
    tokens = torch.randint(11, (1, 6))
    quiet = GPT(layers=1, width=16, heads=2, vocab=11, context=6)
    noisy = GPT(layers=1, width=16, heads=2, vocab=11, context=6, dropout=0.5)
    assert torch.equal(quiet(tokens), quiet(tokens))
    assert not torch.equal(noisy(tokens), noisy(tokens))


def test_the_unrolled_lstm_computes_what_the_fused_one_does() -> None:
    model = LSTM(layers=2, width=6, classes=3)
    fused = nn.LSTM(6, 6, num_layers=2, batch_first=True)
    state = fused.state_dict()
    for index, cell in enumerate(model.cells):
        weights = cell.state_dict()
        state[f"weight_ih_l{index}"] = weights["input.weight"]
        state[f"bias_ih_l{index}"] = weights["input.bias"]
        state[f"weight_hh_l{index}"] = weights["hidden.weight"]
        state[f"bias_hh_l{index}"] = torch.zeros(24)
    fused.load_state_dict(state)
    x = torch.randn(4, 5, 6)
    torch.testing.assert_close(model(x), model.head(fused(x)[0][:, -1]))


def test_the_unet_labels_every_pixel() -> None:
    work = on_meta("unet", Sizes(batch=3, image=48, classes=4, width=8))
    assert work.model(*work.args).shape == (3, 4, 48, 48)
    assert target_of(work).shape == (3, 48, 48)


def test_the_sizes_shape_the_model_and_its_batch() -> None:
    image = on_meta("resnet18", Sizes(batch=3, image=64, classes=7))
    assert image.args[0].shape == (3, 3, 64, 64)
    assert image.model(*image.args).shape == (3, 7)
    sequence = on_meta("lstm", Sizes(batch=3, tokens=5, width=8))
    assert sequence.args[0].shape == (3, 5, 8)
    assert on_meta("preresnet20").args[0].shape == (2, 3, 32, 32)
    assert on_meta("inception_v3").args[0].shape == (2, 3, 299, 299)


# ------------------------------------------------------------------------------------- names and refusals


def test_the_names_are_sorted_and_leave_out_the_preresnets() -> None:
    assert list(names()) == sorted({*PUBLISHED, "lstm", "mlp", "unet"})


def test_the_depth_of_a_preresnet_decides_its_block() -> None:
    assert layout(20) == (BasicBlock, 3)
    assert layout(110) == (BasicBlock, 18)
    assert layout(164) == (Bottleneck, 18)
    assert layout(1001) == (Bottleneck, 111)
    assert layout(1202) == (BasicBlock, 200)


@pytest.mark.parametrize("depth", [1, 2, 21, 29, 165, 1000])
def test_a_preresnet_of_an_impossible_depth_is_refused_with_the_rule(depth: int) -> None:
    with pytest.raises(BadSize, match=rf"preresnet{depth}: .*6n \+ 2 .*9n \+ 2 .*not {depth}$"):
        on_meta(f"preresnet{depth}")


@pytest.mark.parametrize("name", ["vgg12", "", "preresnet", "preresnet20x", "preresnet-20", "preresnet020"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownModel, match=re.escape(repr(name)) + r".*alexnet.*preresnet<depth>") as caught:
        on_meta(name)
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (
            "vgg19",
            Sizes(batch=1, tokens=8),
            "vgg19 has no tokens: the sizes that apply are batch, image, classes",
        ),
        ("preresnet20", Sizes(batch=1, layers=3), "preresnet20 has no layers: .* batch, image, classes"),
        ("gpt", Sizes(batch=1, image=8, classes=2), "gpt has no image or classes: .* heads, vocab"),
        (
            "mlp",
            Sizes(batch=1, layers=3),
            "mlp has no layers: the sizes that apply are batch, width, classes",
        ),
        ("mlp", Sizes(batch=0), "mlp: batch must be at least 1, not 0"),
        ("resnet18", Sizes(batch=1, classes=-2), "resnet18: classes must be at least 1, not -2"),
        ("vgg19", Sizes(batch=1, image=16), "vgg19: image must be at least 32, not 16"),
        ("unet", Sizes(batch=1, image=40), "unet: image must be a multiple of 16, not 40"),
        ("vit", Sizes(batch=1, image=8), "vit: image must be a multiple of 16, not 8"),
        ("gpt", Sizes(batch=1, width=100), "gpt: width 100 is not divisible by heads 12"),
        ("vit", Sizes(batch=1, heads=5), "vit: width 768 is not divisible by heads 5"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_the_reason(name: str, sizes: Sizes, message: str) -> None:
    with pytest.raises(BadSize, match=message):
        on_meta(name, sizes)


@pytest.mark.parametrize(("name", "least"), LEAST.items())
def test_the_smallest_image_allowed_is_the_smallest_that_the_network_survives(name: str, least: int) -> None:
    work = on_meta(name, Sizes(batch=2, image=least))
    assert loss_of(work).shape == ()
    with pytest.raises(BadSize, match=f"image must be at least {least}, not {least - 1}"):
        on_meta(name, Sizes(batch=2, image=least - 1))
    with pytest.raises(RuntimeError):
        work.model(torch.randn(2, 3, least - 1, least - 1, device="meta"))


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "preresnet20", "preresnet164"])
def test_a_residual_network_takes_an_image_of_one_pixel(name: str) -> None:
    assert loss_of(on_meta(name, Sizes(batch=2, image=1))).shape == ()


def test_both_refusals_are_value_errors() -> None:
    assert issubclass(UnknownModel, ValueError)
    assert issubclass(BadSize, ValueError)
