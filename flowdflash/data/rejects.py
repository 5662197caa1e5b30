"""Why a row is not trained on, and the books that show that no row was lost on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flowdflash.errors import FlowdflashError

TOO_LONG = "longer than max_length"
UNSUPERVISED_AFTER_CUT = "no supervised token after truncation"
ANCHORLESS_AFTER_CUT = "fewer than two supervised tokens in a row after truncation"
LENGTH_REASONS = frozenset({TOO_LONG, UNSUPERVISED_AFTER_CUT, ANCHORLESS_AFTER_CUT})
"""Reasons that come from ``max_length`` and not from a fault in the row."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a row, or one turn of it, is left out.

    Attributes:
        reason: one of a small fixed set, so that rows can be counted under it.
        detail: what exactly was found in this row; may be empty.
        turn: assistant turn concerned, from 0; -1 for the whole row.
    """

    reason: str
    detail: str = ""
    turn: int = -1

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class Rejected(Exception):
    """Raised inside the data layer to leave a row out; never leaves it."""

    def __init__(self, reason: str, detail: str = "", turn: int = -1) -> None:
        self.rejection = Rejection(reason, detail, turn)
        super().__init__(str(self.rejection))


@dataclass(slots=True)
class Accounts:
    """What became of every row that was read.

    Attributes:
        rows_read: rows taken from the input; blank lines are no rows.
        rows_kept: rows that gave at least one sample.
        rows_other_split: good rows that belong to the other part of a split.
        rejected: rows left out, by reason.
        samples: samples kept. A template that rewrites earlier turns gives one per assistant turn.
        samples_rejected: turns left out of rows that were kept all the same, by reason.
        truncated: samples cut to ``max_length``.
        tokens, supervised_tokens: over all samples.
        turns_without_end_token: supervised turns that the template does not close with a special token.
        rejected_bad: rows left out, as a whole or a turn of them, for a fault of their own, not for their length.
        first_bad: the first of these, as ``(part, line, rejection)`` in plain values; empty if there is none.
    """

    rows_read: int = 0
    rows_kept: int = 0
    rows_other_split: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    samples_rejected: Counter[str] = field(default_factory=Counter)
    truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    turns_without_end_token: int = 0
    rejected_bad: int = 0
    first_bad: tuple[int, int, str] | tuple[()] = ()

    @property
    def rows_rejected(self) -> int:
        """Rows left out, whatever the reason."""
        return self.rejected.total()

    @property
    def supervised_share(self) -> float:
        """Share of all tokens that carry a loss."""
        return self.supervised_tokens / self.tokens if self.tokens else 0.0

    def balance(self) -> None:
        """Check that every row read is accounted for.

        Raises:
            FlowdflashError: the books do not balance; this is a fault of the data layer, not of the data.
        """
        accounted = self.rows_kept + self.rows_rejected + self.rows_other_split
        if self.rows_read != accounted:
            raise FlowdflashError(
                f"books do not balance: {self.rows_read} rows read, but {self.rows_kept} kept + {self.rows_rejected} "
                f"rejected + {self.rows_other_split} in the other split = {accounted}; please report this"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        return {
            **plain,
            "rejected": dict(self.rejected),
            "samples_rejected": dict(self.samples_rejected),
            "first_bad": list(self.first_bad),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Accounts:
        """The inverse of ``as_dict``."""
        counters = {name: Counter(plain[name]) for name in ("rejected", "samples_rejected")}
        return cls(**{**plain, **counters, "first_bad": tuple(plain["first_bad"])})
