"""The planning plane: from a source's columns to batches in order. No torch, no thread, no token.

A plan is a pure function of seed, epoch, data and configuration. Every contract of a source, bucketer or interleaver is
checked here, and a breach is blamed on the stage that committed it.
"""

from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from flowdflash.errors import DataInvalid, StageFailed
from flowdflash.items import BatchInfo, BatchTable, IntArray, SampleTable, batch_info, read_only
from flowdflash.runtime.contracts import check_coverage, check_order, check_table
from flowdflash.runtime.draft_shape import DraftShape
from flowdflash.runtime.ledger import NOTHING, Ledger
from flowdflash.runtime.plan_tables import BucketRow, EpochPlan, Plan
from flowdflash.stage import Bucketer, History, Interleaver, PlanSummary, Source, Vocabulary

__all__ = [
    "BucketRow",
    "EpochPlan",
    "Plan",
    "PlanBlock",
    "PlanNames",
    "Planner",
    "blamed_on",
    "plan_epochs",
    "summarise",
]


@dataclass(frozen=True, slots=True)
class PlanNames:
    """Names in the pipeline of the stages that make the plan; ``interleaver`` is empty if there is none."""

    source: str
    bucketer: str
    interleaver: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PlanBlock:
    """Batches of one block of an epoch, ordered.

    Attributes:
        batches: the batches, in no particular order.
        order: indices into ``batches``.
        number: number of the block in its epoch.
        dropped: samples left over for good, by reason; only on the last block of an epoch.
        last: no further block follows in this epoch.
    """

    batches: BatchTable
    order: IntArray
    number: int
    dropped: dict[str, int]
    last: bool


class Planner:
    """One run's plan, as blocks of columns or as batch headers.

    Attributes:
        samples_taken: samples that the source gave, so far.
        samples_planned: of these, samples that went into batches.
        dropped: samples that no batch holds, by reason.
        batches_planned: batches given so far.
        shape: of the draft; gives the second term of each batch's cost.
        skip: batches to leave out, because a run that this one continues has consumed them.
        batches_skipped: batches left out so far.
        finished: the plan has been given to its end.
    """

    def __init__(
        self,
        source: Source,
        bucketer: Bucketer,
        interleaver: Interleaver | None,
        names: PlanNames,
        *,
        seed: int,
        window: int = 1,
        skip: Ledger = NOTHING,
        shape: DraftShape | None = None,
    ) -> None:
        self._source, self._bucketer, self._interleaver = source, bucketer, interleaver
        self._names, self._seed, self._window, self.skip, self.shape = names, seed, max(window, 1), skip, shape
        self.samples_taken = self.samples_planned = self.batches_planned = self.batches_skipped = 0
        self.dropped: dict[str, int] = {}
        self.finished = False

    @property
    def window(self) -> int:
        """Micro-batches per optimizer step."""
        return self._window

    def blocks(self) -> Iterator[PlanBlock]:
        """Blocks of batches, epoch after epoch.

        Raises:
            StageFailed: a stage raised or broke its contract, or the whole run has not one batch.
        """
        leftover: SampleTable | None = None
        ordered = np.zeros(0, np.int64)
        number, total = 0, 0
        for samples in self._tables():
            self.samples_taken += len(samples)
            pool = leftover.joined(samples) if leftover is not None else samples
            if self.shape is not None:
                pool = replace(pool, anchor_cost=self.shape.anchor_cost(pool))
            pool = read_only(pool)
            batches, leftover = self._batches(pool, number)
            order = self._order(batches, ordered, number)
            if len(order) and not samples.last:
                ordered = np.concatenate([ordered, batches.bucket[order]])
                ordered.flags.writeable = False
            self.samples_planned += len(batches.members)
            total += len(batches)
            dropped = {}
            if samples.last and leftover is not None and len(leftover):
                dropped = {self._bucketer.leftover_reason: len(leftover)}
                for reason, count in dropped.items():
                    self.dropped[reason] = self.dropped.get(reason, 0) + count
            yield PlanBlock(batches, order, number, dropped, samples.last)
            number += 1
            if samples.last:
                leftover, ordered, number = None, ordered[:0], 0
        if total == 0:
            raise self._nothing()
        self.finished = True

    def batches(self) -> Iterator[BatchInfo]:
        """Headers of the batches in planned order, without those to skip; numbers are the same with and without.

        Holds one back, to know which is the last of its epoch.
        """
        held: tuple[BatchTable, int, int, int] | None = None
        seq = index = 0
        for block in self.blocks():
            for row in block.order.tolist():
                if held is not None:
                    yield from self._header(held, last=False)
                held = (block.batches, row, seq, index)
                seq, index = seq + 1, index + 1
            if block.last:
                if held is not None:
                    yield from self._header(held, last=True)
                held, index = None, 0

    def _header(self, held: tuple[BatchTable, int, int, int], *, last: bool) -> Iterator[BatchInfo]:
        table, row, seq, index = held
        if seq in self.skip:
            self.batches_skipped += 1
            return
        self.batches_planned += 1
        yield batch_info(table, row, seq=seq, index=index, last_of_epoch=last)

    def _tables(self) -> Iterator[SampleTable]:
        """The source's tables, checked. A source that ends within an epoch ends that epoch."""
        name, kind = self._names.source, type(self._source).type
        with blamed_on(name):
            tables = iter(self._source.epochs())
        unfinished: SampleTable | None = None
        while True:
            with blamed_on(name):
                table = next(tables, None)
                if table is not None:
                    check_table(table, unfinished, kind, name)
            if table is None:
                break
            yield table
            unfinished = None if table.last else table
        if unfinished is not None:
            yield replace(unfinished.take(np.zeros(0, np.int64)), last=True)

    def _batches(self, pool: SampleTable, number: int) -> tuple[BatchTable, SampleTable | None]:
        name = self._names.bucketer
        if not len(pool):
            return BatchTable.build(pool, [], []), None
        with blamed_on(name):
            batches, leftover = self._bucketer.batches(pool, self._rng(pool.epoch, number, name))
            check_coverage(pool, batches, leftover, type(self._bucketer).type, name)
        return read_only(batches), leftover

    def _order(self, batches: BatchTable, ordered: IntArray, number: int) -> IntArray:
        if self._interleaver is None:
            return np.arange(len(batches), dtype=np.int64)
        name = self._names.interleaver
        with blamed_on(name):
            history = History(self._window, ordered)
            indices = self._interleaver.order(batches, history, self._rng(batches.samples.epoch, number, name))
            # One more than allowed is enough to catch a generator that never ends.
            taken = list(itertools.islice(iter(indices), len(batches) + 1))
            return check_order(taken, len(batches), type(self._interleaver).type, name)

    def _rng(self, epoch: int, block: int, stage: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, epoch, block, zlib.crc32(stage.encode())])

    def _nothing(self) -> StageFailed:
        why = "; ".join(f"{count} dropped: {reason}" for reason, count in self.dropped.items())
        summary = ", ".join(f"{key} {value}" for key, value in self._source.summary().items())
        said = f" ({self._names.source}: {summary})" if summary else ""
        if self.samples_taken == 0:
            return StageFailed(self._names.source, DataInvalid(f"nothing to train on: the source gave no sample{said}"))
        text = f"nothing to train on: {self.samples_taken} samples made no batch; {why}{said}"
        return StageFailed(self._names.bucketer, DataInvalid(text))


