"""What a run came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from flowdflash.errors import FlowdflashError, StageFailed
from flowdflash.items import StepRecord
from flowdflash.runtime.channel import ChannelStats
from flowdflash.runtime.meter import StageSnapshot, bottleneck, edge_snapshot, stage_snapshot
from flowdflash.runtime.wiring import Wiring
from flowdflash.runtime.works import DraftWork


@dataclass(frozen=True, slots=True, eq=False)
class RunOutcome:
    """The end of a run.

    Attributes:
        status: ``finished`` at the end of the data or of what the drafter wanted; ``interrupted`` at a person's
            request; ``failed`` only in the record that is kept of a run that raised.
        steps: optimizer steps of the first drafter.
        resumed_at_step: where the run was taken up; what follows counts from there. None of a run from its beginning.
        batches, samples, tokens: worked off.
        batches_per_bucket: by bucket id, as text.
        order_distance: most places by which a batch was trained on before or after its place in the plan.
        dropped: samples that were in no batch, by reason.
        wall_secs: from the first stage's opening to the last one's closing.
        run_secs: of these, the time in which batches flowed; what a stage's busy share is of.
        stages, edges: counters.
        bottleneck: the stage that was busiest.
        summaries: ``Stage.summary()`` by stage.
        last_record: the last optimizer step.
        aborted: a person asked twice, so that no final checkpoint was written.
        abandoned: threads that could not be ended, because they were stuck in a call that nothing can interrupt.
        error: of a run that failed.
    """

    status: Literal["finished", "interrupted", "failed"]
    steps: int = 0
    resumed_at_step: int | None = None
    batches: int = 0
    samples: int = 0
    tokens: int = 0
    batches_per_bucket: Mapping[str, int] = field(default_factory=dict)
    order_distance: int = 0
    dropped: Mapping[str, int] = field(default_factory=dict)
    wall_secs: float = 0.0
    run_secs: float = 0.0
    stages: tuple[StageSnapshot, ...] = ()
    edges: tuple[ChannelStats, ...] = ()
    bottleneck: str = ""
    summaries: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    last_record: StepRecord | None = None
    aborted: bool = False
    abandoned: tuple[str, ...] = ()
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        plain = asdict(replace(self, last_record=None, summaries={}))
        plain["summaries"] = {name: dict(summary) for name, summary in self.summaries.items()}
        plain["last_record"] = self.last_record.as_dict() if self.last_record else None
        return plain


def build_outcome(
    wiring: Wiring,
    wall_secs: float,
    run_secs: float,
    *,
    interrupted: bool,
    aborted: bool,
    abandoned: tuple[str, ...],
    summaries: Mapping[str, Mapping[str, Any]],
) -> RunOutcome:
    """Gather what the threads have counted; nothing runs any more."""
    stages, edges = stage_snapshots(wiring, run_secs), edge_snapshots(wiring)
    failed = bool(wiring.failures)
    tally = wiring.tally
    return RunOutcome(
        status="failed" if failed else "interrupted" if interrupted else "finished",
        steps=tally.steps,
        resumed_at_step=wiring.resume.step if wiring.resume else None,
        batches=tally.batches,
        samples=tally.samples,
        tokens=tally.tokens,
        batches_per_bucket=dict(sorted(tally.batches_per_bucket.items(), key=lambda entry: int(entry[0]))),
        order_distance=tally.order_distance,
        dropped=dict(wiring.planner.dropped),
        wall_secs=wall_secs,
        run_secs=run_secs,
        stages=stages,
        edges=edges,
        bottleneck=bottleneck(stages),
        summaries={name: summaries[name] for name in _in_order(wiring) if name in summaries},
        last_record=tally.last_record,
        aborted=aborted,
        abandoned=abandoned,
        error=str(wiring.failures[0]) if failed else "",
    )


def summary_name(stage: str, replica: int) -> str:
    """The stage's name; with the number of the replica from the second on."""
    return f"{stage}[{replica}]" if replica else stage


def _in_order(wiring: Wiring) -> list[str]:
    return [summary_name(name, w.work.replica) for w in wiring.workers for name, _ in w.stages]


def stage_snapshots(wiring: Wiring, run_secs: float) -> tuple[StageSnapshot, ...]:
    """Counters of every stage that runs on a thread of its own, upstream first."""
    names = dict.fromkeys(worker.work.stage for worker in wiring.workers)
    meters = {name: [w.work.meter for w in wiring.workers if w.work.stage == name] for name in names}
    return tuple(stage_snapshot(name, group, run_secs) for name, group in meters.items())


def edge_snapshots(wiring: Wiring) -> tuple[ChannelStats, ...]:
    """Counters of every edge, summed over the replicas of its reader."""
    return tuple(edge_snapshot(name, [c.stats() for c in group]) for name, group in wiring.channels.items())


def check_books(wiring: Wiring, *, stopped: bool) -> None:
    """At the end of a run that did not fail: nothing has got lost, anywhere.

    Raises:
        StageFailed: something has; names the stage.
    """
    for snapshot in stage_snapshots(wiring, 0.0):
        if not snapshot.balanced:
            dropped = sum(snapshot.dropped.values())
            raise _unbalanced(
                snapshot.stage, f"took {snapshot.taken} items, accounts for {snapshot.passed} and dropped {dropped}"
            )
    for name, group in wiring.channels.items():
        for stats in (channel.stats() for channel in group):
            if stats.items_put != stats.items_got + stats.discarded + stats.depth:
                text = f"edge {name}: {stats.items_put} put, {stats.items_got} got, {stats.discarded} discarded"
                raise _unbalanced(name.split("->")[0], text)
    _check_plan(wiring, stopped=stopped)


def _check_plan(wiring: Wiring, *, stopped: bool) -> None:
    planner, names = wiring.planner, wiring.plan_stages.names
    if not planner.finished:
        return
    lost = planner.samples_taken - planner.samples_planned - sum(planner.dropped.values())
    if lost:
        raise _unbalanced(names.bucketer, f"{lost} samples are in no batch and were not counted as dropped")
    given = planner.batches_planned + planner.batches_skipped
    if wiring.plan.batches and given != wiring.plan.batches:
        text = f"the plan made beforehand has {wiring.plan.batches} batches, the run had {given}"
        raise _unbalanced(names.interleaver or names.bucketer, f"{text}; planning must be a pure function")
    works = [worker.work for worker in wiring.workers]
    drafters = [work for work in works if isinstance(work, DraftWork)]
    for work in drafters:
        if not work.cut_short and work.meter.taken != planner.batches_planned:
            text = f"was given {work.meter.taken} of the plan's {planner.batches_planned} batches"
            raise _unbalanced(work.stage, text)
    if not drafters and not stopped and wiring.tally.batches != planner.batches_planned:
        text = f"{wiring.tally.batches} of the plan's {planner.batches_planned} batches were worked off"
        raise _unbalanced(names.source, text)


def _unbalanced(stage: str, text: str) -> StageFailed:
    return StageFailed(stage, FlowdflashError(f"the books do not balance: {text}"))
