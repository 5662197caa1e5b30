"""A plan as columns: an epoch's batches in order, and a row per bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flowdflash.items import IntArray


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One bucket over the whole plan.

    Attributes:
        bucket: bucket id, -1 for none.
        samples, batches, tokens, padded_tokens: counts.
        mean_length, max_length: tokens per sample.
        sample_share, batch_share: share of all samples, of all batches.
    """

    bucket: int
    samples: int
    batches: int
    tokens: int
    padded_tokens: int
    mean_length: float
    max_length: int
    sample_share: float
    batch_share: float


@dataclass(frozen=True, slots=True, eq=False)
class EpochPlan:
    """One epoch, its batches in planned order.

    Attributes:
        buckets, samples, tokens, padded_tokens, max_length: ``[B]`` one entry per batch.
        dropped: samples that are in no batch, by reason.
    """

    buckets: IntArray
    samples: IntArray
    tokens: IntArray
    padded_tokens: IntArray
    max_length: IntArray
    dropped: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.buckets)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """All epochs of a run whose source knows its samples beforehand, or those read so far of one that does not.

    Attributes:
        epochs: the epochs.
        window: micro-batches per optimizer step.
        sha256: of the ids and lengths of all samples, batch by batch: equal plans train on the same.
    """

    epochs: tuple[EpochPlan, ...]
    window: int
    sha256: str = ""

    @property
    def batches(self) -> int:
        """Batches over all epochs."""
        return sum(len(epoch) for epoch in self.epochs)

    def steps(self, window: int = 0) -> int:
        """Optimizer steps, of so many batches each where that is not the plan's; none crosses the end of an epoch."""
        return sum(-(-len(epoch) // (window or self.window)) for epoch in self.epochs)

    @property
    def dropped(self) -> dict[str, int]:
        """Samples that are in no batch, by reason, over all epochs."""
        total: dict[str, int] = {}
        for epoch in self.epochs:
            for reason, count in epoch.dropped.items():
                total[reason] = total.get(reason, 0) + count
        return total

    def bucket_rows(self) -> tuple[BucketRow, ...]:
        """One row per bucket, over all epochs."""
        columns = ("buckets", "samples", "tokens", "padded_tokens", "max_length")
        buckets, samples, tokens, padded, longest = (
            np.concatenate([getattr(epoch, name) for epoch in self.epochs]) for name in columns
        )
        rows = []
        for bucket in np.unique(buckets).tolist():
            here = buckets == bucket
            count, batches = int(samples[here].sum()), int(here.sum())
            rows.append(
                BucketRow(
                    bucket,
                    count,
                    batches,
                    int(tokens[here].sum()),
                    int(padded[here].sum()),
                    int(tokens[here].sum()) / count,
                    int(longest[here].max()),
                    count / int(samples.sum()),
                    batches / len(buckets),
                )
            )
        return tuple(rows)
