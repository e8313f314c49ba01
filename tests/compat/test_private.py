"""The private names that lowtide uses are there, and all of them are declared in `lowtide.compat`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import get_metrics_context
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import lowtide.compat
from lowtide.compat.private import Private


def declared() -> Iterator[tuple[str, Private]]:
    """Every private name that lowtide declares, and the module of `compat` that does."""
    for found in pkgutil.iter_modules(lowtide.compat.__path__):
        module = importlib.import_module(f"lowtide.compat.{found.name}")
        yield from ((found.name, private) for private in getattr(module, "PRIVATE", ()))


DECLARED = list(declared())


def boxed() -> object:
    return pkgutil.resolve_name("torch._functorch._aot_autograd.utils.make_boxed_func")(print)


def compiled_function() -> object:
    """The autograd function that AOTAutograd makes of a graph."""
    torch._dynamo.reset()  # other tests may have compiled so much that Dynamo has given up
    made = torch.compile(torch.exp, backend="aot_eager", dynamic=False)(torch.ones(1, requires_grad=True))
    node: Any = made.grad_fn
    function: object = node._forward_cls
    return function


def replicated() -> object:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        return DistributedDataParallel(torch.nn.Linear(1, 1))
    finally:
        dist.destroy_process_group()


def lightning_module() -> object:
    return pytest.importorskip("lightning.pytorch").LightningModule()


# Classes whose attributes only their instances have.
EXAMPLES: dict[str, Callable[[], object]] = {
    "torch._functorch._aot_autograd.runtime_wrappers.CompiledFunction": compiled_function,
    "torch._functorch._aot_autograd.utils.make_boxed_func": boxed,
    "torch._dynamo.eval_frame.OptimizedModule": lambda: torch.compile(torch.nn.ReLU(), backend="eager"),
    "torch._dynamo.metrics_context.MetricsContext": get_metrics_context,
    "torch._ops.OpOverload": lambda: torch.ops.aten.relu.default,
    "torch.autograd.graph.Node": lambda: torch.ones(1, requires_grad=True).exp().grad_fn,
    "torch.nn.Module": torch.nn.Module,
    "torch.nn.Module._replicate_for_data_parallel": torch.nn.ReLU()._replicate_for_data_parallel,
    "torch.nn.parallel.DistributedDataParallel": replicated,
    "torch.distributed.tensor.DTensor": lambda: DTensor,
    "lightning.pytorch.LightningModule": lightning_module,
}


def resolved(private: Private) -> Any:
    """What goes by the name. What only CUDA has is looked for in the stub that every build comes with."""
    name = private.name
    if private.pythons is not None and not private.pythons[0] <= sys.version_info[:3] <= private.pythons[1]:
        return None
    if private.needs_cuda and not torch.backends.cuda.is_built():
        stub = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text(encoding="utf-8")
        if f"def {name.removeprefix('torch._C.')}(" not in stub:
            raise AttributeError(f"the stub of torch._C does not have '{name}'")
        return None
    owner, _, attribute = name.rpartition(".")
    return getattr(EXAMPLES[owner](), attribute) if owner in EXAMPLES else pkgutil.resolve_name(name)


def complaint(module: str, private: Private) -> str | None:
    """What is wrong with a private name here; None if nothing is."""
    try:
        found = resolved(private)
        missing = set(private.parameters) - set(
            inspect.signature(found).parameters if private.parameters else ()
        )
    except (ImportError, AttributeError) as error:
        change = f"gone ({error})"
    else:
        if not missing:
            return None
        change = f"without the parameters {', '.join(sorted(missing))}"
    library = private.name.partition(".")[0]
    here = importlib.import_module(library).__version__
    return (
        f"lowtide relies on {private.name} ({private.why}), seen in {library} {', '.join(private.seen)}. "
        f"In {library} {here} it is {change}: adapt lowtide/compat/{module}.py."
    )


@pytest.mark.parametrize(("module", "private"), DECLARED, ids=[private.name for _, private in DECLARED])
def test_a_private_name_is_still_there(module: str, private: Private) -> None:
    found = complaint(module, private)
    assert found is None, found


def test_no_private_name_is_declared_twice() -> None:
    names = [private.name for _, private in DECLARED]
    assert sorted(set(names)) == sorted(names)


def test_a_name_that_is_gone_is_told_with_what_it_was_for() -> None:
    gone = Private("torch._C._never_was", "it would be needed", seen=("1.0", "1.1"))
    assert complaint("autograd", gone) == (
        "lowtide relies on torch._C._never_was (it would be needed), seen in torch 1.0, 1.1. In torch "
        f"{torch.__version__} it is gone (module 'torch._C' has no attribute '_never_was'): adapt "
        "lowtide/compat/autograd.py."
    )


def test_a_parameter_that_is_gone_is_told() -> None:
    changed = Private("torch.is_tensor", "a function with one parameter", parameters=("lines", "obj"))
    assert "it is without the parameters lines: adapt" in (complaint("fake", changed) or "")
