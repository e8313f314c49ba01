"""Are gradients under a plan those of plain training, to the last bit, on this machine?

    python -m benchmarks.frontier.equality [--device cuda]

For each network a plain step, a second plain step as the control (kernels that add with atomics differ from
themselves), and steps under plans: prints how many gradients differ, and by how much at most.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

import lowtide
from benchmarks.shared.subjects import FRONTIER_SMALL, Made
from lowtide.planner.ops import StepBudget
from lowtide.trace.spec import StepSpec
from lowtide.trace.step import training_step


def gradients(made: Made) -> list[torch.Tensor]:
    """Of one step from the same random state."""
    made.model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    training_step(made.model, made.example, made.loss)()
    return [parameter.grad.clone() for parameter in made.model.parameters() if parameter.grad is not None]


def difference(mine: list[torch.Tensor], plain: list[torch.Tensor]) -> str:
    """How many of them differ, and by how much at most."""
    pairs = list(zip(mine, plain, strict=True))
    unequal = [pair for pair in pairs if not torch.equal(*pair)]
    most = max((float((a - b).abs().max()) for a, b in unequal), default=0.0)
    return "all equal" if not unequal else f"{len(unequal)} of {len(pairs)} differ, by {most:.1e} at most"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    chosen: Any = parser.parse_args()
    for subject in FRONTIER_SMALL:
        torch.manual_seed(0)
        with torch.device(chosen.device):
            made = subject.build()
        plain = gradients(made)
        print(f"{subject.name:14s} plain again {difference(gradients(made), plain)}", flush=True)
        step = StepBudget(StepSpec(made.model, made.example, made.loss))
        for budget in (1 << 50, "75%", "min"):
            try:
                lowtide.apply(made.model, step.solve("auto", budget))
            except lowtide.InfeasibleBudget as error:
                print(f"{subject.name:14s} {budget} {error}")
                continue
            label = "everything kept" if budget == 1 << 50 else f"planned, {budget}"
            print(f"{subject.name:14s} {label} {difference(gradients(made), plain)}", flush=True)
        lowtide.remove(made.model)
        torch._dynamo.reset()


if __name__ == "__main__":
    main()
