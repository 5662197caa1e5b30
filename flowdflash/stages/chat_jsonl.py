"""Source ``chat_jsonl``: conversations of a JSONL file, as tokens with a loss mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
from pydantic import Field

from flowdflash.data.align import Mask
from flowdflash.data.encode import ChatEncoder, EncodeOptions
from flowdflash.data.rows import read_jsonl
from flowdflash.data.split import Split
from flowdflash.data.store import TokenStore, open_or_build, store_key
from flowdflash.data.template import RESERVED_OPTIONS
from flowdflash.errors import DataInvalid
from flowdflash.items import IntArray, SampleTable
from flowdflash.stage import Check, ModelRef, OpenContext, PipelinePath, Report, Source, StageConfig, Vocabulary
from flowdflash.target.catalogue import ref_problem

SUMMARY = """rows_read rows_kept rows_rejected rows_other_split samples truncated
tokens supervised_tokens supervised_share turns_without_end_token"""
"""Accounts that a person wants to read, besides those by reason."""


class ChatJsonl(Source):
    """Reads conversations from JSONL and renders them with the chat template of the target.

    What the target would have written itself is supervised: the text of each answer and its end-of-turn token, nothing
    that the template or its generation prompt supplies. Tokens are prepared once and kept in the cache; a change of the
    file, the tokenizer, the template or an option prepares them anew. Rows that cannot be used are counted by reason
    and listed in ``<stage>/rejects.jsonl`` of the run.
    """

    type = "chat_jsonl"

    class Config(StageConfig):
        """Options of the source of chat rows."""

        path: PipelinePath = Field(
            description="JSONL file, plain, gzip or zstd; `messages` or `conversations` in each row"
        )
        tokenizer: ModelRef = Field(
            description="the target, whose tokenizer and chat template are used; as its `model`"
        )
        task: Literal["train", "generate"] = Field(
            "train", description="train: conversations with a loss mask; generate: prompts for the target to answer"
        )
        prompt_until: Literal["first_answer", "last_answer"] = Field(
            "first_answer",
            description="task generate: a prompt is everything before the first or the last answer of its row",
        )
        max_length: int = Field(2048, ge=2, description="most tokens in a sample")
        over_long: Literal["truncate", "drop"] = Field(
            "truncate",
            description="cut longer samples at the end, or leave them out; prompts (task generate) are never cut",
        )
        on_bad_row: Literal["skip", "error"] = Field(
            "skip", description="leave rows with a fault out, or end the run when all have been listed"
        )
        surrogates: Literal["reject", "replace"] = Field(
            "reject", description="half a surrogate pair makes its row a bad one, or becomes U+FFFD"
        )
        generation_marks: Literal["check", "ignore"] = Field(
            "check",
            description="the loss mask must agree with the template's generation marks, or they are not looked at",
        )
        template_options: dict[str, bool | int | float | str] = Field(
            {}, description="switches of the chat template, such as enable_thinking"
        )
        split: Literal["all", "train", "held_out"] = Field(
            "all", description="which part of the rows; a prompt, with all its answers, is always in one part"
        )
        held_out_share: float = Field(0.0, ge=0, lt=1, description="share of the distinct prompts that is held out")
        held_out_rows: int = Field(0, ge=0, description="or the number of distinct prompts that is held out")
        limit_rows: int = Field(0, ge=0, description="read only so many rows from the start of the file; 0 for all")
        epochs: int = Field(1, ge=1, description="passes over the data")

    def __init__(self, config: ChatJsonl.Config) -> None:
        super().__init__(config)
        self._store: TokenStore | None = None
        self._expected_key = ""

    def check(self, check: Check) -> Mapping[str, Any]:
        """The file is there, and the options fit each other."""
        config = self.config
        if not config.path.is_file():
            found = "is a folder" if config.path.is_dir() else "does not exist"
            check.refuse(
                "path", f"{config.path} {found}", "name a JSONL file, relative to the folder of the pipeline file"
            )
        message, hint = ref_problem(config.tokenizer)
        if message:
            check.refuse("tokenizer", message, hint)
        self._check_task(check)
        self._check_split(check)
        for name in sorted(RESERVED_OPTIONS & set(config.template_options)):
            check.refuse(f"template_options.{name}", f"{name} is no switch of a chat template", "remove it")
        return {
            "tokenizer": config.tokenizer,
            "max_length": config.max_length,
            "epochs": config.epochs,
            "task": config.task,
            "template_options": dict(config.template_options),
        }

    def _check_task(self, check: Check) -> None:
        config, given = self.config, self.config.model_fields_set
        if config.task == "train" and "prompt_until" in given:
            check.refuse(
                "prompt_until", "only prompts have it, but the task is train", "remove it, or set task: generate"
            )
        if config.task == "generate" and "over_long" in given and config.over_long == "truncate":
            check.refuse("over_long", "a prompt cut short would ask something else", "set over_long: drop")
        if config.task == "generate" and "generation_marks" in given:
            check.refuse("generation_marks", "prompts have no loss mask to compare", "remove it, or set task: train")

    def _check_split(self, check: Check) -> None:
        config = self.config
        named = [name for name in ("held_out_share", "held_out_rows") if getattr(config, name)]
        if len(named) == 2:
            check.refuse("held_out_rows", "held_out_share says already how much is held out", "keep one of the two")
        if config.split == "all":
            for name in named:
                check.refuse(name, "nothing is held out with split: all", "set split: train or split: held_out")
        elif not named:
            check.refuse("split", f"split: {config.split} needs to know how much is held out", "set held_out_share")

    def open(self, ctx: OpenContext) -> None:
        """Find the tokens in the cache, or prepare them."""
        from flowdflash.target.load import load_tokenizer

        config = self.config
        rows = partial(read_jsonl, config.path)
        split = Split(config.split, share=config.held_out_share, prompts=config.held_out_rows, rows=rows)
        encoder = ChatEncoder(
            load_tokenizer(config.tokenizer, ctx.cache_dir, ctx.report), self._encode_options(), split
        )
        progress = partial(ctx.report.progress, f"{ctx.stage}: tokens of {config.path.name} (bytes)")
        key = store_key(encoder, [config.path], limit_rows=config.limit_rows)
        self._store = open_or_build(
            ctx.cache_dir / "tokens",
            key,
            partial(rows, limit=config.limit_rows, progress=progress),
            encoder,
            names=[str(config.path)],
            warn=ctx.report.warn,
        )
        rejects = ctx.run_dir / ctx.stage / "rejects.jsonl"
        self._store.write_rejects(rejects)
        self._tell(ctx.report, str(rejects))
        self._refuse_useless(self._store, str(rejects))
        self._check_unchanged()

    def _encode_options(self) -> EncodeOptions:
        names = (
            "task",
            "max_length",
            "over_long",
            "prompt_until",
            "surrogates",
            "generation_marks",
            "template_options",
        )
        return EncodeOptions(**{name: getattr(self.config, name) for name in names})

    def _tell(self, report: Report, rejects: str) -> None:
        books = self._opened.accounts
        report.info(
            f"{self.config.path.name}: {books.rows_read} rows, {books.rows_kept} kept, {books.samples} samples, "
            f"{books.tokens} tokens, {books.supervised_share:.1%} supervised"
        )
        if books.rows_rejected:
            report.warn(f"{books.rows_rejected} rows rejected ({_counted(books.rejected)}); see {rejects}")
        if books.samples_rejected:
            report.warn(f"turns left out of rows that were kept: {_counted(books.samples_rejected)}; see {rejects}")
        if books.turns_without_end_token:
            report.warn(
                f"{books.turns_without_end_token} answers are not closed by a special token, so the draft does not "
                "learn where an answer ends; check the chat template"
            )

    def _refuse_useless(self, store: TokenStore, rejects: str) -> None:
        """Raise DataInvalid if nothing can be learnt from the samples, or if a bad row must end the run."""
        config, books = self.config, store.accounts
        if not books.rows_read:
            raise DataInvalid(f"{config.path}: the file holds no rows")
        if config.on_bad_row == "error" and books.rejected_bad:
            raise DataInvalid(
                f"{store.first_bad()} ({books.rejected_bad} bad rows in all, see {rejects}; correct them, or set "
                "on_bad_row: skip)"
            )
        if not books.samples:
            other = f"{books.rows_other_split} in the other part of the split" if books.rows_other_split else ""
            why = "; ".join(part for part in (_counted(books.rejected), other) if part)
            first = store.first_bad()
            raise DataInvalid(
                f"{config.path}: no usable row among {books.rows_read} ({why})"
                + (f"; the first: {first}" if first else "")
                + f"; all are in {rejects}; correct the rows, or change max_length or the split"
            )
        if config.task == "train" and books.supervised_tokens in (0, books.tokens):
            share = "every token is" if books.supervised_tokens else "no token is"
            raise DataInvalid(
                f"{config.path}: {share} supervised, so prompt and answer are not told apart; check that the "
                f"chat template of {config.tokenizer} writes a header before each turn"
            )

    @property
    def _opened(self) -> TokenStore:
        if self._store is None:
            raise RuntimeError("the source is not open")
        return self._store

    def epochs(self) -> Iterator[SampleTable]:
        """The same samples in every epoch, numbered in the order of the file."""
        store = self._opened
        ids = np.arange(len(store), dtype=np.int64)
        for epoch in range(self.config.epochs):
            yield SampleTable(epoch, ids, store.lengths, store.supervised)

    def tokens(self, sample_id: int) -> tuple[IntArray, Mask]:
        """Token ids and loss mask of one sample, read from the mapped store."""
        return self._opened.tokens(sample_id)

    def describe(self, sample_id: int) -> str:
        """``file:line`` of the row that a sample comes from."""
        return self._opened.describe(sample_id)

    def row(self, sample_id: int) -> Mapping[str, Any] | None:
        """Task generate: ``messages`` of a prompt, its ``tools`` if any, and the other keys of its row."""
        note = self._opened.note(sample_id)
        return None if note is None else dict(note)

    def vocabulary(self) -> Vocabulary:
        """Token ids that occur in the samples."""
        return Vocabulary(self._opened.token_ids, self._opened.supervised_token_ids)

    def state(self) -> Mapping[str, Any]:
        """Which data this is: a resumed run counts batches of exactly these samples."""
        return {"store_key": self._opened.key}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on with other data than the run began with."""
        self._expected_key = str(state["store_key"])
        if self._store is not None:
            self._check_unchanged()

    def _check_unchanged(self) -> None:
        if self._expected_key and self._expected_key != self._opened.key:
            raise DataInvalid(
                f"{self.config.path}: rows, tokenizer, template or options have changed since the checkpoint, so its "
                "batch numbers mean other samples; put them back, or start a new run"
            )

    def close(self) -> None:
        """Let go of the mapped files."""
        self._store = None

    def summary(self) -> Mapping[str, Any]:
        """What became of the rows."""
        if self._store is None:
            return {}
        books = self._store.accounts
        plain = {name: getattr(books, name) for name in SUMMARY.split()}
        return {**plain, "rejected": dict(books.rejected), "samples_rejected": dict(books.samples_rejected)}


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))
