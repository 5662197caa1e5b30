"""``flowdflash compare``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flowdflash.cli.common import FAILED, exit_codes

if TYPE_CHECKING:
    from flowdflash.runtime.compare import Comparison

RUN = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command("compare")
@click.argument("run_a", type=RUN)
@click.argument("run_b", type=RUN)
@click.option("--metrics", default="metrics.jsonl", show_default=True, help="File of records in the runs' folders.")
@click.option("--format", "style", type=click.Choice(["text", "json"]), default="text")
def command(run_a: Path, run_b: Path, metrics: str, style: str) -> None:
    """Say whether two runs are the same, bit for bit, and where they first part.

    Compared are the samples of every batch, the record of every optimizer step but for its times, the evaluations, and
    weights, moments and counters of the newest checkpoint. Exits with 0 if all are equal, else with 1.
    """
    from flowdflash.runtime.compare import compare_runs

    with exit_codes():
        found = compare_runs(run_a, run_b, metrics)
    click.echo(comparison_text(found, style))
    sys.exit(0 if found.same else FAILED)


def comparison_text(found: Comparison, style: str) -> str:
    """The result for a person or for a program."""
    if style == "json":
        told = {"steps": found.steps, "equal": found.equal, "differences": found.differences}
        return json.dumps({"same": found.same, **told})
    lines = [f"equal      {line}" for line in found.equal] + [f"different  {line}" for line in found.differences]
    return "\n".join([*lines, "the runs are the same" if found.same else "the runs are not the same"])
