"""Sink ``jsonl``: every optimizer step as one line of JSON, in a local file, whatever other loggers do."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, ClassVar

from pydantic import Field

from flowdflash.errors import FlowdflashError
from flowdflash.items import StepRecord
from flowdflash.journal import cut_back
from flowdflash.stage import Check, OpenContext, Sink, StageConfig


class Jsonl(Sink):
    """Writes each record as soon as it comes, and flushes it, so that a killed run keeps its curve.

    JSON knows no NaN and no infinity: such a number is written as ``null``, and ``nonfinite`` in the same line says
    which it was, by dotted name.
    """

    type: ClassVar[str] = "jsonl"
    reads = (StepRecord,)

    class Config(StageConfig):
        """Options of ``jsonl``."""

        path: Path = Field(
            Path("metrics.jsonl"), description="file to write, a path inside the run folder (or an absolute path)"
        )

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._file: IO[str] | None = None
        self._path = Path()
        self._records = 0
        self._last_step: int | None = None

    def check(self, check: Check) -> Mapping[str, Any]:
        """A relative path must stay inside the run folder."""
        path: Path = self.config.path
        if not path.is_absolute() and (".." in path.parts or not path.name):
            check.refuse("path", f"{path} is not a file inside the run folder", "name a file, or an absolute path")
        return {}

    def open(self, ctx: OpenContext) -> None:
        """Make the file; two sinks, or two runs, never share one. A run that is resumed goes on with its own."""
        self._path = ctx.run_dir / self.config.path
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if ctx.resumed_at_step is not None:
            self._last_step = cut_back(self._path, ctx.resumed_at_step)
            self._file = self._path.open("a", encoding="utf-8")
            return
        try:
            self._file = self._path.open("x", encoding="utf-8")
        except FileExistsError as error:
            raise FlowdflashError(f"{self._path} exists already; give this sink a 'path' of its own") from error

    def write(self, item: StepRecord) -> None:
        """One line, flushed."""
        if self._file is None:
            raise FlowdflashError("write() before open()")
        self._file.write(as_line(item) + "\n")
        self._file.flush()
        self._records += 1

    @property
    def last_step(self) -> int | None:
        """Of the last record that a run which was killed has left."""
        return self._last_step

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def summary(self) -> Mapping[str, Any]:
        """Where the records are, and how many."""
        return {"path": str(self._path), "records": self._records}


def as_line(record: StepRecord) -> str:
    """A record as one line of strict JSON."""
    nonfinite: dict[str, str] = {}
    plain = _without_nonfinite(record.as_dict(), "", nonfinite)
    if nonfinite:
        plain["nonfinite"] = nonfinite
    return json.dumps(plain, allow_nan=False, ensure_ascii=False)


def _without_nonfinite(value: Any, name: str, found: dict[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _without_nonfinite(v, f"{name}.{k}" if name else str(k), found) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(v, f"{name}.{i}", found) for i, v in enumerate(value)]
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        found[name] = str(value)
        return None
    return value
