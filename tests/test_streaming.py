"""Samples that come as they come: what is ready is ordered and handed on, whatever has not come yet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flowdflash_stratified import StratifiedInterleaver
from runtime_fakes import FakeSource, Pipeline

from flowdflash.items import SampleTable, StepRecord
from flowdflash.runtime.planner import PlanNames, Planner
from flowdflash.stage import Source
from flowdflash.stages.length import LengthBucketer
from flowdflash.testing import BRIEF_BUDGET, BRIEF_EDGES, brief_samples, make_samples

SIZES = [BRIEF_BUDGET // edge for edge in BRIEF_EDGES]
MOST_BUFFERED = sum(size - 1 for size in SIZES)


class Stream(Source):
    """Gives its samples in blocks; ``taken`` counts them."""

    type = "stream"
    streaming = True

    def __init__(self, samples: SampleTable, block: int) -> None:
        super().__init__(None)
        self.samples, self.block, self.taken = samples, block, 0

    def epochs(self) -> Iterator[SampleTable]:
        for start in range(0, len(self.samples), self.block):
            rows = np.arange(start, min(start + self.block, len(self.samples)))
            self.taken += len(rows)
            yield replace(self.samples.take(rows), last=self.taken == len(self.samples))


def planner(stream: Stream) -> Planner:
    bucketer = LengthBucketer(LengthBucketer.Config(token_budget=BRIEF_BUDGET, edges=BRIEF_EDGES))
    order = StratifiedInterleaver(StratifiedInterleaver.Config())
    return Planner(stream, bucketer, order, PlanNames("corpus", "buckets", "order"), seed=0, window=8)


def shuffled(seed: int, scale: int = 200) -> SampleTable:
    samples = brief_samples(scale)
    return samples.take(np.random.default_rng(seed).permutation(len(samples)))


def test_a_batch_goes_out_as_soon_as_its_bucket_is_full_and_no_bucket_grows() -> None:
    first = []
    for seed in range(15):
        stream = Stream(shuffled(seed), 1)
        next(block for block in planner(stream).blocks() if len(block.batches))
        first.append(stream.taken)
    assert np.median(first) <= 60
    stream, planned, most = Stream(shuffled(0), 1), 0, 0
    for block in planner(stream).blocks():
        planned += len(block.batches.members)
        most = max(most, stream.taken - planned)
        if not block.last:
            assert all(size == SIZES[k] for size, k in zip(block.batches.sizes, block.batches.bucket, strict=True))
    assert planned == len(stream.samples) and most <= MOST_BUFFERED == 166


@pytest.mark.parametrize("block", [1, 64, 500])
def test_no_more_is_held_than_what_fills_no_batch_one_block_and_one_batch(block: int) -> None:
    stream = Stream(shuffled(1), block)
    given = 0
    for info in planner(stream).batches():
        # All that has been taken and not been given, this batch included.
        assert stream.taken - given <= MOST_BUFFERED + block + 2 * max(SIZES)
        given += info.samples
    assert given == len(stream.samples)


def test_a_stream_of_one_bucket_waits_for_no_other() -> None:
    lengths = np.random.default_rng(0).integers(3297, 8193, 120)
    stream = Stream(make_samples(lengths), 1)
    for number, info in enumerate(islice(planner(stream).batches(), 19)):
        assert (info.bucket, info.samples) == (5, 6)
        # One batch is held back, to know which is the last of the epoch.
        assert stream.taken == 6 * (number + 2)


class Gated(FakeSource):
    """Gives block after block, each when the target has got all of the blocks before but the batch held back."""

    streaming = True

    def epochs(self) -> Iterator[SampleTable]:
        for number in range(self.config.blocks):
            assert self.config.gate.wait_for(4 * number - 1), "the samples at hand were not trained on"
            lengths = np.full(8, 3)
            yield SampleTable(
                0, np.arange(8 * number, 8 * number + 8), lengths, lengths, number == self.config.blocks - 1
            )


class Gate:
    """Counts batches; lets others wait for a count."""

    def __init__(self) -> None:
        self.passed, self.changed = 0, threading.Condition()

    def wait_for(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.passed >= count, 40)

    def count(self, *_: Any) -> None:
        with self.changed:
            self.passed += 1
            self.changed.notify_all()


@pytest.mark.timeout(60)
def test_a_run_trains_on_what_is_there_while_its_source_has_no_more_yet(tmp_path: Path) -> None:
    gate = Gate()
    options = {
        "source": {"lengths": [3] * 40, "blocks": 5, "gate": gate},
        "target": {"before": gate.count},
        "drafter": {"accumulate": 2},
    }
    pipeline = Pipeline(classes={"source": Gated}, options=options)
    pipeline.run(tmp_path)
    records = pipeline.written("metrics", StepRecord)
    assert sum(record.batches for record in records) == 20
    assert {record.window_kl for record in records} == {None}
