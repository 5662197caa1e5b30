"""Taking a run up again: which checkpoint, what is left of the plan, and what the sinks are given."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_fakes import FakeBucketer, FakeDrafter, FakeInterleaver, FakeSink, FakeSource, Pipeline

from flowdflash.errors import ModelInvalid, StageFailed
from flowdflash.items import Checkpoint, StepRecord
from flowdflash.journal import cut_back, entries
from flowdflash.runtime.channel import END, Channel
from flowdflash.runtime.checkpoints import damage, load_checkpoint, saved_checkpoints
from flowdflash.runtime.executor import execute
from flowdflash.runtime.ledger import Ledger
from flowdflash.runtime.outlets import Outlet
from flowdflash.runtime.planner import PlanNames, Planner
from flowdflash.runtime.resume import Resume, find_resume, take_up
from flowdflash.runtime.rundir import RunDir, RunDirUnusable
from flowdflash.runtime.turns import Turns
from flowdflash.runtime.worker import _emit
from flowdflash.runtime.works import DraftWork
from flowdflash.stage import OpenContext, SilentReport
from flowdflash.stages.jsonl import Jsonl
from flowdflash.testing import make_records


def test_a_ledger_knows_what_is_left_and_at_which_place() -> None:
    ledger = Ledger(3, (5, 6, 9))
    left = [seq for seq in range(12) if seq not in ledger]
    assert left == [3, 4, 7, 8, 10, 11]
    assert [ledger.place(seq) for seq in left] == list(range(6))
    assert len(ledger) == 6
    assert Ledger.read({"prefix": 3, "extras": [5, 6, 9]}) == ledger


@pytest.mark.parametrize(
    "raw",
    [{}, {"prefix": 2}, {"prefix": -1, "extras": []}, {"prefix": 3, "extras": [3]}, {"prefix": 0, "extras": [5, 4]}],
)
def test_a_ledger_that_makes_no_sense_is_refused(raw: dict[str, Any]) -> None:
    with pytest.raises(ModelInvalid, match="ledger"):
        Ledger.read(raw)


def planner(skip: Ledger) -> Planner:
    pipeline = Pipeline(options={"source": {"lengths": [1 + i % 4 for i in range(21)], "epochs": 2}})
    nodes = pipeline.graph.nodes
    stages = [cls(nodes[name].config) for name, cls in
              (("source", FakeSource), ("buckets", FakeBucketer), ("order", FakeInterleaver))]  # fmt: skip
    for stage in stages:
        stage.open(OpenContext("stage", Path(), Path()))
    return Planner(*stages, PlanNames("source", "buckets", "order"), seed=7, window=4, skip=skip)  # type: ignore[arg-type]


@pytest.mark.parametrize("ledger", [Ledger(), Ledger(5), Ledger(5, (7, 12, 21)), Ledger(22)])
def test_the_plan_that_is_left_is_the_plan_without_what_was_consumed(ledger: Ledger) -> None:
    told = lambda info: (info.seq, info.epoch, info.index, info.sample_ids, info.last_of_epoch)  # noqa: E731
    whole = [told(info) for info in planner(Ledger()).batches()]
    resumed = planner(ledger)
    assert [told(info) for info in resumed.batches()] == [entry for entry in whole if entry[0] not in ledger]
    assert (resumed.batches_planned, resumed.batches_skipped) == (22 - len(ledger), len(ledger))
    assert resumed.finished and resumed.samples_taken == resumed.samples_planned == 42


def resumed(tmp_path: Path, pipeline: Pipeline, resume: Resume | None) -> Any:
    """Run a pipeline of fakes in one folder, from its beginning or from a ledger."""
    (tmp_path / "run").mkdir(exist_ok=True)
    made = RunDir.create(tmp_path / "run", "fake") if resume is None else None
    if made is None:
        (tmp_path / "run" / "pipeline.yaml").write_text("x")
        digest = hashlib.sha256(b"x").hexdigest()
        (tmp_path / "run" / "run.json").write_text(json.dumps({"name": "fake", "pipeline_sha256": digest}))
    with made or RunDir.open_existing(tmp_path / "run") as run:
        return execute(pipeline, None, run, report=pipeline.report, cache_dir=tmp_path / "cache", resume=resume)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("replicas", [1, 4])
def test_a_resumed_run_trains_on_the_rest_in_planned_order_without_a_target_forward_for_what_is_done(
    tmp_path: Path, replicas: int
) -> None:
    pipeline = Pipeline(options={"source": {"lengths": [3] * 40}, "target": {"replicas": replicas}})
    ledger = Ledger(4, (6, 7, 11))
    outcome = resumed(tmp_path, pipeline, Resume(7, ledger))
    left = [seq for seq in range(20) if seq not in ledger]
    assert [seq for _, seq, _ in pipeline.journal.of("step")] == left
    assert sorted(seq for seq, _ in pipeline.journal.of("forward")) == left
    assert (outcome.status, outcome.resumed_at_step, outcome.batches) == ("finished", 7, len(left))


@pytest.mark.timeout(20)
def test_a_run_of_which_nothing_is_left_finishes(tmp_path: Path) -> None:
    pipeline = Pipeline()
    outcome = resumed(tmp_path, pipeline, Resume(7, Ledger(7)))
    assert (outcome.status, outcome.steps, outcome.batches) == ("finished", 7, 0)
    assert pipeline.journal.of("finish") == [("drafter", "final")] and not pipeline.journal.of("forward")


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("lengths", "ledger", "text"),
    [
        ([3] * 12, Ledger(2), "7 batches then, 6 now"),
        ([4] * 14, Ledger(2), "data, or the code"),
        (None, Ledger(8), "more"),
    ],
)
def test_data_that_has_changed_since_is_refused(
    tmp_path: Path, lengths: list[int] | None, ledger: Ledger, text: str
) -> None:
    resumed(tmp_path, Pipeline(), None)
    changed = Pipeline(options={"source": {"lengths": lengths}} if lengths else {})
    with pytest.raises(StageFailed, match=text) as caught:
        resumed(tmp_path, changed, Resume(2, ledger))
    assert caught.value.stage == "source" and not changed.journal.of("forward")


@pytest.mark.timeout(20)
def test_a_source_is_asked_whether_its_data_is_what_it_was(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Stateful(FakeSource):
        def state(self) -> Any:
            return {"store_key": "k1"}

        def restore(self, state: Any) -> None:
            seen.append(state)

    resumed(tmp_path, Pipeline(classes={"source": Stateful}), None)
    resumed(tmp_path, Pipeline(classes={"source": Stateful}), Resume(1, Ledger(1)))
    assert seen == [{"store_key": "k1"}]


def save(run_dir: Path, step: int, *, run: str = "run", number: int = 1, records: Any = ()) -> Path:
    """A whole checkpoint, as the sink writes it."""
    folder = run_dir / "checkpoints" / (f"step-{step:06d}" + (f"-{number}" if number > 1 else ""))
    (folder / "draft").mkdir(parents=True)
    (folder / "draft" / "config.json").write_text(json.dumps({"step": step}))
    torch.save({"tensors": {"w": torch.full((3,), float(step))}, "state": {"steps": step}}, folder / "state.pt")
    (folder / "records.jsonl").write_text("".join(json.dumps(r.as_dict()) + "\n" for r in records))
    files = ("draft/config.json", "state.pt", "records.jsonl")
    content = {name: (folder / name).read_bytes() for name in files}
    listed = {n: {"bytes": len(c), "sha256": hashlib.sha256(c).hexdigest()} for n, c in content.items()}
    ledger = {"prefix": 2 * step, "extras": []}
    manifest = {"step": step, "epoch": 0, "reason": "every", "run": run, "ledger": ledger, "files": listed}
    (folder / "checkpoint.json").write_text(json.dumps(manifest))
    return folder


class Folder:
    """Stands for a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path, self.known_names = path, {"run"}


