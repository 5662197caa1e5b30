"""Plans: pure, checked, whole."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import TRAINING, Pipeline

from flowdflash.errors import PipelineInvalid, PluginBroken, StageFailed
from flowdflash.graph import Graph, Node
from flowdflash.items import BatchTable, SampleTable
from flowdflash.runtime.plan import PlanStages
from flowdflash.runtime.planner import PlanNames, Planner, plan_epochs, summarise
from flowdflash.stage import Bucketer, Interleaver, Source


class Blocks(Source):
    """Gives the tables of its config."""

    type = "blocks"

    def epochs(self) -> Iterator[SampleTable]:
        yield from self.config

    def summary(self) -> dict[str, Any]:
        return {"rejected": 5}


class Pairs(Bucketer):
    """Batches of two; an odd one is left over. Bucket = length // 10."""

    type = "pairs"
    leftover_reason = "odd one out"

    def batches(self, samples: SampleTable, rng: np.random.Generator) -> tuple[BatchTable, SampleTable | None]:
        rows, whole = np.arange(len(samples)), len(samples) // 2 * 2
        groups = [rows[i : i + 2] for i in range(0, whole, 2)]
        table = BatchTable.build(samples, groups, [int(samples.lengths[g[0]]) // 10 for g in groups])
        return table, samples.take(rows[whole:]) if whole < len(rows) else None


class Shuffled(Interleaver):
    type = "shuffled"

    def order(self, batches: BatchTable, history: Any, rng: np.random.Generator) -> Any:
        return rng.permutation(len(batches))


def table(ids: Sequence[int], *, epoch: int = 0, last: bool = True, length: int = 3) -> SampleTable:
    lengths = np.full(len(ids), length)
    return SampleTable(epoch, np.asarray(ids, np.int64), lengths, lengths, last)


def planner(
    tables: Sequence[SampleTable], bucketer: Bucketer, order: Interleaver | None = None, **options: Any
) -> Planner:
    names = PlanNames("corpus", "buckets", "order" if order else "")
    return Planner(Blocks(tables), bucketer, order, names, **{"seed": 7, **options})


def with_order(give: Callable[[BatchTable], Any]) -> Interleaver:
    class Given(Interleaver):
        type = "given"

        def order(self, batches: BatchTable, history: Any, rng: np.random.Generator) -> Any:
            return give(batches)

    return Given(None)


def with_batches(give: Callable[[SampleTable], Any]) -> Bucketer:
    class Given(Bucketer):
        type = "given"

        def batches(self, samples: SampleTable, rng: np.random.Generator) -> Any:
            return give(samples)

    return Given(None)


def test_batches_are_numbered_over_epochs_and_the_last_of_each_is_marked() -> None:
    plan = planner([table(range(5)), table(range(5), epoch=1)], Pairs(None))
    infos = list(plan.batches())
    assert [(i.seq, i.epoch, i.index, i.last_of_epoch) for i in infos] == [
        (0, 0, 0, False),
        (1, 0, 1, True),
        (2, 1, 0, False),
        (3, 1, 1, True),
    ]
    assert plan.dropped == {"odd one out": 2} and plan.finished
    assert (plan.samples_taken, plan.samples_planned, plan.batches_planned) == (10, 8, 4)


def test_what_is_left_over_from_a_block_joins_the_next() -> None:
    tables = [table([0, 1, 2], last=False), table([3, 4], last=False), table([5, 6])]
    plan = planner(tables, Pairs(None))
    assert [i.sample_ids for i in plan.batches()] == [(0, 1), (2, 3), (4, 5)]
    assert plan.dropped == {"odd one out": 1}


def test_a_last_block_without_a_batch_still_ends_the_epoch() -> None:
    plan = planner([table([0, 1], last=False), table([2]), table([0, 1], epoch=1)], Pairs(None))
    assert [(i.sample_ids, i.last_of_epoch) for i in plan.batches()] == [((0, 1), True), ((0, 1), True)]
    empty = planner([table([0, 1], last=False), table([])], Pairs(None))
    assert [i.last_of_epoch for i in empty.batches()] == [True]


def test_a_source_that_ends_within_an_epoch_ends_that_epoch() -> None:
    plan = planner([table([0, 1, 2], last=False)], Pairs(None))
    assert [i.last_of_epoch for i in plan.batches()] == [True]
    assert plan.dropped == {"odd one out": 1}


def test_a_stream_is_passed_on_one_batch_behind() -> None:
    reached = []

    def stream() -> Iterator[SampleTable]:
        for i in range(100):
            reached.append(i)
            yield table([2 * i, 2 * i + 1], last=i == 99)

    batches = planner(stream(), Pairs(None)).batches()  # type: ignore[arg-type]
    assert next(batches).sample_ids == (0, 1) and reached == [0, 1]


def test_history_tells_the_buckets_already_ordered_in_the_epoch() -> None:
    seen: list[list[int]] = []

    class Curious(Interleaver):
        type = "curious"

        def order(self, batches: BatchTable, history: Any, rng: np.random.Generator) -> Any:
            seen.append([history.window, *history.buckets.tolist()])
            return range(len(batches))[::-1]

    tables = [
        SampleTable(0, np.arange(4), np.array([10, 10, 20, 20]), np.ones(4, int), False),
        table([4, 5], length=30),
        table([0, 1], epoch=1),
    ]
    list(planner(tables, Pairs(None), Curious(None), window=4).batches())
    assert seen == [[4], [4, 2, 1], [4]]


@settings(max_examples=40, deadline=None)
@given(
    blocks=st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=5),
    epochs=st.integers(1, 3),
    window=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_the_plan_made_beforehand_is_what_runs(blocks: list[list[int]], epochs: int, window: int, seed: int) -> None:
    def tables() -> list[SampleTable]:
        made = []
        for epoch in range(epochs):
            ids = itertools.count()
            for number, sizes in enumerate(blocks):
                lengths = np.asarray(sizes, np.int64) * 10
                made.append(
                    SampleTable(
                        epoch,
                        np.array([next(ids) for _ in sizes], np.int64),
                        lengths,
                        lengths,
                        number == len(blocks) - 1,
                    )
                )
        return made

    def make() -> Planner:
        return planner(tables(), Pairs(None), Shuffled(None), seed=seed, window=window)

    samples = sum(map(len, blocks))
    if samples < 2:
        with pytest.raises(StageFailed, match="nothing to train on"):
            plan_epochs(make())
        return
    plan, running = plan_epochs(make()), make()
    infos = list(running.batches())
    assert [i.bucket for i in infos] == [b for e in plan.epochs for b in e.buckets.tolist()]
    assert [i.tokens for i in infos] == [t for e in plan.epochs for t in e.tokens.tolist()]
    assert [i.sample_ids for i in infos] == [i.sample_ids for i in make().batches()]
    summary = summarise(plan)
    per_epoch = [sum(i.epoch == e for i in infos) for e in range(epochs)]
    assert summary.batches == len(infos) and summary.steps == sum(-(-n // window) for n in per_epoch)
    for epoch in range(epochs):
        used = [s for i in infos if i.epoch == epoch for s in i.sample_ids]
        assert len(set(used)) == len(used) == samples // 2 * 2
        ends = [i.last_of_epoch for i in infos if i.epoch == epoch]
        assert ends == [False] * (len(ends) - 1) + [True]
    assert running.dropped == plan.dropped == ({"odd one out": epochs} if samples % 2 else {})


def test_seed_epoch_and_stage_name_change_the_order_and_nothing_else_does() -> None:
    def order(seed: int, name: str = "order") -> list[tuple[int, ...]]:
        names = PlanNames("corpus", "buckets", name)
        tables = [table(range(40)), table(range(40), epoch=1)]
        plan = Planner(Blocks(tables), Pairs(None), Shuffled(None), names, seed=seed)
        return [i.sample_ids for i in plan.batches()]

    assert order(1) == order(1)
    assert order(1) != order(2) and order(1) != order(1, "other")
    assert order(1)[:20] != order(1)[20:]


@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda b: [0, 1, 1], "index 1 more than once"),
        (lambda b: [0, 1], "left out 1 of 3 batches, index 2 first"),
        (lambda b: [0, 1, 3], "gave index 3 of 3 batches"),
        (lambda b: [-1, 0, 1], "gave index -1"),
        (lambda b: itertools.cycle([0]), "index 0 more than once"),
        (lambda b: [0.0, 1.0, 2.0], "must give integers"),
        (lambda b: None, "not iterable"),
    ],
)
def test_an_interleaver_that_breaks_its_contract_is_named(give: Any, text: str) -> None:
    with pytest.raises(StageFailed, match=text) as caught:
        list(planner([table(range(6))], Pairs(None), with_order(give)).batches())
    assert caught.value.stage == "order"
    if text != "not iterable":
        assert isinstance(caught.value.cause, PluginBroken) and caught.value.cause.plugin == "given"


def edited(samples: SampleTable, **columns: Any) -> Any:
    return replace(batches_of(samples, [[0, 1, 2, 3]])[0], **columns), None


def batches_of(samples: SampleTable, groups: list[list[int]], leftover: list[int] | None = None) -> Any:
    made = BatchTable.build(samples, [np.array(g) for g in groups], [0] * len(groups))
    return made, None if leftover is None else samples.take(np.array(leftover))


@pytest.mark.parametrize(
    ("give", "text"),
    [
        (lambda s: batches_of(s, [[0, 1]]), r"sample 12 is in no batch and not in the leftover \(2 such samples\)"),
        (lambda s: batches_of(s, [[0, 1], [1, 2, 3]]), "sample 11 is used more than once"),
        (lambda s: batches_of(s, [[0, 1, 2]], [2, 3]), "sample 12 is used more than once"),
        (lambda s: (batches_of(s, [[0, 1, 2, 3]])[0], table([99])), "sample 99 is not among the samples given"),
        (lambda s: BatchTable.build(s, [np.arange(4)], [0]), "unpack|must return"),
        (lambda s: (None, None), "must return"),
        (lambda s: edited(s, cost=np.array([np.nan])), "a cost that is below 0 or no number"),
        (lambda s: edited(s, bucket=np.array([-2])), "bucket -2; a bucket is 0 or more"),
        (lambda s: edited(s, bucket=np.array([0.5])), "a column 'bucket' that is no row of integers"),
        (lambda s: edited(s, tokens=np.array([1, 2])), "2 values of 'tokens' for 1 batches"),
        (lambda s: edited(s, offsets=np.array([0, 3])), "offsets that do not lead through its members"),
        (lambda s: batches_of(replace(s, lengths=s.lengths + 1), [[0, 1, 2, 3]]), "sample 10 has another length"),
        (
            lambda s: (batches_of(s, [[0, 1]])[0], replace(s, lengths=s.lengths + 1).take(np.arange(2, 4))),
            "sample 12 has",
        ),
    ],
)
def test_a_bucketer_that_breaks_its_contract_is_named(give: Any, text: str) -> None:
    with pytest.raises(StageFailed, match=text) as caught:
        list(planner([table([10, 11, 12, 13])], with_batches(give)).batches())
    assert caught.value.stage == "buckets"


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        ([table([1, 2, 1])], "sample 1 is twice in epoch 0"),
        ([table([1, 2], last=False), table([1, 2], epoch=1)], "epoch 1 began although"),
        ([table([1, 2], length=0)], "sample 1 has no tokens"),
        (
            [replace(table([1]), supervised=np.array([-1]))],
            "sample 1 has no tokens, or supervised tokens that are fewer",
        ),
        ([replace(table([1]), lengths=np.array([1.5]))], "must be integers, got float64"),
        (["x"], "yielded a str"),
    ],
)
def test_a_source_that_breaks_its_contract_is_named(tables: Any, text: str) -> None:
    with pytest.raises(StageFailed, match=text) as caught:
        list(planner(tables, Pairs(None)).batches())
    assert caught.value.stage == "corpus"


