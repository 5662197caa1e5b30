"""Bucketer ``sorted_budget``: no buckets; samples in order of length, cut wherever the budget is full."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from pydantic import Field

from flowdflash.batching import Account, BudgetOptions, check_budget, cut, over_budget
from flowdflash.items import BatchTable, SampleTable
from flowdflash.stage import Bucketer, Check


class SortedBudgetBucketer(Bucketer):
    """Sorts samples by length, nearly, and cuts a batch wherever the budget is full: hardly any padding.

    Lengths are sorted with a little noise, so that a sample meets other samples in each epoch. Batches have no bucket
    (-1); an interleaver that orders by length, such as ``golden_lattice``, must follow, or the epoch runs from short to
    long.
    """

    type = "sorted_budget"
    leftover_reason = "longer than the budget, or no full batch at the end of the epoch"

    class Config(BudgetOptions):
        """Options of the sorting bucketer."""

        noise: float = Field(
            0.02, ge=0, lt=1, description="a length counts in the sorting as up to this share more or less than it is"
        )

    def __init__(self, config: SortedBudgetBucketer.Config) -> None:
        super().__init__(config)
        self._account = Account()

    def check(self, check: Check) -> Mapping[str, Any]:
        """The longest sample that can come fits the budget."""
        return {"buckets": 0, **check_budget(check, self.config, check.facts.get("max_length", 0))}

    def batches(self, samples: SampleTable, rng: np.random.Generator) -> tuple[BatchTable, SampleTable | None]:
        """Batches from short to long; the incomplete one at the end is held back while more samples may come."""
        out = over_budget(samples, self.config)
        keep = np.flatnonzero(~out)
        noise = 1 + self.config.noise * rng.uniform(-1, 1, len(keep))
        # Ties are broken at random: without noise, equal lengths would meet in the same batches every epoch.
        rising = keep[np.lexsort((rng.random(len(keep)), samples.lengths[keep] * noise))]
        made, incomplete = cut(samples, rising, self.config, 0, samples.last)
        table = BatchTable.build(samples, made, np.full(len(made), -1))
        return self._account.close(table, samples, np.flatnonzero(out), incomplete)

    def summary(self) -> Mapping[str, Any]:
        """Of the last epoch: counts and lengths, how full batches are, what was left out."""
        return self._account.summary(self.config.token_budget)
