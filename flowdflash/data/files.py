"""Files that a pipeline names."""

from __future__ import annotations

from pathlib import Path


def file_problem(path: Path) -> str:
    """What is wrong with a file that is to be read, as it looks before it is opened; nothing if it is there."""
    try:
        return "" if path.is_file() else f"there is no file {path}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
