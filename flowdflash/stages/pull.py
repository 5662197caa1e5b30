"""Dispatcher ``pull``: whoever is free takes the next batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from flowdflash.items import BatchInfo
from flowdflash.stage import Dispatcher, ReplicaLoad, StageConfig


class Pull(Dispatcher):
    """The next batch goes to the replica with the fewest batches outstanding, as if all pulled from one queue.

    No replica idles while there is work, and a slow one gets fewer batches. Ties go to the replica that has been given
    least so far, then to the lowest number, so the first N batches reach N replicas.
    """

    type: ClassVar[str] = "pull"
    safe_to_change: ClassVar[frozenset[str]] = frozenset({"workers"})

    class Config(StageConfig):
        """Options of ``pull``."""

        workers: int = Field(1, ge=1, le=64, description="threads that fetch and pad tokens (count)")

    def route(self, loads: Sequence[ReplicaLoad], batch: BatchInfo) -> int | None:
        """The replica with the fewest outstanding batches, or None while all are full."""
        free = [load for load in loads if not load.full]
        if not free:
            return None
        return min(free, key=lambda load: (load.outstanding, load.dispatched, load.replica)).replica
