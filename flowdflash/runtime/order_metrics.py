"""How good an order of batches is: figures computed from the sequence of their buckets, lengths and token counts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flowdflash.items import BatchTable, FloatArray, IntArray

TAIL = 0.05
"""Part of the epoch, from its end, that ``tail_share`` looks at."""


@dataclass(frozen=True, slots=True)
class OrderMetrics:
    """Figures of one order of one table of batches.

    Attributes:
        batches, window: number of batches; batches per optimizer step.
        longest_run: longest stretch of batches of one bucket.
        equal_neighbours: share of adjacent pairs with the same bucket.
        prefix_discrepancy: most batches by which any bucket is ever ahead of its share or behind it.
        window_distinct, window_distinct_min: buckets per window, mean and least.
        window_kl, window_kl_max: divergence of the window's mix from the epoch's in bits, mean and most.
        homogeneous_windows: share of windows with one bucket.
        noise_ratio: variance between windows of mean log length, against that of independent batches: 1 for random
            order, 0 ideal.
        window_spread: standard deviation over windows of the token-weighted, standardised log length.
        tokens_cv: variation of real tokens between windows, as a share of their mean.
        adjacent_length_corr: correlation of mean length between neighbours; below 0 is good.
        padding_waste: share of padded tokens that hold nothing.
        tail_gap: most by which the share of a bucket in the last twentieth differs from that in the epoch.
    """

    batches: int
    window: int
    longest_run: int
    equal_neighbours: float
    prefix_discrepancy: float
    window_distinct: float
    window_distinct_min: int
    window_kl: float
    window_kl_max: float
    homogeneous_windows: float
    noise_ratio: float
    window_spread: float
    tokens_cv: float
    adjacent_length_corr: float
    padding_waste: float
    tail_gap: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


def measure(table: BatchTable, order: ArrayLike, window: int) -> OrderMetrics:
    """All figures of ``order`` (indices into ``table``) with ``window`` batches per optimizer step."""
    where = np.asarray(order, dtype=np.int64)
    buckets = table.bucket[where]
    distinct, kl = window_distinct(buckets, window), window_kl(buckets, window)
    padded = int(table.padded_tokens[where].sum())
    shares = bucket_shares(buckets)
    tail = tail_share(buckets)
    return OrderMetrics(
        batches=len(where),
        window=window,
        longest_run=longest_run(buckets),
        equal_neighbours=equal_neighbours(buckets),
        prefix_discrepancy=prefix_discrepancy(buckets),
        window_distinct=float(distinct.mean()) if len(distinct) else 0.0,
        window_distinct_min=int(distinct.min(initial=len(shares))),
        window_kl=float(kl.mean()) if len(kl) else 0.0,
        window_kl_max=float(kl.max(initial=0.0)),
        homogeneous_windows=homogeneous_windows(buckets, window),
        noise_ratio=noise_ratio(table.mean_length[where], window),
        window_spread=window_spread(table, where, window),
        tokens_cv=tokens_cv(table.tokens[where], window),
        adjacent_length_corr=adjacent_length_corr(table.mean_length[where]),
        padding_waste=1 - int(table.tokens[where].sum()) / padded if padded else 0.0,
        tail_gap=max((abs(tail.get(k, 0.0) - share) for k, share in shares.items()), default=0.0),
    )


def longest_run(buckets: IntArray) -> int:
    """Longest stretch of one bucket."""
    if not len(buckets):
        return 0
    ends = np.concatenate([[-1], np.flatnonzero(np.diff(buckets)), [len(buckets) - 1]])
    return int(np.diff(ends).max())


def equal_neighbours(buckets: IntArray) -> float:
    """Share of adjacent pairs with the same bucket."""
    return float((np.diff(buckets) == 0).mean()) if len(buckets) > 1 else 0.0


def prefix_discrepancy(buckets: IntArray) -> float:
    """Most by which the count of any bucket in any prefix differs from its share of that prefix, in batches."""
    worst, total = 0.0, len(buckets)
    for label in np.unique(buckets):
        hits = buckets == label
        gap = np.cumsum(hits) - hits.sum() / total * np.arange(1, total + 1)
        worst = max(worst, float(np.abs(gap).max()))
    return worst


def window_distinct(buckets: IntArray, window: int) -> IntArray:
    """``[W]`` number of buckets in each whole window."""
    return np.asarray((_window_counts(buckets, window) > 0).sum(axis=1), dtype=np.int64)


def window_kl(buckets: IntArray, window: int) -> FloatArray:
    """``[W]`` Kullback-Leibler divergence of the mix of each whole window from that of the epoch, in bits."""
    counts = _window_counts(buckets, window)
    mix = counts / window
    epoch = np.unique(buckets, return_counts=True)[1] / max(len(buckets), 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(counts > 0, mix * np.log2(mix / epoch), 0.0)
    return np.asarray(terms.sum(axis=1), dtype=np.float64)


def homogeneous_windows(buckets: IntArray, window: int) -> float:
    """Share of whole windows that hold one bucket only."""
    distinct = window_distinct(buckets, window)
    return float((distinct == 1).mean()) if len(distinct) else 0.0


def noise_ratio(mean_lengths: FloatArray, window: int) -> float:
    """``window`` times the variance over windows of the mean of z, z being the standardised log mean length."""
    z = np.log(np.maximum(mean_lengths, 1.0))
    if not len(z) or z.std() < 1e-12:
        return 0.0
    windows = _windows((z - z.mean()) / z.std(), window)
    return float(window * windows.mean(axis=1).var()) if len(windows) else 0.0


def window_spread(table: BatchTable, order: IntArray, window: int) -> float:
    """Standard deviation over windows of the token-weighted mean of standardised log length, sample by sample."""
    lengths = table.samples.lengths[table.members].astype(np.float64)
    z = np.log(np.maximum(lengths, 1.0))
    if not len(order) or z.std() < 1e-12:
        return 0.0
    weighted = np.add.reduceat(lengths * (z - z.mean()) / z.std(), table.offsets[:-1])[order]
    tokens = _windows(table.tokens[order].astype(np.float64), window).sum(axis=1)
    return float((_windows(weighted, window).sum(axis=1) / np.maximum(tokens, 1)).std()) if len(tokens) else 0.0


def tokens_cv(tokens: IntArray, window: int) -> float:
    """Standard deviation over windows of their real tokens, divided by the mean."""
    sums = _windows(tokens.astype(np.float64), window).sum(axis=1)
    return float(sums.std() / sums.mean()) if len(sums) and sums.mean() > 0 else 0.0


def adjacent_length_corr(mean_lengths: FloatArray) -> float:
    """Correlation of mean length between a batch and the next."""
    before, after = mean_lengths[:-1], mean_lengths[1:]
    if len(before) < 2 or before.std() < 1e-12 or after.std() < 1e-12:
        return 0.0
    return float(np.corrcoef(before, after)[0, 1])


def bucket_shares(buckets: IntArray) -> dict[int, float]:
    """Share of batches per bucket."""
    labels, counts = np.unique(buckets, return_counts=True)
    return dict(zip(labels.tolist(), (counts / max(len(buckets), 1)).tolist(), strict=True))


def tail_share(buckets: IntArray, part: float = TAIL) -> dict[int, float]:
    """Share of batches per bucket in the last ``part`` of the order: tells of buckets that ran out early."""
    return bucket_shares(buckets[len(buckets) - max(1, round(part * len(buckets))) :]) if len(buckets) else {}


def _windows(values: NDArray[Any], window: int) -> NDArray[Any]:
    """``[W, window]``: whole windows only."""
    whole = len(values) // window
    return values[: whole * window].reshape(whole, window)


def _window_counts(buckets: IntArray, window: int) -> IntArray:
    """``[W, m]`` batches per window and bucket, buckets in rising order."""
    labels, which = np.unique(buckets, return_inverse=True)
    whole = len(buckets) // window
    row = np.repeat(np.arange(whole), window)
    cells = row * len(labels) + which[: whole * window]
    return np.bincount(cells, minlength=whole * len(labels)).reshape(whole, len(labels)).astype(np.int64)
