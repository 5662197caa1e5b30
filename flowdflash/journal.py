"""Files of one JSON object a line, each with the step that it tells of; a resumed run goes on writing them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def cut_back(path: Path, step: int) -> int:
    """Drop the lines of steps after ``step``, and a line that was not written to its end; the last step that is left.

    The file is the old one or the new one at every moment. A file that is absent stays so, and has step 0.
    """
    if not path.is_file():
        return 0
    draft = path.with_name(f".{path.name}.part")
    last = 0
    with path.open("rb") as old, draft.open("wb") as new:
        for line in old:
            found = _step_of(line)
            if found is not None and found <= step:
                new.write(line)
                last = max(last, found)
        new.flush()
        os.fsync(new.fileno())
    draft.replace(path)
    return last


def entries(path: Path) -> list[dict[str, Any]]:
    """Every line of such a file, in order; empty if there is no file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def _step_of(line: bytes) -> int | None:
    """The step of a whole line; None of any other."""
    if not line.endswith(b"\n"):
        return None
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None
