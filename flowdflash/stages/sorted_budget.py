"""Bucketer ``sorted_budget``: no buckets; samples in order of length, cut wherever the budget is full."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from flowdflash.batching import BudgetBucketer, BudgetOptions, cut
from flowdflash.items import BatchTable, IntArray, SampleTable
from flowdflash.stage import Bucketer


class SortedBudgetBucketer(BudgetBucketer, Bucketer):
    """Sorts samples by length, nearly, and cuts a batch wherever the budget is full: hardly any padding.

    Lengths are sorted with a little noise, so that a sample meets other samples in each epoch. Batches have no bucket
    (-1); an interleaver that orders by length, such as ``golden_lattice``, must follow, or the epoch runs from short to
    long.
    """

    type = "sorted_budget"

    class Config(BudgetOptions):
        """Options of the sorting bucketer."""

        noise: float = Field(
            0.02, ge=0, lt=1, description="a length counts in the sorting as up to this share more or less than it is"
        )

    def _made(self, samples: SampleTable, keep: IntArray, rng: np.random.Generator) -> tuple[BatchTable, IntArray]:
        noise = 1 + self.config.noise * rng.uniform(-1, 1, len(keep))
        # Ties are broken at random: without noise, equal lengths would meet in the same batches every epoch.
        rising = keep[np.lexsort((rng.random(len(keep)), samples.lengths[keep] * noise))]
        made, incomplete = cut(samples, rising, self.config, 0, samples.last)
        return BatchTable.build(samples, made, np.full(len(made), -1)), incomplete
