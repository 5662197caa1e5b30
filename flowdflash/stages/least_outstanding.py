"""Dispatcher ``least_outstanding``: load is counted in cost, not in batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from flowdflash.items import BatchInfo
from flowdflash.stage import Dispatcher, ReplicaLoad, StageConfig


class LeastOutstanding(Dispatcher):
    """The next batch goes to the replica with the least cost outstanding (by default, padded tokens).

    Better than ``pull`` where batches differ much in cost, such as 1 and 64 rows.
    """

    type: ClassVar[str] = "least_outstanding"
    safe_to_change: ClassVar[frozenset[str]] = frozenset({"workers"})

    class Config(StageConfig):
        """Options of ``least_outstanding``."""

        workers: int = Field(1, ge=1, le=64, description="threads that fetch and pad tokens (count)")

    def route(self, loads: Sequence[ReplicaLoad], batch: BatchInfo) -> int | None:
        """The replica with the least cost outstanding, or None while all are full."""
        free = [load for load in loads if not load.full]
        if not free:
            return None
        return min(free, key=lambda load: (load.outstanding_cost, load.dispatched, load.replica)).replica
