"""Will it fit, and can it be made to? First asked of models nobody has to build, then checked for real.

    make demo          (or: python examples/demo.py)

Nothing is downloaded. The first part allocates nothing, however large the models are; the second trains
a small VGG on the CPU, measures a step from the allocator's own events, and fails if the prediction is
off by more than 1 % of what the step itself needs. The third trains a small ResNet within a budget, layer
by layer, and fails if the peak is above it or the losses are not those of plain training. The fourth holds a
small GPT to half of its peak, op by op, and fails if it is exceeded or a gradient is not the plain one.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

from lowtide.cli.quiet import hush_libraries, undisturbed

hush_libraries()  # before any of them is imported

import torch  # noqa: E402
from torch import nn  # noqa: E402

import lowtide  # noqa: E402
from lowtide.report.picture.plot import draw, write_picture  # noqa: E402
from lowtide.trace.step import Example, Loss, training_step  # noqa: E402
from lowtide.zoo import Sizes, workload  # noqa: E402
from lowtide.zoo.sources.specs import load  # noqa: E402

CARD = "24GiB"
QUESTIONS = (("vgg19", 64), ("resnet50", 192), ("resnet50", 320), ("hf:gpt2", 8), ("hf:gpt2", 16))
SMALL = Sizes(batch=32, image=64, classes=10)
TEXT = Sizes(batch=8, tokens=128, layers=4, width=256, heads=4, vocab=1000)
HALF = "50%"
STEPS = 5
TOLERANCE = 0.01
PICTURE = Path("demo-out") / "vgg11.png"


def ask_about_known_models() -> None:
    """Predict training with AdamW on a card that need not be in this machine."""
    print(f"1. Does training with AdamW fit on a {CARD} card? Nothing is allocated to find out;")
    print("   kernels' workspaces and the CUDA context come on top of these numbers.\n")
    for name, batch in QUESTIONS:
        print(f"   {name:9} batch {batch:<4} {answer(name, batch)}", flush=True)
    name, batch = QUESTIONS[0]
    print("\n   The same from the shell, with the parts of the peak:")
    print(f"   lowtide fit {name} --batch {batch} --optimizer adamw --device cuda --budget {CARD}\n")


def answer(name: str, batch: int) -> str:
    """The peak and the margin, in words."""
    try:
        setup = load(name, {"batch": batch})
    except lowtide.MissingExtra as error:
        return f"skipped: {error}"
    with undisturbed():
        found = lowtide.fit(
            setup.model,
            setup.example,
            setup.loss,
            optimizer="adamw",
            device="cuda",
            budget=CARD,
            profile=False,
        )
    peak, margin = lowtide.format_bytes(found.peak_bytes), lowtide.format_bytes(abs(found.margin_bytes or 0))
    verdict = f"fits, {margin} to spare" if found.fits else f"does not fit, {margin} too much"
    return f"peak {peak:>9}   {verdict}"


def predict_train_and_measure() -> float:
    """Train a small VGG for a few steps; the error of the predicted peak, as a part of the step's own."""
    torch.manual_seed(0)
    work = workload("vgg11", SMALL)
    print(f"2. vgg11 on {SMALL.batch} images of {SMALL.image} pixels, with momentum, on this CPU: predict,")
    print("   then train. Each kernel is run once for the workspace it takes.\n", flush=True)
    with undisturbed():
        found = lowtide.fit(work.model, work.args, work.loss, optimizer="momentum", name="vgg11")
    print(f"   predicted peak {lowtide.format_bytes(found.peak_bytes)} ({found.predicted_on})")
    write(found)

    optimizer = torch.optim.SGD(work.model.parameters(), lr=0.05, momentum=0.9)
    step = training_step(work.model, work.args, work.loss, optimizer)
    losses = [float(step()) for _ in range(STEPS)]
    print(f"   losses of {STEPS} steps: {', '.join(f'{loss:.3f}' for loss in losses)}")

    # The allocator does not see the release of what it handed out before the recording began, so the
    # old gradients go first; the step itself would drop them before it takes anything.
    optimizer.zero_grad(set_to_none=True)
    reading = lowtide.measure(step, device="cpu")
    error = abs(found.peak_bytes - reading.peak_bytes) / reading.growth_bytes
    peak, own = lowtide.format_bytes(reading.peak_bytes), lowtide.format_bytes(reading.growth_bytes)
    print(f"   measured peak  {peak}, of which the step itself takes {own};")
    print(f"   the prediction is off by {error:.3%} of that")
    return error


