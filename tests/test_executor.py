"""Whole runs over fakes: order, books, failure, stop, backpressure."""

from __future__ import annotations

import json
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from runtime_fakes import (
    GENERATING,
    TRAINING,
    FakeDrafter,
    FakeFeatures,
    FakeInterleaver,
    FakeSink,
    FakeSource,
    FakeTarget,
    Pipeline,
    in_thread,
    threads_left,
)

from flowdflash.errors import PipelineInvalid, PluginBroken, StageFailed
from flowdflash.items import Checkpoint, FeatureBatch, GeneratedBatch, StepRecord
from flowdflash.runtime import order_metrics
from flowdflash.runtime.stop import StopRequest
from flowdflash.stage import OpenContext, Stage
from flowdflash.stages.least_outstanding import LeastOutstanding
from flowdflash.stages.round_robin import RoundRobin

pytestmark = pytest.mark.timeout(20)


@pytest.fixture(autouse=True)
def no_thread_outlives_a_run() -> Any:
    yield
    assert threads_left() == []


def test_a_run_trains_on_every_batch_once_in_planned_order(tmp_path: Path) -> None:
    pipeline = Pipeline()
    outcome = pipeline.run(tmp_path)
    steps = pipeline.journal.of("step")
    assert [seq for _, seq, _ in steps] == list(range(7))
    assert sorted(i for _, _, ids in steps for i in ids) == list(range(14))
    assert (outcome.status, outcome.steps, outcome.batches, outcome.samples, outcome.tokens) == (
        "finished",
        7,
        7,
        14,
        42,
    )
    assert outcome.batches_per_bucket == {"0": 3, "1": 2, "2": 2}
    assert outcome.last_record is not None and outcome.last_record.step == 7
    assert list(outcome.summaries) == STAGES and outcome.summaries["drafter"] == {"name": "drafter"}
    assert 0 < outcome.run_secs <= outcome.wall_secs
    assert {s.stage: (s.taken, s.passed) for s in outcome.stages} == {
        "order": (7, 7),
        "dispatch": (7, 7),
        "target": (7, 7),
        "drafter": (7, 7),
        "metrics": (7, 7),
        "save": (1, 1),
    }
    assert outcome.bottleneck in {s.stage for s in outcome.stages}
    written = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert written["status"] == "finished" and written["steps"] == 7


def test_stages_open_in_topological_order_and_close_once_on_their_own_thread(tmp_path: Path) -> None:
    pipeline = Pipeline(options={"target": {"replicas": 2}})
    pipeline.run(tmp_path)
    opened = pipeline.journal.of("open")
    names = ["source", "buckets", "order", "dispatch", "target", "target", "drafter", "metrics", "save"]
    assert [name for name, _, _ in opened] == names
    assert [replica for name, replica, _ in opened if name == "target"] == [0, 1]
    closed = pipeline.journal.of("close")
    assert [name for name, _ in closed] == names[::-1]
    assert sorted((name, thread) for name, _, thread in opened) == sorted(closed)


def test_every_header_carries_a_stamp_of_each_stage_in_order(tmp_path: Path) -> None:
    pipeline = Pipeline(wires=(*TRAINING, ("target", "", "features", FeatureBatch)))
    pipeline.run(tmp_path)
    for batch in pipeline.written("features", FeatureBatch):
        assert list(batch.info.stamps) == ["order", "dispatch", "target"]
        assert sorted(batch.info.stamps.values()) == list(batch.info.stamps.values())


@pytest.mark.parametrize(("lengths", "epochs", "steps"), [(14, 2, 4), (6, 1, 1), (8, 1, 1)])
def test_windows_do_not_cross_epochs_and_planned_steps_are_done(
    tmp_path: Path, lengths: int, epochs: int, steps: int
) -> None:
    options = {"source": {"lengths": [3] * lengths, "epochs": epochs}, "drafter": {"accumulate": 4}}
    pipeline = Pipeline(options=options)
    outcome = pipeline.run(tmp_path)
    ((plan,),) = pipeline.journal.of("plan")
    assert plan.steps == outcome.steps == steps
    assert (plan.epochs, plan.batches) == (epochs, outcome.batches)
    if epochs == 2:
        assert [r.batches for r in pipeline.written("metrics", StepRecord)] == [4, 3, 4, 3]


def test_each_drafter_is_told_its_own_steps_and_both_see_every_batch(tmp_path: Path) -> None:
    wires = (*TRAINING, ("target", "", "other", FeatureBatch))
    pipeline = Pipeline(wires=wires, options={"other": {"accumulate": 3}, "source": {"epochs": 2}})
    pipeline.run(tmp_path)
    assert [plan.steps for (plan,) in pipeline.journal.of("plan")] == [14, 6]
    for name in ("drafter", "other"):
        assert [seq for who, seq, _ in pipeline.journal.of("step") if who == name] == list(range(14))


