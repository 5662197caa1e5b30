"""Bucketer ``equal_token``: buckets that hold equally many tokens, so that each makes about equally many batches."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from flowdflash.batching import BatchSize, BudgetBucketer, BudgetOptions, bucketed, equal_token_edges
from flowdflash.items import BatchTable, IntArray, SampleTable
from flowdflash.stage import Bucketer


class EqualTokenBucketer(BudgetBucketer, Bucketer):
    """Groups samples of like length into buckets of equal token counts, whose edges follow from the lengths.

    No bucket makes most of the batches, whatever the lengths. Where the source is streaming, edges are worked out per
    block.
    """

    type = "equal_token"

    class Config(BudgetOptions):
        """Options of the equal-token bucketer."""

        buckets: int = Field(6, ge=1, description="number of buckets")
        batch_size: BatchSize = "fixed"

    def _made(self, samples: SampleTable, keep: IntArray, rng: np.random.Generator) -> tuple[BatchTable, IntArray]:
        edges = equal_token_edges(samples.lengths[keep], self.config.buckets)
        return bucketed(samples, keep, edges, self.config, self.config.batch_size, rng)
