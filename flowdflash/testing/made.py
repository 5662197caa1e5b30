"""Samples, batches, records, a checkpoint and a context to test with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowdflash.data.lengths import BRIEF_EDGES, BRIEF_MU, BRIEF_SIGMA, lognormal
from flowdflash.items import BatchTable, Checkpoint, IntArray, SampleTable, StepRecord
from flowdflash.stage import OpenContext

BRIEF_BUDGET = 49152
"""Padded tokens per batch that go with ``brief_samples``."""

_BRIEF_BATCHES = (238, 434, 612, 851, 938, 3367)


def make_samples(
    lengths: Sequence[int] | IntArray,
    supervised: Sequence[int] | IntArray | None = None,
    *,
    epoch: int = 0,
    last: bool = True,
) -> SampleTable:
    """A table of samples with ids from 0; every token is supervised unless said otherwise."""
    column = np.array(lengths, dtype=np.int64)
    loss = column.copy() if supervised is None else np.array(supervised, dtype=np.int64)
    return SampleTable(epoch, np.arange(len(column), dtype=np.int64), column, loss, last)


def make_batches(buckets: Sequence[int] | IntArray, lengths: Sequence[int] | IntArray | None = None) -> BatchTable:
    """A table of one-sample batches with the given buckets; a batch of bucket k has 100 * (k + 1) tokens by default."""
    label = np.array(buckets, dtype=np.int64)
    samples = make_samples(100 * (np.maximum(label, 0) + 1) if lengths is None else lengths)
    return BatchTable.build(samples, list(np.arange(len(label)).reshape(-1, 1)), label)


def brief_samples(scale: int = 1) -> SampleTable:
    """Samples of which the longest of six buckets has a fifth of the samples and over half of the batches.

    Lengths are the mid-rank quantiles of a log-normal law truncated to 1..8192, so nothing is random. With the bucket
    edges ``BRIEF_EDGES`` and ``BRIEF_BUDGET``, every batch is full: 6,440 of them from 100,082 samples. ``scale`` 10 or
    100 gives about a tenth or a hundredth of the batches.
    """
    columns = []
    for low, high, batches in zip((0, *BRIEF_EDGES), BRIEF_EDGES, _BRIEF_BATCHES, strict=False):
        count = round(batches / scale) * (BRIEF_BUDGET // high)
        columns.append(lognormal((np.arange(count) + 0.5) / count, BRIEF_MU, BRIEF_SIGMA, low + 1, high))
    return make_samples(np.concatenate(columns))


def make_records(count: int, *, buckets: int = 3, first_step: int = 1) -> list[StepRecord]:
    """Records of consecutive optimizer steps with plausible values."""
    return [
        StepRecord(
            step=step,
            epoch=0,
            loss=4.0 / step,
            loss_per_bucket={str(k): 4.0 / step + k for k in range(buckets)},
            grad_norm=2.0,
            grad_norm_clipped=1.0,
            lr=1e-4,
            batches=buckets,
            samples=4 * buckets,
            tokens=400 * buckets,
            padded_tokens=500 * buckets,
            terms=200 * buckets,
            anchors=20 * buckets,
            buckets={str(k): 1 for k in range(buckets)},
            length_mean=100.0,
            length_max=125,
            padding=0.2,
            accuracy=0.5,
            accuracy_per_slot=(0.7, 0.5, 0.3),
            step_secs=0.1,
            checkpoint_pause_secs=0.0,
            waits_secs={"target->drafter": 0.01},
            seqs=tuple(range((step - 1) * buckets, step * buckets)),
        )
        for step in range(first_step, first_step + count)
    ]


def make_checkpoint(step: int = 1, reason: str = "every") -> Checkpoint:
    """A tiny checkpoint: one tensor of four numbers."""
    import torch

    tensors = {"fc.weight": torch.arange(4.0).reshape(2, 2)}
    config = {"model_type": "qwen3", "architectures": ["DFlashDraftModel"], "block_size": 4}
    return Checkpoint(step, 0, reason, config, tensors, {"step": step}, {"prefix": step, "extras": []})  # type: ignore[arg-type]


def open_context(run_dir: Path, stage: str = "stage", **given: Any) -> OpenContext:
    """A context to open a stage with: silent, its cache inside ``run_dir``."""
    return OpenContext(stage=stage, run_dir=run_dir, cache_dir=run_dir / "cache", **given)
