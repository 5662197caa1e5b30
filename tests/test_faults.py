"""What a fault leaves behind: what was given to the sinks is written, and a save that fails is told."""

from __future__ import annotations

import errno
import gc
import json
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from runtime_fakes import TRAINING, FakeSink, FakeTarget, Journal, Pipeline, threads_left

from flowdflash.errors import StageFailed
from flowdflash.items import Checkpoint, FeatureBatch, StepRecord, TokenBatch
from flowdflash.runtime import crew
from flowdflash.stage import SilentReport
from flowdflash.testing import run_pipeline

pytestmark = pytest.mark.timeout(20)
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(autouse=True)
def no_thread_outlives_a_run() -> Any:
    yield
    assert threads_left() == []


def failing_at(seq: int, failing: threading.Event) -> Any:
    """A drafter that fails at a batch; the event is set just before."""

    def before(batch: Any) -> None:
        if batch.info.seq == seq:
            failing.set()
            raise ValueError("boom")

    return {"before": before}


def test_checkpoints_and_records_that_were_waiting_when_a_stage_failed_are_written(tmp_path: Path) -> None:
    failing = threading.Event()

    def hold(item: Any) -> None:
        assert failing.wait(10)

    options = {
        "drafter": failing_at(3, failing),
        "save": {"before": hold, "reasons": ("every",)},
        "metrics": {"before": hold},
    }
    pipeline = Pipeline(options=options, capacities={"save": 4, "metrics": 4})
    with pytest.raises(StageFailed, match="boom"):
        pipeline.run(tmp_path)
    assert [c.step for c in pipeline.written("save", Checkpoint)] == [1, 2, 3], "up to the last good step"
    assert [r.step for r in pipeline.written("metrics", StepRecord)] == [1, 2, 3]


def test_a_failed_run_is_not_kept_by_evaluations_that_were_waiting(tmp_path: Path) -> None:
    evaluating, left = threading.Event(), threading.Event()

    class Evaluator(FakeSink):
        saves = False

    class LeftBehind(SilentReport):
        def warn(self, text: str) -> None:
            super().warn(text)
            if "features[0] is stuck" in text:
                left.set()

    def evaluate(item: Any) -> None:
        evaluating.set()
        assert left.wait(10)

    def fail(batch: Any) -> None:
        if batch.info.seq == 3:
            assert evaluating.wait(10)
            raise ValueError("boom")

    wires = (*TRAINING, ("drafter", "checkpoints", "features", Checkpoint))
    options = {"drafter": {"before": fail}, "features": {"before": evaluate, "reasons": ("every",)}}
    pipeline = Pipeline(wires=wires, options=options, classes={"features": Evaluator}, capacities={"features": 4})
    pipeline.report = LeftBehind()
    with pytest.raises(StageFailed, match="boom"):
        pipeline.run(tmp_path, grace_secs=0.1)
    assert left.is_set(), pipeline.report.lines
    for thread in [t for t in threading.enumerate() if t.name == "flowdflash-features[0]"]:
        thread.join(10)
    assert len(pipeline.written("features", Checkpoint)) <= 1, "what waited was dropped"


def test_a_checkpoint_that_is_being_written_when_a_stage_fails_gets_the_time_that_it_needs(tmp_path: Path) -> None:
    writing, failing = threading.Event(), threading.Event()

    class Patient(SilentReport):
        def warn(self, text: str) -> None:
            super().warn(text)
            if "a checkpoint is still being written" in text:
                failing.set()

    def write(item: Any) -> None:
        writing.set()
        assert failing.wait(10)

    def fail(batch: Any) -> None:
        if batch.info.seq == 1:
            assert writing.wait(10)
            raise ValueError("boom")

    options = {"drafter": {"before": fail}, "save": {"before": write, "reasons": ("every",)}}
    pipeline = Pipeline(options=options, report=Patient())
    with pytest.raises(StageFailed, match="boom"):
        pipeline.run(tmp_path, grace_secs=0.5)
    assert [c.step for c in pipeline.written("save", Checkpoint)] == [1]
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["abandoned"] == []


class Told:
    """Stands for the plugins: which checkpoints it was told of."""

    def __init__(self) -> None:
        self.saved: list[int] = []

    def notify(self, name: str, /, **arguments: Any) -> list[str]:
        if name == "flowdflash_checkpoint_saved":
            self.saved.append(arguments["checkpoint"].step)
        return []


