"""The examples that train with other libraries: each says what it held, and that nothing else has changed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lowtide
from tests.helpers.effort import long_but

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "name", long_but(["hf_trainer", "lightning_trainer", "accelerate_loop"], "accelerate_loop")
)
def test_the_example_trains_to_the_same_losses_in_less_memory(name: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(lowtide.__file__).parent.parent), *sys.path]),
        "KINETO_LOG_LEVEL": "6",
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3600,  # a hang is a failure
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    plain, planned = (float(held) for held in re.findall(r"([\d.]+) MiB", done.stdout)[:2])
    assert planned < 0.6 * plain
    assert re.search(r"losses are equal: +True", done.stdout)
