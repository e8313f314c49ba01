"""Documents as tests edit them: without the checksum, as files had none once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def editable(path: Path) -> Any:
    """What is written in the file, but for its checksum."""
    document = json.loads(path.read_text())
    del document["checksum"]
    return document
