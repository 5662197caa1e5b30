"""``flowdflash doctor``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from flowdflash.cli.common import FAILED, SET, exit_codes, load_all_plugins, load_pipeline

if TYPE_CHECKING:
    from flowdflash.doctor import Finding, GateResult

MARKS = {"ok": "ok   ", "fault": "FAULT", "note": "note ", "skipped": "-    "}


@click.command("doctor")
@click.argument("checkpoint", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--target", metavar="MODEL", help="The model that the draft is for.  [default: as the checkpoint says]")
@click.option(
    "--prompts",
    type=click.Path(exists=True, dir_okay=False, path_type=Path, resolve_path=True),
    help="Prompts that the draft was not trained on.  [default: those of the run's evaluator]",
)
@click.option("--device", help="auto, cpu, cuda or cuda:N.  [default: auto]")
@click.option(
    "--gate",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="PIPELINE",
    help="Instead: let this pipeline's drafter learn one answer of its target by heart, and decode that.",
)
@click.option("--steps", type=click.IntRange(1), help="With --gate: most optimizer steps.  [default: 300]")
@click.option("--new-tokens", type=click.IntRange(8), help="With --gate: length of the answer.  [default: 48]")
@SET
@click.option("--format", "style", type=click.Choice(["text", "json"]), default="text")
@click.pass_context
def command(ctx: click.Context, /, checkpoint: Path | None, gate: Path | None, style: str, **options: Any) -> None:
    """Say whether a draft is what was trained and what will be served, and if not, what is wrong and what to do.

    CHECKPOINT is a run (its newest checkpoint), a checkpoint, or an exported draft. Exits with 0 if it is healthy, or
    if the gate is passed, else with 1.
    """
    if (checkpoint is None) == (gate is None):
        raise click.UsageError("name either a CHECKPOINT, or a pipeline with --gate")
    given = {name: value for name, value in options.items() if value not in (None, ())}
    of_gate = {"steps", "new_tokens", "overrides"}
    if wrong := sorted(set(given) & of_gate if gate is None else set(given) - of_gate):
        name = "set" if wrong[0] == "overrides" else wrong[0].replace("_", "-")
        raise click.UsageError(f"--{name} is for {'a pipeline (--gate)' if gate is None else 'a CHECKPOINT'}")
    text, good = _examine(ctx, checkpoint, style, given) if gate is None else _gate(ctx, gate, style, **given)
    click.echo(text)
    sys.exit(0 if good else FAILED)


def _examine(ctx: click.Context, checkpoint: Any, style: str, options: dict[str, Any]) -> tuple[str, bool]:
    from flowdflash.cache import cache_dir
    from flowdflash.cli.console import ConsoleReport
    from flowdflash.doctor import Patient, examine

    def load(text: str, base: Path) -> Any:
        from flowdflash.config.check import load_text

        return load_text(text, load_all_plugins(ctx), base)

    with exit_codes(), ConsoleReport() as report:
        patient = Patient(checkpoint, load, cache_dir=cache_dir(), report=report, **options)
        found = examine(patient)
    healthy = all(finding.status != "fault" for finding in found)
    told = {"checkpoint": str(patient.folder), "target": patient.ref, "healthy": healthy}
    if style == "json":
        return json.dumps({**told, "findings": [asdict(finding) for finding in found]}), healthy
    return "\n".join([f"draft: {patient.folder}", f"target: {patient.ref}", *findings_text(found)]), healthy


def findings_text(found: Sequence[Finding]) -> list[str]:
    """For a person: a line per finding, and what to do about each fault below it."""
    lines = []
    for finding in found:
        lines.append(f"{MARKS[finding.status]}  {finding.name}: {finding.text}")
        if finding.advice:
            lines.append(f"       do: {finding.advice}")
    faults = sum(finding.status == "fault" for finding in found)
    return [*lines, f"{faults} fault{'s' if faults > 1 else ''}" if faults else "healthy"]


def _gate(
    ctx: click.Context,
    file: Path,
    style: str,
    *,
    overrides: tuple[str, ...] = (),
    steps: int = 300,
    new_tokens: int = 48,
) -> tuple[str, bool]:
    from flowdflash.cache import cache_dir
    from flowdflash.cli.console import ConsoleReport
    from flowdflash.doctor import overfit

    with exit_codes(), ConsoleReport() as report:
        pipeline, _ = load_pipeline(ctx, file, overrides)
        result = overfit(
            pipeline.graph,
            steps=steps,
            new_tokens=new_tokens,
            cache_dir=cache_dir(),
            report=report,
            seed=pipeline.seed,
            told=lambda record: report.progress("overfitting", record.step, steps),
        )
    return (json.dumps(asdict(result)) if style == "json" else gate_text(result)), result.passed


def gate_text(result: GateResult) -> str:
    """For a person."""
    figures = f"{result.steps} steps, loss {result.loss:.3f}, {result.accuracy:.1%} of the slots right"
    tokens = " ".join(map(str, result.produced))
    lines = [figures, f"tau {result.tau:.2f} of {result.span} (tokens per pass: {tokens})"]
    if result.passed:
        return "\n".join([*lines, "gate passed: every whole block is accepted on the text that was trained on"])
    if result.accuracy < 1:
        return "\n".join([*lines, "gate failed: the draft has not learnt the text: try more --steps, or another lr"])
    return "\n".join([*lines, "gate failed: the draft knows the text in training and not when it is decoded"])
