"""Taking a run up again: the checkpoint to go on from, the same plan, and sinks that have neither gaps nor repeats."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from flowdflash.errors import DataInvalid
from flowdflash.graph import Graph, Node
from flowdflash.items import Checkpoint, StepRecord
from flowdflash.runtime.checkpoints import FOLDER, Saved, damage, ledger_of, load_checkpoint, run_of, saved_checkpoints
from flowdflash.runtime.ledger import NOTHING, Ledger
from flowdflash.runtime.outlets import Outlet, put_to
from flowdflash.runtime.plan import PlanStages
from flowdflash.runtime.planner import Plan, blamed_on
from flowdflash.runtime.rundir import RunDir, writable, write_atomically
from flowdflash.stage import Drafter, Report

PLAN_NAME = "plan.json"


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a run is taken up.

    Attributes:
        step: optimizer steps that were taken.
        ledger: batches that were trained on.
        newest: the checkpoint, whole; None if there is none, so that the run starts at its beginning.
        older: checkpoints before that one, the oldest first; not known to be whole.
    """

    step: int = 0
    ledger: Ledger = NOTHING
    newest: Saved | None = None
    older: tuple[Saved, ...] = ()


def find_resume(run: RunDir, report: Report) -> Resume:
    """The newest whole checkpoint of a run. A newer one that is damaged is set aside, and a person is told.

    Raises:
        ModelInvalid: the ledger of a checkpoint whose files are whole makes no sense.
    """
    for leftover in sorted((run.path / FOLDER).glob(".writing-step-*")):
        report.warn(f"checkpoint {leftover.name.removeprefix('.writing-')} was never completed; it is not used")
    mine: list[Saved] = []
    for saved in saved_checkpoints(run.path):
        owner = run_of(saved)
        if owner is not None and owner not in run.known_names:
            report.warn(f"checkpoint {saved.folder} belongs to the run {owner!r}; it is not used")
        else:
            mine.append(saved)
    broken: list[tuple[Saved, str]] = []
    while mine:
        newest = mine.pop()
        wrong = damage(newest)
        if not wrong:
            _set_aside(broken, f"the run goes on from {newest.folder.name}", report)
            write_atomically(run.path / FOLDER / "latest", newest.folder.name + "\n")
            ledger = Ledger.read(ledger_of(newest.folder))
            return Resume(newest.step, ledger, newest, tuple(mine))
        broken.append((newest, wrong))
    _set_aside(broken, "the run starts at its beginning", report)
    (run.path / FOLDER / "latest").unlink(missing_ok=True)
    report.warn(f"run folder {run.path} has no complete checkpoint: the run starts at its beginning")
    return Resume()


def _set_aside(broken: Sequence[tuple[Saved, str]], then: str, report: Report) -> None:
    """Give damaged checkpoints a name that nothing takes for a checkpoint; they are left for a person to look at."""
    for saved, wrong in broken:
        aside, number = saved.folder.with_name(f"damaged-{saved.folder.name}"), 1
        while os.path.lexists(aside):
            number += 1
            aside = saved.folder.with_name(f"damaged-{saved.folder.name}-{number}")
        saved.folder.rename(aside)
        report.warn(f"checkpoint {saved.folder.name} is damaged: {wrong}; it is now {aside.name}, and {then}")


def restore_planning(stages: PlanStages, run_dir: Path) -> None:
    """Give the stages of the planning plane what they held when the run began: each refuses data that is not the same.

    Raises:
        StageFailed: the data has changed.
    """
    states = (_plan_record(run_dir) or {}).get("states", {})
    for name, stage in stages.stages():
        if states.get(name):
            with blamed_on(name):
                stage.restore(states[name])


def keep_plan(stages: PlanStages, plan: Plan | None, run_dir: Path, ledger: Ledger | None) -> None:
    """Keep as ``plan.json`` which plan a run has; of a run that is resumed, see that it has the same again.

    Args:
        stages: of the planning plane.
        plan: None of a streaming source.
        run_dir: folder of the run.
        ledger: batches that a resumed run has consumed; None where a run begins.

    Raises:
        StageFailed: the plan is another one.
    """
    before = _plan_record(run_dir) if ledger is not None else None
    if before is not None and plan is not None and before["sha256"] != plan.sha256:
        text = (
            f"the plan is not the one that the run began with ({before['batches']} batches then, {plan.batches} now): "
            "the data, or the code that orders it, has changed; put it back, or start a new run"
        )
        with blamed_on(stages.names.source):
            raise DataInvalid(text)
    if plan is not None and ledger is not None and (ledger.extras or (ledger.prefix - 1,))[-1] >= plan.batches:
        with blamed_on(stages.names.source):
            raise DataInvalid(f"the checkpoint has consumed more batches than the {plan.batches} of the plan")
    if before is None:
        states = {name: dict(stage.state()) for name, stage in stages.stages()}
        record = {"batches": plan.batches if plan else 0, "sha256": plan.sha256 if plan else "", "states": states}
        write_atomically(run_dir / PLAN_NAME, json.dumps(record, indent=2) + "\n")


def made_from(graph: Graph, node: Node, seed: int, run_dir: Path) -> Mapping[str, Any]:
    """What decides the batches that a sink reads where nothing is trained; empty of a streaming source."""
    record = _plan_record(run_dir) or {}
    if not record.get("sha256"):
        return {}
    makers = [graph.nodes[edge.source] for edge in node.inputs]
    options = {
        maker.name: {"type": maker.type, **maker.config.model_dump(mode="json", exclude=set(maker.cls.safe_to_change))}
        for maker in makers
        if isinstance(maker.config, BaseModel)
    }
    told = {"plan": record["sha256"], "data": record["states"], "seed": seed, "stages": options}
    return {key: writable(value) for key, value in told.items()}


def _plan_record(run_dir: Path) -> Mapping[str, Any] | None:
    path = run_dir / PLAN_NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def take_up(drafter: Drafter, resume: Resume, outlets: Sequence[Outlet]) -> tuple[StepRecord, ...]:
    """Put a drafter where a checkpoint left it, and give its sinks what a killed run had not brought to them.

    Sinks run behind the drafter, each on its own thread; a checkpoint may be on disk before the records and the
    evaluations of earlier steps are. An evaluator says by ``wants`` which checkpoints it still lacks, a sink of records
    by ``last_step``.

    Returns:
        The last records before the checkpoint.
    """
    assert resume.newest is not None
    watching = [o for o in outlets if issubclass(Checkpoint, o.payload) and o.sink is not None and not o.sink.saves]
    # The untrained draft, before its weights are replaced.
    for output in drafter.begin():
        put_to(watching, output)
    for saved in (*resume.older, resume.newest) if watching else ():
        # Damage first: an evaluator that has said that it wants a checkpoint counts on it.
        if not damage(saved) and any(outlet.wants(saved.step, "every") for outlet in watching):
            put_to(watching, replace(load_checkpoint(saved.folder), reason="every"))
    checkpoint = load_checkpoint(resume.newest.folder)
    for outlet in outlets:
        has = outlet.sink.last_step if outlet.sink is not None and issubclass(StepRecord, outlet.payload) else None
        for record in checkpoint.records:
            if has is not None and record.step > has:
                outlet.channel.put(record)
    drafter.resume(checkpoint)
    return checkpoint.records