def test_one_drafter_that_is_done_does_not_stop_the_other(tmp_path: Path) -> None:
    wires = (*TRAINING, ("target", "", "other", FeatureBatch))
    pipeline = Pipeline(wires=wires, options={"drafter": {"max_steps": 2}})
    outcome = pipeline.run(tmp_path)
    taken = [who for who, _, _ in pipeline.journal.of("step")]
    assert (taken.count("drafter"), taken.count("other")) == (2, 7)
    assert outcome.status == "finished" and outcome.steps == 2


def test_a_drafter_that_is_done_ends_the_run_cleanly(tmp_path: Path) -> None:
    pipeline = Pipeline(options={"source": {"lengths": [3] * 400}, "drafter": {"max_steps": 3}})
    outcome = pipeline.run(tmp_path)
    assert (outcome.status, outcome.steps, outcome.batches) == ("finished", 3, 3)
    assert pipeline.journal.of("finish") == [("drafter", "final")]
    assert [c.reason for c in pipeline.written("save", Checkpoint)] == ["final"]


def test_a_drafter_that_wants_nothing_gets_nothing(tmp_path: Path) -> None:
    class Done(FakeDrafter):
        done = True

    pipeline = Pipeline(classes={"drafter": Done})
    outcome = pipeline.run(tmp_path)
    assert (outcome.status, outcome.steps) == ("finished", 0)
    assert pipeline.journal.of("step") == []


def test_a_generator_pipeline_needs_neither_interleaver_nor_drafter(tmp_path: Path) -> None:
    pipeline = Pipeline(wires=GENERATING, options={"generator": {"replicas": 3}})
    outcome = pipeline.run(tmp_path)
    assert [b.info.seq for b in pipeline.written("texts", GeneratedBatch)] == list(range(7))
    assert (outcome.status, outcome.steps, outcome.batches, outcome.samples) == ("finished", 0, 7, 14)
    assert outcome.batches_per_bucket == {"0": 3, "1": 2, "2": 2}


def test_a_pipeline_may_end_in_a_sink_of_features(tmp_path: Path) -> None:
    wires = (*TRAINING[:4], ("target", "", "features", FeatureBatch))
    pipeline = Pipeline(wires=wires)
    assert pipeline.run(tmp_path).batches == 7
    assert [b.info.seq for b in pipeline.written("features", FeatureBatch)] == list(range(7))


def test_a_sink_may_read_several_outputs(tmp_path: Path) -> None:
    wires = (*TRAINING, ("target", "", "other", FeatureBatch), ("other", "records", "metrics", StepRecord))
    pipeline = Pipeline(wires=wires)
    outcome = pipeline.run(tmp_path)
    assert len(pipeline.written("metrics", StepRecord)) == 14
    assert "drafter.records->metrics + other.records->metrics" in {edge.name for edge in outcome.edges}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_losses_do_not_depend_on_threads_or_timing(tmp_path: Path, replicas: int, workers: int) -> None:
    delays = random.Random(replicas * 10 + workers)
    lock = threading.Lock()

    def wait(*_: Any) -> None:
        with lock:
            secs = delays.choice((0.0, 0.0, 0.001, 0.003))
        threading.Event().wait(secs)

    def pipeline(before: Any, **extra: Any) -> Pipeline:
        return Pipeline(
            options={
                "source": {"lengths": [1 + i % 5 for i in range(64)]},
                "drafter": {"accumulate": 3, "before": before},
                "metrics": {"before": before, "reasons": ()},
                "target": {"before": before, "replicas": extra.get("replicas", 1)},
                "dispatch": {"workers": extra.get("workers", 1)},
            }
        )

    plain, shaken = pipeline(lambda *_: None), pipeline(wait, replicas=replicas, workers=workers)
    plain.run(tmp_path / "a")
    shaken.run(tmp_path / "b")
    assert shaken.losses() == plain.losses() and len(plain.losses()) == 11
    assert [r.seqs for r in shaken.written("metrics", StepRecord)] == [
        r.seqs for r in plain.written("metrics", StepRecord)
    ]


def test_replicas_may_run_ahead_of_a_slow_one_within_the_reorder_buffer(tmp_path: Path) -> None:
    ahead = threading.Event()

    def hold_the_first(replica: int, batch: Any) -> None:
        if batch.info.seq == 0:
            assert ahead.wait(10)
        elif batch.info.seq >= 5:
            ahead.set()

    pipeline = Pipeline(options={"target": {"replicas": 2, "before": hold_the_first}})
    outcome = pipeline.run(tmp_path)
    assert [seq for _, seq, _ in pipeline.journal.of("step")] == list(range(7))
    assert {edge.name: edge.capacity for edge in outcome.edges}["target->drafter"] == 8


