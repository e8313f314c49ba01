"""Translated functions as machine code, and how Python calls them."""

from __future__ import annotations

import ast
import ctypes
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType
from typing import Any

from llvmlite import binding, ir

from lowtide.solvers.jit import place_of
from lowtide.solvers.jit.kinds import (
    BOOL,
    INT,
    REAL,
    Callee,
    Column,
    Kind,
    Scope,
    Signature,
    Table,
    signature_of,
)
from lowtide.solvers.jit.translation import Translation

# Why so little? A search over a thousand ops takes half a second, and so does compiling. LLVM's usual levels
# take twice as long, and save a twentieth of the search.
_SPEED_LEVEL = 1
_INLINING_THRESHOLD = 40
_C_TYPES: Mapping[Any, Any] = {INT: ctypes.c_int64, REAL: ctypes.c_double, BOOL: ctypes.c_int64}
_PYTHON_TYPES: Mapping[Any, type] = {INT: int, REAL: float, BOOL: bool}


def machine_code(
    functions: Mapping[str, FunctionType], entries: Sequence[str]
) -> dict[str, Callable[..., Any]]:
    """What Python calls for each of `entries`; all of `functions` may be called by one another.

    Raises:
        NotCompilable: one of them is not in the part of Python that can be compiled.
    """
    module = ir.Module("lowtide")
    signatures = {name: signature_of(function) for name, function in functions.items()}
    declared = {
        name: Callee(functions[name], signature, ir.Function(module, signature.llvm, name))
        for name, signature in signatures.items()
    }
    sources = _sources({function.__module__ for function in functions.values()})
    for name, callee in declared.items():
        callee.llvm.linkage = "external" if name in entries else "internal"
        source = sources[callee.python.__module__, name]
        Translation(callee, Scope(callee.python.__globals__, declared)).write(source)
    engine = _engine(str(module))
    return {name: _called(engine, name, signatures[name]) for name in entries}


def _sources(modules: Collection[str]) -> dict[tuple[str, str], ast.FunctionDef]:
    """What stands in the files of `modules`: their functions by module and name."""
    return {
        (module, node.name): node
        for module in modules
        for node in ast.parse(inspect.getsource(sys.modules[module])).body
        if isinstance(node, ast.FunctionDef)
    }


def _engine(text: str) -> Any:
    """Machine code for this processor."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten()
    )
    module = binding.parse_assembly(text)
    module.verify()
    tuning = binding.create_pipeline_tuning_options(speed_level=_SPEED_LEVEL)
    tuning.inlining_threshold = _INLINING_THRESHOLD
    passes = binding.create_pass_builder(machine, tuning)
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine


def _called(engine: Any, name: str, signature: Signature) -> Callable[..., Any]:
    """A Python function that hands its arguments over; `engine` lives as long as it does."""
    if len(signature.results) > 1:
        raise TypeError(f"{name} returns several values, and Python can be handed one")
    result = signature.results[0] if signature.results else None
    types = [each for kind in signature.parameters.values() for each in _c_types(kind)]
    code = ctypes.CFUNCTYPE(None if result is None else _C_TYPES[result], *types)(
        engine.get_function_address(name)
    )
    kinds = tuple(signature.parameters.values())

    def call(*args: Any) -> Any:
        if len(args) != len(kinds):
            raise TypeError(f"{name} takes {len(kinds)} arguments, not {len(args)}")
        handed = [part for kind, each in zip(kinds, args, strict=True) for part in _handed(kind, each)]
        returned = code(*handed)
        return bool(returned) if result == BOOL else returned

    call.engine = engine  # type: ignore[attr-defined]
    return call


def _c_types(kind: Kind) -> list[Any]:
    match kind:
        case Column():
            return [ctypes.c_void_p, ctypes.c_int64]
        case Table():
            return [ctypes.c_void_p]
        case _:
            return [_C_TYPES[kind]]


def _handed(kind: Kind, value: Any) -> tuple[Any, ...]:
    match kind:
        case Column():
            return place_of(value, kind.number == REAL)
        case Table():
            return (value.address,)
        case _:
            return (_PYTHON_TYPES[kind](value),)
