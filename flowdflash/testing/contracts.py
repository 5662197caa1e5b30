"""Checks that a stage keeps the contract of its kind: they raise ``AssertionError`` with what is broken."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flowdflash.items import BatchInfo, BatchTable, Checkpoint, SampleTable, StepRecord, read_only
from flowdflash.plugin.registry import Registry
from flowdflash.stage import Bucketer, Check, Dispatcher, History, Interleaver, ReplicaLoad, Sink, Stage
from flowdflash.testing.made import make_batches, make_checkpoint, make_records, make_samples, open_context

S = TypeVar("S", bound=Stage)
R = TypeVar("R")


def assert_interleaver_contract(cls: type[Interleaver], /, **config: Any) -> None:
    """Each index exactly once over many tables, the same for the same seed, inputs and global state left alone."""
    for batches, history in _tables():
        stage = _built(cls, config)
        given = f"{len(batches)} batches, window {history.window}"
        order = _pure(partial(_ordered, stage, batches, history), list, given)
        wrong = [i for i in order if isinstance(i, bool) or not isinstance(i, (int, np.integer))]
        assert not wrong, f"{given}: order gave {wrong[0]!r}, which is not an index"
        assert sorted(map(int, order)) == list(range(len(batches))), (
            f"{given}: each index must come exactly once; missing {sorted(set(range(len(batches))) - set(order))[:5]}, "
            f"{len(order)} were given"
        )


def assert_bucketer_contract(cls: type[Bucketer], samples: SampleTable | None = None, /, **config: Any) -> None:
    """Each sample in exactly one batch or in the leftover, also over blocks; the same for the same seed; pure.

    ``samples`` replaces the lengths 1..512 that are tried by default, where the options do not allow for these.
    """
    given = make_samples(np.random.default_rng(0).integers(1, 513, 300)) if samples is None else samples
    for rows in (np.arange(0), np.arange(min(1, len(given))), np.arange(len(given))):
        table = read_only(given.take(rows.astype(np.int64)))
        stage = _built(cls, config)
        _pure(partial(_split, stage, table), _plain, f"{len(table)} samples")
        _covers(stage, [table])
    half = len(given) // 2
    first, second = given.take(np.arange(half)), given.take(np.arange(half, len(given)))
    blocks = [SampleTable(t.epoch, t.ids, t.lengths, t.supervised, t is second) for t in (first, second)]
    _covers(_built(cls, config), blocks)


def assert_dispatcher_contract(cls: type[Dispatcher], /, **config: Any) -> None:
    """Names a replica that exists, never waits while all are idle, and decides alike for like loads."""
    for replicas in (1, 2, 5):
        picks = [_dispatched(_built(cls, config), replicas) for _ in range(2)]
        assert picks[0] == picks[1], f"{replicas} replicas: route is not a function of what it has seen"


def assert_sink_contract(cls: type[Sink], items: Sequence[Any] | None = None, /, **config: Any) -> None:
    """Takes its items, closes without error, sums up in plain values, and writes under its own name only.

    ``items`` replaces what is made for the payloads that the sink reads: step records and checkpoints.
    """
    given = list(items) if items is not None else [item for payload in cls.reads for item in _items(payload)]
    assert given, f"pass items: there is no ready-made {cls.reads}"
    with tempfile.TemporaryDirectory() as folder:
        for written in (given, []):
            run_dir = Path(folder) / f"run{len(written)}"
            run_dir.mkdir()
            stage = _built(cls, config)
            try:
                stage.open(open_context(run_dir, "sink"))
                for item in written:
                    pieces = stage.write(item)
                    more = list(pieces if isinstance(pieces, Iterator) else ())
                    assert not (more and stage.saves), "a sink that saves checkpoints writes each in one piece"
            finally:
                stage.close()
            summary = stage.summary()
            assert json.loads(json.dumps(dict(summary))) is not None, "summary must hold plain values"
            strays = [p.name for p in run_dir.iterdir() if not p.name.startswith(("sink", "cache"))]
            assert not strays, f"a stage writes under names that start with its own; this one wrote {strays}"


def _built(cls: type[S], options: Mapping[str, Any]) -> S:
    """A stage built as the runtime builds it: a sound class, a validated config, a clean check, across a process."""
    Registry().register(cls)
    config = cls.Config(**options)
    try:
        copied = pickle.loads(pickle.dumps(config))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise AssertionError(
            f"a config must survive pickling; define the class at the top of a module: {error}"
        ) from error
    assert copied == config, "a config must survive pickling unchanged"
    stage = cls(config)
    check = Check("stage")
    facts = stage.check(check)
    errors = [str(p) for p in check.problems if p.severity == "error"]
    assert not errors, f"check refuses these options: {errors}"
    assert isinstance(facts, Mapping), f"check must return a mapping of facts, it returned {facts!r}"
    return stage


def _pure(call: Callable[[np.random.Generator], R], plain: Callable[[R], Any], given: str) -> R:
    """The result of ``call(rng)``; twice for one seed gives the same, and numpy's global generator is left alone."""
    before = pickle.dumps(np.random.get_state())
    results = [call(np.random.default_rng(7)) for _ in range(2)]
    assert pickle.dumps(np.random.get_state()) == before, f"{given}: use the generator given, not numpy's global one"
    assert plain(results[0]) == plain(results[1]), f"{given}: the same seed must give the same result"
    return results[0]


