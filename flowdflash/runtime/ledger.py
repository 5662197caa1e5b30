"""Which batches of a plan the optimizer has consumed: what a resumed run leaves out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

from flowdflash.errors import ModelInvalid


@dataclass(frozen=True, slots=True)
class Ledger:
    """Batch numbers that the optimizer has consumed.

    Attributes:
        prefix: every batch below this number.
        extras: batches consumed out of turn, rising; all above ``prefix``.
    """

    prefix: int = 0
    extras: tuple[int, ...] = ()

    @classmethod
    def read(cls, raw: Mapping[str, Any]) -> Ledger:
        """As a checkpoint holds it.

        Raises:
            ModelInvalid: it is not a ledger.
        """
        try:
            ledger = cls(int(raw["prefix"]), tuple(int(seq) for seq in raw["extras"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelInvalid(f"the checkpoint's ledger of consumed batches cannot be read: {error!r}") from error
        if ledger.prefix < 0 or list(ledger.extras) != sorted({seq for seq in ledger.extras if seq > ledger.prefix}):
            raise ModelInvalid(f"the checkpoint's ledger of consumed batches is no such thing: {dict(raw)}")
        return ledger

    @classmethod
    def of(cls, seqs: Iterable[int]) -> Ledger:
        """The ledger of these batches."""
        done = set(seqs)
        prefix = next(seq for seq in count() if seq not in done)
        return cls(prefix, tuple(sorted(seq for seq in done if seq > prefix)))

    def __contains__(self, seq: int) -> bool:
        place = bisect_left(self.extras, seq)
        return seq < self.prefix or (place < len(self.extras) and self.extras[place] == seq)

    def __len__(self) -> int:
        return self.prefix + len(self.extras)

    def place(self, seq: int) -> int:
        """The place of a batch among those that are left, from 0."""
        return seq - self.prefix - bisect_left(self.extras, seq)


NOTHING = Ledger()
"""Of a run that begins."""
