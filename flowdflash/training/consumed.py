"""Which batches an optimizer has consumed, as a checkpoint's ledger tells it: a prefix and a few extras."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Consumed:
    """Numbers of batches, gathered one window at a time; in planned order they are a prefix of the plan."""

    def __init__(self, prefix: int = 0, extras: Iterable[int] = ()) -> None:
        self._prefix, self._extras = prefix, set(extras)

    @classmethod
    def of(cls, ledger: Mapping[str, Any]) -> Consumed:
        """As ``as_dict`` gave it."""
        return cls(int(ledger["prefix"]), map(int, ledger["extras"]))

    def add(self, seqs: Iterable[int]) -> None:
        """Take in the batches of a window that is closed."""
        self._extras.update(seqs)
        while self._prefix in self._extras:
            self._extras.remove(self._prefix)
            self._prefix += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values: every batch below ``prefix``, and ``extras`` above it, rising."""
        return {"prefix": self._prefix, "extras": sorted(self._extras)}