def test_arrival_order_takes_what_is_ready_and_records_it(tmp_path: Path) -> None:
    late = threading.Event()

    def hold_the_first(replica: int, batch: Any) -> None:
        if batch.info.seq == 0:
            assert late.wait(10)

    def step(batch: Any) -> None:
        late.set()

    options = {"target": {"replicas": 2, "before": hold_the_first}, "drafter": {"before": step}}
    pipeline = Pipeline(ordering="arrival", options=options)
    outcome = pipeline.run(tmp_path)
    records = pipeline.written("metrics", StepRecord)
    seqs = [r.seqs[0] for r in records]
    assert sorted(seqs) == list(range(7)) and seqs[0] == 1
    assert seqs == [seq for _, seq, _ in pipeline.journal.of("step")]
    away = [abs(seq - place) for place, seq in enumerate(seqs)]
    assert [r.order_distance for r in records] == away and outcome.order_distance == max(away) > 0


@pytest.mark.parametrize("replicas", [1, 3])
def test_every_record_says_how_far_its_window_is_from_the_plan(tmp_path: Path, replicas: int) -> None:
    """In planned order no batch is away from its place; the mix of a window is compared with that of all batches."""
    plans: list[Any] = []
    pipeline = Pipeline(options={"target": {"replicas": replicas}, "drafter": {"accumulate": 3}})
    outcome = pipeline.run(tmp_path, on_plan=plans.append)
    records = pipeline.written("metrics", StepRecord)
    buckets = plans[0].epochs[0].buckets
    whole = order_metrics.window_kl(buckets, 3)
    assert [r.window_kl for r in records[: len(whole)]] == pytest.approx(whole.tolist())
    assert [r.window_distinct for r in records] == [len(r.buckets) for r in records]
    assert {r.order_distance for r in records} == {0} and outcome.order_distance == 0


@pytest.mark.parametrize("policy", [None, RoundRobin, LeastOutstanding])
def test_the_first_four_batches_reach_four_targets_every_time(tmp_path: Path, policy: Any) -> None:
    for repeat in range(20 if policy is None else 5):
        together = threading.Barrier(4)

        def meet(replica: int, batch: Any, together: threading.Barrier = together) -> None:
            # Each of the first four batches waits until four replicas have one.
            together.wait(10)

        classes = {} if policy is None else {"dispatch": policy}
        options = {
            "source": {"lengths": [3] * 32},
            "dispatch": {"workers": 4},
            "target": {"replicas": 4, "before": meet},
        }
        pipeline = Pipeline(options=options, classes=classes)
        pipeline.run(tmp_path / str(repeat))
        by_replica = [r for _, r in sorted(pipeline.journal.of("forward"))]
        assert sorted(by_replica[:4]) == [0, 1, 2, 3]
        assert [by_replica.count(r) for r in range(4)] == [4, 4, 4, 4]


def test_a_slow_target_gets_fewer_batches(tmp_path: Path) -> None:
    last = threading.Event()

    def slow(replica: int, batch: Any) -> None:
        if replica == 0:
            last.wait(10)
        elif batch.info.seq >= 20:
            last.set()

    options = {"source": {"lengths": [3] * 64}, "target": {"replicas": 2, "before": slow}}
    pipeline = Pipeline(ordering="arrival", options=options)
    pipeline.run(tmp_path)
    replicas = [replica for _, replica in pipeline.journal.of("forward")]
    # Until batch 20 the slow one has only what it can hold: one in work and two in its channel.
    assert replicas.count(0) < replicas.count(1) and len(replicas) == 32


