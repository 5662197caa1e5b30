"""What all sources share whose rows become samples in a token store: options, accounts, errors and access."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field

from flowdflash.data.align import Mask
from flowdflash.data.encode import RowResult
from flowdflash.data.rows import RowInput
from flowdflash.data.store import Encoder, TokenStore, open_or_build, store_key
from flowdflash.errors import DataInvalid
from flowdflash.items import IntArray, SampleTable
from flowdflash.stage import Check, OpenContext, Report, Source, StageConfig, Vocabulary

SUMMARY = """rows_read rows_kept rows_rejected rows_other_split samples truncated
tokens supervised_tokens supervised_share turns_without_end_token"""
"""Accounts that a person wants to read, besides those by reason."""


class StoredOptions(StageConfig):
    """Options of every source whose samples lie in a token store."""

    max_length: int = Field(2048, ge=2, description="most tokens in a sample")
    over_long: Literal["truncate", "drop"] = Field(
        "truncate", description="cut longer samples at the end, or leave them out"
    )
    on_bad_row: Literal["skip", "error"] = Field(
        "skip", description="leave rows with a fault out, or end the run when all have been listed"
    )
    limit_rows: int = Field(0, ge=0, description="read only so many rows from the start; 0 for all")
    epochs: int = Field(1, ge=1, description="passes over the data")


class StoredSource(Source):
    """Prepares its token store when it opens, and refuses rows that nothing can be learnt from.

    A source of this sort says where its rows are (``_rows``) and what makes samples of them (``_encoder``).
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._store: TokenStore | None = None
        self._input = RowInput("", (), lambda: iter(()))
        self._expected_key = ""

    def _rows(self) -> RowInput:
        raise NotImplementedError

    def _encoder(self, ctx: OpenContext) -> Encoder:
        raise NotImplementedError

    def _mask_hint(self) -> str:
        raise NotImplementedError

    def open(self, ctx: OpenContext) -> None:
        """Find the tokens in the cache, or prepare them."""
        self._input = self._rows()
        config, name = self.config, self._input.name
        encoder = self._encoder(ctx)
        selection = {"selection": self._input.selection} if self._input.selection else {}
        before = _states(self._input.files)
        keyed = partial(store_key, encoder, self._input.files, limit_rows=config.limit_rows, **selection)
        key = keyed()
        told = f"{ctx.stage}: tokens of {Path(name).name} ({self._input.unit})"
        self._store = open_or_build(
            ctx.cache_dir / "tokens",
            key,
            partial(self._input.read, limit=config.limit_rows, progress=partial(ctx.report.progress, told)),
            encoder,
            names=[name],
            warn=ctx.report.warn,
            nbytes=0 if config.limit_rows else sum(file.stat().st_size for file in self._input.files),
            unchanged=lambda: _states(self._input.files) == before or keyed() == key,
        )
        rejects = ctx.run_dir / ctx.stage / "rejects.jsonl"
        self._store.write_rejects(rejects)
        self._tell(ctx.report, str(rejects))
        self._refuse_useless(self._store, str(rejects))
        self._check_unchanged()

    def preview(self, number: int, ctx: OpenContext) -> tuple[str, RowResult]:
        """Place of a row, counted from 1, and what becomes of it; reads no further and keeps nothing.

        Raises:
            DataInvalid: there is no such row.
        """
        self._input, count = self._rows(), 0
        name, limit = self._input.name, self.config.limit_rows
        for count, row in enumerate(self._input.read(limit=limit), 1):
            if count == number:
                place = f"{name}:{row.line}"
                (result,) = self._encoder(ctx).encode([row], lambda row: f"{name}:{row.line}")
                return place, result
        if not count:
            raise DataInvalid(f"{name}: the file holds no rows")
        of = f"limit_rows is {limit}" if limit and count == limit else f"the last is row {count}"
        raise DataInvalid(f"{name}: there is no row {number}: {of}")

    def _tell(self, report: Report, rejects: str) -> None:
        books = self._opened.accounts
        report.info(
            f"{Path(self._input.name).name}: {books.rows_read} rows, {books.rows_kept} kept, {books.samples} samples, "
            f"{books.tokens} tokens, {books.supervised_share:.1%} supervised"
            + (f"; {books.rows_other_split} rows are in the other part of the split" if books.rows_other_split else "")
        )
        if books.rows_rejected:
            # Where turns were left out of rows that were kept, the first fault may be one of those.
            known = books.first_bad and not books.samples_rejected
            first = f"; the first: {self._opened.first_bad()}" if known else ""
            report.warn(f"{books.rows_rejected} rows rejected ({_counted(books.rejected)}{first}); see {rejects}")
        if books.samples_rejected:
            report.warn(f"turns left out of rows that were kept: {_counted(books.samples_rejected)}; see {rejects}")
        if books.turns_without_end_token:
            report.warn(
                f"{books.turns_without_end_token} answers are not closed by a special token, so the draft does not "
                "learn where an answer ends; check the chat template"
            )

    def _refuse_useless(self, store: TokenStore, rejects: str) -> None:
        """Raise DataInvalid if nothing can be learnt from the samples, or if a bad row must end the run."""
        name, books = self._input.name, store.accounts
        if not books.rows_read:
            raise DataInvalid(f"{name}: the file holds no rows")
        if self.config.on_bad_row == "error" and books.rejected_bad:
            raise DataInvalid(
                f"{store.first_bad()} ({books.rejected_bad} bad rows in all, see {rejects}; correct them, or set "
                "on_bad_row: skip)"
            )
        if not books.samples:
            other = f"{books.rows_other_split} in the other part of the split" if books.rows_other_split else ""
            why = "; ".join(part for part in (_counted(books.rejected), other) if part)
            first = store.first_bad()
            raise DataInvalid(
                f"{name}: no usable row among {books.rows_read} ({why})"
                + (f"; the first: {first}" if first else "")
                + (f"; all are in {rejects}" if books.rejected else "")
                + "; correct the rows, or change max_length or the split"
            )
        training = getattr(self.config, "task", "train") == "train"
        if training and books.supervised_tokens in (0, books.tokens):
            share = "every token is" if books.supervised_tokens else "no token is"
            raise DataInvalid(
                f"{name}: {share} supervised, so prompt and answer are not told apart; check {self._mask_hint()}"
            )

    @property
    def _opened(self) -> TokenStore:
        if self._store is None:
            raise RuntimeError("the source is not open")
        return self._store

    def epochs(self) -> Iterator[SampleTable]:
        """The same samples in every epoch, numbered in the order of the rows."""
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
                f"{self._input.name}: rows, tokenizer, template, options or flowdflash itself have changed since the "
                "checkpoint, so its batch numbers mean other samples; put them back, or start a new run"
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


def _states(files: Sequence[Path]) -> list[tuple[int, int, int]]:
    """Of each file what changes when it is written to, or replaced."""
    found = []
    for file in files:
        with suppress(OSError):  # it will be told by whoever reads it
            stat = file.stat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return found


def check_file(check: Check, path: Path, format: str) -> dict[str, Any]:
    """Refuse an option ``path`` that names no file. Gives the fact of it."""
    found, hint = "", f"name a {format} file, relative to the folder of the pipeline file"
    try:
        if not path.is_file():
            found = "is a pipe or a device, but it is read more than once" if path.exists() else "does not exist"
            found = "is a folder" if path.is_dir() else found
    except OSError as error:
        found, hint = f"cannot be read: {error.strerror or error}", "see who may look into its folder"
    if found:
        check.refuse("path", f"{path} {found}", hint)
    return {"files": (path.resolve(),)}


def _counted(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1]))
