"""Stages and hooks that do what they must not: the run ends soon, or goes on, and says who it was."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from runtime_fakes import (
    FakeBucketer,
    FakeInterleaver,
    FakePull,
    FakeSink,
    FakeSource,
    FakeTarget,
    Pipeline,
    in_thread,
    threads_left,
)

from flowdflash.cli.console import _signals
from flowdflash.errors import PluginBroken, StageFailed
from flowdflash.plugin import hookimpl
from flowdflash.plugin.loader import Plugins
from flowdflash.runtime.outcome import RunOutcome
from flowdflash.runtime.stop import StopRequest
from flowdflash.stage import Stage

pytestmark = pytest.mark.timeout(20)


def instead(base: type[Stage], **methods: Any) -> type[Stage]:
    """A stage that returns what it is told to in place of what it should."""
    bodies = {name: (lambda self, *_, made=made: made) for name, made in methods.items()}
    return type("Odd", (base,), {"type": "odd", "__doc__": "Odd.", **bodies})


ONES = np.ones(3, bool)


@pytest.mark.parametrize(
    ("stage", "cls", "text"),
    [
        ("source", instead(FakeSource, epochs=None), "TypeError"),
        ("source", instead(FakeSource, tokens=None), "TypeError"),
        ("source", instead(FakeSource, tokens=(np.ones((3, 1), int), ONES)), r"must be \[n\] and \[n\]"),
        ("source", instead(FakeSource, tokens=(np.ones(3), ONES)), "must be integers, got float64"),
        ("source", instead(FakeSource, tokens=(np.ones(4, int), np.ones(4, bool))), "announced 3 tokens and gave 4"),
        ("source", instead(FakeSource, tokens=(np.ones(3, int), ~ONES)), "announced 3 supervised tokens and gave 0"),
        ("buckets", instead(FakeBucketer, batches=None), "TypeError"),
        ("order", instead(FakeInterleaver, order=None), "TypeError"),
        ("order", instead(FakeInterleaver, order=["a"] * 7), "must give integers"),
        ("dispatch", instead(FakePull, route="a"), "TypeError"),
        ("metrics", instead(FakeSink, summary=[1, 2]), "TypeError"),
        ("source", instead(FakeSource, summary=None), "TypeError"),
    ],
)
def test_a_stage_that_returns_nonsense_is_named(tmp_path: Path, stage: str, cls: type[Stage], text: str) -> None:
    with pytest.raises(StageFailed, match=text) as caught:
        Pipeline(classes={stage: cls}).run(tmp_path)
    assert caught.value.stage == stage and threads_left() == []


def stuck_run(tmp_path: Path, base: type[Stage], method: str, stage: str) -> tuple[RunOutcome, Pipeline]:
    """What a run comes to in which a method never returns, and a person asks twice to stop."""
    stuck, release = threading.Event(), threading.Event()

    def block(self: Any, *_: Any) -> None:
        stuck.set()
        release.wait(15)

    cls = type("Stuck", (base,), {"type": "stuck", "__doc__": "Stuck.", method: block})
    pipeline, stop = Pipeline(classes={stage: cls}), StopRequest()
    thread, result = in_thread(lambda: pipeline.run(tmp_path, stop=stop, grace_secs=0.3))
    assert stuck.wait(10)
    stop.request()
    stop.request()
    thread.join(10)
    ended = list(result)
    left = [t for t in threading.enumerate() if t.name.startswith("flowdflash-")]
    release.set()
    for other in left:
        other.join(10)
    assert ended, "the run waits for a stage that does not return"
    assert isinstance(ended[0], RunOutcome), ended
    return ended[0], pipeline


@pytest.mark.parametrize(
    ("base", "method", "stage"),
    [
        (FakePull, "route", "dispatch"),
        (FakeSink, "write", "metrics"),
        (FakeBucketer, "batches", "buckets"),
        (FakeSource, "open", "source"),
        (FakeTarget, "open", "target"),
        (FakeTarget, "summary", "target"),
        (FakeSink, "close", "metrics"),
    ],
)
def test_a_stage_that_never_returns_is_left_behind_and_named(
    tmp_path: Path, base: type[Stage], method: str, stage: str
) -> None:
    outcome, pipeline = stuck_run(tmp_path, base, method, stage)
    thread = {"buckets": "order", "source": "order"}.get(stage, stage)
    assert outcome.status == "interrupted" and outcome.aborted
    assert any(thread in line and "is stuck in a call" in line for line in pipeline.report.lines), pipeline.report.lines


def test_a_summary_that_exits_fails_the_run_and_every_stage_closes(tmp_path: Path) -> None:
    def leave(self: Any) -> None:
        raise SystemExit(3)

    pipeline = Pipeline(classes={"target": type("Leaving", (FakeTarget,), {"type": "leaving", "summary": leave})})
    with pytest.raises(StageFailed, match="SystemExit") as caught:
        pipeline.run(tmp_path)
    assert (caught.value.stage, caught.value.phase) == ("target", "close")
    assert len(pipeline.journal.of("close")) == 8 and threads_left() == []


class Hanging:
    """Stands for a plugin whose hook at the start of a run does not return."""

    def __init__(self) -> None:
        self.called = threading.Event()

    def notify(self, name: str, /, **arguments: Any) -> list[str]:
        if name == "flowdflash_run_started":
            self.called.set()
            for _ in range(150):  # in pieces: a signal that comes just before a wait wakes nobody
                threading.Event().wait(0.1)
        return []


def test_ctrl_c_a_third_time_leaves_a_hook_that_does_not_return(tmp_path: Path) -> None:
    heard, plugin = threading.Semaphore(0), Hanging()

    class Heard(StopRequest):
        def request(self) -> None:
            super().request()
            heard.release()

    def interrupt() -> None:
        assert plugin.called.wait(10)
        for _ in range(3):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]
            heard.acquire(timeout=10)

    stop = Heard()
    thread, _ = in_thread(interrupt)
    with _signals(stop), pytest.raises(KeyboardInterrupt):
        Pipeline().run(tmp_path, plugins=plugin, stop=stop)
    heard.release()
    thread.join(10)
    assert not thread.is_alive() and threads_left() == []


class InPieces(FakeSink):
    def write(self, item: Any) -> Any:
        yield


def test_a_sink_that_would_save_in_pieces_is_told_of_and_saves_nothing_in_silence(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match=r"save.*write\(\) of a checkpoint must not be a generator"):
        Pipeline(classes={"save": InPieces}).run(tmp_path)


OBSERVERS: dict[str, Callable[..., Any]] = {
    "flowdflash_run_started": lambda run: 1 / 0,
    "flowdflash_step": lambda record: 1 / 0,
    "flowdflash_checkpoint_saved": lambda checkpoint: 1 / 0,
    "flowdflash_run_finished": lambda run, outcome: 1 / 0,
}


def test_an_observer_that_raises_in_every_hook_is_told_of_once_per_hook_and_changes_nothing(tmp_path: Path) -> None:
    for name, function in OBSERVERS.items():
        function.__name__ = name
    plugins = Plugins()
    plugins.load_module(
        SimpleNamespace(__name__="clumsy", **{n: hookimpl(f) for n, f in OBSERVERS.items()})  # type: ignore[arg-type]
    )
    plain, watched = Pipeline(), Pipeline()
    plain.run(tmp_path / "plain")
    outcome = watched.run(tmp_path / "watched", plugins=plugins)
    assert outcome.status == "finished" and watched.losses() == plain.losses()
    told = [line for line in watched.report.lines if "clumsy" in line]
    assert [sum(name in line for line in told) for name in OBSERVERS] == [1, 1, 1, 1] and len(told) == 4


@pytest.mark.parametrize("fault", [lambda graph: 3, lambda graph: (_ for _ in "ab"), lambda graph: ["text"]])
def test_a_check_that_returns_nonsense_is_a_problem(fault: Any) -> None:
    plugins = Plugins()
    plugins.load_module(SimpleNamespace(__name__="clumsy", flowdflash_check=named("flowdflash_check", fault)))  # type: ignore[arg-type]
    (problem,) = plugins.check(None)  # type: ignore[arg-type]
    assert "'clumsy'" in problem.message and "flowdflash_check failed" in problem.message


def test_a_check_that_exits_is_a_problem_and_does_not_end_the_program() -> None:
    def leave(graph: Any) -> None:
        raise SystemExit(3)

    plugins = Plugins()
    plugins.load_module(SimpleNamespace(__name__="clumsy", flowdflash_check=named("flowdflash_check", leave)))  # type: ignore[arg-type]
    (problem,) = plugins.check(None)  # type: ignore[arg-type]
    assert "SystemExit" in problem.message


def named(hook: str, function: Any) -> Any:
    function.__name__ = hook
    return hookimpl(function)


def writes_to(column: str) -> Callable[[Any], None]:
    def spoil(table: Any) -> None:
        target = table.samples if column == "samples.lengths" else table
        getattr(target, column.rpartition(".")[2])[0] = 7

    return spoil


@pytest.mark.parametrize("column", ["ids", "lengths", "supervised"])
def test_a_bucketer_cannot_write_to_what_it_is_given(tmp_path: Path, column: str) -> None:
    class Spoiler(FakeBucketer):
        def batches(self, samples: Any, rng: Any) -> Any:
            writes_to(column)(samples)
            return super().batches(samples, rng)

    with pytest.raises(StageFailed, match="read-only") as caught:
        Pipeline(classes={"buckets": Spoiler}).run(tmp_path)
    assert caught.value.stage == "buckets"


@pytest.mark.parametrize("column", ["bucket", "cost", "members", "samples.lengths"])
def test_an_interleaver_cannot_write_to_what_it_is_given(tmp_path: Path, column: str) -> None:
    class Spoiler(FakeInterleaver):
        def order(self, batches: Any, history: Any, rng: Any) -> Any:
            writes_to(column)(batches)
            return range(len(batches))

    with pytest.raises(StageFailed, match="read-only") as caught:
        Pipeline(classes={"order": Spoiler}).run(tmp_path)
    assert caught.value.stage == "order"


def test_a_source_may_go_on_writing_to_what_it_has_given(tmp_path: Path) -> None:
    class Reuses(FakeSource):
        def epochs(self) -> Any:
            for table in super().epochs():
                yield table
                table.lengths[:] = table.lengths

    pipeline = Pipeline(classes={"source": Reuses})
    assert pipeline.run(tmp_path).status == "finished"


def test_what_breaks_a_contract_carries_the_name_of_its_type(tmp_path: Path) -> None:
    with pytest.raises(StageFailed) as caught:
        Pipeline(classes={"order": instead(FakeInterleaver, order=[0, 0])}).run(tmp_path)
    assert isinstance(caught.value.cause, PluginBroken) and caught.value.cause.plugin == "odd"