def plan_apply_and_train() -> bool:
    """Train a small ResNet plainly and within a budget; whether budget and losses are kept."""
    torch.manual_seed(0)
    work = workload("resnet18", SMALL)
    planned, plain = work.model, copy.deepcopy(work.model)
    print(
        f"\n3. resnet18 on {SMALL.batch} images of {SMALL.image} pixels: the least peak, then halfway to it."
    )
    with undisturbed():
        rehearsal = lowtide.Rehearsal(planned, work.args, work.loss, name="resnet18")
        least = rehearsal.solve(rehearsal.chain("fine"), "rotor").confirmation
        assert least is not None
        budget = (least.peak_bytes + least.plain_peak_bytes) // 2
        solution = rehearsal.solve(rehearsal.chain("fine"), "rotor", budget)
    found = solution.confirmation
    assert found is not None
    for label, count in (("plain", found.plain_peak_bytes), ("least", least.peak_bytes), ("budget", budget)):
        print(f"   {label:7}{lowtide.format_bytes(count):>11}")
    print(f"   planned{lowtide.format_bytes(found.peak_bytes):>11}   recompute {solution.plan}", flush=True)

    lowtide.apply(planned, solution)
    losses = [trained(model, work.args, work.loss) for model in (plain, planned)]
    step = training_step(planned, work.args, work.loss)
    planned.zero_grad(set_to_none=True)
    reading = lowtide.measure(step, device="cpu")
    peak = rehearsal.plain.timeline.resident_bytes + reading.growth_bytes
    print(f"   measured{lowtide.format_bytes(peak):>10}")
    same = losses[0] == losses[1]
    print(f"   losses of {STEPS} steps: {'those' if same else 'not those'} of plain training")
    return peak <= budget and same


def plan_op_by_op() -> bool:
    """Hold a small GPT to half of its peak; whether the budget holds and gradients are the plain ones."""
    torch.manual_seed(0)
    work = workload("gpt", TEXT)
    planned, plain = work.model, copy.deepcopy(work.model)
    print(f"\n4. gpt of {TEXT.layers} layers on {TEXT.batch} texts: half of its peak, op by op.", flush=True)
    with undisturbed():
        solution = lowtide.plan(planned, work.args, loss=work.loss, budget=HALF, name="gpt")
    assert isinstance(solution, lowtide.GraphSolution)
    assert solution.budget_bytes is not None
    lowtide.apply(planned, solution)
    same = all(map(torch.equal, *(gradients(model, work.args, work.loss) for model in (plain, planned))))
    planned.zero_grad(set_to_none=True)
    reading = lowtide.measure(training_step(planned, work.args, work.loss), device="cpu")
    peak = solution.timeline.resident_bytes + reading.growth_bytes
    for label, count in (
        ("plain", solution.plain_peak_bytes or 0),
        ("budget", solution.budget_bytes),
        ("planned", solution.peak_bytes),
        ("measured", peak),
    ):
        print(f"   {label:9}{lowtide.format_bytes(count):>9}")
    again = sum(solution.recomputed.values())
    print(f"   {again} ops run again, which adds {solution.extra_seconds_ratio:.1%} to a step;")
    print(f"   gradients: {'those' if same else 'not those'} of plain training, bit for bit")
    return peak <= solution.budget_bytes and same


def gradients(model: nn.Module, batch: Example, loss: Loss | None) -> list[torch.Tensor]:
    """Those of one step."""
    torch.manual_seed(1)
    training_step(model, batch, loss)()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def trained(model: nn.Module, batch: Example, loss: Loss | None) -> list[float]:
    """The losses of a few steps."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    step = training_step(model, batch, loss, optimizer)
    return [float(step()) for _ in range(STEPS)]


def write(found: lowtide.Fit) -> None:
    """Draw the step's memory."""
    PICTURE.parent.mkdir(exist_ok=True)
    title = f"vgg11, batch {SMALL.batch}, {SMALL.image} px, momentum, on cpu"
    write_picture(draw(found.trace.timeline, "png", title=title), PICTURE)
    print(f"   live bytes over the step: {PICTURE}")


def main() -> int:
    """All parts; 1 if a prediction or a budget does not hold."""
    ask_about_known_models()
    if predict_train_and_measure() > TOLERANCE:
        print(f"\nThat is more than {TOLERANCE:.0%}: a bug in lowtide.", file=sys.stderr)
        return 1
    if not plan_apply_and_train():
        print("\nThe budget or the losses are not kept: a bug in lowtide.", file=sys.stderr)
        return 1
    if not plan_op_by_op():
        print("\nThe budget or the gradients are not kept: a bug in lowtide.", file=sys.stderr)
        return 1
    print("\nThe prediction and the budgets hold.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
