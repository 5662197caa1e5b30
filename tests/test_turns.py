"""Stages that compute on the CPU take turns."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_fakes import FakeDrafter, FakeSink, FakeTarget, Pipeline

from flowdflash.runtime.channel import ChannelAborted
from flowdflash.runtime.stop import StopRequest
from flowdflash.runtime.turns import Turns


@pytest.mark.timeout(20)
def test_one_at_a_time_and_first_come_first_served() -> None:
    turns, served, inside, most = Turns(), [], 0, 0
    queued = [threading.Event() for _ in range(4)]

    def work(number: int) -> None:
        nonlocal inside, most
        with turns.turn(lambda: None):
            inside += 1
            most = max(most, inside)
            served.append(number)
            inside -= 1

    with turns.turn(lambda: None):
        threads = []
        for number in range(4):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            while len(turns._waiting) <= number:  # a thread is in the queue before the next one starts
                queued[number].wait(0.001)
        assert served == []
    for thread in threads:
        thread.join()
    assert served == [0, 1, 2, 3] and most == 1


@pytest.mark.timeout(20)
def test_a_failure_elsewhere_wakes_whoever_waits() -> None:
    turns, raised = Turns(), []

    def work() -> None:
        try:
            with turns.turn(lambda: None):
                raise AssertionError("the turn is not free")
        except ChannelAborted as error:
            raised.append(error.error)

    with turns.turn(lambda: None):
        thread = threading.Thread(target=work)
        thread.start()
        while not turns._waiting:
            threading.Event().wait(0.001)
        fault = RuntimeError("elsewhere")
        turns.abort(fault)
        thread.join()
    assert raised == [fault]


@pytest.mark.timeout(20)
def test_an_error_inside_gives_the_turn_back() -> None:
    turns = Turns()
    with pytest.raises(ValueError), turns.turn(lambda: None):
        raise ValueError
    with turns.turn(lambda: None):
        pass


class OnCpuTarget(FakeTarget):
    on_cpu = True  # type: ignore[assignment]


class OnCpuDrafter(FakeDrafter):
    on_cpu = True  # type: ignore[assignment]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("on_cpu", [True, False])
def test_target_and_drafter_compute_at_once_only_if_one_is_not_on_the_cpu(tmp_path: Path, on_cpu: bool) -> None:
    """The drafter holds its first batch until the target starts another, which never happens if they take turns."""
    inside, together, second = set(), [], threading.Event()
    calls = {"target": 0}

    def forward(replica: int, batch: object) -> None:
        calls["target"] += 1
        inside.add("target")
        together.append(set(inside))
        if calls["target"] > 1 and "drafter" in inside:
            second.set()
        inside.discard("target")

    def step(batch: object) -> None:
        inside.add("drafter")
        if not on_cpu:
            assert second.wait(10)
        together.append(set(inside))
        inside.discard("drafter")

    classes = {"target": OnCpuTarget, "drafter": OnCpuDrafter} if on_cpu else {}
    flow = Pipeline(classes=classes, options={"target": {"before": forward}, "drafter": {"before": step}})
    assert flow.run(tmp_path).status == "finished"
    assert ({"target", "drafter"} in together) is not on_cpu


class PatientSink(FakeSink):
    """Writes its first record in pieces, until the drafter has come on or the run is to stop."""

    on_cpu = True  # type: ignore[assignment]

    def open(self, ctx: Any) -> None:
        super().open(ctx)
        self.ctx = ctx

    def write(self, item: Any) -> Iterator[None]:  # type: ignore[override]
        while not (self.config.enough() or self.ctx.stopping()):
            yield
        super().write(item)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("stops", [False, True])
def test_what_is_written_in_pieces_holds_up_neither_training_nor_a_stop(tmp_path: Path, stops: bool) -> None:
    """The sink waits for a later step, or for the stop asked for there: with the turn held it would wait for ever."""
    steps, stop = [], StopRequest()

    def step(batch: object) -> None:
        steps.append(batch)
        if stops and len(steps) == 3:
            stop.request()

    flow = Pipeline(
        classes={"target": OnCpuTarget, "drafter": OnCpuDrafter, "metrics": PatientSink},
        options={"drafter": {"before": step}, "metrics": {"enough": lambda: not stops and len(steps) >= 3}},
    )
    outcome = flow.run(tmp_path, stop=stop)
    assert outcome.status == ("interrupted" if stops else "finished")
    assert len(flow.losses()) == outcome.steps >= 3
