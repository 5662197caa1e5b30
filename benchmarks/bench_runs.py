"""What benchmarks that train share: a pipeline run with other settings, unless it has been run to its end before."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PIPELINE = ROOT / "pipelines" / "dflash.yaml"


def flowdflash(verb: str, pipeline: Path, settings: Mapping[str, Any], *more: str) -> list[str]:
    """A command line of this interpreter's flowdflash."""
    pairs = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    return [sys.executable, "-m", "flowdflash.cli", verb, str(pipeline), *pairs, *more]


def trained(folder: Path, pipeline: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What the run in ``folder`` measured after its last step; it is run first unless it has finished."""
    found = _last_evaluation(folder)
    if found is None:
        shutil.rmtree(folder, ignore_errors=True)
        command = flowdflash("run", pipeline, settings, "--run-dir", str(folder))
        subprocess.run(command, check=True, stdout=sys.stderr)
        found = _last_evaluation(folder)
    if found is None:
        sys.exit(f"{folder}: the run ended without measuring its last step")
    return found


def json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _last_evaluation(folder: Path) -> dict[str, Any] | None:
    outcome, evaluations = folder / "outcome.json", folder / "evaluations.jsonl"
    if not (outcome.is_file() and evaluations.is_file()):
        return None
    end = json.loads(outcome.read_text("utf-8"))
    rows = json_lines(evaluations) if end["status"] == "finished" else []
    return next((row for row in rows if row["step"] == end["steps"]), None)


def told(values: Sequence[float | None], digits: int = 3) -> str:
    """Mean and standard deviation over seeds; a dash where a run has no such figure."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return "-"
    mean = f"{statistics.mean(known):.{digits}f}"
    return f"{mean} +- {statistics.stdev(known):.{digits}f}" if len(known) > 1 else mean
