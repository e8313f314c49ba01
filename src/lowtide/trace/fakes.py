"""A model and its optimizer, made of fake tensors for as long as a `with` block lasts.

Every module's parameters and buffers, and the optimizer's parameter groups and state, are swapped for
fake twins of the same shapes, strides and sharing. The real tensors are not touched, and everything
that was swapped or that the step may have changed on the Python side (attributes, modes, hooks, random
streams) is put back at the end, also after an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowtide.compat.fake import FakeTensor, FakeTensorMode
from lowtide.compat.modules import TENSORS_AND_SUBMODULES, buffers_of, parameters_of
from lowtide.compat.tensors import key_of_storage
from lowtide.compat.undo import undone
from lowtide.errors import BadRequest, CannotTrace
from lowtide.ir.graph import Origin, Role
from lowtide.trace.graph_builder import GraphBuilder
from lowtide.trace.put_back import caches, random_streams, restorer


@dataclass(frozen=True, slots=True)
class Resident:
    """A fake tensor that stands for one that exists before the step."""

    fake: torch.Tensor
    role: Role
    name: str
    module: str


@dataclass
class Twins:
    """Fake twins of real tensors: one per tensor, with storages shared as the real ones share theirs."""

    mode: FakeTensorMode
    device: Callable[[torch.device], torch.device]  # where the twin of a tensor on a device lives
    pending: list[Resident] = field(default_factory=list)  # made since the recorder last looked
    _by_tensor: dict[int, torch.Tensor] = field(default_factory=dict)
    _by_storage: dict[int, torch.Tensor] = field(default_factory=dict)
    _real: list[torch.Tensor] = field(default_factory=list)  # keeps ids and storage addresses from reuse

    def is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a fake of this stage."""
        return isinstance(tensor, FakeTensor) and tensor.fake_mode is self.mode

    def known(self, real: torch.Tensor) -> torch.Tensor | None:
        """The twin of `real`, if it has one."""
        return self._by_tensor.get(id(real))

    def forget(self) -> None:
        """Hold no twin any longer: those that nobody else holds die."""
        self._by_tensor.clear()
        self._by_storage.clear()
        self._real.clear()

    def of(self, real: torch.Tensor, role: Role, name: str, module: str = "") -> torch.Tensor:
        """The twin of `real`, made if there is none yet."""
        twin = self.known(real)
        if twin is None:
            twin = self._by_tensor[id(real)] = self._make(real, role, name, module)
            self._real.append(real)
            if real.is_leaf and real.grad is not None:
                # Not remembered: the step may drop its gradients, and then the twin must die too.
                twin.grad = self._make(real.grad, Role.GRADIENT, f"{name}.grad", module)
        return twin

    def _make(self, real: torch.Tensor, role: Role, name: str, module: str) -> torch.Tensor:
        if real.layout is not torch.strided:
            raise CannotTrace(
                f"'{name}' is a sparse tensor, and what is made of one depends on numbers. Make it dense "
                "(.to_dense()), or keep what needs it outside of the step."
            )
        with torch.no_grad(), self.mode:
            twin = self._view_of_storage(real, shared=role is not Role.GRADIENT)
        if isinstance(real, nn.Parameter):
            twin = nn.Parameter(twin, requires_grad=real.requires_grad)
        elif isinstance(real, nn.Buffer):  # a module that assigns it to itself registers it anew
            twin = nn.Buffer(twin, persistent=real.persistent)
        self.pending.append(Resident(twin, role, name, module))
        return twin

    def _view_of_storage(self, real: torch.Tensor, shared: bool) -> torch.Tensor:
        storage = real.untyped_storage()
        known = self._by_storage.get(key_of_storage(storage))
        where = self.device(real.device)
        if known is not None:
            whole = known if known.dtype == real.dtype else known.view(real.dtype)
            return whole.as_strided(real.shape, real.stride(), real.storage_offset()).detach()
        if storage.nbytes() == real.numel() * real.element_size() and not real.storage_offset():
            twin = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=where)
        else:
            whole = torch.empty(storage.nbytes() // real.element_size(), dtype=real.dtype, device=where)
            twin = whole.as_strided(real.shape, real.stride(), real.storage_offset()).detach()
        if shared:
            self._by_storage[key_of_storage(storage)] = twin
        return twin


def stage(
    models: Sequence[nn.Module], device: str | torch.device | None, name: str, origin: Origin
) -> tuple[GraphBuilder, Twins]:
    """What a step of `models` needs to run as a fake on `device`: somewhere to be written down, and twins.

    A device that is not on this machine is played by the CPU; the builder then has something to relabel.
    """
    home = _home_of(models)
    target = _target_device(home, device)
    absent = target.type == "cuda" and not torch.cuda.is_available()
    actor = torch.device("cpu") if absent else target
    builder = GraphBuilder(name, origin, str(target), {"cpu": str(target)} if absent else {})

    def twin_device(real: torch.device) -> torch.device:
        # what is where the model is now will be where the model will be
        return actor if real.type in ("meta", home.type) else real

    return builder, Twins(FakeTensorMode(allow_non_fake_inputs=False), twin_device)


def _home_of(models: Sequence[nn.Module]) -> torch.device:
    tensors = (tensor for model in models for tensor in (*model.parameters(), *model.buffers()))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _target_device(home: torch.device, device: str | torch.device | None) -> torch.device:
    try:
        target = torch.device(device) if device is not None else home
    except RuntimeError:
        raise BadRequest(f"'{device}' is not a device. Try cpu, cuda or cuda:0.") from None
    if target.type == "meta":
        return torch.device("cpu")
    return torch.device("cuda", 0) if target == torch.device("cuda") else target


@contextmanager
def faked(
    twins: Twins,
    models: Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | None,
    others: Sequence[object] = (),
) -> Iterator[None]:
    """Swap `models` and `optimizer` for fakes; put them, and the attributes of `others`, back at the end."""
    modules = {id(m): (path, m) for model in models for path, m in model.named_modules()}
    undo = [restorer(module) for _, module in modules.values()]
    undo += [restorer(thing) for thing in (*others, *([optimizer] if optimizer is not None else []))]
    undo += [caches(module for _, module in modules.values()), random_streams()]

    def put_back() -> None:
        for restore in undo:
            restore()
        twins.forget()  # autograd may hold on to hooks of fakes for ever, and these to what made them

    with undone(put_back):
        for path, module in modules.values():
            _fake_module(twins, path, module)
        if optimizer is not None:
            _fake_optimizer(twins, optimizer)
        yield


def _fake_module(twins: Twins, path: str, module: nn.Module) -> None:
    parameters, buffers = parameters_of(module), buffers_of(module)
    for name, parameter in parameters.items():
        if parameter is not None:
            twin = twins.of(parameter, Role.PARAMETER, _join(path, name), path)
            parameters[name] = twin  # type: ignore[assignment]
    for name, buffer in buffers.items():
        if buffer is not None:
            buffers[name] = twins.of(buffer, Role.BUFFER, _join(path, name), path)
    for name, attribute in list(module.__dict__.items()):
        if name not in TENSORS_AND_SUBMODULES:
            module.__dict__[name] = _swap_known(twins, attribute, path, name)


def _swap_known(twins: Twins, thing: Any, path: str, name: str) -> Any:
    """`thing` with tensors replaced by twins, one container deep (nn.LSTM keeps its weights in a list)."""
    if isinstance(thing, torch.Tensor):
        return twins.of(thing, Role.BUFFER, _join(path, name), path)
    if type(thing) in (list, tuple) and any(isinstance(item, torch.Tensor) for item in thing):
        return type(thing)(_swap_known(twins, item, path, name) for item in thing)
    if type(thing) is dict and any(isinstance(item, torch.Tensor) for item in thing.values()):
        return {key: _swap_known(twins, item, path, name) for key, item in thing.items()}
    return thing


def _fake_optimizer(twins: Twins, optimizer: torch.optim.Optimizer) -> None:
    def twin(real: torch.Tensor) -> torch.Tensor:
        return twins.of(real, Role.PARAMETER, "parameter given to the optimizer only")

    def state_twin(thing: object, name: str) -> object:
        return twins.of(thing, Role.OPTIMIZER_STATE, name) if isinstance(thing, torch.Tensor) else thing

    optimizer.param_groups = [
        {**group, "params": [twin(parameter) for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    for parameter, entries in optimizer.state.items():
        state[twin(parameter)] = {name: state_twin(thing, name) for name, thing in entries.items()}
    optimizer.state = state


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