def _tables() -> Iterator[tuple[BatchTable, History]]:
    rng = np.random.default_rng(3)
    many = np.repeat(np.arange(6), (4, 7, 10, 13, 15, 52))
    for buckets in ([], [0], [-1] * 5, [0] * 9, [4, 4, 2], many, rng.integers(0, 40, 120)):
        label = np.array(buckets, dtype=np.int64)
        batches = read_only(make_batches(label, rng.integers(1, 2000, len(label))))
        for window in (1, 8):
            yield batches, History(window)
        yield batches, History(8, rng.integers(0, 6, 50))


def _ordered(stage: Interleaver, batches: BatchTable, history: History, rng: np.random.Generator) -> list[int]:
    return list(stage.order(batches, history, rng))


def _split(stage: Bucketer, table: SampleTable, rng: np.random.Generator) -> tuple[BatchTable, SampleTable | None]:
    batches, leftover = stage.batches(table, rng)
    assert isinstance(batches, BatchTable), f"batches must return a BatchTable first, it returned {batches!r}"
    return batches, leftover


def _plain(result: tuple[BatchTable, SampleTable | None]) -> Any:
    batches, left = result
    columns = (batches.members, batches.offsets, batches.bucket, batches.cost)
    return [c.tolist() for c in columns], None if left is None else left.ids.tolist()


def _covers(stage: Bucketer, blocks: Sequence[SampleTable]) -> None:
    seen: list[int] = []
    held: SampleTable | None = None
    for block in blocks:
        table = block if held is None else held.joined(block)
        batches, held = _split(stage, table, np.random.default_rng(1))
        seen += batches.samples.ids[batches.members].tolist()
        assert (batches.bucket >= -1).all(), "a bucket id is 0 or more, or -1 for none"
    seen += [] if held is None else held.ids.tolist()
    wanted = sorted(i for block in blocks for i in block.ids.tolist())
    assert sorted(seen) == wanted, (
        f"each sample must be in one batch or in the leftover; lost {sorted(set(wanted) - set(seen))[:5]}, "
        f"{len(seen)} places for {len(wanted)} samples"
    )


def _dispatched(stage: Dispatcher, replicas: int, batches: int = 60, capacity: int = 2) -> list[int]:
    outstanding: list[list[BatchInfo]] = [[] for _ in range(replicas)]
    counts, picks = [0] * replicas, []
    for seq in range(batches):
        batch = BatchInfo(seq, 0, seq, seq % 3, (seq,), (100,), (100,), 100, 100, float(100 * (1 + seq % 3)))
        for round_ in range(replicas * capacity + 1):
            loads = [
                ReplicaLoad(r, len(work), sum(b.cost for b in work), capacity, counts[r])
                for r, work in enumerate(outstanding)
            ]
            pick = stage.route(loads, batch)
            assert pick is None or (isinstance(pick, int) and 0 <= pick < replicas), (
                f"route gave {pick!r}; it must be a replica from 0 to {replicas - 1}, or None to be asked again"
            )
            if pick is not None and not loads[pick].full:
                break
            assert any(outstanding), f"{replicas} replicas: all are idle, and route still lets the batch wait"
            busiest = max(range(replicas), key=lambda r: len(outstanding[r]))
            outstanding[(pick if pick is not None else busiest)].pop(0)
            assert round_ < replicas * capacity, "route lets a batch wait for ever"
        outstanding[pick].append(batch)  # type: ignore[index]
        counts[pick] += 1  # type: ignore[index]
        picks.append(int(pick))  # type: ignore[arg-type]
        if seq % 4 == 3:  # now and then somebody finishes
            outstanding[seq % replicas][:1] = []
    return picks


def _items(payload: type) -> list[Any]:
    if payload is StepRecord:
        return list(make_records(3))
    return [make_checkpoint()] if payload is Checkpoint else []
