"""A thread that stops computing lets its team of OpenMP threads go."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

SOFT = 1
"""``omp_pause_soft``: settings stay."""


def release_team() -> None:
    """End the OpenMP team of the calling thread; its next parallel kernel makes another, in about 50 microseconds.

    GNU's OpenMP counts the threads of all teams, at work or not. Where they are more than the cores, no thread spins
    between two kernels any more: each sleeps, and waking it takes longer than a small kernel does (a product of 150,000
    numbers on two cores: 12 microseconds with one team in the process, 85 with two).
    """
    if "torch" in sys.modules and (pause := _pause()) is not None:
        pause(SOFT)


def is_gnu() -> bool:
    """torch runs on GNU's OpenMP."""
    return _pause() is not None


@cache
def _pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the library that torch runs on; None where that is another OpenMP."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
        (library,) = {line[line.index("/") :] for line in lines if "/libgomp" in line and "/torch" in line}
        pause: Callable[[int], int] = ctypes.CDLL(library).omp_pause_resource_all
    except (OSError, ValueError, AttributeError):
        return None
    return pause
