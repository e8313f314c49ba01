"""Models by the words a user writes: what each spec gives, that nothing is allocated, and refusals."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowtide.errors import BadRequest, DeviceMissing, MissingExtra, UnknownModel
from lowtide.planner.fit import fit
from lowtide.zoo.setup import Setup
from lowtide.zoo.sources.specs import load

SMALL = {"batch": 2, "tokens": 16, "layers": 1, "width": 32, "heads": 4, "vocab": 64}


def parameters(setup: Setup) -> int:
    return sum(parameter.numel() for parameter in setup.model.parameters())


def tensors(setup: Setup) -> Iterator[Tensor]:
    yield from setup.model.state_dict().values()
    yield from (leaf for leaf in tree_leaves(setup.example) if isinstance(leaf, Tensor))


def shapes(setup: Setup) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in tree_leaves(setup.example)]


# The zoo ---------------------------------------------------------------------------------------------


def test_a_zoo_model_is_built_without_allocating_anything() -> None:
    setup = load("vgg19", {"batch": 4096})
    assert setup.name == "vgg19"
    assert parameters(setup) == 143_667_240
    assert shapes(setup) == [(4096, 3, 224, 224)]
    assert {tensor.device.type for tensor in tensors(setup)} == {"meta"}
    assert setup.sizes == {"batch": 4096}


def test_a_batch_that_was_not_asked_for_is_one() -> None:
    setup = load("gpt", {"tokens": 8})
    assert shapes(setup) == [(1, 8)]
    assert setup.sizes == {"batch": 1, "tokens": 8}


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UnknownModel, match=r"no model called 'resnet51'\. Did you mean resnet50") as caught:
        load("resnet51", {})
    assert caught.value.nearest[0] == "resnet50"
    with pytest.raises(UnknownModel, match="hf:TYPE, torchvision:NAME, timm:NAME"):
        load("huggingface:gpt2", {})


def test_a_size_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(
        BadRequest, match="vgg19 has no tokens: the sizes that apply are batch, image, classes"
    ):
        load("vgg19", {"tokens": 3})
    with pytest.raises(BadRequest, match="image must be at least 32, not 8"):
        load("vgg19", {"image": 8})


# transformers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "sizes", "count", "example"),
    [
        ("hf:gpt2", {"batch": 2}, 124_439_808, [(2, 1024), (2, 1024)]),
        ("hf:bert", {"batch": 2}, 109_514_298, [(2, 512), (2, 512)]),
        ("hf:llama", {"tokens": 4}, 6_738_415_616, [(1, 4), (1, 4)]),
        ("hf:vit", {"batch": 2, "classes": 1000}, 86_567_656, [(2, 3, 224, 224), (2,)]),
        ("hf:resnet", {"image": 64, "classes": 1000}, 25_557_032, [(1, 3, 64, 64), (1,)]),
    ],
)
def test_a_transformers_type_gives_its_usual_model_without_allocating_anything(
    spec: str, sizes: dict[str, int], count: int, example: list[tuple[int, ...]]
) -> None:
    setup = load(spec, sizes)
    assert parameters(setup) == count
    assert shapes(setup) == example
    assert {tensor.device.type for tensor in tensors(setup)} == {"meta"}
    assert setup.model.training


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama", "mistral", "t5"])
def test_a_transformers_text_model_is_trained_on_the_loss_it_carries(kind: str) -> None:
    setup = load(f"hf:{kind}", SMALL)
    found = fit(setup.model, setup.example, setup.loss, optimizer="sgd", profile=False, name=setup.name)
    assert found.model == f"hf:{kind}"
    assert sum(found.categories.values()) == found.peak_bytes
    assert found.peak_bytes > 4 * parameters(setup)


def test_sizes_change_the_configuration_and_what_goes_with_it() -> None:
    config: Any = load("hf:bert", {"width": 1024, "layers": 24, "heads": 16}).model.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (1024, 24, 16)
    assert config.intermediate_size == 4096  # as in bert-large
    grouped: Any = load("hf:mistral", {"layers": 1, "heads": 16}).model.config
    assert grouped.num_key_value_heads == 4  # 8 for 32 heads


def test_transformers_does_not_chatter_about_a_vocabulary_we_made_small() -> None:
    remarks: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = remarks.append  # type: ignore[assignment]
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.addHandler(handler)
    try:
        load("hf:gpt2", {**SMALL, "vocab": 77})  # a size of its own: each remark is made only once
    finally:
        logger.removeHandler(handler)
    assert remarks == []
    assert logger.level == level


@pytest.mark.parametrize(
    ("spec", "sizes", "said"),
    [
        ("hf:gpt2", {"tokens": 2048}, "hf:gpt2 has 1024 positions, so 2048 tokens are too many"),
        ("hf:gpt2", {"image": 64}, "hf:gpt2 has no image: the sizes that apply are batch, tokens, width"),
        ("hf:vit", {"tokens": 64}, "hf:vit has no tokens: the sizes that apply are batch, image, classes"),
        ("hf:resnet", {"heads": 4}, "hf:resnet has no heads: the sizes that apply are batch, image, classes"),
        ("hf:gpt2", {"heads": 5}, "hf:gpt2 cannot be built with these sizes: .*divisible"),
        ("hf:clap", {}, "hf:clap has no head with a loss that lowtide knows"),
    ],
)
def test_what_a_transformers_model_cannot_be_is_refused(spec: str, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        load(spec, sizes)


def test_an_unknown_transformers_type_suggests_the_nearest() -> None:
    with pytest.raises(UnknownModel, match=r"no model called 'hf:lama'\. Did you mean hf:llama"):
        load("hf:lama", {})


# torchvision and timm, played by stand-ins -----------------------------------------------------------


class TwoHeads(nn.Module):
    """A classifier with an auxiliary head, like inception."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.default_cfg = {"input_size": (1, 12, 16)}
        self.main = nn.Conv2d(1, classes, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        scores = self.main(x[:, :1]).mean((2, 3))
        return scores, 2 * scores, None


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_model(name: str, weights: None, num_classes: int) -> nn.Module:
        return TwoHeads(num_classes)

    def create_model(name: str, pretrained: bool, num_classes: int) -> nn.Module:
        return TwoHeads(num_classes)

    torchvision, timm = ModuleType("torchvision"), ModuleType("timm")
    models = SimpleNamespace(list_models=lambda module: ["resnet50", "inception_v3"], get_model=get_model)
    torchvision.models = models  # type: ignore[attr-defined]
    timm.is_model = lambda name: name == "resnet50d"  # type: ignore[attr-defined]
    timm.list_models = lambda: ["resnet50d"]  # type: ignore[attr-defined]
    timm.create_model = create_model  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", torchvision)
    monkeypatch.setitem(sys.modules, "timm", timm)


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("spec", "sizes", "image"),
    [
        ("torchvision:resnet50", {"batch": 3}, (3, 3, 224, 224)),
        ("torchvision:inception_v3", {}, (1, 3, 299, 299)),
        ("torchvision:resnet50", {"image": 64, "classes": 7}, (1, 3, 64, 64)),
        ("timm:resnet50d", {}, (1, 1, 12, 16)),
        ("timm:resnet50d", {"image": 20, "classes": 7}, (1, 1, 20, 20)),
    ],
)
def test_a_classifier_of_another_library_is_trained_on_all_its_heads(
    spec: str, sizes: dict[str, int], image: tuple[int, ...]
) -> None:
    setup = load(spec, sizes)
    assert shapes(setup) == [image]
    assert {tensor.device.type for tensor in tensors(setup)} == {"meta"}
    classes = sizes.get("classes", 1000)
    assert parameters(setup) == 2 * classes
    found = fit(setup.model, setup.example, setup.loss, profile=False)
    targets = [op.target for op in found.trace.graph.ops]
    assert targets.count("aten._log_softmax.default") == 2


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(
    ("spec", "sizes", "said"),
    [
        (
            "torchvision:resnet51",
            {},
            "no model called 'torchvision:resnet51'. Did you mean torchvision:resnet50",
        ),
        ("timm:resnet50", {}, "no model called 'timm:resnet50'. Did you mean timm:resnet50d"),
        ("torchvision:resnet50", {"tokens": 3}, "torchvision:resnet50 has no tokens"),
        ("timm:resnet50d", {"width": 3}, "timm:resnet50d has no width"),
    ],
)
def test_what_another_library_does_not_have_is_refused(spec: str, sizes: dict[str, int], said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        load(spec, sizes)


@pytest.mark.parametrize(
    ("spec", "package", "extra"),
    [
        ("hf:gpt2", "transformers", "hf"),
        ("torchvision:a", "torchvision", "torchvision"),
        ("timm:a", "timm", "timm"),
    ],
)
def test_a_library_that_is_not_installed_is_named(
    spec: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtra, match=rf"{spec} needs {package}: pip install 'lowtide\[{extra}\]'"):
        load(spec, {})


# A user's file ---------------------------------------------------------------------------------------

USER_FILE = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class Config:
    width: int = 3

def plain():
    return nn.Linear(3, 2), (torch.ones(5, 3),), torch.sum

def sized(batch=4, width=3):
    return nn.Linear(width, 1), {"input": torch.ones(batch, width)}

def anything(**sizes):
    plain.seen = sizes
    return nn.Linear(3, 2), (torch.ones(5, 3),)

def demanding(batch, path):
    return nn.Linear(3, 2), (torch.ones(5, 3),)

def neighbourly():
    import neighbour
    return neighbour.model(), (torch.ones(5, 3),)

def raising():
    numbers = torch.zeros(3)
    return numbers.reshape(2, 2)

def quitting():
    raise SystemExit(0)

def model_only():
    return nn.Linear(3, 2)

def bare_example():
    return nn.Linear(3, 2), torch.ones(5, 3)

def bad_loss():
    return nn.Linear(3, 2), (torch.ones(5, 3),), 3

def too_many():
    return nn.Linear(3, 2), (torch.ones(5, 3),), torch.sum, "and more"

def nothing():
    pass

not_a_function = 3
"""


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    (tmp_path / "neighbour.py").write_text("from torch import nn\ndef model(): return nn.Linear(3, 2)\n")
    return path


def test_a_users_function_sets_up_what_it_returns(user_file: Path) -> None:
    setup = load(f"{user_file}:plain", {})
    assert setup.name == f"{user_file}:plain"
    assert shapes(setup) == [(5, 3)]
    assert setup.loss is torch.sum
    assert {tensor.device.type for tensor in tensors(setup)} == {"cpu"}  # as it is, not on meta
    assert (setup.sizes, setup.notes) == ({}, ())


def test_sizes_reach_a_function_that_takes_them_and_a_note_names_the_others(user_file: Path) -> None:
    setup = load(f"{user_file}:sized", {"batch": 7, "width": 2, "tokens": 9})
    assert shapes(setup) == [(7, 2)]
    assert setup.sizes == {"batch": 7, "width": 2}
    (note,) = setup.notes
    assert note.endswith("mine.py:sized takes no tokens, so what was asked for had no effect")
    assert load(f"{user_file}:anything", {"batch": 7, "vocab": 2}).sizes == {"batch": 7, "vocab": 2}
    assert load(f"{user_file}:sized", {}).sizes == {}


def test_a_users_file_may_import_its_neighbours_and_leaves_no_trace(user_file: Path) -> None:
    before = list(sys.path)
    load(f"{user_file}:neighbourly", {})
    assert sys.path == before
    assert not list(user_file.parent.glob("__pycache__/mine*"))
    sys.modules.pop("neighbour")


def test_a_file_in_the_working_directory_needs_no_slash(
    user_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(user_file.parent)
    assert load("mine.py:plain", {}).name == "mine.py:plain"


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (":model_only", r"mine.py:model_only returned a Linear. Expected \(model, example\) or"),
        (":bare_example", r"mine.py:bare_example returned a tuple \(Linear, Tensor\). Expected"),
        (":bad_loss", r"mine.py:bad_loss returned a tuple \(Linear, tuple, int\). Expected"),
        (":too_many", r"mine.py:too_many returned a tuple \(Linear, tuple, \w+, str\). Expected"),
        (":nothing", "mine.py:nothing returned a NoneType. Expected"),
        (":absent", "mine.py' has no function 'absent'. It has plain, sized, anything, demanding"),
        (":not_a_function", "mine.py' has no function 'not_a_function'. It has plain"),
        ("", "which function builds the model. It has plain, .* Write .*mine.py:plain"),
        (":demanding", "cannot call .*mine.py:demanding: missing a required argument: 'batch'"),
    ],
)
def test_a_function_that_is_not_as_it_should_be_is_refused(user_file: Path, function: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        load(f"{user_file}{function}", {})


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match=r"there is no file '.*/absent\.py'"):
        load(f"{tmp_path}/absent.py:build", {})
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(BadRequest, match=r"folder\.py' is not a file"):
        load(f"{tmp_path}/folder.py:build", {})
    (tmp_path / "empty.py").touch()
    with pytest.raises(BadRequest, match="It defines no functions"):
        load(f"{tmp_path}/empty.py:build", {})


def refused(spec: str) -> str:
    with pytest.raises(BadRequest) as caught:
        load(spec, {})
    return str(caught.value)


def test_a_function_that_raises_is_shown_with_its_own_frames_only(user_file: Path) -> None:
    line = USER_FILE.splitlines().index("    return numbers.reshape(2, 2)") + 1
    message = refused(f"{user_file}:raising")
    assert message.startswith(f"{user_file}:raising raised an error.\nTraceback (your frames only):\n")
    assert f'File "{user_file}", line {line}, in raising\n    return numbers.reshape(2, 2)' in message
    assert message.endswith("RuntimeError: shape '[2, 2]' is invalid for input of size 3")
    assert "lowtide/zoo" not in message


def test_a_function_that_quits_does_not_end_lowtide(user_file: Path) -> None:
    assert refused(f"{user_file}:quitting").endswith("SystemExit: 0")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import torch\n1 / 0\n", "line 2, in <module>\n    1 / 0\n"),
        ("def build(:\n", "SyntaxError: invalid syntax"),
        ("import not_a_library\n", "ModuleNotFoundError: No module named 'not_a_library'"),
        ("\0", "null bytes"),
    ],
)
def test_a_file_that_raises_is_shown_with_its_own_frames_only(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    message = refused(f"{tmp_path}/broken.py:build")
    assert said in message
    assert "lowtide/zoo" not in message
    assert "_lowtide_user_broken" not in sys.modules


def test_an_error_of_lowtide_in_a_users_file_passes_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text("import lowtide\nlowtide.parse_bytes('much')\n")
    assert refused(f"{tmp_path}/asks.py:build").startswith("cannot read 'much' as a size")


# For real --------------------------------------------------------------------------------------------


def test_on_a_device_everything_is_there_and_the_same_each_time(user_file: Path) -> None:
    for spec in ("preresnet8", f"{user_file}:plain"):
        first, second = (load(spec, {}, "cpu") for _ in range(2))
        assert {tensor.device.type for tensor in tensors(first)} == {"cpu"}
        assert all(map(torch.equal, tensors(first), tensors(second)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(DeviceMissing, match="cannot measure on 'cuda'"):
        load("mlp", {}, "cuda")
