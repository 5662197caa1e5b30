"""The one loop, and the thread around it."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from flowdflash.errors import StageFailed
from flowdflash.items import BatchInfo
from flowdflash.runtime.channel import END, ChannelAborted
from flowdflash.runtime.worker import Opening, Work, Worker, pump
from flowdflash.runtime.works import _gradients_off
from flowdflash.stage import OpenContext, Stage

pytestmark = pytest.mark.timeout(20)


class Item:
    def __init__(self, seq: int) -> None:
        self.info = BatchInfo(seq, 0, seq, 0, (seq, seq + 100), (1, 1), (1, 1), 2, 2, 2.0)


class Doubler(Work):
    """Puts out each number twice."""

    def __init__(self, items: Iterable[Any]) -> None:
        super().__init__("doubler", 1)
        self.items, self.out, self.left = iter(items), [], False

    def get(self) -> Any:
        return next(self.items, END)

    def process(self, item: Any) -> Any:
        yield item
        yield item

    def put(self, output: Any) -> bool:
        self.out.append(output)
        return True

    def leave(self) -> None:
        self.left = True


def test_the_loop_takes_processes_and_passes_on() -> None:
    work = Doubler([1, 2])
    pump(work)
    assert work.out == [1, 1, 2, 2] and work.left
    assert (work.meter.taken, work.meter.passed) == (2, 2)


def test_outputs_before_and_after_the_items() -> None:
    work = Doubler([1])
    work.begin = lambda: ["first"]  # type: ignore[method-assign]
    work.finish = lambda: ["last"]  # type: ignore[method-assign]
    pump(work)
    assert work.out == ["first", 1, 1, "last"]


def test_items_that_nobody_wants_are_counted() -> None:
    work = Doubler([1, 2, 3])
    work.put = lambda output: False  # type: ignore[method-assign]
    pump(work)
    assert work.meter.dropped == {"no stage wanted it any more": 3} and work.meter.passed == 0


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(2), KeyboardInterrupt()])
def test_whatever_is_raised_becomes_a_failure_with_its_batch(error: BaseException) -> None:
    work = Doubler([Item(4)])

    def process(item: Any) -> Any:
        raise error

    work.process = process  # type: ignore[method-assign]
    with pytest.raises(StageFailed) as caught:
        pump(work)
    failure = caught.value
    assert (failure.stage, failure.replica, failure.batch, failure.sample_ids) == ("doubler", 1, 4, (4, 104))
    assert failure.cause is error and not work.left


def test_a_failure_elsewhere_passes_through_unchanged() -> None:
    work, error = Doubler([]), ChannelAborted(ValueError("elsewhere"))

    def get() -> Any:
        raise error

    work.get = get  # type: ignore[method-assign]
    with pytest.raises(ChannelAborted) as caught:
        pump(work)
    assert caught.value is error


def test_a_failure_in_an_output_generator_keeps_what_came_before() -> None:
    work = Doubler([Item(1)])

    def process(item: Any) -> Any:
        yield "kept"
        raise ValueError("boom")

    work.process = process  # type: ignore[method-assign]
    with pytest.raises(StageFailed, match="boom"):
        pump(work)
    assert work.out == ["kept"]


def test_no_batch_is_kept_alive_while_the_next_is_awaited() -> None:
    seen: list[Any] = []

    class Watching(Doubler):
        def get(self) -> Any:
            gc.collect()
            if seen:
                assert seen[-1]() is None
            item = super().get()
            if item is not END:
                seen.append(weakref.ref(item))
            return item

        def process(self, item: Any) -> Any:
            return ()

    pump(Watching(Item(i) for i in range(3)))
    assert len(seen) == 3


class Life(Stage):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.threads: list[str] = []

    def open(self, ctx: OpenContext) -> None:
        self.threads.append(threading.current_thread().name)
        if self.config == "open":
            raise OSError("no device")

    def close(self) -> None:
        self.threads.append(threading.current_thread().name)
        if self.config == "close":
            raise OSError("disk full")


def test_a_thread_opens_and_closes_what_it_tried_once() -> None:
    replies: SimpleQueue[Any] = SimpleQueue()
    stages = [Life(""), Life("open"), Life("")]
    worker = Worker(Doubler([]), [(str(i), s) for i, s in enumerate(stages)], replies, feeds=False)
    openings = [Opening(s, OpenContext(str(i), Path(), Path())) for i, s in enumerate(stages)]
    worker.tell("open", lambda: worker.open(openings))
    reply = replies.get(timeout=5)
    assert reply.phase == "open" and (reply.error.stage, reply.error.phase) == ("1", "open")
    failures: list[StageFailed] = []
    for _ in range(2):
        worker.tell("close", lambda: worker.close(failures.append))
        assert replies.get(timeout=5).error is None
    worker.dismiss()
    worker.join()
    assert [len(s.threads) for s in stages] == [2, 2, 0] and failures == []
    assert {name for s in stages for name in s.threads} == {"flowdflash-doubler[1]"}


def test_a_failed_close_is_told_and_the_others_close() -> None:
    replies: SimpleQueue[Any] = SimpleQueue()
    stages = [Life(""), Life("close")]
    worker = Worker(Doubler([]), [(str(i), s) for i, s in enumerate(stages)], replies, feeds=False)
    failures: list[StageFailed] = []
    openings = [Opening(s, OpenContext(str(i), Path(), Path())) for i, s in enumerate(stages)]
    worker.tell("open", lambda: worker.open(openings))
    worker.tell("close", lambda: worker.close(failures.append))
    worker.dismiss()
    worker.join()
    assert [(f.stage, f.phase) for f in failures] == [("1", "close")] and len(stages[0].threads) == 2


def test_gradients_are_off_around_a_target_if_torch_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"on": True}

    class NoGrad:
        def __enter__(self) -> None:
            state["on"] = False

        def __exit__(self, *_: Any) -> None:
            state["on"] = True

    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(no_grad=NoGrad))
    with _gradients_off():
        assert not state["on"]
    assert state["on"]
    monkeypatch.delitem(sys.modules, "torch")
    with _gradients_off():
        assert "torch" not in sys.modules