def test_no_batch_at_all_says_why() -> None:
    with pytest.raises(StageFailed, match=r"1 samples made no batch; 1 dropped: odd one out \(corpus: rejected 5\)"):
        plan_epochs(planner([table([0])], Pairs(None)))
    with pytest.raises(StageFailed, match=r"the source gave no sample \(corpus: rejected 5\)"):
        list(planner([], Pairs(None)).batches())


def test_rows_per_bucket_add_up() -> None:
    lengths = np.array([10, 12, 20, 20, 20, 20])
    plan = plan_epochs(planner([SampleTable(0, np.arange(6), lengths, lengths)], Pairs(None)))
    one, two = plan.bucket_rows()
    assert (one.bucket, one.samples, one.batches, one.tokens, one.padded_tokens) == (1, 2, 1, 22, 24)
    assert (one.mean_length, one.max_length) == (11.0, 12)
    assert (two.samples, two.batches, two.sample_share, two.batch_share) == (4, 2, 4 / 6, 2 / 3)


def test_windows_end_with_their_epoch() -> None:
    plan = plan_epochs(planner([table(range(14)), table(range(14), epoch=1)], Pairs(None), window=4))
    summary = summarise(plan)
    assert (summary.epochs, summary.batches, summary.steps) == (2, 14, 4)
    assert (summary.samples_per_epoch, summary.tokens_per_epoch) == (14, 42)
    assert summarise(plan, 8).steps == 2


def test_a_run_has_one_source() -> None:
    graph = Pipeline(wires=TRAINING).graph
    source = graph.nodes["source"]
    second = Node("second", source.kind, source.type, source.cls, source.config)
    with pytest.raises(PipelineInvalid, match="exactly one source, this pipeline has 2"):
        PlanStages.build(Graph({**graph.nodes, "second": second}, graph.edges))


def test_planning_never_imports_torch() -> None:
    code = "import sys, flowdflash.runtime.plan; assert 'torch' not in sys.modules and 'click' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
