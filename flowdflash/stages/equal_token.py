"""Bucketer ``equal_token``: buckets that hold equally many tokens, so that each makes about equally many batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from flowdflash.batching import (
    Account,
    BatchSize,
    BudgetOptions,
    bucketed,
    check_budget,
    equal_token_edges,
    over_budget,
)
from flowdflash.items import BatchTable, SampleTable
from flowdflash.stage import Bucketer, Check


class EqualTokenBucketer(Bucketer):
    """Groups samples of like length into buckets of equal token counts, whose edges follow from the lengths.

    No bucket makes most of the batches, whatever the lengths. Where the source is streaming, edges are worked out per
    block.
    """

    type = "equal_token"
    leftover_reason = "longer than the budget, or no full batch at the end of the epoch"

    class Config(BudgetOptions):
        """Options of the equal-token bucketer."""

        buckets: int = Field(6, ge=1, description="number of buckets")
        batch_size: BatchSize = "fixed"

    def __init__(self, config: EqualTokenBucketer.Config) -> None:
        super().__init__(config)
        self._account = Account()

    def check(self, check: Check) -> Mapping[str, Any]:
        """The longest sample that can come fits the budget."""
        return {"buckets": self.config.buckets, **check_budget(check, self.config, check.facts.get("max_length", 0))}

    def batches(self, samples: SampleTable, rng: np.random.Generator) -> tuple[BatchTable, SampleTable | None]:
        """Batches bucket after bucket; incomplete ones are held back while more samples may come."""
        out = over_budget(samples, self.config)
        keep = np.flatnonzero(~out)
        edges = equal_token_edges(samples.lengths[keep], self.config.buckets)
        table, incomplete = bucketed(samples, keep, edges, self.config, self.config.batch_size, rng)
        return self._account.close(table, samples, np.flatnonzero(out), incomplete)

    def summary(self) -> Mapping[str, Any]:
        """Of the last epoch: counts and lengths per bucket, how full batches are, what was left out."""
        return self._account.summary(self.config.token_budget)