@contextmanager
def blamed_on(stage: str) -> Iterator[None]:
    """Whatever is raised within is a failure of ``stage``."""
    try:
        yield
    except StageFailed:
        raise
    except BaseException as error:
        raise StageFailed(stage, error) from error


def plan_epochs(planner: Planner) -> Plan:
    """Plan every epoch, as columns; what ``Planner.batches`` gives later is exactly this.

    Raises:
        StageFailed: a stage raised or broke its contract, or the whole run has not one batch.
    """
    epochs: list[EpochPlan] = []
    blocks: list[PlanBlock] = []
    digest = hashlib.sha256()
    for block in planner.blocks():
        blocks.append(block)
        for column in _identity(block):
            digest.update(column.astype("<i8").tobytes())
        if block.last:
            epochs.append(_epoch(blocks))
            blocks = []
    return Plan(tuple(epochs), planner.window, digest.hexdigest())


def _identity(block: PlanBlock) -> Iterator[IntArray]:
    """Which samples are in which batch, in planned order, and how long they are."""
    table = block.batches
    rows = [table.positions(batch) for batch in block.order.tolist()]
    where = np.concatenate([np.zeros(0, np.int64), *rows])
    samples = table.samples
    yield table.sizes[block.order]
    yield from (samples.ids[where], samples.lengths[where], samples.supervised[where])


def summarise(plan: Plan, window: int = 0, vocabulary: Vocabulary | None = None) -> PlanSummary:
    """The numbers that a drafter is told; ``window`` is its own, where it is not that of the plan."""
    first = plan.epochs[0]
    return PlanSummary(
        epochs=len(plan.epochs),
        batches=plan.batches,
        steps=plan.steps(window),
        samples_per_epoch=int(first.samples.sum()),
        tokens_per_epoch=int(first.tokens.sum()),
        vocabulary=vocabulary,
        bucket_shares={str(row.bucket): row.batch_share for row in plan.bucket_rows()},
    )


def _epoch(blocks: Sequence[PlanBlock]) -> EpochPlan:
    def column(name: str) -> IntArray:
        return np.concatenate([getattr(block.batches, name)[block.order] for block in blocks])

    return EpochPlan(
        column("bucket"),
        column("sizes"),
        column("tokens"),
        column("padded_tokens"),
        column("max_length"),
        {reason: count for block in blocks for reason, count in block.dropped.items()},
    )
