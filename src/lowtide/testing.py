"""Assertions about memory, for a test suite: a model that suddenly needs more fails its test."""

from __future__ import annotations

import os

import torch
from torch import nn

from lowtide._version import __version__
from lowtide.errors import BadRequest
from lowtide.execute.identity import described_inputs
from lowtide.planner.baseline import Baseline, Source, Verdict, judge, load_baseline, save_baseline
from lowtide.planner.fit import Fit, fit
from lowtide.planner.real_step import RealStep
from lowtide.text.sizes import parse_bytes
from lowtide.text.units import format_bytes
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import Example, Loss, arguments, declared
from lowtide.trace.training import empty_gradients

_WRITE = "Write it once, with write_baseline=True, and put the file under version control."
_MODULES_SHOWN = 5


def assert_peak(
    model: nn.Module,
    example: Example,
    *,
    loss: Loss | None = None,
    optimizer: str | None = None,
    device: str | torch.device | None = None,
    at_most: str | int | None = None,
    baseline: str | os.PathLike[str] | None = None,
    tolerance: str | int = "2%",
    write_baseline: bool = False,
    profile: bool = True,
    measured: bool = False,
) -> None:
    """Raise AssertionError if training `model` on `example` peaks too high; the message says what grew.

    The peak is predicted, as `lowtide.fit` does: nothing is allocated, and a device that is not here will do.
    It must be `at_most` that, or, with a `baseline`, no more than what that file says and the `tolerance`, a
    part of it or bytes. With `write_baseline` the file is written and nothing is compared.

    With `measured` one step is run for real, after one that sets everything up, and the peak is read from the
    allocator. The model is trained by that. On a CPU every tensor of the process counts.

    Raises:
        BadRequest: there is nothing to hold the peak against, no baseline yet, or one of another step.
        BadFile: the baseline cannot be read or written.
    """
    if at_most is None and baseline is None:
        raise BadRequest(
            'there is nothing to hold the peak against: give at_most="8GiB" or baseline="peak.json".'
        )
    if write_baseline and baseline is None:
        raise BadRequest('write_baseline says to write a file; say which: baseline="peak.json".')
    __tracebackhide__ = True  # pytest shows the test, not this
    example, loss = declared(example, loss)
    kept = None if baseline is None or write_baseline else load_baseline(baseline, _WRITE)
    if measured:
        found = _measured(model, example, loss, optimizer, device)
    else:
        predicted = fit(model, example, loss, optimizer=optimizer, device=device, profile=profile)
        found = baseline_of(predicted, example)
    if at_most is not None and found.peak_bytes > parse_bytes(at_most):
        raise AssertionError(_too_much(found, parse_bytes(at_most)))
    if baseline is not None and write_baseline:
        save_baseline(found, baseline)
    if kept is not None:
        judgement = judge(kept, found, tolerance)
        if judgement.verdict is Verdict.GREW:
            raise AssertionError(str(judgement))


def baseline_of(found: Fit, example: Example, sizes: dict[str, int] | None = None) -> Baseline:
    """A prediction as a baseline of later ones."""
    return Baseline(
        model=found.model,
        device=found.device,
        optimizer=found.optimizer,
        inputs=described_inputs(*arguments(example)),
        sizes=sizes or {},
        source=Source.PREDICTED,
        peak_bytes=found.peak_bytes,
        categories={category.value: held for category, held in found.categories.items()},
        modules=dict(found.modules),
        lowtide_version=__version__,
        torch_version=torch.__version__.partition("+")[0],
    )


def _measured(
    model: nn.Module,
    example: Example,
    loss: Loss | None,
    optimizer: str | None,
    device: str | torch.device | None,
) -> Baseline:
    step = RealStep(StepSpec(model, example, loss, optimizer, device=device), warm_up=1)
    with empty_gradients(model):
        reading = step.measured()
    return Baseline(
        model=type(model).__name__,
        device=reading.device,
        optimizer=optimizer,
        inputs=described_inputs(*arguments(example)),
        sizes={},
        source=Source.MEASURED,
        peak_bytes=reading.peak_bytes,
        categories={},
        modules={},
        lowtide_version=__version__,
        torch_version=torch.__version__.partition("+")[0],
    )


def _too_much(found: Baseline, most_bytes: int) -> str:
    over, most = format_bytes(found.peak_bytes - most_bytes), format_bytes(most_bytes)
    said = f"the {found.source} peak is {format_bytes(found.peak_bytes)}, {over} above {most}"
    largest = [f"{name or 'the model itself'} {format_bytes(held)}" for name, held in found.modules.items()]
    return f"{said}; held at the peak: {', '.join(largest[:_MODULES_SHOWN])}" if largest else said
