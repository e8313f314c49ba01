"""What generated kernels are refused for, in words and with a way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch._inductor.exc import InvalidCxxCompiler

import lowtide
from lowtide.cli import main
from lowtide.compat import inductor
from lowtide.errors import BadRequest

UNKNOWN = "kernels is 'triton'; it is one of eager, inductor."


def given() -> tuple[nn.Module, tuple[torch.Tensor]]:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(2, 4),)


def refusal_of(**options: Any) -> str:
    model, args = given()
    with pytest.raises(BadRequest) as refusal:
        lowtide.plan(model, args, loss=torch.sum, profile=False, **options)
    return str(refusal.value)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(inductor, "get_cpp_compiler", missing)


def test_kernels_that_there_are_not_are_refused_with_those_that_there_are() -> None:
    assert refusal_of(budget="min", kernels="triton") == UNKNOWN
    model, args = given()
    with pytest.raises(BadRequest, match="kernels is 'triton'"):
        lowtide.optimize(model, args, loss=torch.sum, budget="min", kernels="triton")
    options: dict[str, Any] = {"budget": "1GB", "kernels": "triton"}
    with pytest.raises(Exception, match="kernels is 'triton'"):
        torch.compile(model, backend="lowtide", options=options)(*args)


@pytest.mark.parametrize("method", ["rotor", "hong-linear"])
def test_methods_for_chains_are_refused(method: str) -> None:
    told = refusal_of(budget="1GB", method=method, kernels="inductor")
    assert told == "kernels='inductor' is for methods that plan op by op (auto); leave it out for chains.", (
        told
    )


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_it_is_said_what_to_install() -> None:
    assert refusal_of(budget="min", kernels="inductor") == (
        'kernels="inductor" generates code, and needs a C++ compiler (g++ or clang++) for cpu, which is not '
        'here. Install it, or leave kernels="eager".'
    )


@pytest.mark.usefixtures("no_compiler")
def test_eager_kernels_need_none() -> None:
    model, args = given()
    assert lowtide.plan(model, args, loss=torch.sum, budget="min", profile=False).peak_bytes > 0


USER_FILE = """
import torch
from torch import nn

def mine(batch=2):
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(batch, 4),), torch.sum
"""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--frontier", "--kernels", "inductor"], "--frontier is of eager kernels. Plan for a budget"),
        (["--budget", "min", "--kernels", "triton"], "'triton' is not one of 'eager', 'inductor'"),
        (["--kernels", "inductor", "--method", "rotor", "--budget", "1GB"], "leave it out for chains"),
    ],
)
def test_the_command_line_refuses_the_same_with_exit_code_two(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(USER_FILE)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["plan", "mine.py:mine", "--no-profile", *arguments])
    assert result.exit_code == 2
    assert told in result.output
