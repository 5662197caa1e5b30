"""Writes generated responses as chat rows, ready to be the training data of a draft."""

from __future__ import annotations

import gzip
import json
import os
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from flowdflash.errors import DataInvalid
from flowdflash.items import GeneratedBatch
from flowdflash.stage import Check, OpenContext, PipelinePath, Report, SilentReport, Sink, StageConfig


class Responses(Sink):
    """Writes each prompt with its response to one JSONL file, in the order of the prompts, when the run has ended.

    A row is the prompt's row with the response as the last of its ``messages``, and ``finish_reason`` and
    ``response_tokens`` beside it. A run that ends early leaves what it has in ``<name>.partial``, never under the name
    of a whole file.
    """

    type = "responses"
    reads = (GeneratedBatch,)

    class Config(StageConfig):
        """Options of the file of responses."""

        path: PipelinePath = Field(description="JSONL file to write; a name that ends in .gz is compressed.")
        keep: Literal["stop", "all"] = Field(
            "stop", description="stop drops responses that were cut at the token limit, all keeps them."
        )
        min_tokens: int = Field(
            1, ge=1, description="Fewest tokens of a response that is kept, its end token included."
        )
        overwrite: bool = Field(False, description="Replace the file if it is there.")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._rows: dict[tuple[int, int], dict[str, Any]] = {}
        self._dropped: Counter[str] = Counter()
        self._batches: set[int] = set()
        self._expected = 0
        self._written = ""
        self._kept = 0
        self._report: Report = SilentReport()

    def check(self, check: Check) -> Mapping[str, Any]:
        """The name must be one that a chat source reads."""
        if not self.config.path.name.endswith((".jsonl", ".jsonl.gz")):
            check.refuse("path", f"{self.config.path.name} is no .jsonl or .jsonl.gz file", "name it responses.jsonl")
        return {}

    def open(self, ctx: OpenContext) -> None:
        """See that the file can be written, before hours are spent."""
        path = self.config.path
        if path.exists() and not self.config.overwrite:
            raise DataInvalid(f"{path} is there already (move it away, name another path, or set overwrite: true)")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise DataInvalid(f"folder {path.parent} cannot be written to")
        self._report = ctx.report
        self._expected = ctx.plan.batches if ctx.plan else 0

    def write(self, item: GeneratedBatch) -> None:
        """Take the responses of one batch of prompts."""
        if len(item.rows) != len(item.texts):
            raise DataInvalid(
                "the source does not give the rows of its prompts, so responses cannot be written next to them "
                "(use a source that does, such as chat_jsonl with task: generate)"
            )
        self._batches.add(item.info.seq)
        for place, sample_id in enumerate(item.info.sample_ids):
            reason = self._drop_reason(item, place)
            if reason:
                self._dropped[reason] += 1
                continue
            row = dict(item.rows[place])
            row["messages"] = [*_prompt(row, sample_id), {"role": "assistant", "content": item.texts[place]}]
            row["finish_reason"] = item.finish_reasons[place]
            row["response_tokens"] = item.token_counts[place]
            self._rows[item.info.epoch, sample_id] = row

    def _drop_reason(self, item: GeneratedBatch, place: int) -> str:
        if self.config.keep == "stop" and item.finish_reasons[place] == "length":
            return "cut at the token limit"
        if not item.texts[place].strip():
            return "empty"
        if item.token_counts[place] < self.config.min_tokens:
            return "shorter than min_tokens"
        return ""

    def close(self) -> None:
        """Write the file: whole under its name, or partial beside it."""
        path = self.config.path
        rows, self._rows = self._rows, {}
        if not self._batches:
            return
        whole = len(self._batches) >= self._expected
        target = path if whole else path.with_name(f"{path.name}.partial")
        write_rows(target, (rows[key] for key in sorted(rows)), compress=path.name.endswith(".gz"))
        self._written, self._kept = str(target), len(rows)
        if not whole:
            self._report.warn(f"{len(self._batches)} of {self._expected} batches were answered; they are in {target}")
        if not rows:
            self._report.warn(f"{target} is empty: all {self._dropped.total()} responses were dropped")

    def summary(self) -> Mapping[str, Any]:
        """How many responses were kept, and why others were not."""
        kept = self._kept if self._written else len(self._rows)
        return {"path": self._written, "responses_kept": kept, "responses_dropped": dict(self._dropped)}


def write_rows(path: Path, rows: Iterator[Mapping[str, Any]], *, compress: bool) -> None:
    """Write a JSONL file so that it is whole or absent."""
    fresh = path.with_name(f".{path.name}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with fresh.open("wb") as file:
            if compress:
                # No time stamp inside: the same rows give the same file.
                with gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) as packed:
                    for row in rows:
                        packed.write(_line(row))
            else:
                for row in rows:
                    file.write(_line(row))
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    finally:
        fresh.unlink(missing_ok=True)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n"


def _prompt(row: Mapping[str, Any], sample_id: int) -> Sequence[Any]:
    """Messages up to the last one that is not the assistant's: an older answer at the end is replaced."""
    messages = row.get("messages")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise DataInvalid(f"the row of sample {sample_id} has no list of messages")
    end = len(messages)
    while end and isinstance(messages[end - 1], Mapping) and messages[end - 1].get("role") == "assistant":
        end -= 1
    if not end:
        raise DataInvalid(f"the row of sample {sample_id} has no message to answer")
    return list(messages[:end])
