"""``flowdflash run --resume``: the run's own pipeline, its newest whole checkpoint, and on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowdflash.cli.console import ConsoleReport, carry_out, is_resumable
from flowdflash.errors import FlowdflashError, PipelineInvalid, Problem

if TYPE_CHECKING:
    from flowdflash.config.check import Pipeline
    from flowdflash.plugin.loader import Plugins
    from flowdflash.runtime.rundir import RunDir


def resume_run(
    path: Path,
    plugins: Plugins,
    report: ConsoleReport,
    *,
    file: Path | None = None,
    overrides: tuple[str, ...] = (),
    strict: bool = False,
    say: Callable[[str], None],
) -> int:
    """Go on with a run that was interrupted, killed or failed; returns the exit code.

    Args:
        path: folder of the run.
        plugins: as for any run.
        report: told about progress.
        file: a pipeline to go on with; by default the one that the run began with.
        overrides: ``a.b=value`` each, on top of it.
        strict: take warnings for errors.
        say: for results.

    Raises:
        PipelineInvalid: the pipeline is not the one that the run began with.
        FlowdflashError: it cannot go on, or it failed again.
    """
    from flowdflash.runtime.resume import Resume, find_resume
    from flowdflash.runtime.rundir import RunDir

    with RunDir.open_existing(path) as run:
        if (steps := _finished(run)) is not None:
            say(f"finished: nothing is left to do in {run.path} after {steps:,} optimizer steps")
            return 0
        pipeline = _same_pipeline(run, plugins, report, file, overrides, strict)
        drafters = pipeline.graph.of_kind("drafter")
        if len(drafters) > 1 or not (drafters or is_resumable(pipeline)):
            raise FlowdflashError(
                f"run folder {run.path}: only a run with one drafter can be resumed, or a run without one whose "
                f"sinks all know which batches they have; its pipeline has {len(drafters)} drafters; start a new run"
            )
        resume = find_resume(run, report) if drafters else Resume()
        for changed in run.note_resume(resume.step):
            report.warn(f"since the run began: {changed}; results may differ in the last digits")
        done = f"after step {resume.step:,} ({len(resume.ledger):,} batches done) " if drafters else ""
        report.info(f"resuming {done}in {run.path}")
        return carry_out(pipeline, plugins, run, report, say=say, resume=resume)


def _finished(run: RunDir) -> int | None:
    """Optimizer steps of a run that came to its end."""
    try:
        outcome: dict[str, Any] = json.loads((run.path / "outcome.json").read_text(encoding="utf-8"))
        return int(outcome["steps"]) if outcome["status"] == "finished" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _same_pipeline(
    run: RunDir, plugins: Plugins, report: ConsoleReport, file: Path | None, overrides: tuple[str, ...], strict: bool
) -> Pipeline:
    """The pipeline to go on with: that of the run, but for options that no weight depends on."""
    from flowdflash.config.changes import changes
    from flowdflash.config.check import load, load_mapping, load_text

    folder = Path(run.provenance()["pipeline_folder"])
    began = load_text((run.path / "pipeline.yaml").read_text(encoding="utf-8"), plugins, folder)
    now = began
    if file is not None:
        now = load(file, plugins, overrides=overrides, strict=strict)
    elif overrides:
        now = load_mapping(began.resolved, plugins, folder, overrides=overrides, strict=strict)
    differences = changes(began, now)
    problems = [
        Problem(f"{change.before} when the run began, {change.after} now", path=change.path)
        for change in differences
        if not change.safe
    ]
    if problems:
        advice = f"a run goes on as it began: leave the pipeline as it is in {run.path / 'pipeline.yaml'}"
        raise PipelineInvalid([*problems, Problem(f"{advice}, or start a new run")])
    for change in differences:
        report.info(f"changed: {change}")
    return now
