"""A thread that stops computing lets its team of OpenMP threads go."""

from __future__ import annotations

import ctypes
import re
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
    # Not "torch", which is there as soon as another thread begins to import it, before its libraries are.
    if "torch._C" in sys.modules and (pause := _pause()) is not None:
        pause(SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """``omp_pause_resource_all`` of the GNU OpenMP that comes with torch; None where torch runs on another."""
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
        (library,) = set(re.findall(r"/.*/torch(?:/lib|\.libs)/libgomp.*", maps))
        pause: Callable[[int], int] = ctypes.CDLL(library).omp_pause_resource_all
    except (OSError, ValueError, AttributeError):
        return None
    return pause
