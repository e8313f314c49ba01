"""Plans put on models and taken off again, whatever their kind."""

from __future__ import annotations

from lowtide.errors import BadRequest
from lowtide.execute.ops_forward import Model, plans_of, remove, reroute, set_aside
from lowtide.solvers.solution import GraphSolution, Solution

__all__ = ["Model", "apply", "plans_of", "remove", "set_aside"]


def apply(
    model: Model, solution: Solution | GraphSolution, *, on_new_inputs: str = "warn", accumulate: int = 1
) -> Model:
    """Make `model` recompute as `solution` plans, in place, and return it.

    Class, parameters and `state_dict` keys stay; gradients are those of plain training, bit for bit
    where PyTorch is deterministic; random streams and running statistics advance once a step. A plan that
    was applied before is replaced, and `remove` takes it off. Wrap the model (DDP) after applying.

    A plan of layers checkpoints stretches of the model's own modules. A plan of ops runs the model's
    forward as graphs that Dynamo captures, whose forward and backward do op by op what was planned. Where
    gradients are off, and in another mode (`train`, `eval`) than it was planned in, the model runs as if it
    had no plan.

    The plan holds for inputs of the planned shapes. With others the peak is not the promised one:
    `on_new_inputs` says whether to "warn" once, raise an "error" or "ignore" it; `lowtide.optimize` plans
    for them. Gradients that are there when a forward begins are outside of a plan of ops, unless it was made
    for them: `accumulate` says how many backward calls there are between two optimizer steps.

    Raises:
        CannotApply: the plan was made for a model with other parameters, another torch or another device.
        BadRequest: the plan was made from sizes, or from a graph, alone.
    """
    if not isinstance(solution, Solution | GraphSolution):
        raise BadRequest(
            f"a plan is what lowtide.plan and lowtide.load_solution return, not a {type(solution).__name__}."
        )
    of_layers = isinstance(solution, Solution)
    return reroute(model, solution, on_new_inputs=on_new_inputs, accumulate=accumulate, of_layers=of_layers)
