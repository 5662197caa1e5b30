"""What is drawn of a planned epoch: columns thinned out to what a page can show. Plain values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flowdflash.items import BatchTable, IntArray
from flowdflash.runtime.plan_compare import StrategyPlan

CLASSES = 6
"""Classes of length where the pipeline's own batches have no buckets."""

BINS = 64
STRIP_BATCHES = 500
POINTS = 400


def length_classes(table: BatchTable) -> list[int]:
    """Rising upper bounds in tokens that every strategy's batches are coloured by: those of the buckets, if any."""
    labels = np.unique(table.bucket)
    if len(labels) > 1:
        return sorted({int(table.max_length[table.bucket == k].max()) for k in labels.tolist()})
    lengths = np.sort(table.samples.lengths[table.members])
    total = np.cumsum(lengths)
    places = np.searchsorted(total, total[-1] * np.arange(1, CLASSES + 1) / CLASSES)
    return [int(bound) for bound in np.unique(lengths[np.minimum(places, len(lengths) - 1)])]


def histogram(lengths: IntArray) -> dict[str, list[float]]:
    """How many samples there are of each length, in bins of equal width from 0."""
    counts, bounds = np.histogram(lengths, bins=BINS, range=(0, int(lengths.max(initial=1))))
    return {"bounds": bounds.tolist(), "counts": counts.tolist()}


def series(plan: StrategyPlan, classes: Sequence[int]) -> dict[str, list[float]]:
    """The class of length of each of the first batches, and how far the classes are from their share over the epoch."""
    upper = np.asarray(classes)
    mean_lengths = plan.table.mean_length[plan.order]
    label = np.minimum(np.searchsorted(upper, mean_lengths), len(upper) - 1)
    place = np.arange(1, len(label) + 1)
    worst = np.zeros(len(label))
    for k in np.unique(label).tolist():
        hits = label == k
        worst = np.maximum(worst, np.abs(np.cumsum(hits) - hits.mean() * place))
    # The most of each stretch: thinning out must not hide a peak.
    starts = np.unique(np.linspace(0, len(label), min(POINTS, len(label)), endpoint=False).astype(np.int64))
    return {
        "strip": label[:STRIP_BATCHES].tolist(),
        "discrepancy": np.maximum.reduceat(worst, starts).tolist() if len(label) else [],
        "discrepancy_at": ((starts + 1) / max(len(label), 1)).tolist(),
    }
