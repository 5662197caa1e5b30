"""Runs a pipeline: open in order, start, watch, stop, close, account for everything."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from flowdflash.cache import cache_dir as user_cache_dir
from flowdflash.errors import StageFailed
from flowdflash.graph import Checked, Node
from flowdflash.runtime.crew import Crew
from flowdflash.runtime.draft_shape import DraftShape
from flowdflash.runtime.ledger import Ledger
from flowdflash.runtime.observers import Notifier, Observers
from flowdflash.runtime.outcome import RunOutcome, build_outcome, check_books, summary_name
from flowdflash.runtime.plan import window_of
from flowdflash.runtime.planner import Plan, blamed_on, plan_epochs, summarise
from flowdflash.runtime.probe import measured
from flowdflash.runtime.resume import Resume, keep_plan, made_from, restore_planning
from flowdflash.runtime.rundir import RunDir
from flowdflash.runtime.stop import StopRequest
from flowdflash.runtime.watchdog import Watchdog
from flowdflash.runtime.wiring import PLANNING, Wiring, replicas_of
from flowdflash.runtime.worker import Opening, Reply, Worker, pump
from flowdflash.runtime.works import DraftWork, SinkWork
from flowdflash.stage import OpenContext, PlanSummary, Report, Vocabulary

__all__ = ["GRACE_SECS", "RunOutcome", "StopRequest", "execute"]

GRACE_SECS = 3.0
"""How long a thread may go on after a failure, or a feeding thread after everything else has ended."""


def execute(
    pipeline: Checked,
    plugins: Notifier | None,
    run: RunDir,
    *,
    report: Report,
    stop: StopRequest | None = None,
    cache_dir: Path | None = None,
    on_plan: Callable[[Plan], None] | None = None,
    grace_secs: float = GRACE_SECS,
    resume: Resume | None = None,
) -> RunOutcome:
    """Run a pipeline to its end.

    Args:
        pipeline: what to run.
        plugins: whose hooks to call.
        run: folder of the run.
        report: where stages and the runtime say what they do.
        stop: lets a person stop the run.
        cache_dir: cache shared between runs; the user's by default.
        on_plan: told the plan on the calling thread, before the data plane opens; never of a streaming source.
        grace_secs: how long to wait for a thread that is stuck in a call, once the run is over otherwise.
        resume: where to go on, if the folder is that of a run which has not come to its end.

    Raises:
        PipelineInvalid: the runtime cannot run this graph.
        StageFailed: a stage failed; every thread has ended and every stage that was opened has been closed.
    """
    # Two stages that compute at once have a team of OpenMP threads each, on the same cores. A team that spins while it
    # waits keeps the other from its work, so waiting threads sleep. Read when torch is first imported: later than here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    cache = cache_dir if cache_dir is not None else user_cache_dir()
    execution = _Execution(pipeline, plugins, run, report, stop or StopRequest(), cache, grace_secs, resume)
    return execution.run(on_plan)


class _Execution:
    """One run, from the calling thread's point of view."""

    def __init__(
        self,
        pipeline: Checked,
        plugins: Notifier | None,
        run: RunDir,
        report: Report,
        stop: StopRequest,
        cache_dir: Path,
        grace_secs: float,
        resume: Resume | None,
    ) -> None:
        self._resume = resume
        self._pipeline, self._run_dir, self._report, self._stop = pipeline, run, report, stop
        self._cache_dir = cache_dir
        # A SimpleQueue may be put to from a signal handler that interrupts a get on the same thread.
        replies: SimpleQueue[Reply | None] = SimpleQueue()
        self._observers = Observers(plugins, report)
        self._wiring = Wiring(
            pipeline.graph,
            seed=pipeline.seed,
            ordering=pipeline.ordering,
            replies=replies,
            stop=stop,
            report=report,
            observers=self._observers,
            resume=resume,
        )
        self._watchdog = Watchdog(self._wiring, report, pipeline.stall_secs)
        self._crew = Crew(self._wiring, self._watchdog, grace_secs)
        self._plan: Plan | None = None
        self._vocabulary: Vocabulary | None = None
        self._summaries: dict[str, Mapping[str, Any]] = {}
        self._started = False
        self._run_secs = 0.0

    def run(self, on_plan: Callable[[Plan], None] | None) -> RunOutcome:
        wiring, begin = self._wiring, time.monotonic()
        wake = partial(wiring.replies.put, None)
        self._stop.listen(wake)
        try:
            try:
                self._open_all(on_plan)
                self._leave_out_done()
                if not self._halted:
                    self._started = True
                    self._observers.tell("flowdflash_run_started", run=self._run_dir)
                    self._run_all()
            except BaseException as error:
                self._crew.give_up(error)
                raise
            finally:
                self._close_all()
                wall_secs = time.monotonic() - begin
            return self._conclude(wall_secs)
        finally:
            self._stop.unlisten(wake)

    @property
    def _halted(self) -> bool:
        return bool(self._wiring.failures) or self._stop.requested

    def _open_all(self, on_plan: Callable[[Plan], None] | None) -> None:
        """One stage at a time, in topological order; the plan is made before the data plane opens."""
        for worker in self._wiring.workers:
            if self._halted:
                return
            openings = self._openings(worker)
            self._crew.do([worker], "open", partial(Worker.open, openings=openings))
            if worker is self._wiring.workers[0] and not self._halted:
                self._make_plan(worker)
                if self._plan is not None and on_plan is not None:
                    on_plan(self._plan)

    def _make_plan(self, worker: Worker) -> None:
        stages = self._wiring.plan_stages
        planner = stages.planner(self._pipeline.seed, self._wiring.planner.window)

        def plan(worker: Worker) -> None:
            with blamed_on(stages.names.source):
                self._vocabulary = stages.source.vocabulary()
            if self._resume is not None:
                restore_planning(stages, self._run_dir.path)
            if stages.shape is not None and stages.shape.measured:
                planner.shape = self._wiring.planner.shape = self._measured(stages.shape)
            if not stages.source.streaming:
                self._plan = plan_epochs(planner)
                self._wiring.plan = summarise(self._plan)
            consumed = self._resume.ledger if self._resume is not None else None
            keep_plan(stages, self._plan, self._run_dir.path, consumed)

        self._crew.do([worker], "plan", plan)

    def _measured(self, shape: DraftShape) -> DraftShape:
        ctx = OpenContext("", self._run_dir.path, self._cache_dir, seed=self._pipeline.seed, report=self._report)
        (drafter, *_) = self._wiring.graph.of_kind("drafter")
        with blamed_on(drafter.name):
            return measured(self._wiring.graph, shape, self._vocabulary, ctx)

    def _openings(self, worker: Worker) -> list[Opening]:
        graph, replica = self._wiring.graph, worker.work.replica
        openings = []
        for name, stage in worker.stages:
            node = graph.nodes[name]
            planning = node.kind in PLANNING
            context = OpenContext(
                stage=name,
                run_dir=self._run_dir.path,
                cache_dir=self._cache_dir,
                seed=self._pipeline.seed,
                facts=node.facts,
                report=self._report,
                replica=replica,
                replicas=replicas_of(node),
                plan=None if planning else self._summary(node),
                checkpoint_due=partial(self._wiring.checkpoint_due, name),
                checkpoints_in_use=self._wiring.checkpoints_in_use,
                waits=self._wiring.waits,
                resumed_at_step=self._resume.step if self._resume else None,
                stopping=lambda: self._stop.requested,
                made_from=self._made_from(node),
            )
            openings.append(Opening(stage, context))
        return openings

    def _made_from(self, node: Node) -> Mapping[str, Any]:
        if node.kind != "sink" or self._wiring.graph.of_kind("drafter"):
            return {}
        return made_from(self._wiring.graph, node, self._pipeline.seed, self._run_dir.path)

    def _leave_out_done(self) -> None:
        """Without a drafter, what all sinks have from an earlier run is not run again."""
        sinks = {worker: worker.work for worker in self._wiring.workers if isinstance(worker.work, SinkWork)}
        if self._halted or not sinks or self._wiring.graph.of_kind("drafter"):
            return
        done: list[set[int]] = []
        self._crew.do(list(sinks), "open", lambda worker: done.append(set(sinks[worker].batches_done)))
        if not self._halted:
            self._wiring.leave_out(Ledger.of(set.intersection(*done)))

    def _summary(self, node: Node) -> PlanSummary:
        if self._plan is None:
            return PlanSummary(int(node.facts.get("epochs", 0)), 0, 0, vocabulary=self._vocabulary)
        window = window_of(self._wiring.graph, node.name) if node.kind == "drafter" else 0
        return summarise(self._plan, window, self._vocabulary)

    def _run_all(self) -> None:
        begin = time.monotonic()
        self._watchdog.start()
        try:
            self._crew.do(self._wiring.workers, "run", lambda worker: pump(worker.work))
        finally:
            self._run_secs = time.monotonic() - begin

    def _close_all(self) -> None:
        """Ask for summaries and close, downstream first; then let every thread end."""
        wiring = self._wiring
        for worker in reversed(wiring.workers):
            if worker.tried and worker not in self._crew.abandoned:
                self._watchdog.start()
                # A sink may take long to write what it holds, so only a second request to stop ends this wait.
                self._crew.do([worker], "close", self._close)
        for worker in wiring.workers:
            if worker in self._crew.abandoned:
                worker.tell("close", partial(worker.close, lambda failure: None))
            worker.dismiss()
        for worker in wiring.workers:
            if worker not in self._crew.abandoned:
                worker.join()

    def _close(self, worker: Worker) -> None:
        """Ask for summaries and close. On the worker's thread, where a summary that hangs can be left behind."""
        replica, wiring = worker.work.replica, self._wiring
        for name, stage in worker.stages if self._started and not wiring.failures else ():
            try:
                self._summaries[summary_name(name, replica)] = dict(stage.summary())
            except BaseException as error:
                wiring.fail(StageFailed(name, error, phase="close", replica=replica))
        worker.close(wiring.fail)

    @property
    def _unfinished(self) -> bool:
        """There was more to do when the run ended."""
        if self._stop.urgent or not self._started:
            return True
        wiring = self._wiring
        drafters = [worker.work for worker in wiring.workers if isinstance(worker.work, DraftWork)]
        if drafters:
            return any(work.interrupted for work in drafters)
        return not wiring.planner.finished or wiring.tally.batches < wiring.planner.batches_planned

    def _conclude(self, wall_secs: float) -> RunOutcome:
        wiring = self._wiring
        if self._started and not (wiring.failures or self._stop.urgent or self._crew.abandoned):
            try:
                check_books(wiring, stopped=self._stop.requested)
            except StageFailed as failure:
                wiring.fail(failure)
        outcome = build_outcome(
            wiring,
            wall_secs,
            self._run_secs,
            interrupted=self._stop.requested and self._unfinished,
            aborted=self._stop.urgent,
            abandoned=tuple(worker.name for worker in self._crew.abandoned),
            summaries=self._summaries,
        )
        self._run_dir.write_outcome(outcome.as_dict())
        self._observers.tell("flowdflash_run_finished", run=self._run_dir, outcome=outcome)
        if wiring.failures:
            first, *later = wiring.failures
            first.later.extend(later)
            raise first
        return outcome