def test_a_save_that_fails_is_told_at_once_and_again_at_the_next_and_training_goes_on(tmp_path: Path) -> None:
    told, pipeline = Told(), Pipeline(options={"save": {"reasons": ("every",)}})
    pipeline.faults.at("save", "write", 1, FULL)
    outcome = pipeline.run(tmp_path, plugins=told)
    assert (outcome.status, outcome.steps, told.saved) == ("finished", 7, [1, 3, 4, 5, 6, 7])
    first, second = pipeline.report.lines
    assert "save: the checkpoint of step 2 could not be saved" in first and "No space left" in first
    assert second == "warning: save: step 2 was not saved; trying step 3"
    save = next(stage for stage in outcome.stages if stage.stage == "save")
    assert (save.taken, save.passed, dict(save.dropped)) == (7, 6, {"could not be saved": 1})


def test_a_run_whose_last_save_failed_has_failed(tmp_path: Path) -> None:
    told, pipeline = Told(), Pipeline(options={"save": {"reasons": ("every", "final")}})
    pipeline.faults.at("save", "write", 6, FULL)
    pipeline.faults.at("save", "write", 7, FULL)
    with pytest.raises(StageFailed) as caught:
        pipeline.run(tmp_path, plugins=told)
    assert (caught.value.stage, caught.value.cause) == ("save", FULL)
    assert "pass_by" in caught.value.original_traceback()
    assert told.saved == [1, 2, 3, 4, 5, 6] and len(pipeline.journal.of("step")) == 7


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError("no"), SystemExit(1)], ids=lambda e: type(e).__name__)
def test_a_fault_of_the_checkpoint_sink_itself_ends_the_run(tmp_path: Path, error: BaseException) -> None:
    pipeline = Pipeline(options={"source": {"lengths": [3] * 400}, "save": {"reasons": ("every",)}})
    pipeline.faults.at("save", "write", 1, error)
    with pytest.raises(StageFailed) as caught:
        pipeline.run(tmp_path)
    assert (caught.value.stage, caught.value.cause) == ("save", error)
    assert len(pipeline.journal.of("step")) < 200


@pytest.mark.parametrize("replica", [0, 1, 2])
def test_a_fault_in_any_replica_names_it(tmp_path: Path, replica: int) -> None:
    together = threading.Barrier(3)

    def fail(this: int, batch: TokenBatch) -> None:
        if batch.info.seq < 3:
            together.wait(10)  # so that each of them has one
        if this == replica:
            raise MemoryError("out of memory")

    pipeline = Pipeline(options={"target": {"replicas": 3, "before": fail}, "dispatch": {"workers": 3}})
    with pytest.raises(StageFailed, match="MemoryError: out of memory") as caught:
        pipeline.run(tmp_path)
    assert (caught.value.stage, caught.value.replica, len(caught.value.sample_ids)) == ("target", replica, 2)
    closed = [name for name, _ in pipeline.journal.of("close")]
    assert closed.count("target") == 3 and len(closed) == 10


@pytest.mark.timeout(60)
@pytest.mark.parametrize("policy", ["stop", "skip_step"])
def test_n1_a_gradient_that_is_not_finite_reaches_neither_weights_nor_moments(tmp_path: Path, policy: str) -> None:
    import torch
    from drafter_fakes import batch, opened, records

    drafter = opened(tmp_path, on_nonfinite=policy)
    list(drafter.step(batch(0)))
    held = {**drafter.trainer.weights(), **drafter.trainer.moments()["state"][0]}
    next(drafter.trainer.draft.parameters()).register_hook(lambda gradient: gradient * torch.inf)
    if policy == "stop":
        with pytest.raises(FloatingPointError, match=r"step 2: gradient norm is .* samples \[10, 11\]"):
            list(drafter.step(batch(1)))
    else:
        (record,) = records(drafter.step(batch(1)))
        assert record.loss < torch.inf and "gradient norm is" in record.skipped
        assert drafter.summary()["steps_skipped"] == 1
    now = {**drafter.trainer.weights(), **drafter.trainer.moments()["state"][0]}
    assert len(held) > 5 and all(torch.equal(tensor, now[name]) for name, tensor in held.items())