def found(run_dir: Path) -> tuple[Resume, list[str]]:
    report = SilentReport()
    return find_resume(Folder(run_dir), report), report.lines  # type: ignore[arg-type]


def test_the_newest_whole_checkpoint_is_taken(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        save(tmp_path, step)
    newest = save(tmp_path, 10, number=2)
    resume, lines = found(tmp_path)
    assert (resume.step, resume.ledger) == (10, Ledger(20)) and resume.newest is not None
    assert resume.newest.folder == newest and [s.step for s in resume.older] == [2, 9, 10]
    assert lines == [] and (tmp_path / "checkpoints" / "latest").read_text() == "step-000010-2\n"
    assert load_checkpoint(newest).draft_tensors["w"].tolist() == [10.0] * 3


def edit(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        manifest = json.loads((folder / "checkpoint.json").read_text())
        manifest[name] = change(manifest[name])
        (folder / "checkpoint.json").write_text(json.dumps(manifest))

    return apply


def flip(folder: Path) -> None:
    content = bytearray((folder / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "state.pt").write_bytes(bytes(content))


def link_out(folder: Path) -> None:
    elsewhere = folder.parent / "config.json"
    (folder / "draft" / "config.json").rename(elsewhere)
    (folder / "draft" / "config.json").symlink_to(elsewhere)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit flipped": (flip, "its sha256 differs"),
    "cut": (lambda f: (f / "state.pt").write_bytes(b"PK"), "has 2 bytes instead of"),
    "a file missing": (lambda f: (f / "draft" / "config.json").unlink(), "draft/config.json is missing"),
    "no manifest": (lambda f: (f / "checkpoint.json").unlink(), "cannot be read"),
    "half a manifest": (lambda f: (f / "checkpoint.json").write_text('{"step": 3, '), "cannot be read"),
    "no ledger": (edit("ledger", lambda old: None), "has no ledger"),
    "another step": (edit("step", lambda old: 7), "is that of step 7"),
    "not listed": (edit("files", lambda old: {"state.pt": old["state.pt"]}), "does not list records.jsonl"),
    "outside": (edit("files", lambda old: {**old, "../x": {}}), "outside the checkpoint"),
    "absolute": (edit("files", lambda old: {**old, "/etc/passwd": {}}), "outside the checkpoint"),
    "a link out": (link_out, "draft/config.json', which is outside the checkpoint"),
    "a name that is none": (edit("files", lambda old: {**old, "a\0b": {}}), "cannot be checked"),
    "no size": (edit("files", lambda old: {**old, "state.pt": {}}), "cannot be checked"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_taken(tmp_path: Path, name: str) -> None:
    older, newest = save(tmp_path, 2), save(tmp_path, 3)
    (tmp_path / "checkpoints" / "latest").write_text("step-000003\n")
    damaging, text = DAMAGES[name]
    damaging(newest)
    resume, lines = found(tmp_path)
    assert resume.step == 2 and resume.newest is not None and resume.newest.folder == older
    (line,) = lines
    assert text in line and "damaged-step-000003" in line and "goes on from step-000002" in line
    assert not newest.exists() and (tmp_path / "checkpoints" / "damaged-step-000003").is_dir()
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000002\n"
    save(tmp_path, 3)
    assert found(tmp_path)[0].step == 3


def test_without_a_whole_checkpoint_the_run_starts_at_its_beginning(tmp_path: Path) -> None:
    assert found(tmp_path)[0] == Resume()
    flip(save(tmp_path, 4))
    (tmp_path / "checkpoints" / ".writing-step-000006").mkdir()
    resume, lines = found(tmp_path)
    assert resume == Resume() and saved_checkpoints(tmp_path) == []
    assert "step-000006 was never completed" in lines[0] and "starts at its beginning" in lines[-1]


def test_a_checkpoint_of_another_run_is_not_taken_and_not_touched(tmp_path: Path) -> None:
    save(tmp_path, 2)
    foreign = save(tmp_path, 1000, run="other")
    resume, lines = found(tmp_path)
    assert resume.step == 2 and foreign.is_dir() and "belongs to the run 'other'" in lines[0]


def test_code_in_a_checkpoint_does_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("code from a checkpoint ran",))

    folder = save(tmp_path, 2)
    torch.save({"tensors": {}, "state": Trap()}, folder / "state.pt")
    with pytest.raises(ModelInvalid, match="cannot be read"):
        load_checkpoint(folder)


class Watching(FakeSink):
    """An evaluator that has measured steps 0 and 2 already."""

    saves = False

    def wants(self, step: int, reason: str) -> bool:
        return step not in (0, 2)


class Behind(FakeSink):
    last_step = 4


class Resumable(FakeDrafter):
    def begin(self) -> Any:
        return [Checkpoint(0, 0, "start", {}, {}, {}, {})]

    def resume(self, checkpoint: Checkpoint) -> None:
        self.config.journal.note("resume", checkpoint.step)


def test_sinks_are_given_what_a_killed_run_had_not_brought_to_them(tmp_path: Path) -> None:
    records = make_records(6)
    for step in (2, 4, 6):
        save(tmp_path, step, records=records[:step])
    config = Pipeline().graph.nodes["save"].config
    kinds: list[tuple[type, type]] = [
        (Checkpoint, Watching), (Checkpoint, FakeSink), (StepRecord, Behind), (StepRecord, FakeSink)
    ]  # fmt: skip
    outlets = [Outlet(payload, Channel("c", 100), "s", cls(config)) for payload, cls in kinds]
    pipeline = Pipeline()
    drafter = Resumable(pipeline.graph.nodes["drafter"].config)
    recent = take_up(drafter, found(tmp_path)[0], outlets)
    assert pipeline.journal.of("resume") == [(6,)] and [r.step for r in recent] == [1, 2, 3, 4, 5, 6]
    given: list[list[int]] = []
    for outlet in outlets:
        outlet.channel.finish()
        given.append([item.step for item in iter(outlet.channel.get, END)])
    assert given == [[4, 6], [], [5, 6], []]
    assert recent == tuple(records)


def test_an_evaluator_is_not_asked_about_a_checkpoint_that_it_cannot_be_given(tmp_path: Path) -> None:
    damaged, *_ = [save(tmp_path, step) for step in (2, 4, 6)]
    (damaged / "state.pt").write_bytes(b"")
    asked = set()

    class Asked(Watching):
        def wants(self, step: int, reason: str) -> bool:
            asked.add(step)
            return True

    nodes = Pipeline().graph.nodes
    outlet = Outlet(Checkpoint, Channel("c", 100), "s", Asked(nodes["save"].config))
    take_up(Resumable(nodes["drafter"].config), found(tmp_path)[0], [outlet])
    assert asked == {0, 4, 6} == outlet.held


class OnCpu(Resumable):
    on_cpu = True  # type: ignore[assignment]


@pytest.mark.timeout(60)
def test_sinks_that_wait_for_their_turn_take_what_a_killed_run_had_not_brought_to_them(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    turns, nodes = Turns(), Pipeline().graph.nodes
    outlet = Outlet(Checkpoint, Channel("c", 1), "s", Watching(nodes["save"].config))
    work = DraftWork(
        "drafter",
        OnCpu(nodes["drafter"].config),
        Channel("in", 1),
        [outlet],
        stopping=lambda: False,
        retire=lambda: None,
        recorded=lambda record: None,
        turns=turns,
        place=lambda seq: seq,
        shares=dict,
        resume=found(tmp_path)[0],
    )
    thread = threading.Thread(target=_emit, args=(work, work.begin), daemon=True)
    thread.start()
    seen = []
    while len(seen) < 3:
        item = outlet.channel.get()
        assert item is not END
        with turns.turn(lambda: None):
            seen.append(item.step)
    thread.join(10)
    assert not thread.is_alive() and seen == [1, 3, 4]


def test_a_file_of_records_is_cut_back_to_the_checkpoint_and_goes_on(tmp_path: Path) -> None:
    first = Jsonl(Jsonl.Config())
    records = make_records(6)
    first.open(OpenContext("metrics", tmp_path, tmp_path))
    for record in records[:5]:
        first.write(record)
    first.close()
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "lo')  # killed within a line
    second = Jsonl(Jsonl.Config())
    second.open(OpenContext("metrics", tmp_path, tmp_path, resumed_at_step=3))
    assert second.last_step == 3
    for record in records[3:]:
        second.write(record)
    second.close()
    assert [entry["step"] for entry in entries(path)] == [1, 2, 3, 4, 5, 6]


def test_a_cut_leaves_an_absent_file_absent_and_knows_the_last_step(tmp_path: Path) -> None:
    assert cut_back(tmp_path / "none.jsonl", 5) == 0 and not (tmp_path / "none.jsonl").exists()
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\nnot json\n{"step": "2"}\n{"step": 2, "x": 1}\n{"step": 9}\n')
    assert cut_back(path, 8) == 2 and path.read_text() == '{"step": 1}\n{"step": 2, "x": 1}\n'


def test_a_record_survives_its_way_through_a_checkpoint(tmp_path: Path) -> None:
    (record,) = make_records(1)
    assert StepRecord.from_dict(json.loads(json.dumps(record.as_dict()))) == record


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunDirUnusable, match=r"there is no pipeline\.yaml"):
        RunDir.open_existing(tmp_path)
    with RunDir.create(tmp_path / "run", "n") as run:
        run.write_pipeline("version: 1\n")
        run.write_provenance(pipeline_text="version: 1\n", seed=1)
        with pytest.raises(RunDirUnusable, match="another run is using it"):
            RunDir.open_existing(tmp_path / "run")
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    with RunDir.open_existing(moved) as run:
        assert (run.name, run.known_names) == ("n", {"run", "moved"})
        (moved / "outcome.json").write_text("{}")
        assert run.note_resume(4) == [] and run.note_resume(6) == []
        assert [entry["step"] for entry in run.provenance()["resumed"]] == [4, 6]
        assert not (moved / "outcome.json").exists()
    (moved / "pipeline.yaml").write_text("version: 1\nseed: 3\n")
    with pytest.raises(RunDirUnusable, match="has been changed since the run began"):
        RunDir.open_existing(moved)


def test_other_versions_of_packages_are_told(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", "n") as run:
        run.write_provenance(pipeline_text="", seed=1)
        record = run.provenance()
        record["versions"]["torch"] = "0.1"
        (run.path / "run.json").write_text(json.dumps(record))
        (line,) = run.note_resume(1)
        assert line.startswith("torch 0.1, now ")


def test_a_whole_checkpoint_has_no_damage(tmp_path: Path) -> None:
    save(tmp_path, 2)
    assert [damage(saved) for saved in saved_checkpoints(tmp_path)] == [""]
