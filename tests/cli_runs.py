"""The command line in process: what the tests of commands, pipelines and evaluation share."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from flowdflash.cli import main

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "pipelines" / "tiny.yaml"

SHORT = {
    "stages.corpus.samples": 24,
    "stages.corpus.epochs": 1,
    "stages.acceptance.num_prompts": 1,
    "stages.acceptance.max_new_tokens": 4,
}
"""Overrides that make the tiny pipeline a matter of a second: six batches, two optimizer steps."""

# Newer versions of click keep the two streams apart without being asked.
_APART = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner.__init__).parameters else {}


def invoke(*arguments: object, cache: Path | None = None) -> Result:
    """Run a command; what it raises besides an exit code is raised here."""
    environment = {} if cache is None else {"FLOWDFLASH_CACHE_DIR": str(cache)}
    result = CliRunner(**_APART).invoke(main, [str(a) for a in arguments], env=environment)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def overrides(values: dict[str, Any]) -> list[str]:
    """``--set`` for each value."""
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]


def json_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a file of strict JSON lines."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{path}: {name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]