@pytest.mark.timeout(120)
def test_features_that_are_not_numbers_end_the_run_with_step_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from flowdflash.stages.toy_target import ToyTarget

    forward = ToyTarget.forward

    def sick(self: ToyTarget, batch: TokenBatch) -> FeatureBatch:
        made = forward(self, batch)
        if batch.info.seq == 2:
            made.features.fill_(torch.nan)
        return made

    monkeypatch.setattr(ToyTarget, "forward", sick)
    corpus = {"kind": "source", "type": "synthetic_lengths", "samples": 8, "law": "fixed", "length": 16}
    shape = {"block_size": 4, "num_hidden_layers": 1, "num_anchors": 4, "device": "cpu", "precision": "float32"}
    tree = {
        "stages": {
            "corpus": {**corpus, "vocab_size": 64, "avoid_token_ids": [63]},
            "buckets": {"kind": "bucketer", "type": "length", "inputs": "corpus", "buckets": 1, "token_budget": 32},
            "dispatch": {"kind": "dispatcher", "type": "pull", "inputs": "buckets"},
            "target": {"kind": "target-forward", "type": "toy", "inputs": "dispatch", "vocab_size": 64},
            "drafter": {"kind": "drafter", "type": "dflash", "inputs": "target", **shape},
            "metrics": {"kind": "sink", "type": "jsonl", "inputs": "drafter.records"},
            "save": {"kind": "sink", "type": "checkpoint", "inputs": "drafter.checkpoints", "every_steps": 2},
        }
    }
    with pytest.raises(StageFailed, match=r"step 3: loss is nan; weights unchanged; samples \[\d, \d\]") as caught:
        run_pipeline(tree, run_dir=tmp_path / "run")
    assert (caught.value.stage, caught.value.batch, len(caught.value.sample_ids)) == ("drafter", 2, 2)
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-000002\n", "that of the last good step"
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 3


def test_a_failed_run_does_not_wait_for_ever_for_a_stage_that_does_not_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew, "CLOSE_GRACE_SECS", 0.05)
    release = threading.Event()

    class Endless(FakeSink):
        def close(self) -> None:
            super().close()
            release.wait(15)

    pipeline = Pipeline(classes={"metrics": Endless})
    pipeline.faults.at("target", "forward", 3, ValueError("boom"))
    with pytest.raises(StageFailed, match="boom"):
        pipeline.run(tmp_path)
    left = [t for t in threading.enumerate() if t.name.startswith("flowdflash-")]
    assert not release.is_set() and any("metrics[0] is stuck" in line for line in pipeline.report.lines)
    assert "metrics[0]" in json.loads((tmp_path / "run" / "outcome.json").read_text())["abandoned"]
    release.set()
    for thread in left:
        thread.join(10)


def test_a_stage_that_raises_while_another_does_is_listed_behind_it(tmp_path: Path) -> None:
    together = threading.Barrier(2)

    class Twin(FakeTarget):
        def forward(self, batch: TokenBatch) -> FeatureBatch:
            together.wait(10)
            raise MemoryError(f"replica {self.ctx.replica}")

    pipeline = Pipeline(classes={"target": Twin}, options={"target": {"replicas": 2}})
    with pytest.raises(StageFailed, match="MemoryError") as caught:
        pipeline.run(tmp_path)
    assert [type(later.cause) for later in caught.value.later] == [MemoryError]
    assert {caught.value.replica, caught.value.later[0].replica} == {0, 1}


class Forgetful(Journal):
    """Keeps nothing, so that what grows is the runtime's."""

    def note(self, *entry: Any) -> None:
        """Drop it."""


@pytest.mark.timeout(60)
def test_memory_does_not_grow_with_the_batches(tmp_path: Path) -> None:
    traced: list[int] = []

    def measure(batch: Any) -> None:
        if batch.info.seq in (500, 1499):
            gc.collect()
            traced.append(tracemalloc.get_traced_memory()[0])

    options = {"source": {"lengths": [3] * 3000}, "drafter": {"before": measure}, "target": {"replicas": 2}}
    pipeline = Pipeline(options=options, journal=Forgetful())
    tracemalloc.start()
    try:
        assert pipeline.run(tmp_path).batches == 1500
    finally:
        tracemalloc.stop()
    after_warm_up, at_the_end = traced
    assert at_the_end - after_warm_up < 200 * 1024, "1,000 batches; of each a header alone is a kilobyte"
