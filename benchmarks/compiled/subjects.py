"""The nine steps that are trained in every way there is, and what is asked of lowtide on each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from benchmarks.shared.subjects import Made, gpt2, llama
from benchmarks.standing import models
from benchmarks.standing.models import Sample, classifier, images, text
from benchmarks.tiles.subjects import qwen3, qwen3_600m


@dataclass(frozen=True)
class Target:
    """So many milliseconds at most, within so many MiB."""

    within_mib: float
    most_ms: float
    series: str = ""  # of which plans; empty: any


@dataclass(frozen=True)
class Step:
    """A step, and what is asked beside what is asked of all."""

    sample: Sample
    targets: tuple[Target, ...] = ()
    most_eager_ms: float | None = None  # with nothing recomputed and eager kernels

    @property
    def budgets(self) -> tuple[str, ...]:
        """What plans are asked to keep within, beside the peaks of others."""
        return tuple(f"{target.within_mib:g}MiB" for target in self.targets)


def of_timm(name: str, batch: int, image: int, **options: int) -> Sample:
    """A network of timm as it is published, in bfloat16 where autocast would."""

    def build() -> Made:
        import timm

        model = timm.create_model(name, pretrained=False, **options)
        return classifier(model, None, batch, image)

    title = f"{name.partition('_patch')[0]}, {batch}×{image}², bf16 autocast"
    return Sample(title, build, lambda: f"timm {version('timm')}")


# What tells most comes first: on a machine that is lent for a while, later ones may not get their turn.
LARGE: Mapping[str, Step] = {
    "llama-1b": Step(
        models.LARGE["llama-1b"],
        (
            Target(12_000, 300, "lowtide inductor tiles"),
            Target(7712, 340, "lowtide inductor tiles"),
        ),
    ),
    "resnet50": Step(images("resnet50", 192, 224), (Target(4500, 75),)),
    "convnext_base": Step(of_timm("convnext_base", 96, 224), (Target(3083, 70),)),
    "swin_base": Step(of_timm("swin_base_patch4_window7_224", 96, 224), most_eager_ms=95),
    "qwen3-0.6b": Step(text("qwen3-0.6b, 1×16384, bf16", qwen3_600m, 1, 16_384)),
    "gpt2-medium": Step(models.LARGE["gpt2-medium"]),
    "vit_large": Step(of_timm("vit_large_patch16_224", 96, 224)),
    "vgg19": Step(images("vgg19", 128, 224)),
    "densenet201": Step(images("densenet201", 96, 224)),
}


def _small_text(name: str, make: Callable[[], object]) -> Sample:
    return text(f"{name}, 2×64, fp32", make, 2, 64)


TINY: Mapping[str, Step] = {
    "vgg19": Step(images("vgg11", 2, 32)),
    "resnet50": Step(images("resnet18", 4, 32), (Target(100, 1000),)),
    "densenet201": Step(images("densenet121", 2, 32)),
    "gpt2-medium": Step(
        _small_text("tiny gpt2", partial(gpt2, n_embd=64, n_layer=3, n_head=2, vocab_size=2000))
    ),
    "llama-1b": Step(
        _small_text(
            "tiny llama",
            lambda: llama(
                hidden_size=64,
                intermediate_size=256,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=2000,
            ).float(),
        ),
        (Target(4, 1000, "lowtide tiles"),),
    ),
    "convnext_base": Step(of_timm("convnext_atto", 2, 32)),
    "swin_base": Step(of_timm("swin_tiny_patch4_window7_224", 2, 32, img_size=32, window_size=2)),
    "vit_large": Step(of_timm("vit_tiny_patch16_224", 2, 32, img_size=32)),
    "qwen3-0.6b": Step(
        _small_text(
            "tiny qwen3",
            lambda: qwen3(
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                vocab_size=2000,
            ).float(),
        )
    ),
}
