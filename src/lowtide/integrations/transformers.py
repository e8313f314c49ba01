"""Hugging Face's Trainer within a budget: a callback that puts a plan on the model while it trains."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from lowtide.compat.patches import patched
from lowtide.distributed import Replicated
from lowtide.errors import BadRequest, MissingExtra
from lowtide.execute.apply import plans_of, remove
from lowtide.integrations.epoch import WorstBatch, by_keyword, look_ahead
from lowtide.integrations.ranks import optimize_where_it_trains
from lowtide.solvers.method import Method, Scheduler
from lowtide.solvers.solution import GraphSolution, Solution
from lowtide.text.card import Card
from lowtide.text.progress import bar_while_planning
from lowtide.trace.step import Loss

try:
    from transformers import TrainerCallback
    from transformers.training_args import ParallelMode
    from transformers.utils import ModelOutput
except ModuleNotFoundError as error:
    raise MissingExtra("transformers", "transformers", "a callback for Hugging Face's Trainer") from error

# What a Trainer may be told that does not go together with a plan, and why.
_REFUSED = {
    "gradient_checkpointing": "both would recompute, and the budget would count what is not kept. Leave it "
    "out: the plan recomputes what the budget asks for",
    "torch_compile": "a plan is itself compiled, op by op. Leave it out",
    "fsdp": "a plan is for whole parameters, and FSDP shards them. Train with DDP or on one device",
    "deepspeed": "a plan is for whole parameters, and DeepSpeed moves them. Train with DDP or on one device",
}
_NO_LOGITS = (
    "while it trains, the model's output has its loss and no logits: as a whole they would be most of what "
    "slices spare. In evaluation they are there."
)


class LowtideCallback(TrainerCallback):  # type: ignore[misc]
    """Keeps the step of a `Trainer` within `budget`: `Trainer(…, callbacks=[LowtideCallback("8GiB")])`.

    The first batch is planned for when the model meets it, new shapes when they are met, and no data is
    looked at before. Parameters, optimizer states, gradients, the batch, activations and temporaries are
    counted; of gradient accumulation and mixed precision, and of the optimizer that the Trainer made, the
    callback knows by itself. Several processes share one plan, and DDP's buckets are counted. Not counted:
    batches that the Trainer has fetched ahead, and clipping, which comes after the backward and holds one
    number for each parameter.

    Losses and weights are those of a training without it; bit for bit where PyTorch is deterministic and
    there is no mixed precision (see `lowtide.apply`). `budget`, `method`, `loss`, `on_new_shape`, `tiles` and
    `kernels` are as in `lowtide.optimize`; `loss` is wanted only where the model's output carries none,
    because the Trainer computes it (`compute_loss_func`, `label_smoothing_factor`). With `progress` a
    terminal shows how far planning is.

    With a `length_key` a sample has its length, or its tokens, under that key ("input_ids"), and the data is
    looked at before the first step, every sample once: the longest batch that can come is named (`worst`, and
    a warning), and the budget is settled on it rather than on the batch that comes first. Plans are made
    for `classes` of lengths, how many (4) or which, when the first batch comes; batches of other lengths
    follow the plan of a class, as in `lowtide.optimize`. Not with several processes.

    With `tiles` the head of a language model and its loss run in slices where that pays, and the output of
    the model leaves its logits out while it trains and carries a loss (they are None): a `compute_loss` of
    your own that reads them has to go without `tiles`.

    `plans` has what was planned, one plan for each shape of batch, from the first step on; also after the
    training. The plan is taken off the model when the training ends. A Trainer tells no callback of an error
    that ends it early: then `lowtide.remove(model)` takes it off, and the next training replaces it.

    Raises, when the training begins:
        BadRequest: gradient_checkpointing, torch_compile, FSDP, DeepSpeed or DataParallel are asked for too,
            or an argument makes no sense: there is no such length_key, say.
    Raises, in the first step: what `lowtide.optimize` does, InfeasibleBudget above all.
    """

    def __init__(
        self,
        budget: str | int | Card,
        *,
        method: str | Method | Scheduler | None = None,
        loss: Loss | None = None,
        on_new_shape: str = "plan",
        progress: bool = True,
        tiles: bool = False,
        kernels: str = "eager",
        length_key: str | None = None,
        classes: int | Sequence[int] | None = None,
    ) -> None:
        self.budget = budget
        self.length_key = length_key
        self.classes = classes
        self.worst: WorstBatch | None = None
        self.method = method
        self.loss = loss
        self.on_new_shape = on_new_shape
        self.progress = progress
        self.tiles = tiles
        self.kernels = kernels
        self.plans: tuple[Solution | GraphSolution, ...] = ()
        self._undo = ExitStack()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        """Put a plan on the model that will be made when it meets its first batch."""
        _refuse_what_does_not_go_together(args)
        self._undo.close()  # of a training that an error has ended
        loader = others.get("train_dataloader")
        self.worst, ahead = look_ahead(loader, self.length_key, self.classes, by_keyword)
        with ExitStack() as undo:
            if self.tiles:
                remove(model)
                why = "what a model returns is held as a whole, and a Trainer needs the loss alone"
                undo.enter_context(
                    patched(model, "forward", _loss_alone(model), why=why, since="transformers 4.40")
                )
                undo.callback(remove, model)
                warnings.warn(f"lowtide: {_NO_LOGITS}", stacklevel=2)
            optimize_where_it_trains(
                model,
                _engine(args),
                ahead,
                budget=self.budget,
                method=self.method,
                loss=self.loss,
                optimizer=getattr(optimizer, "optimizer", optimizer),  # accelerate wraps it
                accumulate=args.gradient_accumulation_steps,
                on_new_shape=self.on_new_shape,
                progress=bar_while_planning(self.progress and state.is_local_process_zero),
                tiles=self.tiles,
                kernels=self.kernels,
            )
            self._undo = undo.pop_all()

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **others: Any) -> None:
        """Look up what has been planned."""
        self.plans = plans_of(model)

    def on_train_end(self, args: Any, state: Any, control: Any, *, model: Any = None, **others: Any) -> None:
        """Take the plan off."""
        remove(model)
        self._undo.close()


def _loss_alone(model: nn.Module) -> Callable[..., Any]:
    """The forward of `model`, whose output leaves logits out where it is for training and has a loss."""
    own = model.forward

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        if not model.training or not torch.is_grad_enabled() or not isinstance(output, ModelOutput):
            return output
        if output.get("loss") is None or output.get("logits") is None:
            return output
        return type(output)(**{name: field for name, field in output.items() if name != "logits"})

    return forward


def _engine(args: Any) -> Replicated | None:
    """How the Trainer replicates the model: callbacks are shown the model, and not what is around it."""
    if args.parallel_mode is not ParallelMode.DISTRIBUTED:
        return None
    if args.world_size == 1 and args.device.type != "cpu":  # accelerate leaves a single GPU's model as it is
        return None
    told = args.ddp_find_unused_parameters
    return Replicated(find_unused_parameters=True if told is None else told)


def _refuse_what_does_not_go_together(args: Any) -> None:
    for name, why in _REFUSED.items():
        asked = getattr(args, name, None)
        if asked:
            raise BadRequest(f"LowtideCallback does not go together with {name}={asked}: {why}.")
    if args.n_gpu > 1:
        raise BadRequest(
            f"LowtideCallback does not go together with DataParallel, which copies the model to {args.n_gpu} "
            "GPUs in each step. Start one process for each GPU (torchrun), or show it one "
            "(CUDA_VISIBLE_DEVICES=0)."
        )
