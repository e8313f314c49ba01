"""Where and how a benchmark was run, to be written down beside its figures."""

from __future__ import annotations

import platform
import sys
import time

import torch


def device() -> str:
    """Where benchmarks that run on either are run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


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
        "command": " ".join(["python", *sys.argv]),
    }
