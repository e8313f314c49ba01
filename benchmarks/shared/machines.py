"""Where and how a benchmark was run, to be written down beside its figures."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

import torch


def device() -> str:
    """Where benchmarks that run on either are run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def command() -> list[str]:
    """How this process was started, without where that is on this machine: `python -m benchmarks.x.y …`."""
    spec = sys.modules["__main__"].__spec__
    started = [Path(sys.argv[0]).name] if spec is None else ["-m", spec.name]
    return ["python", *started, *sys.argv[1:]]


def again(*more: str) -> list[str]:
    """The command that starts this one once more, with further arguments."""
    return [sys.executable, *command()[1:], *more]


def machine(commit: str) -> dict[str, str]:
    """The machine, the versions and the command."""
    cpu = f"cpu, {torch.get_num_threads()} threads"
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else cpu,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit,
        "seed": "0",
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(command()),
    }
