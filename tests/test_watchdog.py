"""The watchdog: says where a run is stuck, once per stall, and lets it go on."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_fakes import FakeSink, FakeSource, Pipeline, threads_left

from flowdflash.runtime.channel import Channel
from flowdflash.runtime.meter import WorkerMeter
from flowdflash.runtime.watchdog import Watchdog
from flowdflash.stage import SilentReport

pytestmark = pytest.mark.timeout(20)


class Listening(SilentReport):
    """Lets a stage go on once a line has been told that holds all of the texts."""

    def __init__(self, *texts: str) -> None:
        super().__init__()
        self.texts, self.told, self.found = texts, threading.Event(), ""

    def warn(self, text: str) -> None:
        super().warn(text)
        if all(wanted in text for wanted in self.texts):
            self.found = text
            self.told.set()


def test_a_stuck_drafter_is_named_with_the_edge_that_it_does_not_read(tmp_path: Path) -> None:
    report = Listening("stuck: drafter[0] takes nothing from edge target->drafter, where 2 of 2 wait")

    def block(batch: Any) -> None:
        if batch.info.seq == 2:
            assert report.told.wait(15)

    pipeline = Pipeline(options={"drafter": {"before": block}}, report=report, stall_secs=0.05)
    assert pipeline.run(tmp_path).steps == 7, "it went on"
    assert "nothing has moved for" in report.found
    assert "stage target[0]: blocked on output" in report.found and "stage drafter[0]: at work" in report.found
    assert "stage metrics[0]: waiting for input, 2 items taken" in report.found
    assert "edge target->drafter: 2 of 2 items wait" in report.found
    stack = report.found.split("thread flowdflash-drafter[0]:")[1].split("thread flowdflash")[0]
    assert "in block" in stack, "where it is stuck"
    assert threads_left() == []


def test_a_stuck_source_is_named_with_the_edge_that_it_does_not_feed(tmp_path: Path) -> None:
    report = Listening("stuck: order[0] puts nothing on edge order->dispatch", "stage drafter[0]: waiting for input")

    class Slow(FakeSource):
        streaming = True

        def epochs(self) -> Any:
            yield from super().epochs()
            assert report.told.wait(15)

    pipeline = Pipeline(classes={"source": Slow}, report=report, stall_secs=0.05)
    assert pipeline.run(tmp_path).steps == 7


def test_a_sink_that_does_not_close_is_told_of_with_its_stack(tmp_path: Path) -> None:
    report = Listening("nothing has moved for", "thread flowdflash-metrics[0]:", "in flush_for_long")

    class Slow(FakeSink):
        def close(self) -> None:
            super().close()
            self.flush_for_long()

        def flush_for_long(self) -> None:
            assert report.told.wait(15)

    pipeline = Pipeline(classes={"metrics": Slow}, report=report, stall_secs=0.05)
    assert pipeline.run(tmp_path).status == "finished"


def test_a_run_that_moves_is_left_alone(tmp_path: Path) -> None:
    pipeline = Pipeline(stall_secs=15)
    pipeline.run(tmp_path)
    assert pipeline.report.lines == []


def watchdog(stall_secs: float = 10.0, **meter: Any) -> tuple[Watchdog, WorkerMeter, SilentReport, list[float]]:
    """Over one stage that reads one edge, which holds an item; and its clock."""
    now, report = [100.0], SilentReport()
    work = SimpleNamespace(stage="late", replica=0, meter=WorkerMeter(**meter))
    channel: Channel[str] = Channel("early->late", 4)
    channel.put("item")
    node = SimpleNamespace(inputs=[SimpleNamespace(name="early->late")])
    graph = SimpleNamespace(nodes={"late": node}, outputs=lambda name: ())
    workers = [SimpleNamespace(work=work, name="late[0]")]
    wiring: Any = SimpleNamespace(workers=workers, channels={"early->late": [channel]}, graph=graph)
    return Watchdog(wiring, report, stall_secs, clock=lambda: now[0]), work.meter, report, now


def test_it_looks_again_no_sooner_than_a_stall_can_be_over_and_tells_of_each_stall_once() -> None:
    dog, meter, report, now = watchdog()
    assert dog.look() == 10.0
    now[0], meter.moved_at = 108.0, 105.0
    assert dog.look() == 7.0 and report.lines == []
    now[0] = 115.0
    assert dog.look() == 10.0 and len(report.lines) == 1
    now[0] = 500.0
    assert dog.look() == 10.0 and len(report.lines) == 1, "the same stall"
    meter.moved_at = 501.0
    now[0] = 502.0
    assert dog.look() == 9.0
    now[0] = 511.0
    dog.look()
    assert len(report.lines) == 2 and "moved for 10 s" in report.lines[1]


def test_time_before_the_run_does_not_count() -> None:
    dog, _, report, now = watchdog()
    now[0] = 1000.0
    dog.start()
    assert dog.look() == 10.0 and report.lines == []


def test_items_that_no_stage_at_work_could_take_are_told() -> None:
    dog, _, report, now = watchdog(state="waiting for input")
    now[0] = 120.0
    dog.look()
    assert "late[0] waits although edge early->late holds 1 of 4; no stage is at work" in report.lines[0]


def test_zero_turns_it_off() -> None:
    dog, _, report, now = watchdog(stall_secs=0)
    now[0] = 1e9
    assert dog.look() is None and report.lines == []
