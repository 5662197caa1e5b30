"""Who is told what a run does: plugins and a person; and the counts that they are told."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from flowdflash.items import BatchInfo, StepRecord
from flowdflash.stage import Report


class Notifier(Protocol):
    """The plugins, as far as a run needs them."""

    def notify(self, name: str, /, **arguments: Any) -> list[str]:
        """Call the observers of a hook; the text of each failure that was kept away from the run."""


class Observers:
    """Tells plugins and a person what has happened; a failing observer is a warning, never a failed run."""

    def __init__(self, plugins: Notifier | None, report: Report) -> None:
        self._plugins, self._report = plugins, report

    def tell(self, hook: str, **arguments: Any) -> None:
        """Call a hook."""
        if self._plugins is not None:
            for text in self._plugins.notify(hook, **arguments):
                self._report.warn(text)


class Tally:
    """What has been worked off so far, counted from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.steps = self.batches = self.samples = self.tokens = 0
        self.batches_per_bucket: dict[str, int] = {}
        self.last_record: StepRecord | None = None
        self.order_distance = 0

    def add_batch(self, info: BatchInfo) -> int:
        """One batch of a pipeline without a drafter; how many there have been."""
        with self._lock:
            self._count(info.samples, info.tokens, {str(info.bucket): 1})
            return self.batches

    def add_record(self, record: StepRecord) -> None:
        """One optimizer step."""
        with self._lock:
            self._count(record.samples, record.tokens, dict(record.buckets))
            self.steps, self.last_record = record.step, record
            self.order_distance = max(self.order_distance, record.order_distance)

    def _count(self, samples: int, tokens: int, buckets: dict[str, int]) -> None:
        self.samples += samples
        self.tokens += tokens
        self.batches += sum(buckets.values())
        for bucket, count in buckets.items():
            self.batches_per_bucket[bucket] = self.batches_per_bucket.get(bucket, 0) + count
