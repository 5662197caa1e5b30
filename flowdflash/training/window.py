"""Sums over one accumulation window, and the record made of them. Sums and counts, never means of means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from flowdflash.items import BatchInfo, StepRecord


class Window:
    """The micro-batches of one optimizer step."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.infos: list[BatchInfo] = []
        self.sums: list[Any] = []
        self.secs = 0.0

    def add(self, info: BatchInfo, sums: Any) -> None:
        """Take in one micro-batch; ``sums`` are detached loss sums."""
        self.infos.append(info)
        self.sums.append(sums)

    def _total(self, name: str, bucket: int | None = None) -> float:
        chosen = (s for i, s in zip(self.infos, self.sums, strict=True) if bucket is None or i.bucket == bucket)
        return sum(float(getattr(s, name)) for s in chosen)

    @property
    def den(self) -> float:
        """Summed weights of the window."""
        return self._total("den")

    @property
    def terms(self) -> int:
        """Supervised slots of the window."""
        return int(self._total("terms"))

    @property
    def loss(self) -> float:
        """Weighted mean over all slots of the window; 0 where there are none."""
        return self._total("num") / self.den if self.den else 0.0

    def _per_slot(self) -> tuple[list[int], list[int]]:
        right = [0] * (self.block_size - 1)
        count = [0] * (self.block_size - 1)
        for sums in self.sums:
            for k, (r, n) in enumerate(zip(sums.correct_per_slot.tolist(), sums.terms_per_slot.tolist(), strict=True)):
                right[k] += int(r)
                count[k] += int(n)
        return right, count

    def record(
        self,
        *,
        step: int,
        lr: float,
        grad_norm: float,
        grad_norm_clipped: float,
        skipped: str,
        pause_secs: float,
        waits_secs: Mapping[str, float],
    ) -> StepRecord:
        """The record of the step that this window led to."""
        infos = self.infos
        right, count = self._per_slot()
        buckets = Counter(info.bucket for info in infos)
        samples, tokens = sum(i.samples for i in infos), sum(i.tokens for i in infos)
        padded = sum(i.padded_tokens for i in infos)
        per_bucket = {}
        for bucket in sorted(buckets):
            den = self._total("den", bucket)
            if den:
                per_bucket[str(bucket)] = self._total("num", bucket) / den
        return StepRecord(
            step=step,
            epoch=infos[-1].epoch,
            loss=self.loss if self.terms else float("nan"),
            loss_per_bucket=per_bucket,
            grad_norm=grad_norm,
            grad_norm_clipped=grad_norm_clipped,
            lr=lr,
            batches=len(infos),
            samples=samples,
            tokens=tokens,
            padded_tokens=padded,
            terms=self.terms,
            anchors=int(self._total("anchors")),
            buckets={str(bucket): buckets[bucket] for bucket in sorted(buckets)},
            length_mean=tokens / samples,
            length_max=max(max(i.lengths) for i in infos),
            padding=1.0 - tokens / padded,
            accuracy=sum(right) / max(sum(count), 1),
            accuracy_per_slot=tuple(r / n if n else 0.0 for r, n in zip(right, count, strict=True)),
            step_secs=self.secs,
            checkpoint_pause_secs=pause_secs,
            waits_secs=waits_secs,
            seqs=tuple(i.seq for i in infos),
            skipped=skipped,
        )
