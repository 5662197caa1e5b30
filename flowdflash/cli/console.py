"""What a person sees of a run: live progress, the plan before it, the account after it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Self

from flowdflash.cache import cache_dir
from flowdflash.cli.report_text import outcome_text, plan_text, resume_text, step_text
from flowdflash.errors import StageFailed
from flowdflash.items import Checkpoint, StepRecord
from flowdflash.secrets import hidden
from flowdflash.stage import Sink

if TYPE_CHECKING:
    from flowdflash.config.check import Pipeline
    from flowdflash.plugin.loader import Plugins
    from flowdflash.runtime.resume import Resume
    from flowdflash.runtime.rundir import RunDir
    from flowdflash.runtime.stop import StopRequest

INTERVAL_SECS = 10.0
"""Between two lines about the same thing where there is no terminal."""


class ConsoleReport:
    """Tells a person on stderr: bars on a terminal, a line per interval elsewhere. Safe to call from any thread."""

    def __init__(self, interval_secs: float = INTERVAL_SECS, clock: Callable[[], float] = time.monotonic) -> None:
        self._interval_secs, self._clock = interval_secs, clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bars = Progress(*columns, console=Console(stderr=True))
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._bars is not None:
                self._bars.stop()
                self._bars = None

    def info(self, text: str) -> None:
        """One line."""
        with self._lock:
            self._say(text)

    def _say(self, text: str) -> None:
        text = hidden(text)
        if self._bars is not None:
            # As it is: nothing in it is markup, and a table that is wider than the terminal keeps its lines.
            self._bars.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """One line that a person should see."""
        self.info(f"warning: {text}")

    def progress(self, what: str, done: int, total: int, note: str = "") -> None:
        """Long work: a bar, or a line per interval; the first and the last call are always shown."""
        with self._lock:
            if self._bars is not None:
                if what not in self._tasks:
                    self._tasks[what] = self._bars.add_task(what, total=total)
                self._bars.update(self._tasks[what], completed=done, total=total, description=f"{what} {note}".rstrip())
                return
            now = self._clock()
            if what not in self._last or done >= total or now - self._last[what] >= self._interval_secs:
                self._last[what] = now
                self._say(f"{what}: {done:,} of {total:,}{'  ' + note if note else ''}")


class _Watch:
    """Passes hooks on to the plugins, and shows each optimizer step."""

    def __init__(self, plugins: Plugins, report: ConsoleReport) -> None:
        self._plugins, self._report = plugins, report
        self.total_steps = 0

    def notify(self, hook: str, /, **arguments: Any) -> list[str]:
        """As ``Plugins.notify``."""
        record = arguments.get("record")
        if hook == "flowdflash_step" and isinstance(record, StepRecord):
            self._report.progress("training", record.step, max(self.total_steps, record.step), step_text(record))
        return self._plugins.notify(hook, **arguments)


def run_pipeline(
    pipeline: Pipeline, plugins: Plugins, run_dir: Path | None, report: ConsoleReport, *, say: Callable[[str], None]
) -> int:
    """Run a pipeline, showing the plan, the progress and the account; returns the exit code.

    Raises:
        FlowdflashError: the run failed, or its folder cannot be used.
    """
    from flowdflash.runtime.rundir import RunDir

    with RunDir.create(run_dir, pipeline.name) as run:
        run.write_pipeline(pipeline.text)
        run.write_provenance(
            pipeline_text=pipeline.text, seed=pipeline.seed, pipeline_folder=pipeline.path.resolve().parent
        )
        report.info(f"run folder: {run.path}")
        return carry_out(pipeline, plugins, run, report, say=say)


def carry_out(
    pipeline: Pipeline,
    plugins: Plugins,
    run: RunDir,
    report: ConsoleReport,
    *,
    say: Callable[[str], None],
    resume: Resume | None = None,
) -> int:
    """Run a pipeline in its folder, from the beginning or from where it was left; returns the exit code.

    Raises:
        FlowdflashError: the run failed.
    """
    from flowdflash.runtime.executor import execute
    from flowdflash.runtime.stop import StopRequest

    stop, watch = StopRequest(), _Watch(plugins, report)
    resumable, drafters = is_resumable(pipeline), pipeline.graph.of_kind("drafter")

    def on_plan(plan: Any) -> None:
        watch.total_steps = _steps_wanted(plan, pipeline)
        report.info(plan_text(plan))

    with _signals(stop) as received:
        try:
            outcome = execute(
                pipeline, watch, run, report=report, stop=stop, cache_dir=cache_dir(), on_plan=on_plan, resume=resume
            )
        except StageFailed as error:
            if resumable and (not drafters or (run.path / "checkpoints" / "latest").is_file()):
                error.add_note(resume_text(run.path))
            raise
        say(outcome_text(outcome, run.path))
    if outcome.status == "interrupted":
        if resumable:
            say(resume_text(run.path))
        return 128 + (received[0] if received else signal.SIGINT)
    return 0


def is_resumable(pipeline: Pipeline) -> bool:
    """A run of it leaves checkpoints to go on from; or, where nothing is trained, sinks that know what they have."""
    drafters = pipeline.graph.of_kind("drafter")
    sinks = [node.cls for node in pipeline.graph.of_kind("sink")]
    if not drafters:
        return bool(sinks) and all(getattr(cls, "batches_done", None) is not Sink.batches_done for cls in sinks)
    return len(drafters) == 1 and any(Checkpoint in cls.reads and getattr(cls, "saves", False) for cls in sinks)


def _steps_wanted(plan: Any, pipeline: Pipeline) -> int:
    """Optimizer steps of the plan, or as many of them as the drafter wants."""
    planned: int = plan.steps()
    drafters = pipeline.graph.of_kind("drafter")
    limit: int = getattr(drafters[0].config, "max_steps", 0) if drafters else 0
    return min(planned, limit) if limit else planned


@contextmanager
def _signals(stop: StopRequest) -> Iterator[list[int]]:
    """Turn SIGINT and SIGTERM into requests to stop; gives the list of signals received."""
    received: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.urgent:
            raise KeyboardInterrupt  # this thread itself does not return, from a hook of a plugin
        received.append(number)
        stop.request()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
