"""What an examination finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Finding:
    """One result of one check.

    Attributes:
        name: what was looked at; of a fault, what is at fault.
        status: a ``note`` is worth knowing and no fault; ``skipped`` says why there was no check.
        text: what was found, in one sentence.
        advice: of a fault, what to do about it.
    """

    name: str
    status: Literal["ok", "fault", "note", "skipped"]
    text: str
    advice: str = ""


def fault(name: str, text: str, advice: str) -> Finding:
    """Something is wrong."""
    return Finding(name, "fault", text, advice)
