"""Training part and held-out part of one file, told apart by what is asked.

The part of a row depends only on a hash of everything before its first answer. So the same prompt never lies in both
parts, however often it occurs, and neither the order of the file nor a seed changes the part of a row.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, Literal

from flowdflash.data.chat import Conversation, read_conversation
from flowdflash.data.rejects import Rejected
from flowdflash.data.rows import Row

Part = Literal["all", "train", "held_out"]
HASH_RANGE = 1 << 64


def prompt_hash(conversation: Conversation) -> int:
    """64 bits of SHA-256 over the messages before the first answer; tools do not count."""
    plain = [[message["role"], message["content"]] for message in conversation.opening]
    digest = hashlib.sha256(json.dumps(plain, ensure_ascii=True).encode()).digest()
    return int.from_bytes(digest[:8], "big")


class Split:
    """Which rows are wanted.

    Args:
        part: the part that is wanted; ``all`` takes every row.
        share: hold out about this share of the distinct prompts.
        prompts: or hold out so many distinct prompts, those with the lowest hashes.
        rows: reads the whole input, whatever part of it is used, so that all users of a file agree; needed for
            ``prompts`` only, and called only when the first row is asked about.
    """

    def __init__(
        self,
        part: Part = "all",
        *,
        share: float = 0.0,
        prompts: int = 0,
        rows: Callable[[], Iterable[Row]] | None = None,
    ) -> None:
        if prompts and rows is None:
            raise ValueError("to hold out a number of prompts, the rows must be read")
        self.part, self.share, self.prompts, self._rows = part, share, prompts, rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "border": self.border, "_rows": None}  # a copy knows the border without the rows

    @property
    def fingerprint(self) -> tuple[str, float, int]:
        """All that decides the part of a row, given the input."""
        return self.part, self.share, self.prompts

    @cached_property
    def border(self) -> int:
        """Rows with a prompt hash below it are held out."""
        if not self.prompts or self._rows is None:
            return round(self.share * HASH_RANGE)
        lowest = _lowest(filter(None, map(_hash_of, self._rows())), self.prompts)
        return max(lowest) + 1 if lowest else 0

    def wants(self, conversation: Conversation) -> bool:
        """Is the row of this conversation in the wanted part?"""
        if self.part == "all":
            return True
        return (prompt_hash(conversation) < self.border) == (self.part == "held_out")


def _lowest(numbers: Iterable[int], count: int) -> set[int]:
    """The ``count`` lowest distinct numbers."""
    heap: list[int] = []  # negated: the largest that is kept is on top
    kept: set[int] = set()
    for number in numbers:
        if number in kept or (len(heap) == count and number > -heap[0]):
            continue
        kept.add(number)
        if len(heap) < count:
            heapq.heappush(heap, -number)
        else:
            kept.discard(-heapq.heapreplace(heap, -number))
    return kept


def _hash_of(row: Row) -> int | None:
    if row.problem:
        return None
    try:
        return prompt_hash(read_conversation(row.value))
    except (Rejected, RecursionError):
        return None
