"""Interleaver ``shuffle``: batches in uniformly random order."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from flowdflash.items import BatchTable
from flowdflash.stage import History, Interleaver


class Shuffle(Interleaver):
    """Puts batches into uniformly random order, whatever their buckets: the usual baseline."""

    type = "shuffle"

    def order(self, batches: BatchTable, history: History, rng: np.random.Generator) -> Iterable[int]:
        """A random permutation."""
        return rng.permutation(len(batches))
