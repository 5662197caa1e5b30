"""Which process of several trains on which batches of an accumulation window: pure functions of the batches' costs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from flowdflash.items import FloatArray, IntArray


def share_out(costs: FloatArray, ranks: int) -> tuple[IntArray, ...]:
    """Positions of the batches of one window per rank, the dearest dealt with first: largest differencing.

    Every batch begins as an assignment of its own; the two that are least even are joined, the busiest rank of one with
    the idlest of the other, until one is left. Giving each batch to the rank with the least so far leaves ranks further
    apart where many batches cost the same: by one of these.

    Ranks meet at the optimizer step only, so their costs are made equal and not their counts; a rank may even have no
    batch. It takes part in the step all the same: every window is one step of every rank.
    """
    idle: list[tuple[float, list[int]]] = [(0.0, [])] * (ranks - 1)
    heap = [(-cost, batch, [(cost, [batch]), *idle]) for batch, cost in enumerate(costs.tolist())]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        parts = sorted(((a + b, mine + theirs) for (a, mine), (b, theirs) in pairs), key=lambda part: -part[0])
        heapq.heappush(heap, (parts[-1][0] - parts[0][0], first, parts))
    parts = heap[0][2] if heap else [(0.0, []), *idle]
    return tuple(np.sort(np.array(batches, dtype=np.int64)) for _, batches in parts)


def balance(costs: FloatArray, shares: Sequence[IntArray]) -> float:
    """Mean cost of a rank as a share of that of the busiest, for whom all others wait: 1 where all have the same."""
    loads = [float(costs[share].sum()) for share in shares]
    return sum(loads) / len(loads) / max(loads) if max(loads) else 1.0
