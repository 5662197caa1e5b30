"""What is drawn: the values of one record by the name of their series, and counts kept over the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowdflash.items import StepRecord

AXIS = "step"
"""The optimizer step: the axis of every series."""


class Series:
    """Turns records into values by series; counts dispatched batches per bucket over the run."""

    def __init__(self, dispatched: Mapping[int, int] | None = None) -> None:
        self._dispatched: Counter[int] = Counter(dispatched or {})

    @property
    def dispatched(self) -> Mapping[int, int]:
        """Batches per bucket so far."""
        return dict(self._dispatched)

    def values(self, record: StepRecord) -> dict[str, Any]:
        """Everything about one optimizer step except the histogram."""
        self._dispatched.update({int(k): n for k, n in record.buckets.items()})
        window = max(record.batches, 1)
        return {
            AXIS: record.step,
            "epoch": record.epoch,
            "train/loss": record.loss,
            "train/lr": record.lr,
            "train/grad_norm": record.grad_norm,
            "train/grad_norm_clipped": record.grad_norm_clipped,
            "train/accuracy": record.accuracy,
            "train/skipped": int(bool(record.skipped)),
            "window/batches": record.batches,
            "window/samples": record.samples,
            "window/tokens": record.tokens,
            "window/terms": record.terms,
            "window/anchors": record.anchors,
            "window/distinct_buckets": len(record.buckets),
            "window/padding": record.padding,
            "window/order_distance": record.order_distance,
            **({} if record.window_kl is None else {"window/kl_bits": record.window_kl}),
            "length/mean": record.length_mean,
            "length/max": record.length_max,
            "time/step_secs": record.step_secs,
            "time/checkpoint_pause_secs": record.checkpoint_pause_secs,
            **{f"accuracy_per_slot/{slot:02d}": value for slot, value in enumerate(record.accuracy_per_slot, 1)},
            **{f"loss_per_bucket/{k}": value for k, value in record.loss_per_bucket.items()},
            **{f"window_mix/{k}": count / window for k, count in record.buckets.items()},
            **{f"dispatched/{k}": count for k, count in sorted(self._dispatched.items())},
            **{f"wait_secs/{edge}": secs for edge, secs in record.waits_secs.items()},
        }

    def histogram(self) -> tuple[Any, Any] | None:
        """Batches dispatched per bucket over the run: counts, and edges half-way between bucket numbers."""
        if not self._dispatched:
            return None
        low, high = min(self._dispatched), max(self._dispatched)
        counts = np.array([self._dispatched[k] for k in range(low, high + 1)])
        return counts, np.arange(low, high + 2) - 0.5
