"""Sums over one accumulation window, and the record made of them. Sums and counts, never means of means."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowdflash.items import BatchInfo, StepRecord

if TYPE_CHECKING:
    from torch import Tensor

    from flowdflash.dflash.loss import LossSums


class Window:
    """The micro-batches of an optimizer step that is not taken yet.

    Attributes:
        infos: their headers.
        secs: time spent on them.
        without_anchor: samples of theirs that had no anchor.
    """

    def __init__(self) -> None:
        self.infos: list[BatchInfo] = []
        self.secs = 0.0
        self.without_anchor = 0
        self._rows: list[Tensor] = []

    def __len__(self) -> int:
        return len(self.infos)

    def add(self, info: BatchInfo, sums: LossSums) -> None:
        """Take in one micro-batch; its sums stay on their device, without their graph."""
        self.infos.append(info)
        self._rows.append(sums.row())

    def totals(self) -> WindowSums:
        """All sums on the host, fetched in one go: on a GPU every fetch waits for all that was started before."""
        import torch

        batches = [BatchSums.of(row) for row in torch.stack(self._rows).tolist()]
        return WindowSums(tuple(self.infos), tuple(batches))


@dataclass(frozen=True, slots=True)
class BatchSums:
    """Sums of one micro-batch; ``right`` and ``slots`` count per slot 1..B-1. See ``LossSums``."""

    num: float
    den: float
    terms: int
    anchors: int
    right: tuple[int, ...]
    slots: tuple[int, ...]

    @classmethod
    def of(cls, row: Sequence[float]) -> BatchSums:
        """From the numbers of ``LossSums.row``."""
        num, den, terms, anchors, *counts = row
        half = len(counts) // 2
        right, slots = (tuple(map(int, part)) for part in (counts[:half], counts[half:]))
        return cls(num, den, int(terms), int(anchors), right, slots)


@dataclass(frozen=True, slots=True)
class WindowSums:
    """Sums of the micro-batches of one optimizer step, and their headers in the same order."""

    infos: tuple[BatchInfo, ...]
    batches: tuple[BatchSums, ...]

    @property
    def den(self) -> float:
        """Summed weights."""
        return sum(b.den for b in self.batches)

    @property
    def terms(self) -> int:
        """Supervised slots."""
        return sum(b.terms for b in self.batches)

    @property
    def loss(self) -> float:
        """Weighted mean over all slots; 0 where there are none."""
        return sum(b.num for b in self.batches) / self.den if self.den else 0.0

    def loss_per_bucket(self) -> dict[str, float]:
        """Weighted mean over the slots of each bucket that has any."""
        found = {}
        for bucket in sorted({info.bucket for info in self.infos}):
            inside = [b for info, b in zip(self.infos, self.batches, strict=True) if info.bucket == bucket]
            den = sum(b.den for b in inside)
            if den:
                found[str(bucket)] = sum(b.num for b in inside) / den
        return found

    def record(
        self,
        *,
        step: int,
        lr: float,
        grad_norm: float,
        grad_norm_clipped: float,
        skipped: str,
        step_secs: float,
        pause_secs: float,
        waits_secs: Mapping[str, float],
    ) -> StepRecord:
        """The record of the step that this window led to."""
        infos = self.infos
        right = [sum(column) for column in zip(*(b.right for b in self.batches), strict=True)]
        slots = [sum(column) for column in zip(*(b.slots for b in self.batches), strict=True)]
        buckets = Counter(info.bucket for info in infos)
        samples, tokens = sum(i.samples for i in infos), sum(i.tokens for i in infos)
        padded = sum(i.padded_tokens for i in infos)
        return StepRecord(
            step=step,
            epoch=infos[-1].epoch,
            loss=self.loss if self.terms else float("nan"),
            loss_per_bucket=self.loss_per_bucket(),
            grad_norm=grad_norm,
            grad_norm_clipped=grad_norm_clipped,
            lr=lr,
            batches=len(infos),
            samples=samples,
            tokens=tokens,
            padded_tokens=padded,
            terms=self.terms,
            anchors=sum(b.anchors for b in self.batches),
            buckets={str(bucket): buckets[bucket] for bucket in sorted(buckets)},
            length_mean=tokens / samples,
            length_max=max(max(i.lengths) for i in infos),
            padding=1.0 - tokens / padded,
            accuracy=sum(right) / max(sum(slots), 1),
            accuracy_per_slot=tuple(r / n if n else 0.0 for r, n in zip(right, slots, strict=True)),
            step_secs=step_secs,
            checkpoint_pause_secs=pause_secs,
            waits_secs=waits_secs,
            seqs=tuple(i.seq for i in infos),
            skipped=skipped,
        )
