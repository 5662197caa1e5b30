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
from flowdflash.cli.report_text import outcome_text, plan_text, step_text
from flowdflash.items import StepRecord

if TYPE_CHECKING:
    from flowdflash.config.check import Pipeline
    from flowdflash.plugin.loader import Plugins
    from flowdflash.runtime.stop import StopRequest

INTERVAL_SECS = 10.0
"""Between two lines about the same thing where there is no terminal."""


class ConsoleReport:
    """Tells a person on stderr: bars on a terminal, a line per interval elsewhere. Safe to call from any thread."""

    def __init__(self, interval_secs: float = INTERVAL_SECS) -> None:
        self._interval_secs = interval_secs
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
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def info(self, text: str) -> None:
        """One line."""
        with self._lock:
            if self._bars is not None:
                self._bars.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """One line that a person should see."""
        self.info(f"warning: {text}")

    def progress(self, what: str, done: int, total: int, note: str = "") -> None:
        """Long work: a bar, or a line per interval; the first and the last call are always shown."""
        if self._bars is not None:
            with self._lock:
                if what not in self._tasks:
                    self._tasks[what] = self._bars.add_task(what, total=total)
                self._bars.update(self._tasks[what], completed=done, total=total, description=f"{what} {note}".rstrip())
            return
        now = time.monotonic()
        with self._lock:
            due = what not in self._last or done >= total or now - self._last[what] >= self._interval_secs
            if due:
                self._last[what] = now
        if due:
            self.info(f"{what}: {done:,} of {total:,}{'  ' + note if note else ''}")


class _Watch:
    """Passes hooks on to the plugins, and shows each optimizer step."""

    def __init__(self, plugins: Plugins, report: ConsoleReport) -> None:
        self._plugins, self._report = plugins, report
        self.total_steps = 0

    def notify(self, hook: str, **arguments: Any) -> list[str]:
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
    from flowdflash.runtime.executor import execute
    from flowdflash.runtime.rundir import RunDir
    from flowdflash.runtime.stop import StopRequest

    stop, watch = StopRequest(), _Watch(plugins, report)

    def on_plan(plan: Any) -> None:
        watch.total_steps = sum(epoch.steps(plan.window) for epoch in plan.epochs)
        report.info(plan_text(plan))

    with RunDir.create(run_dir, pipeline.name) as run, _signals(stop) as received:
        run.write_pipeline(pipeline.text)
        run.write_provenance(
            pipeline_text=pipeline.text, seed=pipeline.seed, pipeline_folder=pipeline.path.resolve().parent
        )
        report.info(f"run folder: {run.path}")
        outcome = execute(pipeline, watch, run, report=report, stop=stop, cache_dir=cache_dir(), on_plan=on_plan)
        say(outcome_text(outcome, run.path))
    if outcome.status == "interrupted":
        return 128 + (received[0] if received else signal.SIGINT)
    return 0


@contextmanager
def _signals(stop: StopRequest) -> Iterator[list[int]]:
    """Turn SIGINT and SIGTERM into requests to stop; gives the list of signals received."""
    received: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        received.append(number)
        stop.request()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
