"""Dispatcher ``round_robin``: one shared cursor over the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pydantic import Field

from flowdflash.items import BatchInfo
from flowdflash.stage import Dispatcher, ReplicaLoad, StageConfig


class RoundRobin(Dispatcher):
    """Replica 0, 1, 2, ... in turn. A slow replica holds up all: to compare with, or where replicas are alike.

    There is one cursor however many threads fetch tokens, so the first N batches reach N replicas.
    """

    type: ClassVar[str] = "round_robin"
    safe_to_change: ClassVar[frozenset[str]] = frozenset({"workers"})

    class Config(StageConfig):
        """Options of ``round_robin``."""

        workers: int = Field(1, ge=1, le=64, description="threads that fetch and pad tokens (count)")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._cursor = 0

    def route(self, loads: Sequence[ReplicaLoad], batch: BatchInfo) -> int:
        """The next replica in turn, full or not."""
        chosen = self._cursor % len(loads)
        self._cursor = chosen + 1
        return chosen
