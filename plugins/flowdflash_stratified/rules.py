"""Rules that put batches into order so that every stretch of the order holds its share of every bucket.

``tijdeman`` and ``largest_deficit`` treat buckets as unordered labels and give a sequence of buckets; ``herding`` gives
one too, and knows a value of each bucket; ``golden_lattice`` spreads batches along a value such as their length and
gives a sequence of batches.

None of them is "never the same bucket twice running". Where one bucket has over half of the batches that cannot hold,
and a rule that tries spends the other buckets early and ends in one long run of the large one.
"""

from __future__ import annotations

import heapq
from math import gcd

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

GOLDEN = (5**0.5 - 1) / 2


def tijdeman(counts: IntArray, ahead: FloatArray | None = None) -> IntArray:
    """Buckets in the order of Tijdeman's rule for the chairman assignment problem.

    With shares p = counts / total and m buckets, after t places every bucket has been taken p t times, up to
    1 - 1 / (2m - 2): the best bound that any rule can keep, and one that holds for windows of every size at once. The
    rule: of the buckets that may be taken (p t minus taken is at least 1 / (2m - 2)), take the one whose deadline
    (the t at which the bound would break) is the earliest.

    Args:
        counts: ``[m]`` batches per bucket.
        ahead: ``[m]`` how far each bucket is ahead of its share before the first place; none is by default. Where
            some are, the bound holds up to that much.
    """
    counts = np.asarray(counts, dtype=np.int64)
    present = np.flatnonzero(counts)
    if len(present) <= 1:
        return np.repeat(np.arange(len(counts)), counts)
    if ahead is None:
        return _tijdeman_exact(counts, present)
    slack = 1 / (2 * len(present) - 2)
    releases, deadlines = [], []
    for k in present.tolist():
        taken = np.arange(counts[k]) + ahead[k]
        pace = counts.sum() / counts[k]
        releases.append(np.ceil((taken + slack) * pace - 1e-9))
        deadlines.append((taken + 1 - slack) * pace)
    return _earliest_deadline(present, releases, deadlines)


def _tijdeman_exact(counts: IntArray, present: IntArray) -> IntArray:
    """Releases by integer arithmetic: a rounding error there could leave a place that nobody may take."""
    total, double = int(counts.sum()), 2 * len(present) - 2
    releases, deadlines = [], []
    for k in present.tolist():
        taken = np.arange(counts[k], dtype=np.int64)
        releases.append(-(-(total * (taken * double + 1)) // (double * counts[k])))
        deadlines.append(total * (taken + 1 - 1 / double) / counts[k])
    return _earliest_deadline(present, releases, deadlines)


def _earliest_deadline(present: IntArray, releases: list[NDArray[np.generic]], deadlines: list[FloatArray]) -> IntArray:
    """Places 1, 2, ...: of the released jobs the one with the earliest deadline; if none is, the next to be released.

    The jobs of one bucket are released in order, each after the deadline of the one before, so a merge of all jobs by
    release and one heap do.
    """
    release = np.concatenate(releases)
    deadline = np.concatenate(deadlines)
    bucket = np.repeat(present, [len(r) for r in releases])
    by_release = np.lexsort((deadline, release))
    due, when, label = (column[by_release].tolist() for column in (deadline, release, bucket))
    ready: list[tuple[float, int]] = []
    order = []
    arrived, jobs = 0, len(due)
    for place in range(1, jobs + 1):
        while arrived < jobs and (when[arrived] <= place or not ready):
            heapq.heappush(ready, (due[arrived], label[arrived]))
            arrived += 1
        order.append(heapq.heappop(ready)[1])
    return np.array(order, dtype=np.int64)


def largest_deficit(counts: IntArray, ahead: FloatArray | None = None) -> IntArray:
    """Buckets in the order of "largest deficit first", also known as smooth weighted round robin.

    At each place every bucket earns its share; the one that is owed most is taken. Lower discrepancy on average than
    ``tijdeman``, longer runs.
    """
    counts = np.asarray(counts, dtype=np.int64)
    total = int(counts.sum())
    share = counts.astype(np.float64)
    owed = -np.asarray(ahead, dtype=np.float64) * total if ahead is not None else np.zeros(len(counts))
    left = counts.tolist()
    owed[counts == 0] = -np.inf
    order = []
    for _ in range(total):
        owed += share
        k = int(owed.argmax())
        owed[k] -= total
        left[k] -= 1
        if not left[k]:
            owed[k] = -np.inf
        order.append(k)
    return np.array(order, dtype=np.int64)


def herding(counts: IntArray, ahead: FloatArray | None = None, *, values: FloatArray) -> IntArray:
    """Buckets in an order whose running sum of values stays near zero: least noise between windows, looser bounds.

    At each place, of the buckets that Tijdeman's rule would let be taken, the one is taken whose value brings the sum
    of all values so far nearest to zero. A bucket that is owed a whole batch goes first. No bucket is ever a whole
    batch ahead of its share.

    Args:
        counts: ``[m]`` batches per bucket.
        ahead: ``[m]`` how far each bucket is ahead of its share before the first place; none is by default.
        values: ``[m]`` a value per bucket; its mean over all batches is taken off.
    """
    counts = np.asarray(counts, dtype=np.int64)
    total, present = int(counts.sum()), np.count_nonzero(counts)
    if present <= 1:
        return np.repeat(np.arange(len(counts)), counts)
    share = counts / total
    value = values - share @ values
    owed = np.where(counts > 0, -(np.zeros(len(counts)) if ahead is None else ahead), -np.inf)
    slack, left, run, order = 1 / (2 * present - 2) - 1e-12, counts.tolist(), 0.0, []
    for _ in range(total):
        owed += share
        most = int(owed.argmax())
        distance = np.abs(run + value)
        k = most if not slack <= owed[most] < 1 else int(np.where(owed >= slack, distance, np.inf).argmin())
        run += value[k]
        left[k] -= 1
        owed[k] = owed[k] - 1 if left[k] else -np.inf
        order.append(k)
    return np.array(order, dtype=np.int64)


def golden_lattice(values: FloatArray, start: int, ties: IntArray) -> IntArray:
    """Batches in the order of a lattice over their values: place t holds rank (start + t g) mod B.

    g is coprime to B, so each batch comes exactly once, and g / B is close to the golden ratio, so that every stretch
    of the order is spread evenly over all values. ``ties`` says who is first among equal values.
    """
    count = len(values)
    ranked = np.lexsort((ties, values))
    return ranked[(start + np.arange(count) * lattice_step(count)) % max(count, 1)]


def lattice_step(count: int) -> int:
    """The number nearest to ``count`` times the golden ratio that is coprime to ``count``."""
    near = round(count * GOLDEN)
    candidates = (near + sign * distance for distance in range(count + 1) for sign in (1, -1))
    return next((step for step in candidates if 0 < step <= max(count, 1) and gcd(step, count) == 1), 1)
