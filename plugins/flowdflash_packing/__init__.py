"""Bucketer that packs samples end to end into rows: a first-party plugin of flowdflash.

A packed row holds no padding: its samples are documents that never see each other, neither in the target nor in the
draft. What a row leaves unused of its budget is all that packing wastes.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from flowdflash.batching import BudgetBucketer, BudgetOptions
from flowdflash.items import BatchTable, IntArray, SampleTable
from flowdflash.plugin import hookimpl
from flowdflash.stage import Bucketer, Check

__all__ = ["PackingBucketer", "best_fit", "flowdflash_register"]


class PackingBucketer(BudgetBucketer, Bucketer):
    """Packs samples into rows of ``token_budget`` tokens: each goes, in random order, to the open row it fills best.

    Only ``open_bins`` rows are open at once, so memory is bounded on a stream too. Batches have no bucket (-1).
    """

    type = "packing"
    leftover_reason = "longer than the budget, or in a row that was still open at the end of the epoch"

    class Config(BudgetOptions):
        """Options of the packing bucketer."""

        token_budget: int = Field(ge=1, description="most tokens in a row, which is a batch")
        drop_last: bool = Field(False, description="leave out the rows that are still open at the end of an epoch")
        open_bins: int = Field(
            8, ge=1, description="rows that are filled at once; more of them waste less and take longer"
        )

    def check(self, check: Check) -> Mapping[str, Any]:
        """The longest sample that can come fits a row."""
        facts = super().check(check)
        if self.config.cost_budget:
            check.refuse("cost_budget", "rows are filled up to their tokens, whatever they cost", "remove it")
        return {**facts, "packed": True}

    def _made(self, samples: SampleTable, keep: IntArray, rng: np.random.Generator) -> tuple[BatchTable, IntArray]:
        config, shuffled = self.config, rng.permutation(keep)
        rows, unfilled = best_fit(
            shuffled, samples.lengths[shuffled], config.token_budget, config.open_bins, config.max_samples
        )
        held: list[list[int]] = unfilled if config.drop_last or not samples.last else []
        made = rows if held else rows + unfilled
        groups = [np.array(row, dtype=np.int64) for row in made]
        table = BatchTable.build(samples, groups, np.full(len(groups), -1), packed=True)
        return table, np.array([i for row in held for i in row], dtype=np.int64)


def best_fit(
    members: IntArray, lengths: IntArray, capacity: int, open_bins: int, most: int = 0
) -> tuple[list[list[int]], list[list[int]]]:
    """Rows of members in the order in which they were closed, and those still open, the fullest first.

    A member goes to the row with the least room that still takes it. If none does, a new row is opened, for which the
    fullest is closed where ``open_bins`` are open; a row is closed too when it has no room left, or ``most`` members.
    A member that is longer than ``capacity`` has a row of its own.
    """
    limit = most or sys.maxsize
    closed: list[list[int]] = []
    # Of the open rows: room left, rising, and members. Eight entries are quicker to search and shift than any tree.
    rooms: list[int] = []
    rows: list[list[int]] = []
    for member, length in zip(members.tolist(), lengths.tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room, row = rooms.pop(at) - length, rows.pop(at)
            row.append(member)
        else:
            room, row = capacity - length, [member]
        if room <= 0 or len(row) >= limit:
            closed.append(row)
            continue
        if len(rooms) == open_bins:
            rooms.pop(0)
            closed.append(rows.pop(0))
        at = bisect_left(rooms, room)
        rooms.insert(at, room)
        rows.insert(at, row)
    return closed, rows


@hookimpl
def flowdflash_register(registry: Any) -> None:
    """Register the bucketer."""
    registry.register(PackingBucketer)
