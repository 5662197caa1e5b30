"""The planning plane: samples and batches as columns of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class SampleTable:
    """A block of samples of one epoch, as columns of equal length n. No tokens.

    Attributes:
        epoch: 0-based pass over the data.
        ids: ``[n]`` sample ids; ``Source.tokens(id)`` fetches the tokens. Unique within an epoch.
        lengths: ``[n]`` tokens per sample, after truncation.
        supervised: ``[n]`` tokens that carry a loss.
        last: no further block follows in this epoch. A map-style source gives one block per epoch.
        anchor_cost: ``[n]`` cost of the draft's anchors of each sample, in target tokens, put in by the runtime; None
            where they cost nothing.
    """

    epoch: int
    ids: IntArray
    lengths: IntArray
    supervised: IntArray
    last: bool = True
    anchor_cost: FloatArray | None = None

    def __post_init__(self) -> None:
        if not (self.ids.shape == self.lengths.shape == self.supervised.shape and self.ids.ndim == 1):
            raise ValueError(
                f"columns of a SampleTable must be one-dimensional and of one length, got ids {self.ids.shape}, "
                f"lengths {self.lengths.shape}, supervised {self.supervised.shape}"
            )

    def __len__(self) -> int:
        return int(self.ids.shape[0])

    def take(self, rows: IntArray) -> SampleTable:
        """The rows at the given positions, in that order."""
        cost = None if self.anchor_cost is None else self.anchor_cost[rows]
        return replace(
            self, ids=self.ids[rows], lengths=self.lengths[rows], supervised=self.supervised[rows], anchor_cost=cost
        )

    def joined(self, other: SampleTable) -> SampleTable:
        """This table followed by ``other``, without ``anchor_cost``; epoch and ``last`` are those of ``other``."""
        join = np.concatenate
        return SampleTable(
            other.epoch,
            join([self.ids, other.ids]),
            join([self.lengths, other.lengths]),
            join([self.supervised, other.supervised]),
            other.last,
        )


@dataclass(frozen=True, slots=True, eq=False)
class BatchTable:
    """Batches over one ``SampleTable``, as columns of length B (number of batches), in no particular order.

    Attributes:
        samples: the table that ``members`` points into.
        members: ``[m]`` positions in ``samples``, batch after batch.
        offsets: ``[B + 1]`` batch i holds ``members[offsets[i]:offsets[i + 1]]``.
        bucket: ``[B]`` bucket of each batch, 0-based; -1 where batches have no bucket.
        sizes, tokens, padded_tokens, supervised, min_length, max_length: ``[B]`` derived by ``build``.
        mean_length: ``[B]`` float.
        cost: ``[B]`` float, cost of the batch in target tokens; by default its padded tokens and its anchors, of which
            each row has as many as the one with most.
        packed: the samples of a batch share one row, end to end, without padding; else each has a row of its own.
    """

    samples: SampleTable
    members: IntArray
    offsets: IntArray
    bucket: IntArray
    sizes: IntArray
    tokens: IntArray
    padded_tokens: IntArray
    supervised: IntArray
    min_length: IntArray
    max_length: IntArray
    mean_length: FloatArray
    cost: FloatArray
    packed: bool = False

    @classmethod
    def build(
        cls,
        samples: SampleTable,
        groups: Sequence[IntArray],
        bucket: Sequence[int] | IntArray,
        cost: FloatArray | None = None,
        *,
        packed: bool = False,
    ) -> BatchTable:
        """A table from one array of positions in ``samples`` per batch. Padding is to the longest of the batch, if any.

        Raises:
            ValueError: a batch is empty, a position is out of range, or ``bucket`` has another length than ``groups``.
        """
        buckets = np.asarray(bucket, dtype=np.int64).reshape(-1)
        if len(buckets) != len(groups):
            raise ValueError(f"{len(groups)} batches but {len(buckets)} bucket ids")
        sizes = np.fromiter(map(len, groups), np.int64, len(groups))
        if (sizes == 0).any():
            raise ValueError(f"batch {int(np.flatnonzero(sizes == 0)[0])} has no samples")
        members = np.concatenate([*groups]).astype(np.int64) if len(groups) else np.zeros(0, np.int64)
        if len(members) and (members.min() < 0 or members.max() >= len(samples)):
            raise ValueError(f"batches point outside their table of {len(samples)} samples")
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        starts = offsets[:-1]
        lengths, supervised = samples.lengths[members], samples.supervised[members]
        empty = np.zeros(0, np.int64)
        tokens = np.add.reduceat(lengths, starts) if len(groups) else empty
        longest = np.maximum.reduceat(lengths, starts) if len(groups) else empty
        padded = tokens if packed else longest * sizes
        if cost is None:
            cost = padded.astype(np.float64)
            if samples.anchor_cost is not None and len(groups):
                each = samples.anchor_cost[members]
                cost += np.add.reduceat(each, starts) if packed else np.maximum.reduceat(each, starts) * sizes
        return cls(
            samples,
            members,
            offsets,
            buckets,
            sizes,
            tokens,
            padded,
            np.add.reduceat(supervised, starts) if len(groups) else empty,
            np.minimum.reduceat(lengths, starts) if len(groups) else empty,
            longest,
            tokens / np.maximum(sizes, 1),
            np.asarray(cost, dtype=np.float64),
            packed,
        )

    def __len__(self) -> int:
        return int(self.bucket.shape[0])

    def positions(self, batch: int) -> IntArray:
        """Positions in ``samples`` of the samples of one batch."""
        return self.members[self.offsets[batch] : self.offsets[batch + 1]]


Columns = TypeVar("Columns", SampleTable, BatchTable)


def read_only(table: Columns) -> Columns:
    """The same table with columns that cannot be written to; whoever made the table still can."""
    views: dict[str, Any] = {}
    for entry in fields(table):
        column = getattr(table, entry.name)
        if isinstance(column, np.ndarray):
            views[entry.name] = column.view()
            views[entry.name].flags.writeable = False
        elif isinstance(column, SampleTable):
            views[entry.name] = read_only(column)
    return replace(table, **views)
