"""Writes generated responses as chat rows, ready to be the training data of a draft."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from flowdflash.data.partial import Entry, PartialFile
from flowdflash.errors import DataInvalid
from flowdflash.generation import checked_rows, conversation, questions
from flowdflash.items import Answer, GeneratedBatch
from flowdflash.stage import Check, OpenContext, PipelinePath, Report, SilentReport, Sink, StageConfig

OF_OLD_ANSWERS = frozenset({"stop_reason", "weight"})
"""What a row says of the answers that it had."""


class Responses(Sink):
    """Writes each prompt with its answers to one JSONL file, in the order of the prompts, when all are answered.

    A row is the prompt's row with the answers among its ``messages``, and ``finish_reason`` (of the last answer) and
    ``response_tokens`` (of all) beside it. A conversation ends before its first answer that is not kept. Rows that
    are left out, in whole or from some turn on, are in ``<stage>/rejects.jsonl`` of the run, with the reason.

    Until the end the rows are in ``<name>.partial``, batch by batch. A run that was stopped, killed or failed goes on
    from there, with ``--resume`` or when the same pipeline is run again.
    """

    type = "responses"
    reads = (GeneratedBatch,)
    safe_to_change = frozenset({"overwrite"})

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
        self._partial: PartialFile | None = None
        self._rejects = Path()
        self._expected = self._before = 0
        self._written = ""
        self._report: Report = SilentReport()

    def check(self, check: Check) -> Mapping[str, Any]:
        """The name must be one that a chat source reads."""
        if not self.config.path.name.endswith((".jsonl", ".jsonl.gz")):
            check.refuse("path", f"{self.config.path.name} is no .jsonl or .jsonl.gz file", "name it responses.jsonl")
        if self.config.path.resolve() in check.facts.get("files", ()):
            check.refuse(
                "path", "the prompts are read from this file, and the answers would replace it", "name another"
            )
        return {}

    def open(self, ctx: OpenContext) -> None:
        """See that the file can be written, before hours are spent, and take up what an earlier run has left."""
        path: Path = self.config.path
        if not (ctx.plan and ctx.plan.batches):
            raise DataInvalid("the source is streaming, so there is no telling when all prompts have been answered")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise DataInvalid(f"folder {path.parent} cannot be written to")
        options = {name: getattr(self.config, name) for name in ("keep", "min_tokens")}
        began = path.with_name(f"{path.name}.partial").exists()
        if path.exists() and not (self.config.overwrite or began):
            raise DataInvalid(f"{path} is there already (move it away, name another path, or set overwrite: true)")
        self._partial = PartialFile(path, {**ctx.made_from, "responses": options})
        self._report, self._expected = ctx.report, ctx.plan.batches
        self._rejects = ctx.run_dir / ctx.stage / "rejects.jsonl"
        self._before = len(self._partial.batches)
        if self._before:
            self._report.info(f"{self._before:,} of {self._expected:,} batches are answered in {self._partial.path}")
        self._finish()

    @property
    def batches_done(self) -> Collection[int]:
        """Batches whose rows an earlier run has written."""
        return tuple(self._opened.batches)

    def write(self, item: GeneratedBatch) -> None:
        """Take the answers of one batch of prompts."""
        if item.info.seq in self._opened.batches:
            return
        rows = checked_rows(item.rows, len(item.answers))
        entries: list[Entry] = []
        for sample_id, row, answers in zip(item.info.sample_ids, rows, item.answers, strict=True):
            entries += self._entries(sample_id, row, answers)
        self._opened.add(item.info.seq, item.info.epoch, entries)
        self._finish()

    def _entries(self, sample_id: int, row: Mapping[str, Any], answers: tuple[Answer, ...]) -> list[Entry]:
        """The row with the answers that are kept, and another one that says why it ends there."""
        reasons = [self._drop_reason(answer) for answer in answers]
        good = next((turn for turn, reason in enumerate(reasons) if reason), len(answers))
        entries = []
        if good:
            kept = answers[:good]
            tokens = sum(answer.tokens for answer in kept)
            facts = {"finish_reason": kept[-1].finish_reason, "response_tokens": tokens}
            about = {key: value for key, value in row.items() if key not in OF_OLD_ANSWERS}
            entries.append(Entry(sample_id, "", {**about, "messages": _said(row, kept), **facts}))
        if good < len(questions(row)):
            reason = reasons[good] if good < len(answers) else "asked after an answer that was cut"
            why = {"sample": sample_id, "turn": good, "reason": reason}
            if good < len(answers) and answers[good].detail:
                why["detail"] = answers[good].detail
            entries.append(Entry(sample_id, reason, {**why, "row": {**row, "messages": _said(row, answers)}}))
        return entries

    def _drop_reason(self, answer: Answer) -> str:
        if answer.rejected:
            return answer.rejected
        if self.config.keep == "stop" and answer.finish_reason == "length":
            return "cut at the token limit"
        if not answer.text.strip():
            return "empty"
        return "shorter than min_tokens" if answer.tokens < self.config.min_tokens else ""

    def _finish(self) -> None:
        """Once all batches are there: write the file."""
        partial = self._opened
        if len(partial.batches) < self._expected:
            return
        partial.write_dropped(self._rejects)
        if not self._counts[""]:
            why = ", ".join(f"{reason} {count}" for reason, count in self._counts.most_common())
            raise DataInvalid(
                f"every response was dropped ({why}; see {self._rejects}), so {self.config.path} is not written; "
                f"to ask again, change what is asked or whom, and delete {partial.path}"
            )
        partial.complete()
        self._written = str(self.config.path)

    def close(self) -> None:
        """Leave what there is for the run that goes on."""
        partial = self._partial
        if partial is None:
            return
        if not self._written and 0 < len(partial.batches) < self._expected:
            partial.write_dropped(self._rejects)
            done = f"{len(partial.batches):,} of {self._expected:,} batches were answered; they are in {partial.path}"
            self._report.warn(f"{done}, and the next run of this pipeline goes on from there")
        partial.close()

    @property
    def _opened(self) -> PartialFile:
        assert self._partial is not None, "write before open"
        return self._partial

    @property
    def _counts(self) -> Counter[str]:
        """Rows by the reason why they were dropped; those that were kept under none."""
        return Counter(reason for reasons in self._opened.batches.values() for reason in reasons)

    def summary(self) -> Mapping[str, Any]:
        """How many responses were kept, and why others were not; those of an earlier run included."""
        dropped = dict(self._counts)
        kept = dropped.pop("", 0)
        where = self._written or str(self._opened.path)
        return {
            "path": where,
            "responses_kept": kept,
            "responses_dropped": dropped,
            "batches_of_an_earlier_run": self._before,
        }


def _said(row: Mapping[str, Any], answers: tuple[Answer, ...]) -> list[Any]:
    """The messages up to the last answer. Older answers are not the target's own, so they are not to be learnt."""
    asked = questions(row)[: len(answers)]
    messages = [
        {**message, "weight": 0} if message.get("role") == "assistant" else message
        for question in asked
        for message in question
    ]
    return conversation({"messages": messages}, answers)