def test_a_slow_drafter_holds_back_everything_before_it(tmp_path: Path) -> None:
    """Peak = one per worker and what the channels hold, to the batch."""
    alive, peak, lock = set(), [0], threading.Lock()
    full = threading.Event()

    class Counted(FakeSource):
        def tokens(self, sample_id: int) -> Any:
            with lock:
                alive.add(sample_id // 2)
                peak[0] = max(peak[0], len(alive))
                if len(alive) == 6:
                    full.set()
            return super().tokens(sample_id)

    def step(batch: Any) -> None:
        if batch.info.seq == 0:
            assert full.wait(10)
            threading.Event().wait(0.05)  # nothing more comes although there is time
        with lock:
            alive.discard(batch.info.sample_ids[0] // 2)

    pipeline = Pipeline(
        wires=(TRAINING[0], ("buckets", "", "dispatch", TRAINING[1][3]), *TRAINING[3:]),
        options={"source": {"lengths": [3] * 80}, "drafter": {"before": step}},
        classes={"source": Counted},
    )
    outcome = pipeline.run(tmp_path)
    # One in work at the drafter, two waiting for it, one in work at the target, two waiting for it. The dispatcher
    # fetches tokens only for a batch that has a place, so it holds none of its own.
    assert peak[0] == 1 + 2 + 1 + 2
    edges = {edge.name: edge for edge in outcome.edges}
    assert edges["dispatch->target"].high_water <= 2 and edges["target->drafter"].high_water <= 2
    assert edges["target->drafter"].put_wait_secs > 0


def test_a_byte_limit_below_one_batch_still_trains(tmp_path: Path) -> None:
    pipeline = Pipeline(capacities={"drafter": 8}, capacity_bytes={"drafter": 50}, options={"target": {"replicas": 3}})
    outcome = pipeline.run(tmp_path)
    assert outcome.steps == 7


FAULTS = [
    ("source", "epochs", 0),
    ("source", "tokens", 0),
    ("source", "tokens", 13),
    ("buckets", "batches", 0),
    ("order", "order", 0),
    ("dispatch", "route", 0),
    ("dispatch", "route", 6),
    ("target", "forward", 0),
    ("target", "forward", 6),
    ("drafter", "begin", 0),
    ("drafter", "step", 0),
    ("drafter", "step", 6),
    ("drafter", "finish", 0),
    ("metrics", "write", 0),
    ("metrics", "write", 6),
    ("save", "write", 0),
    ("save", "wants", 0),
]
STAGES = ["source", "buckets", "order", "dispatch", "target", "drafter", "metrics", "save"]


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(3), MemoryError("full")], ids=repr)
@pytest.mark.parametrize(("stage", "method", "call"), FAULTS)
def test_a_fault_in_any_stage_ends_the_run_with_that_error(
    tmp_path: Path, stage: str, method: str, call: int, error: BaseException
) -> None:
    pipeline = Pipeline(capacities=dict.fromkeys(STAGES, 1))
    pipeline.faults.at(stage, method, call, error)
    begin = time.monotonic()
    with pytest.raises(StageFailed) as caught:
        pipeline.run(tmp_path)
    assert time.monotonic() - begin < 5
    assert (caught.value.stage, caught.value.phase, caught.value.cause) == (stage, "run", error)
    assert "pass_by" in caught.value.original_traceback()
    if method in ("tokens", "route", "forward", "step"):
        assert caught.value.batch == (call // 2 if method == "tokens" else call)
        assert len(caught.value.sample_ids) == (1 if method == "tokens" else 2)
    assert sorted(name for name, _ in pipeline.journal.of("close")) == sorted(
        name for name, _, _ in pipeline.journal.of("open")
    )
    written = json.loads((tmp_path / "run" / "outcome.json").read_text())
    assert written["status"] == "failed" and stage in written["error"]


@pytest.mark.parametrize("error", [OSError("no such device"), SystemExit(3), MemoryError("full")], ids=repr)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_does_not_open_stops_everything_before_it_starts(
    tmp_path: Path, stage: str, error: BaseException
) -> None:
    pipeline = Pipeline()
    pipeline.faults.at(stage, "open", 0, error)
    with pytest.raises(StageFailed) as caught:
        pipeline.run(tmp_path)
    assert (caught.value.stage, caught.value.phase, caught.value.cause) == (stage, "open", error)
    tried = STAGES[: STAGES.index(stage) + 1]
    assert sorted(name for name, _ in pipeline.journal.of("close")) == sorted(tried)
    assert pipeline.journal.of("step") == [] and pipeline.journal.of("forward") == []


@pytest.mark.parametrize("error", [OSError("no such device"), SystemExit(3), MemoryError("full")], ids=repr)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_does_not_close_fails_the_run_and_the_others_close(
    tmp_path: Path, stage: str, error: BaseException
) -> None:
    pipeline = Pipeline()
    pipeline.faults.at(stage, "close", 0, error)
    with pytest.raises(StageFailed) as caught:
        pipeline.run(tmp_path)
    assert (caught.value.stage, caught.value.phase, caught.value.cause) == (stage, "close", error)
    assert sorted(name for name, _ in pipeline.journal.of("close")) == sorted(STAGES)


def test_a_stage_that_cannot_be_built_starts_no_thread(tmp_path: Path) -> None:
    class Unbuildable(FakeTarget):
        def __init__(self, config: Any) -> None:
            raise RuntimeError("no")

    with pytest.raises(StageFailed, match=r"'target' failed in open: RuntimeError: no"):
        Pipeline(classes={"target": Unbuildable}).run(tmp_path)


def test_later_failures_are_listed_after_the_first(tmp_path: Path) -> None:
    pipeline = Pipeline()
    pipeline.faults.at("drafter", "step", 2, ValueError("first"))
    pipeline.faults.at("save", "close", 0, OSError("then"))
    pipeline.faults.at("source", "close", 0, OSError("last"))
    with pytest.raises(StageFailed, match="first") as caught:
        pipeline.run(tmp_path)
    assert [(later.stage, later.phase) for later in caught.value.later] == [("save", "close"), ("source", "close")]


@pytest.mark.parametrize("stage", ["target", "drafter"])
def test_a_fault_says_where_the_samples_of_its_batch_come_from(tmp_path: Path, stage: str) -> None:
    class Placed(FakeSource):
        def describe(self, sample_id: int) -> str:
            return f"rows.jsonl:{sample_id + 1}"

    class Silent(FakeSource):
        def describe(self, sample_id: int) -> str:
            raise RuntimeError("the source is not open")

    method = {"target": "forward", "drafter": "step"}[stage]
    for source, told in ((Placed, r", from rows\.jsonl:\d+, rows\.jsonl:\d+\]$"), (Silent, r"samples \d+, \d+\]$")):
        pipeline = Pipeline(classes={"source": source})
        pipeline.faults.at(stage, method, 1, ValueError("boom"))
        with pytest.raises(StageFailed, match=told) as caught:
            pipeline.run(tmp_path / source.__name__)
        numbers = [int(place.rpartition(":")[2]) - 1 for place in caught.value.places]
        assert numbers == (list(caught.value.sample_ids) if source is Placed else [])


def test_a_fault_frees_a_feeder_that_is_blocked_on_a_full_channel(tmp_path: Path) -> None:
    pipeline = Pipeline(options={"source": {"lengths": [3] * 200}}, capacities=dict.fromkeys(STAGES, 1))
    pipeline.faults.at("metrics", "write", 3, RuntimeError("sink broke"))
    with pytest.raises(StageFailed, match="sink broke"):
        pipeline.run(tmp_path)


def test_a_stage_that_is_stuck_after_a_failure_is_left_behind_and_named(tmp_path: Path) -> None:
    stuck, release = threading.Event(), threading.Event()

    def block(replica: int, batch: Any) -> None:
        if batch.info.seq == 1:
            stuck.set()
            release.wait(10)

    def fail(batch: Any) -> None:
        stuck.wait(10)
        raise ValueError("boom")

    pipeline = Pipeline(options={"target": {"before": block}, "drafter": {"before": fail}})
    with pytest.raises(StageFailed, match="boom"):
        pipeline.run(tmp_path, grace_secs=0.05)
    assert any("target[0] is stuck" in line for line in pipeline.report.lines)
    left = [t for t in threading.enumerate() if t.name == "flowdflash-target[0]"]
    release.set()
    for thread in left:
        thread.join(5)
    assert ("target",) in [entry[:1] for entry in pipeline.journal.of("close")]


class Contrary(FakeTarget):
    """Breaks the contract in the way its config says."""

    def forward(self, batch: Any) -> Any:
        made = super().forward(batch)
        if self.config.breach == "type":
            return batch
        if self.config.breach == "gradient":
            return FeatureBatch(batch, FakeFeatures(requires_grad=True), (0,))
        self.kept = getattr(self, "kept", made)
        return self.kept


@pytest.mark.parametrize(
    ("breach", "text"),
    [("type", "returned TokenBatch"), ("gradient", "carry a gradient"), ("stale", "batch 1 and returned 0")],
)
def test_a_target_that_breaks_its_contract_is_named(tmp_path: Path, breach: str, text: str) -> None:
    pipeline = Pipeline(classes={"target": Contrary}, options={"target": {"breach": breach}})
    with pytest.raises(StageFailed, match=text) as caught:
        pipeline.run(tmp_path)
    assert caught.value.stage == "target" and isinstance(caught.value.cause, PluginBroken)


def test_a_drafter_that_returns_nothing_is_named(tmp_path: Path) -> None:
    class Mute(FakeDrafter):
        def step(self, batch: Any) -> Any:
            return None

    with pytest.raises(StageFailed, match=r"step\(\) returned NoneType"):
        Pipeline(classes={"drafter": Mute}).run(tmp_path)


def test_batches_that_no_record_accounts_for_are_an_error(tmp_path: Path) -> None:
    class Forgetful(FakeDrafter):
        def finish(self, reason: Any) -> Any:
            return ()

    options = {"drafter": {"accumulate": 4}, "source": {"lengths": [3] * 12}}

    class Unending(Forgetful):
        def step(self, batch: Any) -> Any:
            self.window.append(batch.info)
            if len(self.window) == 4:
                yield self.record()

    with pytest.raises(StageFailed, match="took 6 items, accounts for 4") as caught:
        Pipeline(classes={"drafter": Unending}, options=options).run(tmp_path)
    assert caught.value.stage == "drafter"


def test_a_plan_that_changes_between_planning_and_running_is_found_out(tmp_path: Path) -> None:
    class Moody(FakeSource):
        rounds = 0

        def epochs(self) -> Any:
            self.rounds += 1
            self.config.epochs = self.rounds
            return super().epochs()

    with pytest.raises(StageFailed, match="the plan made beforehand has 7 batches, the run had 14"):
        Pipeline(classes={"source": Moody}).run(tmp_path)


def test_zero_batches_is_an_error_that_says_why(tmp_path: Path) -> None:
    options = {"source": {"lengths": [3] * 3}, "buckets": {"batch": 8, "drop_last": True}}
    with pytest.raises(StageFailed, match="3 samples made no batch; 3 dropped: last batch not full") as caught:
        Pipeline(options=options).run(tmp_path / "a")
    assert caught.value.stage == "buckets"
    with pytest.raises(StageFailed, match="the source gave no sample") as caught:
        Pipeline(options={"source": {"lengths": []}}).run(tmp_path / "b")
    assert caught.value.stage == "source"


def test_dropped_samples_are_counted_with_their_reason(tmp_path: Path) -> None:
    options = {"source": {"lengths": [3] * 103, "epochs": 2}, "buckets": {"batch": 8, "drop_last": True}}
    outcome = Pipeline(options=options).run(tmp_path)
    assert outcome.dropped == {"last batch not full": 14}
    assert outcome.samples == 192


def test_a_streaming_source_is_not_planned_beforehand(tmp_path: Path) -> None:
    class Stream(FakeSource):
        streaming = True

    pipeline = Pipeline(classes={"source": Stream})
    assert pipeline.run(tmp_path).steps == 7
    ((plan,),) = pipeline.journal.of("plan")
    assert (plan.batches, plan.steps) == (0, 0)


@pytest.mark.parametrize(
    ("wires", "text"),
    [
        (TRAINING[1:], "a bucketer needs an input"),
        ((*TRAINING, ("buckets", "", "metrics", TRAINING[1][3])), "a sink cannot read a bucketer"),
        ((*TRAINING, ("dispatch", "", "features", TRAINING[3][3])), "feeds exactly one target"),
        ((*TRAINING, ("drafter", "records", "drafter", StepRecord)), "reads one input, this one has 2"),
    ],
)
def test_a_graph_that_the_runtime_cannot_run_is_refused(tmp_path: Path, wires: Any, text: str) -> None:
    with pytest.raises(PipelineInvalid, match=text):
        Pipeline(wires=wires).run(tmp_path)


class Recorder:
    """Stands for the plugins."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def notify(self, name: str, /, **arguments: Any) -> list[str]:
        self.calls.append((name, arguments))
        return ["observer broke"] if name == "flowdflash_step" and arguments["record"].step == 1 else []


def test_observers_are_told_and_cannot_stop_the_run(tmp_path: Path) -> None:
    plugins, pipeline = Recorder(), Pipeline()
    pipeline.run(tmp_path, plugins=plugins)
    names = [name for name, _ in plugins.calls]
    assert names[0] == "flowdflash_run_started" and names[-1] == "flowdflash_run_finished"
    assert [a["record"].step for n, a in plugins.calls if n == "flowdflash_step"] == list(range(1, 8))
    assert [a["checkpoint"].reason for n, a in plugins.calls if n == "flowdflash_checkpoint_saved"] == ["final"]
    assert plugins.calls[-1][1]["outcome"].status == "finished"
    assert pipeline.report.lines.count("warning: observer broke") == 1


def test_a_sink_that_only_looks_at_checkpoints_saves_none(tmp_path: Path) -> None:
    class Evaluator(FakeSink):
        saves = False

    plugins, pipeline = Recorder(), Pipeline(classes={"save": Evaluator})
    pipeline.run(tmp_path, plugins=plugins)
    assert len(pipeline.written("save", Checkpoint)) == 1
    assert "flowdflash_checkpoint_saved" not in [name for name, _ in plugins.calls]


def test_who_keeps_checkpoints_knows_which_an_evaluator_is_not_done_with(tmp_path: Path) -> None:
    seen, far = list[tuple[str, list[int]]](), threading.Event()

    class Keeper(FakeSink):
        def open(self, ctx: OpenContext) -> None:
            super().open(ctx)
            self.in_use = ctx.checkpoints_in_use

        def write(self, item: Checkpoint) -> None:
            seen.append((f"{item.step}", sorted(self.in_use())))
            if item.step == 5:
                far.set()

        def close(self) -> None:
            super().close()
            seen.append(("close", sorted(self.in_use())))

    class Evaluator(FakeSink):
        saves = False

        def wants(self, step: int, reason: str) -> bool:
            return step in (2, 3)

        def write(self, item: Checkpoint) -> None:
            assert far.wait(20)

    wires = (*TRAINING, ("drafter", "checkpoints", "features", Checkpoint))
    classes: dict[str, type[Stage]] = {"save": Keeper, "features": Evaluator}
    Pipeline(wires=wires, classes=classes, options={"save": {"reasons": ("every",)}}).run(tmp_path)
    assert [step for step, _ in seen] == [*"1234567", "close"]
    told = dict(seen)
    assert (told["4"], told["5"], told["close"]) == ([2, 3], [2, 3], [])


def test_observers_are_told_of_a_failed_run(tmp_path: Path) -> None:
    plugins, pipeline = Recorder(), Pipeline()
    pipeline.faults.at("target", "forward", 3, ValueError("boom"))
    with pytest.raises(StageFailed):
        pipeline.run(tmp_path, plugins=plugins)
    assert plugins.calls[-1][1]["outcome"].status == "failed"


def test_checkpoints_go_only_to_sinks_that_want_them(tmp_path: Path) -> None:
    wires = (*TRAINING, ("drafter", "checkpoints", "features", Checkpoint))
    options = {"save": {"reasons": ("start", "final")}, "features": {"reasons": ("every",)}}
    pipeline = Pipeline(wires=wires, options=options)
    pipeline.run(tmp_path)
    assert [c.reason for c in pipeline.written("save", Checkpoint)] == ["start", "final"]
    assert [c.step for c in pipeline.written("features", Checkpoint)] == list(range(1, 8))


def test_waits_are_told_per_edge(tmp_path: Path) -> None:
    pipeline = Pipeline(options={"target": {"before": lambda *_: threading.Event().wait(0.005)}})
    pipeline.run(tmp_path)
    waits = pipeline.written("metrics", StepRecord)[-1].waits_secs
    assert set(waits) == {
        "order->dispatch",
        "dispatch->target",
        "target->drafter",
        "drafter.records->metrics",
        "drafter.checkpoints->save",
    }
    assert waits["target->drafter"] >= 0.02


def test_a_request_to_stop_ends_at_a_step_boundary_with_one_checkpoint(tmp_path: Path) -> None:
    stop, ahead = StopRequest(), threading.Event()

    def ask(batch: Any) -> None:
        if batch.info.seq == 9:
            # The rest of the window is there, so the drafter does not have to wait for it.
            assert ahead.wait(10)
            stop.request()

    def forward(replica: int, batch: Any) -> None:
        if batch.info.seq == 12:
            ahead.set()

    options = {
        "source": {"lengths": [3] * 400},
        "target": {"before": forward},
        "drafter": {"accumulate": 4, "before": ask},
    }
    pipeline = Pipeline(options=options, capacities={"drafter": 8})
    outcome = pipeline.run(tmp_path, stop=stop)
    assert (outcome.status, outcome.steps, outcome.aborted) == ("interrupted", 3, False)
    assert [seq for _, seq, _ in pipeline.journal.of("step")] == list(range(12))
    assert [c.reason for c in pipeline.written("save", Checkpoint)] == ["interrupted"]
    assert len(pipeline.losses()) == 3


def test_a_stop_while_the_drafter_waits_drops_the_open_window(tmp_path: Path) -> None:
    stop, stepped = StopRequest(), threading.Event()

    def hold(replica: int, batch: Any) -> None:
        if batch.info.seq == 6:
            stepped.wait(10)
            stop.request()
            # The drafter is free to go while this batch is still in work.
            threading.Event().wait(0.05)

    def step(batch: Any) -> None:
        if batch.info.seq == 5:
            stepped.set()

    options = {"drafter": {"accumulate": 4, "before": step}, "target": {"before": hold}}
    pipeline = Pipeline(options=options)
    outcome = pipeline.run(tmp_path, stop=stop)
    assert (outcome.status, outcome.steps) == ("interrupted", 1)
    drafter = next(s for s in outcome.stages if s.stage == "drafter")
    assert sum(drafter.dropped.values()) == 2 and drafter.passed == 4


def test_a_stop_while_the_source_blocks_for_ever_still_ends_with_a_checkpoint(tmp_path: Path) -> None:
    blocked, release, stop = threading.Event(), threading.Event(), StopRequest()

    class Pipe(FakeSource):
        streaming = True

        def epochs(self) -> Any:
            yield from super().epochs()
            blocked.set()
            release.wait(15)

    pipeline = Pipeline(classes={"source": Pipe})
    thread, result = in_thread(lambda: pipeline.run(tmp_path, stop=stop, grace_secs=0.5))
    assert blocked.wait(10)
    stop.request()
    thread.join(5)
    assert not thread.is_alive()
    (outcome,) = result
    assert outcome.status == "interrupted" and outcome.abandoned == ("order[0]",)
    assert [c.reason for c in pipeline.written("save", Checkpoint)] == ["interrupted"]
    left = [t for t in threading.enumerate() if t.name.startswith("flowdflash-")]
    release.set()
    for planner in left:
        planner.join(5)


def test_a_stop_while_stages_open_runs_nothing_and_closes_all(tmp_path: Path) -> None:
    stop = StopRequest()

    class Slow(FakeTarget):
        def open(self, ctx: Any) -> None:
            super().open(ctx)
            stop.request()

    pipeline = Pipeline(classes={"target": Slow})
    outcome = pipeline.run(tmp_path, stop=stop)
    assert (outcome.status, outcome.steps) == ("interrupted", 0)
    assert [name for name, _ in pipeline.journal.of("close")] == ["target", "dispatch", "order", "buckets", "source"]


def test_a_stop_in_a_generator_pipeline_finishes_the_batches_in_work(tmp_path: Path) -> None:
    stop = StopRequest()

    def ask(replica: int, batch: Any) -> None:
        if batch.info.seq == 3:
            stop.request()

    pipeline = Pipeline(wires=GENERATING, options={"source": {"lengths": [3] * 400}, "generator": {"before": ask}})
    outcome = pipeline.run(tmp_path, stop=stop)
    written = [b.info.seq for b in pipeline.written("texts", GeneratedBatch)]
    assert outcome.status == "interrupted"
    assert written == list(range(len(written))) and 4 <= len(written) < 200
    assert outcome.batches == len(written)


def test_a_stop_after_the_last_batch_is_a_finished_run(tmp_path: Path) -> None:
    stop = StopRequest()

    def ask(item: Any) -> None:
        if isinstance(item, Checkpoint):
            stop.request()

    outcome = Pipeline(options={"save": {"before": ask}}).run(tmp_path, stop=stop)
    assert outcome.status == "finished"


def test_asking_twice_stops_at_once_without_a_checkpoint(tmp_path: Path) -> None:
    stop = StopRequest()

    def ask(batch: Any) -> None:
        if batch.info.seq == 2:
            stop.request()
            stop.request()

    pipeline = Pipeline(options={"source": {"lengths": [3] * 400}, "drafter": {"accumulate": 50, "before": ask}})
    outcome = pipeline.run(tmp_path, stop=stop)
    assert (outcome.status, outcome.aborted) == ("interrupted", True)
    assert pipeline.written("save", Checkpoint) == []


def test_a_keyboard_interrupt_on_the_calling_thread_closes_everything(tmp_path: Path) -> None:
    class Interrupting(Recorder):
        def notify(self, name: str, /, **arguments: Any) -> list[str]:
            if name == "flowdflash_run_started":
                raise KeyboardInterrupt
            return []

    pipeline = Pipeline()
    with pytest.raises(KeyboardInterrupt):
        pipeline.run(tmp_path, plugins=Interrupting())
    assert sorted(name for name, _ in pipeline.journal.of("close")) == sorted(STAGES)


def test_a_keyboard_interrupt_during_training_ends_all_threads(tmp_path: Path) -> None:
    def interrupt(batch: Any) -> None:
        if batch.info.seq == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    pipeline = Pipeline(options={"source": {"lengths": [3] * 4000}, "drafter": {"before": interrupt}})
    # A shell script starts what it does not wait for with SIGINT ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            pipeline.run(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted(name for name, _ in pipeline.journal.of("close")) == sorted(STAGES)
    assert len(pipeline.journal.of("step")) < 2000


def test_a_stop_request_may_come_from_a_signal_handler_on_the_waiting_thread(tmp_path: Path) -> None:
    stop, stopped = StopRequest(), threading.Event()

    def ask(batch: Any) -> None:
        if batch.info.seq == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
            assert stopped.wait(10)

    def handle(*_: Any) -> None:
        stop.request()
        stopped.set()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        outcome = Pipeline(options={"drafter": {"before": ask}}).run(tmp_path, stop=stop)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (outcome.status, outcome.steps) == ("interrupted", 3)


def test_the_plan_is_told_before_the_data_plane_opens(tmp_path: Path) -> None:
    pipeline, told = Pipeline(), []

    def on_plan(plan: Any) -> None:
        told.append((len(plan.epochs[0]), [name for name, *_ in pipeline.journal.of("open")]))

    pipeline.run(tmp_path, on_plan=on_plan)
    assert told == [(7, ["source", "buckets", "order"])]


def test_an_unknown_ordering_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PipelineInvalid, match="ordering must be plan or arrival, got 'any'"):
        Pipeline(ordering="any").run(tmp_path)


def test_rows_reach_a_generator_and_nobody_else(tmp_path: Path) -> None:
    class Rows(FakeSource):
        def row(self, sample_id: int) -> Any:
            return {"id": sample_id}

    seen: list[Any] = []
    before = {"before": lambda replica, batch: seen.append(batch.rows)}
    Pipeline(wires=GENERATING, classes={"source": Rows}, options={"generator": before}).run(tmp_path / "a")
    assert seen == [({"id": 2 * i}, {"id": 2 * i + 1}) for i in range(7)]
    seen.clear()
    Pipeline(classes={"source": Rows}, options={"target": before}).run(tmp_path / "b")
    assert seen == [()] * 7


def test_an_interleaver_is_told_the_drafters_window(tmp_path: Path) -> None:
    seen = []

    class Curious(FakeInterleaver):
        def order(self, batches: Any, history: Any, rng: Any) -> Any:
            seen.append(history.window)
            return range(len(batches))

    Pipeline(classes={"order": Curious}, options={"drafter": {"accumulate": 4}}).run(tmp_path)
    assert seen == [4, 4]
