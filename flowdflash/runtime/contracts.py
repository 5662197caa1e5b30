"""What a source, a bucketer and an interleaver promise, checked; a breach names the plugin, the stage and the item."""

from __future__ import annotations

import numpy as np

from flowdflash.errors import PluginBroken
from flowdflash.items import BatchTable, IntArray, SampleTable


def check_table(table: SampleTable, before: SampleTable | None, kind: str, name: str) -> None:
    """A table of a source holds each sample once, with tokens, and continues the epoch that is open."""
    if not isinstance(table, SampleTable):
        raise PluginBroken(kind, f"source {name!r}: epochs() yielded a {type(table).__name__}, not a SampleTable")
    if before is not None and table.epoch != before.epoch:
        text = f"epoch {table.epoch} began although the last block of epoch {before.epoch} was not marked as last"
        raise PluginBroken(kind, f"source {name!r}: {text}")
    for column in (table.ids, table.lengths, table.supervised):
        if column.dtype.kind not in "iu":
            raise PluginBroken(kind, f"source {name!r}: columns of epochs() must be integers, got {column.dtype}")
    ids, counts = np.unique(table.ids, return_counts=True)
    if (counts > 1).any():
        raise PluginBroken(kind, f"source {name!r}: sample {ids[counts > 1][0]} is twice in epoch {table.epoch}")
    bad = table.ids[(table.lengths < 1) | (table.supervised > table.lengths) | (table.supervised < 0)]
    if len(bad):
        text = "has no tokens, or supervised tokens that are fewer than 0 or more than its tokens"
        raise PluginBroken(kind, f"source {name!r}: sample {bad[0]} {text}")


def check_coverage(pool: SampleTable, batches: BatchTable, leftover: SampleTable | None, kind: str, name: str) -> None:
    """Every sample of the pool is in exactly one batch or in the leftover, and nothing else is."""
    if not isinstance(batches, BatchTable) or not (leftover is None or isinstance(leftover, SampleTable)):
        raise PluginBroken(kind, f"bucketer {name!r}: batches() must return (BatchTable, SampleTable or None)")
    if fault := _table_fault(batches):
        raise PluginBroken(kind, f"bucketer {name!r}: batches() returned {fault}")
    given = batches.samples.ids[batches.members]
    if leftover is not None:
        given = np.concatenate([given, leftover.ids])
    # A fast comparison first; only a breach pays for finding out what it is.
    if len(given) == len(pool) and np.array_equal(np.sort(given), np.sort(pool.ids)):
        for table in (batches.samples, leftover):
            if table is not None and table is not pool and len(changed := _changed(table, pool)):
                raise PluginBroken(kind, f"bucketer {name!r}: sample {changed[0]} has another length than it was given")
        return
    seen, counts = np.unique(given, return_counts=True)
    for ids, what in (
        (np.setdiff1d(pool.ids, seen), "in no batch and not in the leftover"),
        (seen[counts > 1], "used more than once"),
        (np.setdiff1d(seen, pool.ids), "not among the samples given"),
    ):
        if len(ids):
            raise PluginBroken(kind, f"bucketer {name!r}: sample {ids[0]} is {what} ({len(ids)} such samples)")


_INTEGERS = ("bucket", "sizes", "tokens", "padded_tokens", "supervised", "min_length", "max_length")


def _table_fault(batches: BatchTable) -> str:
    """What is wrong with the columns of a table that was not put together by ``BatchTable.build``."""
    for name in (*_INTEGERS, "mean_length", "cost", "members", "offsets"):
        column, kinds = getattr(batches, name), "iuf" if name in ("mean_length", "cost") else "iu"
        if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in kinds:
            return f"a column {name!r} that is no row of {'numbers' if 'f' in kinds else 'integers'}"
        if name not in ("members", "offsets") and len(column) != len(batches.sizes):
            return f"{len(column)} values of {name!r} for {len(batches.sizes)} batches"
    ends = np.append(0, np.cumsum(batches.sizes))
    if not np.array_equal(batches.offsets, ends) or ends[-1] != len(batches.members) or (batches.sizes < 1).any():
        return "a batch without samples, or offsets that do not lead through its members"
    if (batches.bucket < -1).any():
        return f"bucket {batches.bucket.min()}; a bucket is 0 or more, or -1 for none"
    return "" if (np.isfinite(batches.cost) & (batches.cost >= 0)).all() else "a cost that is below 0 or no number"


def _changed(table: SampleTable, pool: SampleTable) -> IntArray:
    """Ids of samples that are not as they are in the pool."""
    order = np.argsort(pool.ids)
    rows = order[np.searchsorted(pool.ids, table.ids, sorter=order)]
    changed: IntArray = table.ids[(table.lengths != pool.lengths[rows]) | (table.supervised != pool.supervised[rows])]
    return changed


def check_order(taken: list[int], count: int, kind: str, name: str) -> IntArray:
    """The order as an array, if it names each of ``count`` batches exactly once."""
    order = np.asarray(taken if taken else np.zeros(0, np.int64))
    if order.ndim != 1 or order.dtype.kind not in "iu":
        raise PluginBroken(kind, f"interleaver {name!r}: order() must give integers, got {order.dtype}")
    order = order.astype(np.int64)
    outside = order[(order < 0) | (order >= count)]
    if len(outside):
        raise PluginBroken(kind, f"interleaver {name!r}: order() gave index {outside[0]} of {count} batches")
    times = np.bincount(order, minlength=count)
    if (times > 1).any():
        raise PluginBroken(kind, f"interleaver {name!r}: order() gave index {int(np.argmax(times > 1))} more than once")
    if (times == 0).any():
        missing = np.flatnonzero(times == 0)
        raise PluginBroken(
            kind, f"interleaver {name!r}: order() left out {len(missing)} of {count} batches, index {missing[0]} first"
        )
    return order
